"""``--lines FILE``: a line of JSON for each test, written when the test ends.

A run that is cut leaves the results of all tests that ended before. A file that cannot be imported
has a line, too. Fields of a line:

test      its id
status    "passed", "failed" (its process died, too), "error" (outside of the test), or "skipped"
seconds   wall time with fixtures
detail    why it did not pass
"""

import json
import time
from pathlib import Path

import pytest

DETAIL = 300  # characters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", metavar="FILE", help="add a line of JSON for each test to the file")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.lines and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines(Path(config.option.lines)))


class Lines:
    """Writes the lines, in the process that all reports come to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._started: dict[str, float] = {}
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started[nodeid] = time.monotonic()
        self._reports[nodeid] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._reports:
            return  # the process died after the test's last report
        reports = self._reports[report.nodeid]
        reports.append(report)
        if report.when not in ("setup", "call"):  # "teardown", or xdist's word for a dead process
            del self._reports[report.nodeid]
            seconds = sum(report.duration for report in reports)
            started = self._started.pop(report.nodeid)
            if report.when != "teardown":  # a dead process has measured nothing
                seconds = time.monotonic() - started
            self._write(report.nodeid, seconds, *_outcome(reports))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, 0.0, "error", _why(report))

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, test: str, seconds: float, status: str, detail: str) -> None:
        line = {"test": test, "status": status, "seconds": round(seconds, 3), "detail": detail}
        self._file.write(json.dumps(line) + "\n")


def _outcome(reports: list[pytest.TestReport]) -> tuple[str, str]:
    """Return status and detail of a test, given the reports of its phases."""
    for report in reports:
        if report.failed:
            outside = report.when in ("setup", "teardown")
            return "error" if outside else "failed", _why(report)
    for report in reports:
        if report.skipped:
            return "skipped", _why(report)
    return "passed", ""


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the error with its place, or the reason for a skip, cut to ``DETAIL``."""
    if reason := getattr(report, "wasxfail", ""):
        return reason[:DETAIL]
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")[:DETAIL]
    if crash := getattr(report.longrepr, "reprcrash", None):
        return f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"[:DETAIL]
    return str(report.longrepr)[-DETAIL:]  # the error stands at the end of a traceback

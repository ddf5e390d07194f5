"""The summary of first_gpu.sh, from the lines of its parts."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonl

WRONG = "FAILED"  # how a line of the summary begins that makes its part fail
MOST = 25  # lines of failures
Summary = Callable[[Path, str], list[str]]
"""Takes the folder of the results, and the log of the part."""


def text(folder: Path) -> str:
    """Return the summary of the selftest and the tests in a folder."""
    files = jsonl.MENDED, jsonl.TESTS
    return "\n".join(
        [
            *checks(folder, ""),
            *speed(folder, ""),
            *(t for f in files for t in tests_of(f)(folder, "")),
        ]
    )


def head(about: dict[str, Any], cores: int) -> str:
    what = about["device"] if about["run"] else "no GPU: a dry run, which measures nothing"
    return (
        f"commit {about['commit']}, torch {about['torch']}, triton {about['triton']}, "
        f"{cores} cores, {what}"
    )


def checks(folder: Path, log: str) -> list[str]:
    """Return the number of passed checks of the selftest, and the failed ones."""
    found = [line for line in _last_checks(folder) if line["group"] != "speed"]
    tried = [line for line in found if line["status"] != "not here"]
    if not tried:
        return []
    slowest = max(tried, key=lambda line: line["seconds"])
    ok = sum(line["status"] == "ok" for line in tried)
    said = [
        f"{ok} of {len(tried)} checks hold; slowest: {_check(slowest)}, {slowest['seconds']:.0f} s"
    ]
    said += [f"{_check(line)}: {line['detail']}" for line in tried if "CUDA graph" in line["name"]]
    bad = [f"{line['status']} {_check(line)}: {line['detail']}" for line in tried]
    return said + [line for line in bad if not line.startswith("ok ")][:MOST]


def _last_checks(folder: Path) -> list[dict[str, Any]]:
    """Return the last line of each check of the selftest."""
    found = jsonl.read(folder / jsonl.CHECKS)
    return list({(line["group"], line["name"]): line for line in found}.values())


def _check(line: dict[str, Any]) -> str:
    return f"{line['group']} {line['name']}"


def speed(folder: Path, log: str) -> list[str]:
    """Return each kernel's fraction of the copy bandwidth, several in a line."""
    found = [line for line in _last_checks(folder) if line["group"] == "speed"]
    copies = [line for line in found if line["name"] == "copy" and "gb_per_s" in line]
    said = [f"copy {line['gb_per_s']:.0f} GB/s" for line in copies]
    fractions = [
        f"{line['name']} {line['fraction_of_copy']:.2f}"
        for line in found
        if "fraction_of_copy" in line
    ]
    said += ["of copy: " + ", ".join(fractions[i : i + 8]) for i in range(0, len(fractions), 8)]
    return said + [
        f"{WRONG} {_check(line)}: {line['detail']}" for line in found if line["status"] == WRONG
    ]


def rows_of(tier: int) -> Summary:
    """Return a summary of a tier: a line per case, and reasons for absent rows.

    A row of ours that fails makes its part fail; peers may fail in any way.
    """

    def rows(folder: Path, log: str) -> list[str]:
        found = {(line.get("case"), line["peer"]): line for line in jsonl.read(folder / jsonl.ROWS)}
        own = [line for line in found.values() if line.get("tier") == tier]
        cases: dict[str, list[str]] = {}
        for line in own:
            if "case" in line:
                cases.setdefault(line["case"], []).append(_row(line))
        said = [f"{case}: {'; '.join(peers)}" for case, peers in cases.items()]
        if not any("us" in line for line in own):
            said = ["no row was measured"]
        absent = Counter((line["peer"], line["reason"]) for line in own if "reason" in line)
        for (peer, reason), count in absent.most_common(MOST):
            is_fault = peer.startswith("tritonamp") and reason != jsonl.OUT_OF_TIME
            said.append(f"{WRONG if is_fault else 'not measured'}: {peer}, {count} times: {reason}")
        return said

    return rows


def _row(row: dict[str, Any]) -> str:
    if "us" not in row:
        return f"{row['peer']}: none"
    if row["clock"] == "host":
        return f"{row['peer']}: ran"  # a toy, whose time means nothing
    parts = [row["peer"], f"{row['us'] / 1e3:.3g} ms" if row["us"] > 1e4 else f"{row['us']:.4g} us"]
    if row["fraction_of_copy"]:
        parts.append(f"{row['fraction_of_copy']:.2f} of copy")
    if row["group"] == "training step" and row["peak_bytes"]:
        parts.append(f"{row['peak_bytes'] / 2**30:.1f} GiB")
    return " ".join(parts)


def tests_of(file: str) -> Summary:
    """Return a summary of tests: the number of passed ones, and those that failed."""

    def tests(folder: Path, log: str) -> list[str]:
        found = {line["test"]: line for line in jsonl.read(folder / file)}
        counts = Counter(line["status"] for line in found.values())
        if not counts:
            return []
        bad = [line for line in found.values() if line["status"] in ("failed", "error")]
        return [
            ", ".join(f"{count} {status}" for status, count in counts.most_common()),
            *(f"{WRONG} {line['test']}: {_on_one_line(line['detail'])}" for line in bad[:MOST]),
        ]

    return tests


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def sanitizer(folder: Path, log: str) -> list[str]:
    """Return the verdicts of compute-sanitizer with their counts."""
    said = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*|Invalid .*|.*hazard.*)", log)
    return [
        f"{'' if re.search(r'SUMMARY: 0 ', text) else WRONG + ' '}{text} ({count} times)"
        for text, count in Counter(said).most_common(MOST)
    ]


def ncu(folder: Path, log: str) -> list[str]:
    """Return ncu's numbers of each kernel."""
    wanted = r"^  [a-z_]+ \(|(DRAM Throughput|Achieved Occupancy|Max Bandwidth) .*|ERR"
    return [line.strip() for line in log.splitlines() if re.search(wanted, line)][: 4 * MOST]

"""What ``--cuda`` adds: a process of the tests ends where a test hangs or has broken the GPU.

No signal interrupts a CUDA call that hangs, and after an illegal address every CUDA call of the
process fails. Then xdist reports the test as crashed, and goes on in a new process; without xdist
the run ends there.
"""

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest

LIMIT = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cuda",
        action="store_true",
        help="run the tests that take a device, and the READMEs, on the GPU",
    )
    parser.addoption(
        "--limit",
        type=float,
        default=LIMIT,
        metavar="SECONDS",
        help=f"with --cuda: the process of a test that takes longer ends ({LIMIT:g})",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cuda:
        if getattr(config.option, "maxschedchunk", 0) is None:  # xdist's
            config.option.maxschedchunk = 4  # tests begin in about their order: a run may be cut
        # each process of the tests would start a process for each core
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        config.pluginmanager.register(OneContext(config))


class OneContext:
    """Watches over the CUDA context of this process."""

    def __init__(self, config: pytest.Config) -> None:
        self._limit = config.option.limit
        self._in_a_worker = hasattr(config, "workerinput")
        self._stderr = os.dup(2)  # the real one, while pytest captures
        self._is_broken = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._start_clock()
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        self._start_clock()  # pytest stops it where a test fails
        try:
            return (yield)
        finally:
            self._check()

    @pytest.hookimpl(trylast=True)  # behind xdist, which sends the reports
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._is_broken and self._in_a_worker:
            os._exit(1)
        if self._is_broken:
            pytest.exit(f"{nodeid} has broken the CUDA context of this process", returncode=1)

    def _start_clock(self) -> None:
        """End the process when the time is up: from a thread in C, which waits for no GIL."""
        faulthandler.dump_traceback_later(self._limit, exit=True, file=self._stderr)

    def _check(self) -> None:
        """Raise if the context is gone, after all work of the test is done."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            self._is_broken = True
            raise RuntimeError(f"the CUDA context is gone after this test: {error}") from error

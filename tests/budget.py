"""What a test may take that is not marked as slow: seconds of CPU time, which others that share
the machine lengthen little. A slow machine gets more of them.

``--rest`` and ``--full`` hold to it, and ``--budget SECONDS`` does without them. What is measured
is the test itself: fixtures are shared, and their first user would pay for all.
"""

import os
import time
from typing import NamedTuple

import pytest
from covering import SLOW, is_slow

SECONDS = 2.0
IN_PROCESSES = 10.0
"""The limit for processes that a test starts, each of which imports torch for two seconds."""
LOOP = 0.011
"""What ``slowness`` has Python do takes as many seconds where tests were marked."""


class CpuTime(NamedTuple):
    """Seconds that this process has taken, and those that it started and that have ended."""

    own: float
    children: float

    @classmethod
    def now(cls) -> "CpuTime":
        times = os.times()
        return cls(time.process_time(), times.children_user + times.children_system)

    def since(self, before: "CpuTime") -> "CpuTime":
        return CpuTime(self.own - before.own, self.children - before.children)

    def exceeds(self, limits: "CpuTime") -> bool:
        return self.own > limits.own or self.children > limits.children


def slowness() -> float:
    """Return how many times slower this machine is now than where tests were marked; at least 1."""
    times = []
    for _ in range(3):
        before = time.process_time()
        sum(i * i for i in range(200_000))
        times.append(time.process_time() - before)
    return max(1.0, min(times) / LOOP)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"a test that is not marked as slow fails where it takes more CPU time; {SECONDS:g} "
        "with --rest and --full",
    )


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    on_a_gpu = getattr(option, "cuda", False) or getattr(option, "fake_cuda", None)
    if option.budget is None and (option.rest or option.full) and not on_a_gpu:
        option.budget = SECONDS


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    before = CpuTime.now()
    result = yield
    taken, seconds = CpuTime.now().since(before), pyfuncitem.config.option.budget
    if seconds is None or is_slow(pyfuncitem):
        return result
    limits = CpuTime(seconds, IN_PROCESSES)
    if taken.exceeds(limits):
        slower = slowness()  # measured now, because a shared machine has slow minutes
        limits = CpuTime(slower * seconds, slower * IN_PROCESSES)
    if taken.exceeds(limits):
        pytest.fail(
            f"{taken.own:.1f} s of CPU time, {taken.children:.1f} s in processes that it started; "
            f"{limits.own:.1f} s and {limits.children:.1f} s are allowed: mark it slow "
            f"({', '.join(SLOW)})",
            pytrace=False,
        )
    return result

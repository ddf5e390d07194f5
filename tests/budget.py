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
from slowness import slowness

SLOWNESS = pytest.StashKey[float]()
SECONDS = 2.0
IN_PROCESSES = 10.0
"""The limit for processes that a test starts, each of which imports torch for two seconds."""


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
    config.stash[SLOWNESS] = slowness() if option.budget else 1.0


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    before = CpuTime.now()
    result = yield
    taken, config = CpuTime.now().since(before), pyfuncitem.config
    if config.option.budget is None or is_slow(pyfuncitem):
        return result
    own, children = (s * config.stash[SLOWNESS] for s in (config.option.budget, IN_PROCESSES))
    if taken.own > own or taken.children > children:
        pytest.fail(
            f"{taken.own:.1f} s of CPU time, {taken.children:.1f} s in processes that it started; "
            f"{own:.1f} s and {children:.1f} s are allowed: mark it slow ({', '.join(SLOW)})",
            pytrace=False,
        )
    return result

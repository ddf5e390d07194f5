"""A test for each case and peer, on the device, by pytest-benchmark.

pytest bench                              # on a GPU at real size; without one every case at
                                          # toy size, which measures nothing
pytest bench -k "softmax and forward"
"""

from collections.abc import Callable

import pytest
import torch
from case import Case
from matrix import all_cases
from peers import missing
from timing import Stopwatch, now

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ROUNDS = 20 if GPU else 1

if not GPU:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Print no table for toy sizes on a CPU without --benchmark-enable; the times mean nothing."""
    if not GPU:
        config.option.benchmark_disable = True


def pytest_report_header() -> str:
    return (
        f"benchmarks: {torch.cuda.get_device_name()}"
        if GPU
        else "benchmarks: no GPU, toy sizes, no measurement"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each case and peer."""
    # peers may warn
    marks = pytest.mark.benchmark(timer=clock), pytest.mark.filterwarnings("default")
    pairs = [
        pytest.param(case, peer, id=f"{case.name}-{peer}", marks=marks)
        for case in all_cases(toy=not GPU)
        for peer in case.peers
    ]
    metafunc.parametrize(("case", "peer"), pairs)


def clock() -> float:
    """Return seconds, after the device is idle."""
    return now(DEVICE)


@pytest.fixture(scope="session")
def stopwatch() -> Stopwatch:
    return Stopwatch(DEVICE, 0.2, *(() if GPU else (1 << 20,)))


@pytest.fixture
def compare(benchmark, stopwatch: Stopwatch) -> Callable[[Case, str], None]:
    """Return a function that times a peer's work, in a table with all peers of a case."""

    def run(case: Case, peer: str) -> None:
        what = missing(peer)
        if what:
            pytest.skip(what)
        torch.manual_seed(0)
        benchmark.group = case.name
        benchmark.extra_info |= {
            "peer": peer,
            "device": str(DEVICE),
            "copy_gb_per_s": stopwatch.copy_bandwidth / 1e9,
        }
        work = case.peers[peer](DEVICE)
        try:
            calls = iter(range(1 << 30))
            benchmark.pedantic(
                lambda: work.calls[next(calls) % len(work.calls)](),
                setup=stopwatch.flush, rounds=ROUNDS, warmup_rounds=min(2, ROUNDS),
            )  # fmt: skip
        finally:
            work.close()
        if GPU and case.bytes and benchmark.stats:
            rate = case.elements * case.bytes / benchmark.stats.stats.median
            benchmark.extra_info |= {
                "gb_per_s": rate / 1e9,
                "fraction_of_copy": rate / stopwatch.copy_bandwidth,
            }

    return run

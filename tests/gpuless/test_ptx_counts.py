"""bench/counts.py: its gate on rows made by hand, and what it counts in real kernels."""

from pathlib import Path

import pytest
from fresh_python import run_compiled

pytestmark = pytest.mark.static
BENCH = Path(__file__).resolve().parents[2] / "bench"
GATE = """
import counts
from snapshots import growth_faults
row = counts.Row("softmax", 90, 10.0, 16.0, 16.0, 4.0, 0.0)
same = {"softmax": {"90": list(row[2:])}}
def faults(**changes):
    return growth_faults(counts.numbers(row._replace(**changes)), same, counts.SNAPSHOT.name)
assert faults() == []
assert faults(instructions=11.4) == []
[message] = faults(loads=32.0)
assert message.startswith("sm_90 softmax: 32 sectors a load, 16 in counts-triton-"), message
[message] = faults(name="other")
assert "not in counts-triton-" in message
"""


def test_growth_is_told() -> None:
    run_compiled("-c", GATE, cwd=BENCH)


def test_a_line_in_registers_is_read_and_written_once() -> None:
    """In whole sectors: 16 in a request of 32 lanes with 16 bytes each."""
    line = counted("softmax", "softmax float16 n=1024")
    assert " 4.00 B asked 16.00 sectors a load 16.00 a store" in line


def test_halves_of_a_tensor() -> None:
    """The rows of an argument that is a view reach beyond as many bytes as it has elements."""
    line = counted("activation", "silu float16 gated")
    assert " 6.00 B asked 16.00 sectors a load 16.00 a store" in line


def counted(op: str, name: str) -> str:
    done = run_compiled("counts.py", "--op", op, "--only", f"^{name}$", cwd=BENCH)
    [line] = done.stdout.splitlines()
    return line

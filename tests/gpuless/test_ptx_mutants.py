"""Compiled kernels with one thing broken: the emulator must find it out, and nothing before."""

from pathlib import Path

import pytest
from fresh_python import run_compiled

pytestmark = pytest.mark.static
TESTS = Path(__file__).resolve().parents[1]
PROGRAM = r"""
import re
import torch
from gpuless.ptx.emulated import emulated, on_cpu
from tritonamp.kernels import _launch, softmax

half = torch.float16

def run(x, broken=str):
    softmax.softmax_kernel.device_caches.clear()
    with emulated(80) as gpu, on_cpu():
        gpu.rewrite = broken
        y = softmax.softmax_triton(x, 1, half, False)
    return gpu, y

def without_mask(what):
    return lambda ptx: re.sub(rf"@%p\d+ ({what}\.global)", r"\1", ptx)

def without_barrier(number):
    def broken(ptx):
        parts = ptx.split("bar.sync \t0;")
        parts[number : number + 2] = [parts[number] + parts[number + 1]]
        return "bar.sync \t0;".join(parts)
    return broken

def shifted(ptx):
    found = re.subn(r"(ld\.global\S* \{[^}]*\}, \[ %rd\d+ \+ )0", r"\g<1>4", ptx, count=1)
    assert found[1] == 1
    return found[0]

# nothing is broken
x, long = torch.randn(6, 1000).to(half), torch.randn(2, 4096).to(half)
for values in x, long:
    gpu, y = run(values)
    assert not gpu.findings and gpu.memory.unwritten(y) == 0, gpu.findings
    expected = softmax.softmax_torch(values, 1, half, False)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-6)

# masks
for what in "ld", "st":
    gpu, y = run(x, without_mask(what))
    assert "out of bounds" in gpu.findings.kinds(), gpu.findings

# a load that begins between elements of a vector
gpu, y = run(x, shifted)
assert gpu.findings.kinds() == {"misaligned"}, gpu.findings

# a store that is not there
gpu, y = run(x, lambda ptx: re.sub(r"(?m)^.*\bst\.global.*$", "", ptx, count=1))
assert gpu.memory.unwritten(y) > 0

# barriers, each of them
barriers = run(long)[0].launches[0].program.text.count("bar.sync")
assert barriers >= 2
for number in range(barriers):
    gpu, y = run(long, without_barrier(number))
    assert any("race" in kind for kind in gpu.findings.kinds()), number

# code for aligned memory, and other memory
unaligned = torch.randn(6 * 1000 + 1).to(half)[1:].view(6, 1000)
with emulated(80) as gpu, on_cpu():
    softmax.softmax_triton(x, 1, half, False)
    (compiled,) = _launch._compiled.values()
    given = list(gpu.launches[0].arguments.values())
    compiled[gpu.launches[0].grid](unaligned, torch.empty_like(unaligned), *given[2:], stream=0)
assert "misaligned" in gpu.findings.kinds(), gpu.findings

# an instruction that the emulator does not know
try:
    run(x, lambda ptx: ptx.replace("ex2.approx", "tanh.approx"))
except _launch.KernelError as error:
    assert "Unsupported: tanh.approx" in str(error), error
else:
    raise AssertionError("the unknown instruction ran")
print("done")
"""


def test_what_is_broken_is_found() -> None:
    done = run_compiled(
        "-c", PROGRAM, cwd=TESTS.parent, PYTHONPATH=str(TESTS), TRITON_INTERPRET="0"
    )
    assert done.stdout == "done\n", done.stderr

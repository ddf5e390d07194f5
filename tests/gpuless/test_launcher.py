"""``Launch`` through Triton's own driver and launcher, over a libcuda that runs nothing.

In processes of their own, because kernels are interpreted in this one, and it has another libcuda.
"""

import json
from pathlib import Path

import pytest
from fresh_python import run_compiled

pytest.importorskip("triton")

from gpuless.launcher import libcuda

from tritonamp.kernels._implementations import operations

pytestmark = [
    pytest.mark.static,
    pytest.mark.skipif(libcuda.obstacle() is not None, reason=str(libcuda.obstacle())),
]
TESTS = Path(__file__).resolve().parents[1]

START = """
from gpuless.launcher import libcuda

cuda = libcuda.load()  # before torch

import warnings
import torch
from fresh_python import run_compiled
from gpuless.fake_cuda import in_software
from tritonamp.kernels import _implementations, _launch, reduce, softmax

half = torch.float16

def run(x, backend="triton"):
    return softmax.softmax(x, 1, half, False, backend)
"""

PROPERTIES = """
def code():
    (compiled,) = (c for c in _launch._compiled.values() if c.function not in known)
    known.add(compiled.function)
    return compiled.asm["ptx"]

known = set()
with in_software(cuda.launching):
    aligned = torch.zeros(8, dtype=half, device="cuda")
    sizes, constants = (1, 5, 1, 1, 1), (True, 8, 8, 1, 1024)
    launch = _launch.Launch(reduce.sum_kernel, (1, 1, 1), sizes, constants, 1)

    launch.prepare(aligned, aligned)
    assert cuda.loads == 1 and not cuda.launches
    assert "ld.global.v4" in code()

    # a repeated call, and a launch of the same: nothing is compiled or loaded, nothing is kept
    again = _launch.Launch(reduce.sum_kernel, (7, 1, 1), (1, 6, 1, 1, 1), constants, 1)
    for stream, (repeated, *expected) in enumerate([
        (launch, (1, 1, 1), 5), (launch, (1, 1, 1), 5), (again, (7, 1, 1), 6),
    ]):
        cuda.stream = stream
        tensors = [torch.zeros(8, dtype=half, device="cuda") for _ in range(2)]
        repeated(*tensors)
        seen = cuda.launches[-1]
        assert [seen.grid, seen.parameters[3]] == expected, seen
        assert (seen.stream, seen.block) == (stream, (32, 1, 1)), seen
        assert seen.parameters[:2] == [t.data_ptr() for t in tensors], seen
    assert (cuda.loads, len(cuda.launches)) == (1, 3)

    # memory at another address modulo 16 bytes: code without vectors
    odd = torch.zeros(9, dtype=half, device="cuda")[1:]
    launch(odd, aligned)
    assert cuda.launches[-1].parameters[0] == odd.data_ptr()
    assert cuda.loads == 2 and "ld.global.v4" not in code()

    # a size of 64 bits, whichever it is
    for wide in range(2):
        sizes = [1 << 31 if i == wide else 1 for i in range(5)]
        _launch.Launch(reduce.sum_kernel, (1, 1, 1), sizes, constants, 1)(aligned, aligned)
        assert cuda.launches[-1].parameters[2:7] == sizes, cuda.launches[-1]
        types = ["u64" if size > 1 else "u32" for size in sizes]
        assert libcuda.declared(code())[2:7] == types
"""

ERRORS = """
NO_BINARY, INVALID_VALUE, ILLEGAL_ADDRESS = 209, 1, 700  # of the driver's errors

def error_of(backend="triton", **planted):
    with cuda.planted(**planted):
        try:
            run(x, backend)
        except Exception as error:
            return type(error), str(error)
    raise AssertionError("no error")

with in_software(cuda.launching):
    x = torch.ones(256, 256, dtype=half, device="cuda")

    # not loaded: the operation's kernel is given up, and can be had again
    kind, text = error_of(load_result=NO_BINARY)
    assert kind is _launch.KernelError, kind
    expected = "softmax_kernel cannot be compiled: RuntimeError: Triton Error [CUDA]: "
    assert text == expected + "error 209 of the driver", text
    assert not (cuda.loads or cuda.launches or _implementations.failures)
    with cuda.planted(load_result=NO_BINARY), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = run(x, "auto")
    assert [str(w.message).partition(":")[0] for w in caught] == [
        "softmax runs in eager torch from now on"
    ]
    assert torch.equal(y.cpu(), torch.full((256, 256), 1 / 256, dtype=half))
    _implementations.failures.clear()
    run(x)
    assert [seen.kernel for seen in cuda.launches] == ["softmax_kernel"]

    # not launched: no kernel of another kind would help
    for backend in "auto", "triton":
        kind, text = error_of(backend, launch_result=ILLEGAL_ADDRESS)
        assert (kind, text) == (RuntimeError, "Triton Error [CUDA]: error 700 of the driver")
        kind, text = error_of(backend, pointer_result=INVALID_VALUE)
        assert kind is ValueError and "cannot be accessed from Triton" in text, text
    assert not _implementations.failures and len(cuda.launches) == 1
    run(x)
    assert len(cuda.launches) == 2

    # it takes more registers than there are for so many threads
    x = torch.ones(256, 512, dtype=half, device="cuda")
    kind, text = error_of(max_threads=16)
    assert kind is _launch.KernelError and "out of resource: threads" in text, text
"""


def on_the_launcher(*arguments: str) -> str:
    done = run_compiled(*arguments, cwd=TESTS, PYTHONPATH=str(TESTS), TRITON_INTERPRET="0")
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "program",
    [pytest.param(PROPERTIES, marks=pytest.mark.smoke), ERRORS],
    ids=["properties", "errors"],
)
def test_launches(program: str) -> None:
    on_the_launcher("-c", START + program)


def test_every_call_of_every_operation() -> None:
    lines = on_the_launcher("-m", "gpuless.launcher.samples").splitlines()
    found = {report["operation"]: report for report in map(json.loads, lines)}
    assert found.keys() == operations().keys()
    assert {name: report["wrong"] for name, report in found.items() if report["wrong"]} == {}
    assert all(report["launches"] for report in found.values())

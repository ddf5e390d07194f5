"""``launch`` against Triton's own compiler, with a driver that records what it is given instead of
a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tritonamp.kernels import _launch, reduce, softmax

calls, loaded = [], []

class Launcher:
    def __init__(self, src, metadata):
        self.constants = {src.fn.arg_names[path[0]]: value for path, value in src.constants.items()}
        given = src.attrs.items()
        self.attributes = {src.fn.arg_names[path[0]]: value for path, value in given if value}
        self.signature, self.num_warps = src.signature, metadata.num_warps
        self.maxnreg = metadata.maxnreg

    def __call__(
        self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args
    ):
        calls.append(SimpleNamespace(grid=(x, y, z), stream=stream, args=args, build=self))

def load_binary(name, kernel, shared, device):
    loaded.append(name)
    return 1, 2, 32, 0, 1024

class Driver:
    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=load_binary,
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: -1  # of a tensor in main memory
    get_current_stream = lambda self, device: 0

driver.set_active(Driver())
torch.cuda.current_device = lambda: -1
torch._C._cuda_getCurrentRawStream = lambda device: 7

half = torch.float16
x = torch.zeros(4, 1024, dtype=half)
y = softmax.softmax_triton(x, 1, half)
(call,) = calls
assert call.grid == (4, 1, 1) and call.stream == 7
assert call.args[0] is x and call.args[1] is y and call.args[2:5] == (4, 1024, 4), call.args
assert call.build.signature["rows"] == "i32" and call.build.signature["x_ptr"] == "*fp16"
assert call.build.constants["BLOCK"] == 1024 and call.build.constants["LOG"] is False
attributes = call.build.attributes
assert "rows" not in attributes and "x_ptr" in attributes  # 16-byte alignment is compiled in
assert call.build.num_warps == 1 and call.build.maxnreg == softmax.MAX_REGISTERS

# the same build serves other numbers of rows, and memory elsewhere
softmax.softmax_triton(torch.zeros(1, 1024, dtype=half), 1, half)
softmax.softmax_triton(torch.zeros(7, 1024, dtype=half), 1, half)
assert loaded == ["softmax_kernel"], loaded

# memory that is not aligned, another dtype, another length: other builds
unaligned = torch.zeros(4 * 1024 + 1, dtype=half)[1:].view(4, 1024)
softmax.softmax_triton(unaligned, 1, half)
assert "x_ptr" not in calls[-1].build.attributes
softmax.softmax_triton(x.bfloat16(), 1, torch.bfloat16)
assert calls[-1].build.signature["x_ptr"] == "*bf16" and calls[-1].build.constants["SHIFT"] == 64
softmax.softmax_triton(torch.zeros(4, 1000, dtype=half), 1, half)
assert len(loaded) == 4, loaded

# sizes beyond 2**31
wide = _launch.launch
meta = torch.zeros(16, dtype=half)
wide(reduce.sum_kernel, (1, 1, 1), (meta, meta), (1, 2**31, 1, 1, 1), (True, 8, 1, 1024), 1)
assert calls[-1].build.signature["n"] == "i64" and calls[-1].build.signature["rows"] == "i32"
wide(reduce.sum_kernel, (1, 1, 1), (meta, meta), (1, 2**31 - 1, 1, 1, 1), (True, 8, 1, 1024), 1)
assert calls[-1].build.signature["n"] == "i32"

# a kernel that cannot be compiled, or loaded
def no_compiler(*args):
    raise FileNotFoundError("ptxas")

Driver.utils.load_binary = no_compiler
try:
    softmax.softmax_triton(torch.zeros(4, 64, dtype=half), 1, half)
except _launch.KernelError as error:
    assert str(error) == "softmax_kernel cannot be compiled: FileNotFoundError: ptxas", error
else:
    raise AssertionError("no error")
print("done")
"""


@pytest.mark.static
def test_builds_and_their_arguments(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.stdout == "done\n", done.stderr

"""``Launch`` against Triton's own compiler, with a driver that records what it is given instead of
a GPU.
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tritonamp.kernels import _launch

DRIVER = """
import torch
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tritonamp.kernels import _launch, device, reduce, softmax

calls, loaded = [], []

class Launcher:
    def __init__(self, src, metadata):
        self.name = src.fn.__name__
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
torch.cuda.is_current_stream_capturing = lambda: False
device._answers[torch.device("cpu")] = True

half = torch.float16
x = torch.zeros(4, 1024, dtype=half)
"""

BUILDS = """
y = softmax.softmax_triton(x, 1, half, False)
(call,) = calls
assert call.grid == (4, 1, 1) and call.stream == 7
assert call.args[0] is x and call.args[1] is y and call.args[2:5] == (4, 1024, 4), call.args
assert call.build.signature["rows"] == "i32" and call.build.signature["x_ptr"] == "*fp16"
assert call.build.constants["BLOCK"] == 1024 and call.build.constants["LOG"] is False
attributes = call.build.attributes
assert "rows" not in attributes and "x_ptr" in attributes  # 16-byte alignment is compiled in
assert call.build.num_warps == 1 and call.build.maxnreg == softmax.MAX_REGISTERS

# the same build serves other numbers of rows, and memory elsewhere
softmax.softmax_triton(torch.zeros(1, 1024, dtype=half), 1, half, False)
softmax.softmax_triton(torch.zeros(7, 1024, dtype=half), 1, half, False)
assert loaded == ["softmax_kernel"], loaded

# memory that is not aligned, another dtype, another length: other builds
unaligned = torch.zeros(4 * 1024 + 1, dtype=half)[1:].view(4, 1024)
softmax.softmax_triton(unaligned, 1, half, False)
assert "x_ptr" not in calls[-1].build.attributes
softmax.softmax_triton(x.bfloat16(), 1, torch.bfloat16, False)
assert calls[-1].build.signature["x_ptr"] == "*bf16" and calls[-1].build.constants["SHIFT"] == 64
softmax.softmax_triton(torch.zeros(4, 1000, dtype=half), 1, half, False)
assert len(loaded) == 4, loaded

# sizes beyond 2**31
def wide(kernel, grid, tensors, *rest):
    _launch.Launch(kernel, grid, *rest)(*tensors)

meta = torch.zeros(16, dtype=half)
wide(reduce.sum_kernel, (1, 1, 1), (meta, meta), (1, 2**31, 1, 1, 1), (True, 8, 8, 1, 1024), 1)
assert calls[-1].build.signature["n"] == "i64" and calls[-1].build.signature["rows"] == "i32"
wide(reduce.sum_kernel, (1, 1, 1), (meta, meta), (1, 2**31 - 1, 1, 1, 1), (True, 8, 8, 1, 1024), 1)
assert calls[-1].build.signature["n"] == "i32"

# a kernel that cannot be compiled, or loaded
def no_compiler(*args):
    raise FileNotFoundError("ptxas")

Driver.utils.load_binary = no_compiler
try:
    softmax.softmax_triton(torch.zeros(4, 64, dtype=half), 1, half, False)
except _launch.KernelError as error:
    assert str(error) == "softmax_kernel cannot be compiled: FileNotFoundError: ptxas", error
else:
    raise AssertionError("no error")
"""

MODES = """
import contextlib
import tritonamp
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))

def names(mode):
    parameter = torch.nn.Parameter(torch.zeros(64))
    parameter.grad = torch.ones(64)
    optimizer = tritonamp.optim.AdamW([parameter])
    calls.clear()
    with mode:
        optimizer.step()
        softmax.softmax(x, 1, half, False, "triton")
    return [call.build.name for call in calls]

expected = ["count_steps_kernel", "update_kernel", "softmax_kernel"]
assert names(contextlib.nullcontext()) == expected, calls
for mode in (Log(), FlopCounterMode(display=False), DebugMode()):
    assert names(mode) == expected, (mode, calls)
with Log(), Log():
    assert names(Log()) == expected, calls
log = Log()
names(log)
assert "tritonamp::softmax" in log.seen, log.seen  # what a mode may go by: selective checkpointing
"""

TRACERS = """
from functorch.compile import aot_function, make_boxed_func
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

class Watch(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

def function(x):
    return softmax.softmax_triton(x, 1, half, False)

def kernels_of(graph):
    return [node for node in graph.nodes if "triton_kernel_wrapper" in str(node.target)]

(traced,) = kernels_of(make_fx(function)(x).graph)
assert len(calls) == 1, calls  # as make_fx runs what it records
options = dict(traced.kwargs["kwargs"])
options |= kernel_side_table.get_constant_args(traced.kwargs["constant_args_idx"])
assert options["maxnreg"] == softmax.MAX_REGISTERS and options["enable_fp_fusion"], options
(traced,) = kernels_of(make_fx(function, tracing_mode="fake")(x).graph)
with Watch():  # a mode that looks on does not hide the tracer behind it
    (traced,) = kernels_of(make_fx(function)(x).graph)

calls.clear()
with FakeTensorMode(allow_non_fake_inputs=True) as mode:
    assert function(mode.from_tensor(x)).shape == function(x).shape == x.shape
assert not calls, calls

graphs = []

def compiler(graph_module, inputs):
    graphs.append(graph_module.graph)
    return make_boxed_func(graph_module.forward)

aot_function(lambda x: softmax.softmax(x, 1, half, False, "triton"), fw_compiler=compiler)(x)
(traced,) = kernels_of(graphs[0])
assert str(traced.target) == "triton_kernel_wrapper_functional", traced.target
"""

VIEWS = """
from functorch.compile import aot_function, make_boxed_func

from tritonamp.kernels._by_length import BATCH_INVARIANT

graphs = []

def compiler(graph_module, inputs):
    graphs.append(graph_module.graph)
    return make_boxed_func(graph_module.forward)

def of_rows(x):
    return softmax.softmax(x, 1, half, False, BATCH_INVARIANT["triton"])

odd = torch.zeros(4, 101, dtype=half)
# a view that the graph makes, one that comes in, and none
for function, given, copies in (
    (lambda x: of_rows(x[1:]), odd, 1), (of_rows, odd[1:], 1), (of_rows, odd, 0),
):
    aot_function(function, fw_compiler=compiler)(given)
    called = [str(node.target) for node in graphs[-1].nodes]
    (launched,) = (i for i, name in enumerate(called) if "triton_kernel" in name)
    assert sum("clone" in name for name in called[:launched]) == copies, called
"""

DEVICES = """
import tritonamp

device._answers.clear()
torch.cuda.current_device = lambda: 0  # a machine with a GPU
message = "backend='triton' cannot run: cpu is not an NVIDIA GPU. Use backend='auto'"
for function in (
    lambda: softmax.softmax(x, 1, half, False, "triton"),
    lambda: reduce.sum(x, (1,), False, half, "triton"),
):
    try:
        function()
    except tritonamp.UnsupportedDeviceError as error:
        assert str(error).startswith(message), error
    else:
        raise AssertionError("no error")
"""

EARLIER_ERRORS = """
import warnings

def load_binary(*args):
    raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

def capturing():
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

Driver.utils.load_binary = load_binary
torch.cuda.is_current_stream_capturing = capturing
x = torch.zeros(1 << 8, 1 << 8, dtype=half)
warnings.simplefilter("error")
for backend in ("auto", "triton"):
    try:
        softmax.softmax(x, 1, half, False, backend)
    except torch.AcceleratorError as error:
        assert str(error) == "CUDA error: an illegal memory access was encountered", error
    else:
        raise AssertionError("no error")
from tritonamp.kernels import _implementations
assert not _implementations.failures, _implementations.failures
"""


@pytest.mark.static
@pytest.mark.parametrize(
    "program",
    [BUILDS, MODES, TRACERS, VIEWS, DEVICES, EARLIER_ERRORS],
    ids=["builds", "modes", "tracers", "views", "devices", "earlier errors"],
)
def test_launch(tmp_path: Path, program: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER + program + 'print("done")'],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.stdout == "done\n", done.stderr


def test_a_kernel_may_take_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "_compile", lambda kernel, grid, args, options: args)
    tensor = torch.zeros(16)
    found = _launch.Launch(object(), (1, 1, 1), (), (True,), 1)._find((tensor,))
    assert found == (tensor, True)


class Compiled:
    """A stand-in for a kernel compiled for some alignment, which remembers its launches."""

    def __init__(self, made: list["Compiled"]) -> None:
        self.launches: list[tuple[Any, ...]] = []
        made.append(self)

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, stream: int) -> None:
            self.launches.append((grid, stream, *args))

        return run


class Launches(NamedTuple):
    """A prepared launch, its table and its operands, and what was compiled."""

    prepared: _launch.Launch
    table: Tensor
    operands: list[Tensor]
    made: list[Compiled]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Of a kernel that runs on the CPU, as it were."""
    made: list[Compiled] = []
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "_compile", lambda *args: Compiled(made))
    monkeypatch.setattr(_launch, "require_triton", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    table, numbers = torch.zeros(16), torch.zeros(8)
    tensors = _launch.Operand.FOUND_INF, table, _launch.Operand.GRAD_SCALE
    launch = _launch.Launch(
        object(), (3, 1, 1), (5,), (True, "constant"), 4, tensors=(table, *tensors)
    )
    return Launches(launch, table, [numbers[0], numbers[4]], made)


def test_a_prepared_launch_takes_the_operands_of_each_call(prepared: Launches) -> None:
    scale, skip = prepared.operands
    others = torch.zeros(8)
    calls = [(scale, skip), (scale, skip), (others[4], others[0])]
    for operands in calls:
        prepared.prepared(*operands)
    (compiled,) = prepared.made
    for (grid, stream, *tensors, size, flag, word), (one, other) in zip(
        compiled.launches, calls, strict=True
    ):
        assert (grid, stream, size, flag, word) == ((3, 1, 1), 7, 5, True, "constant")
        given = prepared.table, other, prepared.table, one
        assert all(a is b for a, b in zip(tensors, given, strict=True))


def test_a_prepared_launch_is_compiled_by_alignment(prepared: Launches) -> None:
    scale, skip = prepared.operands
    unaligned = torch.zeros(8)[1]
    for operands in [(scale, skip), (scale, unaligned), (scale, skip), (scale, unaligned)]:
        prepared.prepared(*operands)
    assert [len(compiled.launches) for compiled in prepared.made] == [2, 2]
    assert prepared.made[1].launches[1][3] is unaligned


def test_a_prepared_launch_on_another_device(
    prepared: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes the long way, which switches devices."""
    prepared.prepared(*prepared.operands)
    switched = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1 if switched else 0)
    monkeypatch.setattr(torch.cuda, "device", lambda d: switched.append(d) or nullcontext())
    prepared.prepared(*prepared.operands)
    assert switched == [-1] and len(prepared.made[0].launches) == 2


def test_a_prepared_launch_runs_nothing_of_before_a_broken_compiler(prepared: Launches) -> None:
    prepared.prepared(*prepared.operands)
    with _launch.broken_compiler():
        prepared.prepared(*prepared.operands)
    prepared.prepared(*prepared.operands)
    assert [len(compiled.launches) for compiled in prepared.made] == [2, 1]


ROOMS = ((2, 3), (3, 1), torch.float16), ((4,), (1,), torch.float32)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_results_are_new_tensors_behind_the_given_ones(prepared: Launches) -> None:
    """A mode that watches sees their allocation."""
    launch = _launch.Launch(object(), (1, 1, 1), (), (), 1, results=ROOMS)
    x = torch.zeros(4)
    with Seen() as seen:
        watched = launch(x)
    calls = [watched, launch(x), launch(x)]
    assert seen.names == ["aten::new_empty_strided"] * 2
    (compiled,) = prepared.made
    for (_, _, first, *behind), results in zip(compiled.launches, calls, strict=True):
        assert first is x
        assert all(a is b for a, b in zip(behind, results, strict=True))
        assert tuple((tuple(r.shape), r.stride(), r.dtype) for r in results) == ROOMS
    assert len({result.data_ptr() for results in calls for result in results}) == 6

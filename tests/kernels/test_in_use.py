"""From the op to the kernel: which calls arrive at Triton, what autograd and torch.compile make of
them.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh_python import run_compiled
from helpers import of_kernels
from launches import note_launches
from small_models import Apply
from torch import Tensor, nn

import tritonamp
from tritonamp import functional
from tritonamp.kernels import _implementations, _launch, softmax
from tritonamp.kernels import device as hardware

pytestmark = of_kernels
FP16, FP32 = torch.float16, torch.float32
SHAPE = (8, 8192)  # as many elements as a GPU needs to take the kernels


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched."""
    return note_launches(monkeypatch, lambda launch: [launch.kernel.__name__])


def run(function: Callable[..., Any], x: Tensor, backend: str = "triton", **policy: Any) -> Any:
    model = Apply(function)
    amp = tritonamp.enable(model, level="O1", cast_outputs=None, backend=backend, **policy)
    try:
        return model(x)
    finally:
        amp.disable()


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "F.softmax": lambda x: F.softmax(x, dim=1),
    "Tensor.softmax": lambda x: x.softmax(dim=-1),
    "torch.special.softmax": lambda x: torch.special.softmax(x, -1),
    "nn.Softmax": lambda x: nn.Softmax(1)(x),
    "nn.Softmax2d": lambda x: nn.Softmax2d()(x[:, :, None, None]).flatten(1),
}
LOG_SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.log_softmax": lambda x: torch.log_softmax(x, -1),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=1),
    "Tensor.log_softmax": lambda x: x.log_softmax(1),
    "nn.LogSoftmax": lambda x: nn.LogSoftmax(-1)(x),
}
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sum": torch.sum,
    "torch.sum dim": lambda x: torch.sum(x, 1),
    "Tensor.sum": lambda x: x.sum((0, 1), keepdim=True),
    "torch.sum dim=[]": lambda x: torch.sum(x, dim=[]),
}


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(SHAPE, device=device).half()


@pytest.mark.parametrize("name", SOFTMAXES)
def test_every_softmax_arrives_at_the_kernel(name: str, x: Tensor, launched: list[str]) -> None:
    y = run(SOFTMAXES[name], x)
    assert launched == ["softmax_kernel"]
    assert y.dtype is FP16
    torch.testing.assert_close(y.double(), x.double().softmax(1), rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("name", LOG_SOFTMAXES)
def test_every_log_softmax_arrives_at_the_kernel(name: str, x: Tensor, launched: list[str]) -> None:
    y = run(LOG_SOFTMAXES[name], x)
    assert launched == ["softmax_kernel"]
    assert y.dtype is FP32
    torch.testing.assert_close(
        y.double(), x.double().log_softmax(1), rtol=2**-20, atol=2**-11
    )  # 8192 u, absolute


@pytest.mark.parametrize("name", SUMS)
def test_every_sum_arrives_at_the_kernel(name: str, x: Tensor, launched: list[str]) -> None:
    y = run(SUMS[name], x)
    assert {*launched} == {"sum_kernel"}
    assert y.dtype is FP32
    exact = SUMS[name](x.double())
    assert y.shape == exact.shape
    torch.testing.assert_close(
        y.double(), exact, rtol=0, atol=19 * 2**-24 * x.double().abs().sum().item()
    )


def test_attention_arrives_at_the_kernel(device: torch.device, launched: list[str]) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True, device=device)
    x = torch.randn(4, 128, 8, device=device)
    amp = tritonamp.enable(attention, level="O1", backend="triton")
    attention(x, x, x, need_weights=True)
    assert launched == ["softmax_kernel"]
    amp.disable()


@pytest.mark.parametrize("dtype", [FP32, torch.float64, torch.bfloat16], ids=str)
def test_an_explicit_dtype_wins(x: Tensor, dtype: torch.dtype) -> None:
    for function in (torch.softmax, torch.log_softmax, torch.sum):
        assert run(lambda x, function=function: function(x, 1, dtype=dtype), x).dtype is dtype


def test_softmax_dtype_of_the_policy(x: Tensor, launched: list[str]) -> None:
    assert run(SOFTMAXES["F.softmax"], x, softmax_dtype=FP32).dtype is FP32
    assert launched == ["softmax_kernel"]


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("name", ["F.softmax", "torch.log_softmax", "torch.sum"])
def test_what_does_not_arrive_there(
    name: str, backend: str, x: Tensor, launched: list[str]
) -> None:
    """Eager never does; "auto" neither on a CPU nor for a small input."""
    function = {**SOFTMAXES, **LOG_SOFTMAXES, **SUMS}[name]
    y = run(function, x if backend == "eager" or x.device.type == "cpu" else x[:2], backend)
    assert launched == []
    assert y.dtype is (FP16 if name == "F.softmax" else FP32)


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
def test_other_input_is_torchs(x: Tensor, dtype: torch.dtype, launched: list[str]) -> None:
    for function in (SOFTMAXES["F.softmax"], LOG_SOFTMAXES["F.log_softmax"], torch.sum):
        assert run(function, x.to(dtype)).dtype is dtype
    assert launched == []


def test_size_and_device_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = softmax.SOFTMAX
    large, small = (
        torch.empty(n, device="meta")
        for n in (_implementations.MIN_NUMEL, _implementations.MIN_NUMEL - 1)
    )
    assert not operation.uses_triton("auto", large)  # not a GPU
    monkeypatch.setitem(hardware._answers, torch.device("meta"), True)
    assert operation.uses_triton("auto", large)
    assert not operation.uses_triton("auto", small)
    assert not operation.uses_triton("eager", large)
    monkeypatch.setitem(_implementations.failures, "softmax", "no compiler")
    assert not operation.uses_triton("auto", large)
    assert operation.uses_triton("triton", small)


# autograd


@pytest.mark.parametrize("name", ["F.softmax", "torch.log_softmax", "torch.sum dim"])
def test_gradients(name: str, x: Tensor, launched: list[str]) -> None:
    """The half gradient: one rounding of what FP32 gives from the rounded y (2 u of fp16, relative
    to the terms).
    """
    function = {**SOFTMAXES, **LOG_SOFTMAXES, **SUMS}[name]
    x, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    y, exact = run(function, x), function(wide)
    grad = torch.randn_like(exact).to(y.dtype)
    y.backward(grad)
    exact.backward(grad.double())
    assert x.grad is not None and x.grad.dtype is FP16
    g = grad.double().abs()
    terms = {"F.softmax": exact * g.amax(), "torch.log_softmax": exact.exp() * g.sum()}
    bound = 2**-10 * (terms.get(name, torch.zeros_like(wide)) + wide.grad.abs()) + 2**-24
    assert ((x.grad.double() - wide.grad).abs() <= bound).all()
    assert launched.count("softmax_backward_kernel") == (name != "torch.sum dim")


@pytest.mark.parametrize("name", ["F.softmax", "torch.log_softmax", "torch.sum dim"])
def test_double_backward_goes_through_torch(name: str, x: Tensor, launched: list[str]) -> None:
    """The gradient of a gradient's square sum, against FP64: some roundings to half of the largest
    term.
    """
    function = {**SOFTMAXES, **LOG_SOFTMAXES, **SUMS}[name]
    x[:, :4] += 10  # probabilities that half gradients can show
    x, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    results: list[Tensor] = []
    for y, leaf in ((run(function, x), x), (function(wide), wide)):
        torch.manual_seed(1)
        weight = torch.randn(y.shape, device=y.device).to(y.dtype) / 64
        (first,) = torch.autograd.grad((y * y * weight).double().sum(), leaf, create_graph=True)
        assert "softmax_backward_kernel" not in launched
        results.append(torch.autograd.grad(first.double().square().sum(), leaf)[0].double())
        launched.clear()
    difference = (results[0] - results[1]).abs().max()
    assert difference <= 2**-8 * results[1].abs().max()


def test_a_backward_on_another_thread(x: Tensor, launched: list[str]) -> None:
    x = x.clone().requires_grad_()
    y = run(SOFTMAXES["F.softmax"], x)
    thread = threading.Thread(target=lambda: y.float().square().sum().backward())
    thread.start()
    thread.join()
    assert x.grad is not None
    assert launched == ["softmax_kernel", "softmax_backward_kernel"]


def test_training_is_the_same_on_either_backend(device: torch.device) -> None:
    """The same ops at the same places: losses agree to the precision of half activations."""
    losses = []
    for backend in ("triton", "eager"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.Softmax(1), nn.Linear(16, 4), nn.LogSoftmax(1)
        ).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        amp = tritonamp.enable(model, optimizer, level="O2", backend=backend)
        x, y = torch.randn(32, 8, device=device), torch.randint(4, (32,), device=device)
        for _ in range(5):
            loss = F.nll_loss(model(x), y)
            amp.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        assert amp.stats()["backend"] == backend
        amp.disable()
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


# a kernel that cannot be compiled


def _broken(*args: Any) -> None:
    raise _launch.KernelError("softmax_kernel cannot be compiled: FileNotFoundError: no C compiler")


def test_auto_goes_on_in_eager_torch_with_one_warning(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch.Launch, "__call__", _broken)
    monkeypatch.setattr(_implementations, "failures", {})
    monkeypatch.setitem(hardware._answers, x.device, True)
    text = (
        "softmax runs in eager torch from now on: "
        "softmax_kernel cannot be compiled: FileNotFoundError: no C comp"
    )
    with pytest.warns(RuntimeWarning, match=text):
        y = softmax.softmax(x, 1, FP16, False)
    assert torch.equal(y, softmax.softmax_torch(x, 1, FP16, False))
    assert torch.equal(softmax.softmax(x, 1, FP16, False), y)  # without another warning
    amp = tritonamp.enable(nn.Linear(1, 1))
    assert list(amp.stats()["kernel_failures"]) == ["softmax"]
    amp.disable()


def test_an_explicit_request_raises(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch.Launch, "__call__", _broken)
    with pytest.raises(_launch.KernelError, match="no C compiler"):
        run(SOFTMAXES["F.softmax"], x)


# tracing: in a process of its own, the interpreter's kernels cannot be traced


TRACE = """
import logging
import torch, tritonamp
from functorch.compile import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from tritonamp.casts import active

# without a GPU Triton cannot tell which arguments a kernel writes
logging.disable(logging.CRITICAL)
amp = tritonamp.enable(torch.nn.Linear(1, 1))
number = active.number_of(amp.policy, "triton", "cpu")

def function(x, target):
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        active.enter(number)
        y = torch.softmax(x, -1).sum(1), torch.log_softmax(x, 1)
        y += (torch.nn.functional.cross_entropy(x, target, reduction="none"),)
        active.leave()
    return y

def show(graph, inputs):
    print(sum("triton_kernel" in str(node.target) for node in graph.graph.nodes))
    return make_boxed_func(graph.forward)

with FakeTensorMode(allow_non_fake_inputs=True):
    x = torch.empty(96, 1024, dtype=torch.float16, requires_grad=True)
    target = torch.zeros(96, dtype=torch.int64)
    y, z, losses = aot_function(function, fw_compiler=show, bw_compiler=show)(x, target)
    assert (y.dtype, z.dtype, y.shape) == (torch.float32, torch.float32, (96,))
    assert (losses.dtype, losses.shape) == (torch.float32, (96,))
    (y.sum() + z.sum() + losses.sum()).backward()
"""


@pytest.mark.compiled
def test_a_traced_graph_holds_the_kernels(tmp_path: Path) -> None:
    """Of softmax, sum, log_softmax and cross_entropy in the forward, of three in the backward."""
    assert run_compiled("-c", TRACE, cwd=tmp_path).stdout.split() == ["4", "3"]


def test_functional_works_outside_enabled_models(x: Tensor) -> None:
    assert functional.softmax(x, 1).dtype is FP16
    assert functional.log_softmax(x, 1).dtype is FP16
    assert functional.sum(x, 1).dtype is FP16


def test_triton_runs_on_gpus_with_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(hardware, "capability", lambda device: (6, 1))
    assert "compute capability 6.1" in str(hardware.why_not_triton(gpu))
    monkeypatch.setattr(hardware, "capability", lambda device: (7, 0))
    assert hardware.why_not_triton(gpu) is None
    monkeypatch.setattr(hardware, "triton_version", lambda: None)
    assert hardware.why_not_triton(gpu) == "Triton cannot be imported"

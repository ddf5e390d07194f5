"""Plans: what rules keep of their choices decides nothing that a first call would not."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tritonamp
from tritonamp.casts import fused_ops, op_rules
from tritonamp.casts.fused_ops import Choice
from tritonamp.kernels import _implementations
from tritonamp.kernels import device as hardware
from tritonamp.kernels._implementations import TraceableOp, compile_failure
from tritonamp.kernels._launch import KernelError
from tritonamp.kernels.device import INTERPRETED

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),  # NumPy's
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="kernels cannot run here"
    ),
]
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
N = 12


def weights(x: Tensor, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    n = torch.arange(N, device=x.device)
    return (1 + n / N).to(dtype), (n / N).to(dtype)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "sum": lambda x: torch.sum(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (N,), *weights(x)),
    "rms_norm": lambda x: F.rms_norm(x, (N,), weights(x)[0]),
    "group_norm": lambda x: F.group_norm(x, 3, *weights(x)),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def x(device: torch.device) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(5, N, device=device).half().requires_grad_()


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> list[dict[Any, Choice]]:
    """The plans of each op."""
    found: list[dict[Any, Choice]] = []
    plain = op_rules.Stock.__init__

    def noted(op: op_rules.Stock, *args: Any) -> None:
        plain(op, *args)
        found.append(op.plans)

    monkeypatch.setattr(op_rules.Stock, "__init__", noted)
    return found


def enabled(x: Tensor, **policy: Any) -> tritonamp.Amp:
    model = nn.Linear(1, 1).to(x.device)
    return tritonamp.enable(model, level="O1", **{"backend": "triton", **policy})


@pytest.fixture
def amp(plans: Any, x: Tensor) -> Iterator[tritonamp.Amp]:
    with enabled(x) as amp, amp.autocast():
        yield amp


def values(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Return the result and, if there is one, the gradient of a sum of its squares."""
    x = x.detach().requires_grad_(x.requires_grad)
    y = call(x)
    if not y.requires_grad:
        return (y,)
    return y, *torch.autograd.grad(y.float().square().sum(), x)


@each_call
def test_a_choice_is_made_once(
    amp: tritonamp.Amp,
    x: Tensor,
    call: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = values(call, x)
    with torch.no_grad():
        assert torch.equal(call(x), first[0])
    monkeypatch.setattr(fused_ops, "_apply", None)
    again = values(call, x)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with torch.no_grad():
        y = call(x)
    assert torch.equal(y, first[0]) and not y.requires_grad


def other_weights(x: Tensor) -> Tensor:
    return F.layer_norm(x, (N,), *weights(x, FP16))


OTHERS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "dtype of the result": lambda x: values(functools.partial(torch.softmax, dim=1, dtype=FP32), x),
    "dimension": lambda x: values(lambda x: torch.softmax(x, 0), x),
    "dtype": lambda x: values(CALLS["softmax"], x.bfloat16()),
    "FP32": lambda x: values(CALLS["softmax"], x.float()),
    "shape": lambda x: values(CALLS["softmax"], x[:, :7]),
    "strides": lambda x: values(CALLS["sum"], x.t().contiguous().t()),
    "keepdim": lambda x: values(lambda x: torch.sum(x, -1, keepdim=True), x),
    "dtype of weights": lambda x: values(other_weights, x),
    "no weights": lambda x: values(lambda x: F.layer_norm(x, (N,)), x),
    "eps": lambda x: values(lambda x: F.layer_norm(x, (N,), *weights(x), 0.1), x),
    "groups": lambda x: values(lambda x: F.group_norm(x, 4, *weights(x)), x),
    "memory format": lambda x: values(
        CALLS["group_norm"],
        x.expand(2, 5, N).reshape(2, N, 5, 1).contiguous(memory_format=torch.channels_last),
    ),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_differs_is_looked_at(
    amp: tritonamp.Amp,
    x: Tensor,
    other: Callable[[Tensor], tuple[Tensor, ...]],
    plans: list[dict[Any, Choice]],
) -> None:
    expected = other(x)
    for kept in plans:
        kept.clear()
    for call in CALLS.values():
        call(x)
    F.group_norm(x.detach().expand(2, 5, N).reshape(2, N, 5, 1), 3, *weights(x))
    for got, wanted in zip(other(x), expected, strict=True):
        assert got.dtype is wanted.dtype and got.stride() == wanted.stride()
        assert torch.equal(got, wanted)


def test_each_policy_has_its_own(x: Tensor) -> None:
    softmax = CALLS["softmax"]
    with enabled(x) as half, enabled(x, softmax_dtype=FP32) as wide, enabled(x, op_policy=False):
        for _ in range(2):
            for amp, dtype in ((half, FP16), (wide, FP32)):
                with amp.autocast():
                    assert softmax(x).dtype is dtype


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_who_looks_on_sees_the_op(amp: tritonamp.Amp, x: Tensor, name: str) -> None:
    y = CALLS[name](x)
    with Log() as log:
        assert torch.equal(CALLS[name](x), y)
    assert f"tritonamp::{name.removeprefix('layer_')}" in log.seen
    mapped = torch.func.vmap(CALLS[name])(x.detach())
    torch.testing.assert_close(mapped.float(), y.detach().float(), rtol=2e-3, atol=1e-3)


@each_call
def test_a_kernel_that_is_lost_later(
    amp: tritonamp.Amp, x: Tensor, call: Callable[[Tensor], Tensor]
) -> None:
    """It raises as in a first call, and comes back."""
    y = call(x)
    with compile_failure():
        for _ in range(2):
            with pytest.raises(KernelError, match="cannot be compiled"):
                call(x)
    assert torch.equal(call(x), y)


def test_auto_goes_on_in_eager_torch(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hardware._answers, x.device, True)
    for module in (_implementations, fused_ops):  # the latter on a GPU
        monkeypatch.setattr(module, "MIN_NUMEL", 1)
    softmax = CALLS["softmax"]
    with enabled(x, backend="auto") as amp, amp.autocast():
        y = softmax(x)
        chosen = amp.stats()["kernel_failures"]
        with compile_failure():
            with pytest.warns(RuntimeWarning, match="softmax runs in eager torch from now on"):
                eager = softmax(x)
            assert torch.equal(softmax(x), eager)  # without another warning
        assert not chosen and torch.equal(softmax(x), y)


def test_there_are_not_too_many(
    amp: tritonamp.Amp, x: Tensor, monkeypatch: pytest.MonkeyPatch, plans: list[dict[Any, Choice]]
) -> None:
    monkeypatch.setattr(fused_ops, "MOST_PLANS", 2)
    for n in range(1, 6):
        torch.softmax(x[:, :n], -1)
    assert sum(map(len, plans)) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_a_shape_or_strides(amp: tritonamp.Amp, x: Tensor) -> None:
    sparse = x.detach().to_sparse()
    assert torch.sum(sparse, (0, 1)).dtype is FP32
    nested = torch.nested.nested_tensor([x[0].detach(), x[1, :3].detach()])
    assert torch.softmax(nested.float(), -1).dtype is FP32


def test_preparing_is_the_operation(x: Tensor) -> None:
    """What an operation prepares serves other memory, which lies in the same way."""
    for operation in _implementations.operations().values():
        if not isinstance(operation, TraceableOp) or operation.prepared is None:
            continue
        for sample in operation.samples:
            args = sample.args(x.detach(), 1)
            tensors = [a for a in args if a is None or isinstance(a, Tensor)]
            run = operation.prepared(*args)
            moved = [a if a is None else a.clone() * 2 for a in tensors]
            got = run(*moved)
            expected = operation.triton_function(*moved, *args[len(tensors) :])
            for a, b in zip(as_tuple(got), as_tuple(expected), strict=True):
                assert torch.equal(a, b)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result

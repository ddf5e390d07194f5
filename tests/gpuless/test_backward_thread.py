"""Backward runs in a thread of the device, where the caller's thread-local state is not."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import more
from gpuless.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.checkpoint import checkpoint
from watched.seen import Doubles, Seen

import tritonamp
from tritonamp.casts import active

BF16, FP16 = torch.bfloat16, torch.float16


class Calls(torch.autograd.Function):
    """The identity, whose backward calls a function of the gradient first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.function(grad)
        return grad.clone(), None


def in_backward(function: Any, device: str = "cuda") -> None:
    x = torch.ones(2, 2, device=device, requires_grad=True)
    Calls.apply(x, function).sum().backward()


def thread_of_backward(device: str = "cuda") -> int:
    found: list[int] = []
    in_backward(lambda grad: found.append(threading.get_ident()), device)
    return found[0]


# the thread


def test_the_device_has_a_thread_of_its_own(fake_cuda: FakeCuda) -> None:
    here = threading.get_ident()
    thread = thread_of_backward()
    assert thread != here
    assert thread_of_backward() == thread
    assert thread_of_backward("cpu") == here
    with torch.autograd.set_multithreading_enabled(False):
        assert thread_of_backward() == here


def test_what_torch_takes_to_that_thread(fake_cuda: FakeCuda) -> None:
    """Dispatch modes, and autocast with its dtype; not that its cache is off."""
    found: list[Any] = []

    def look(grad: Tensor) -> None:
        found.append(torch.ones(1, device="cuda").device.type)
        found.append(torch.is_autocast_enabled("cuda"))
        found.append(torch.get_autocast_dtype("cuda"))
        found.append(torch.is_autocast_cache_enabled())

    with torch.autocast("cuda", dtype=BF16, cache_enabled=False):
        in_backward(look)
    assert found == ["cuda", True, BF16, True]


def test_an_exception_comes_through(fake_cuda: FakeCuda) -> None:
    def fail(grad: Tensor) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        in_backward(fail)
    assert thread_of_backward() != threading.get_ident()


def test_a_backward_inside_of_a_backward_is_in_the_same_thread(fake_cuda: FakeCuda) -> None:
    found: list[int] = []

    def segment(x: Tensor) -> Tensor:
        found.append(threading.get_ident())
        return Calls.apply(x.exp(), lambda grad: found.append(threading.get_ident()))

    x = torch.ones(2, device="cuda", requires_grad=True)
    checkpoint(segment, x, use_reentrant=True).sum().backward()
    thread = thread_of_backward()
    assert found == [threading.get_ident(), thread, thread]
    assert x.grad is not None and torch.equal(x.grad, x.exp())


# places of ops


def in_a_new_thread(test: Any) -> Any:
    """Run a test where autograd's counter of nodes begins at 0. Here it may be at millions."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(test, *args, **kwargs).result()

    return run


def let_numbers_clash() -> None:
    """Bring autograd's counters of nodes to one value: of this thread, and of the device's."""
    number = torch._C._autograd._get_sequence_nr
    one = torch.ones((), requires_grad=True)
    here = number()

    def advance(to: int) -> None:
        while number() < to:
            one.clone()

    def catch_up(grad: Tensor) -> None:
        with torch.enable_grad():
            advance(here + 8)
        there.append(number())

    there: list[int] = []
    in_backward(catch_up)  # makes a few nodes here, too
    advance(there[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
@in_a_new_thread
def test_places_of_a_segment_that_is_computed_again(
    fake_cuda: FakeCuda, use_reentrant: bool
) -> None:
    """Numbers of the nodes that it makes there are those of other ops of the forward."""
    model = nn.Sequential(Doubles(), Doubles())
    x = torch.ones(2, device="cuda", requires_grad=True)
    let_numbers_clash()
    with Seen(model) as seen:
        y = checkpoint(model[1], model[0](x), use_reentrant=use_reentrant)
        y.sum().backward()
    forward = [place.module for place, backward in seen.of("exp") if not backward]
    assert forward == ["0", "1", "1"]
    backward = [place.module for place, _ in seen.of("tanh_backward")]
    assert backward == ["1.inner", "0.inner"]


@in_a_new_thread
def test_places_after_a_segment_was_computed_again(fake_cuda: FakeCuda) -> None:
    """Its nodes have the numbers that the next forward's ops get."""
    model = nn.Sequential(Doubles(), Doubles())
    x = torch.ones(2, device="cuda", requires_grad=True)
    let_numbers_clash()
    with Seen(model) as seen:
        loss = checkpoint(model[1], x, use_reentrant=False).sum()
        for _ in range(8):
            loss.backward(retain_graph=True)
        seen.ops.clear()
        for _ in range(3):
            model[0](x).sum().backward()
    assert {place.module for place, _ in seen.of("tanh_backward")} == {"0.inner"}


# a backward that is called inside of a forward


class Forces(nn.Module):
    """Returns a gradient of its output; a backward of its own multiplies by an FP32 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def _look(self, grad: Tensor) -> None:
        product = grad.float() @ self.layer.weight.float()
        self.dtypes += [product.dtype, product.softmax(-1).dtype, product.sum().dtype]

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        energy = Calls.apply(self.layer(x), self._look).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", *more(["O3"])])
def test_a_backward_inside_of_a_forward(
    fake_cuda: FakeCuda, level: str, dtype: torch.dtype
) -> None:
    """Its ops follow the forward's policy, as on a CPU, whose backward runs in the same thread."""
    dtypes, gradients = {}, {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = Forces()
        x = torch.randn(3, 4)
        amp = tritonamp.enable(model.to(device), level=level, dtype=dtype)
        model(x.to(device)).float().square().sum().backward()
        dtypes[device] = model.dtypes
        gradients[device] = model.layer.weight.grad.float().cpu()  # type: ignore[union-attr]
        amp.disable()
    assert dtypes["cuda"] == dtypes["cpu"]
    if level != "O3":
        assert dtypes["cuda"][0] is dtype
    # three matmuls in half, of which each rounds its operands and its result
    eps = torch.finfo(dtype).eps
    scale = gradients["cpu"].abs().max()
    assert (gradients["cuda"] - gradients["cpu"]).abs().max() <= 9 * eps / 2 * scale


def test_only_a_forward_takes_backwards_into_its_thread(fake_cuda: FakeCuda) -> None:
    found: list[int] = []

    class Notes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found.append(thread_of_backward())
            return super().forward(x)

    model = Notes(2, 2).cuda()
    amp = tritonamp.enable(model, level="O1")
    model(torch.ones(2, 2, device="cuda"))
    assert found == [threading.get_ident()]
    assert thread_of_backward() != threading.get_ident()
    with torch.autograd.set_multithreading_enabled(False):
        model(torch.ones(2, 2, device="cuda"))
        assert not torch._C._is_multithreading_enabled()
    amp.disable()


def test_a_trace_that_was_given_up_leaves_backwards_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy: Any = SimpleNamespace(device_type="cuda")
    monkeypatch.setattr(active.process, "add_mark", lambda policy: None)
    active.push_policy(policy, TracingContext(None))
    assert not torch._C._is_multithreading_enabled()
    assert not active.thread.live()  # that trace is not the current one
    assert torch._C._is_multithreading_enabled()

"""torch.func, batches of gradients and forward-mode AD through modules whose ops have rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import Apply, WrittenNorm
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import tritonamp

FP16, BF16 = torch.float16, torch.bfloat16


def _attention(x: Tensor) -> Tensor:
    y = x.reshape(-1, 1, 2, 4)
    return F.scaled_dot_product_attention(y, y, y).reshape(x.shape)


def _reductions(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True) + x.var(-1, keepdim=True) + x.norm(dim=-1, keepdim=True)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "BatchNorm1d without statistics": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "BatchNorm1d in evaluation": lambda: nn.BatchNorm1d(8).eval(),
    "BatchNorm2d": lambda: nn.Sequential(
        nn.Unflatten(-1, (8, 1, 1)), nn.BatchNorm2d(8), nn.Flatten()
    ),
    "InstanceNorm1d": lambda: nn.Sequential(
        nn.Unflatten(-1, (2, 4)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(-2)
    ),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "written norm": lambda: WrittenNorm(8),
    "softmax": lambda: Apply(lambda x: x.softmax(-1) * x.log_softmax(-1)),
    "reductions": lambda: Apply(lambda x: x + _reductions(x)),
    "attention": lambda: Apply(_attention),
    "cross entropy": lambda: Apply(
        lambda x: x + F.cross_entropy(x, torch.zeros(x.shape[:1], dtype=torch.int64))
    ),
}


def _parameters(m: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in m.named_parameters()}


def _loss(m: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(m, params, (x,)).float().square().sum()


def _batch_of_gradients(m: nn.Module, x: Tensor, batched: bool) -> Any:
    y, params = m(x).float(), list(m.parameters())
    seeds = torch.eye(y.numel())[:3].reshape(3, *y.shape)
    if batched:
        return torch.autograd.grad(y, params, seeds, is_grads_batched=True)
    return vmap(lambda seed: torch.autograd.grad(y, params, seed, retain_graph=True))(seeds)


def _dual(m: nn.Module, x: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        y = m(torch.autograd.forward_ad.make_dual(x, x))
        return tuple(torch.autograd.forward_ad.unpack_dual(y))


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap of autograd.grad": lambda m, x: _batch_of_gradients(m, x, False),
    "is_grads_batched": lambda m, x: _batch_of_gradients(m, x, True),
    "functional_call": lambda m, x: functional_call(m, _parameters(m), (x,)),
    "vmap": lambda m, x: vmap(m)(x.reshape(2, 2, 8)),
    "ensemble": lambda m, x: vmap(lambda p: functional_call(m, p, (x,)))(
        {name: torch.stack([p, p]) for name, p in _parameters(m).items()}
    ),
    "grad": lambda m, x: grad(lambda p: _loss(m, p, x))(_parameters(m)),
    "per-sample grad": lambda m, x: vmap(
        grad(lambda p, x: _loss(m, p, x[None].repeat(2, 1))), in_dims=(None, 0)
    )(_parameters(m), x),
    "jvp": lambda m, x: jvp(m, (x,), (x,)),
    "vjp": lambda m, x: vjp(m, x)[1](torch.linspace(-1, 1, 12).reshape(4, 3)),
    "jacrev": lambda m, x: jacrev(m)(x),
    "jacfwd": lambda m, x: jacfwd(m)(x),
    "hessian": lambda m, x: hessian(lambda x: m(x).float().square().sum())(x),
    "autograd's jacobian, forward mode": lambda m, x: torch.autograd.functional.jacobian(
        m, x, vectorize=True, strategy="forward-mode"
    ),
    "forward-mode AD": _dual,
}


def made(module: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), MODULES[module](), nn.Linear(8, 3))


# torch's own, in forward-mode derivatives and of ops that have no batching rule
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Mismatch dtype between")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("module", MODULES)
def test_transforms_run_where_they_do_in_fp32(module: str, transform: str) -> None:
    torch.manual_seed(1)
    x, call = torch.randn(4, 8), TRANSFORMS[transform]
    try:
        expected = [t.detach() for t in tree_leaves(call(made(module), x))]
    except (RuntimeError, ValueError):
        pytest.skip("torch refuses it in FP32: statistics that are written to, under vmap")
    largest = max(float(t.abs().max()) for t in expected)
    for level, half in (("O1", FP16), ("O2", FP16), ("O1", BF16), ("O2", BF16)):
        with tritonamp.enable(model := made(module), level=level, dtype=half):
            found = tree_leaves(call(model, x))
        assert [t.shape for t in found] == [t.shape for t in expected]
        # some eight roundings each way, which grow by the gain of a norm and the square of the loss
        close = 2 * 16 * torch.finfo(half).eps * largest
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(f.detach().float(), e, rtol=0, atol=close)

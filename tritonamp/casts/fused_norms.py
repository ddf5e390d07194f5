"""Recognise RMSNorms that users wrote by their code, and run them as ``rms_norm``."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tritonamp import functional
from tritonamp.casts.enabled_module import NormModule
from tritonamp.casts.norm_terms import Term
from tritonamp.casts.straight_code import Computed, computed_by
from tritonamp.policy import HALF_DTYPES

_PROBES = (((6,), 1.0), ((2, 3), 1e-4), ((1, 2, 3), 1e4), ((70,), 1.0))
"""Shapes without the last dimension, and magnitudes of values. Small values reveal eps."""
_CLOSE = 16 * torch.finfo(torch.float32).eps  # times the largest value: some ten roundings

Norm = Callable[[Tensor, Tensor], Tensor]
"""Function of input and weight that computes a norm over the last dimension."""


class Recipe(NamedTuple):
    """The formula of a module: ``rms_norm(x, x.shape[-1:], offset + weight, eps)``.

    ``offset`` is 1 where the parameter is the weight's distance from 1, else 0.
    """

    weight: str  # name of the parameter
    offset: float
    eps: float
    computed: Computed  # the proof, and its conditions

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of ``x``, in its dtype. Half is computed in FP32 and rounded once."""
        if self.offset and weight.dtype in HALF_DTYPES:  # half has no numbers between 1 and 1.001
            weight = weight.float()
        weight = weight.to(torch.promote_types(weight.dtype, x.dtype))
        if self.offset:
            weight = weight + self.offset
        return functional.rms_norm(x, x.shape[-1:], weight, self.eps)


def proved(module: nn.Module) -> Recipe | None:
    """Return the formula of an RMSNorm if ``computed_by`` proves it from the code, else None."""
    own = list(module.named_parameters())
    if len(own) != 1 or own[0][1].dim() != 1 or [*module.children(), *module.buffers()]:
        return None
    n = len(own[0][1])
    computed = computed_by(module, n)
    if computed is None:
        return None
    eps, offset = computed.result.eps, computed.result.offset
    if computed.result != Term(n, x=1, mean=-0.5, eps=eps, weight=1, offset=offset):
        return None
    return Recipe(computed.weight, offset, eps, computed)


def recipe_of(module: nn.Module) -> Recipe | None:
    """Return the formula of an RMSNorm; None for other modules, and for unproved ones.

    The code has to prove the formula. Then a copy runs on a few FP32 numbers on the CPU, and its
    values and gradients are compared with those of ``rms_norm`` in float64, because torch's
    operations may not be those of the proof. Hooks do not run.
    """
    recipe = proved(module)
    if recipe is None:
        return None

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        twin: Any = copy.copy(module)
        twin._parameters = {recipe.weight: weight}
        result: Tensor = twin.forward(x)
        return result

    n = len(getattr(module, recipe.weight))
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            torch.manual_seed(0)
            return recipe if _is_same(norm, recipe.norm, n) else None
    except Exception:  # the user's code wants other arguments, or its tensors are elsewhere
        return None


def _is_same(norm: Norm, other: Norm, n: int) -> bool:
    """Return whether two norms agree, gradients included, and ``norm`` keeps half inputs half."""
    half = _probe(2, n).half()
    if norm(half, half[0]).dtype is not half.dtype:
        return False
    for shape, size in _PROBES:
        given = size * _probe(*shape, n), _probe(n), _probe(*shape, n)
        found = _values(norm, *given)
        expected = _values(other, *(t.double() for t in given))
        if not all(map(_is_close, found, expected)):
            return False
    # to the format's end, where squares still have a sum; gradients need their third power
    largest = (torch.finfo(torch.float32).max / n) ** 0.5 / 2
    x, weight = largest * _probe(2, n), _probe(n)
    return _is_close(norm(x, weight), other(x.double(), weight.double()))


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not torch.float32 or a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= _CLOSE * b.abs().max())  # NaN is not close


def _values(norm: Norm, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        x, weight = x.requires_grad_(), weight.requires_grad_()
        y = norm(x, weight)
        return y.detach(), *torch.autograd.grad(y, (x, weight), grad.to(y.dtype))


def _probe(*shape: int) -> Tensor:
    """Return FP32 values of both signs, from 0.5 to 1.5 in magnitude."""
    values = torch.rand(shape, dtype=torch.float64, device="cpu") * 2 - 1
    return (values + 0.5 * values.sign()).float()


def _fits(x: Any, weight: Any) -> bool:
    """Return whether the norm of ``x`` has the dtype of ``x``, whatever casts the code makes."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return False
    if x.shape[-1:] != weight.shape or x.device != weight.device:
        return False
    return x.dtype in HALF_DTYPES or x.dtype is weight.dtype is torch.float32


class FusedRMSNorm(NormModule):
    """An RMSNorm that is not torch's, whose forward is ``rms_norm``."""

    _belongings: ClassVar[tuple[str, ...]] = (*NormModule._belongings, "_tritonamp_recipe")

    def _run(self: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any) -> Any:
        recipe: Recipe = self._tritonamp_recipe
        weight: Tensor = getattr(self, recipe.weight)
        fits = len(args) == 1 and not kwargs and _fits(args[0], weight)
        if fits and recipe.computed.still_holds(self, forward):
            return recipe.norm(args[0], weight)
        return super()._run(forward, bound, args, kwargs)

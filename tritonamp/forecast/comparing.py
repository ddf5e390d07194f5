"""The same batch at two levels."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from tritonamp.casts.fused_norms import recipe_of
from tritonamp.forecast.differences import Comparison
from tritonamp.forecast.places import Location
from tritonamp.forecast.results import Compared, Key, Known, Reference, Results
from tritonamp.forecast.running import Batch, LossFn, isolated, loss_of, named_failures
from tritonamp.forecast.twin import fp32_copy
from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.runtime import enable


class Side(NamedTuple):
    """One of the two levels.

    Attributes:
        name: as the report calls it.
        policy: of the level.
        scale: the loss scale of its backward, a power of two.
    """

    name: str
    policy: Policy
    scale: float


def compared(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, asked: Side, reference: Side
) -> Comparison:
    """Run copies of a model at two levels; model and random states stay as they are, bit for bit.

    The reference runs first, and every result of it is kept until the other has been compared.
    Where the two part, both run once more, with that module in FP32.

    Args:
        model: as for ``dry_run``.
        batch: of the model.
        loss_fn: as for ``dry_run``.
        asked: the level that the question is about.
        reference: what it is compared with.

    Raises:
        RuntimeError: the reference fails; the module is named.
    """
    found = _compared(model, batch, loss_fn, asked, reference)
    module = found.parted.place.module if found.parted else ""
    if not module or not _is_half(asked.policy):
        return found
    tried = dataclasses.replace(asked.policy, fp32_modules=(*asked.policy.fp32_modules, module))
    cured = _compared(model, batch, loss_fn, asked._replace(policy=tried), reference)
    return dataclasses.replace(found, tried=cured)


def _compared(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, asked: Side, reference: Side
) -> Comparison:
    dtype = (asked if _is_half(asked.policy) else reference).policy.dtype
    # an RMSNorm that the user wrote is one operation of ours at some levels
    wholes = {path for path, module in model.named_modules() if recipe_of(module) is not None}
    kept = Reference(wholes)
    expected = _run(model, batch, loss_fn, reference, kept)
    watch = Compared(kept, dtype, asked.scale / reference.scale)
    got, failed = float("nan"), ""
    try:
        got = _run(model, batch, loss_fn, asked, watch)
    except RuntimeError as error:
        failed = str(error).removeprefix("tritonamp.check: ")
    return Comparison(
        level=asked.name,
        reference=reference.name,
        dtype=dtype,
        differences=tuple(watch.differences),
        unmatched=watch.unmatched + (0 if failed else kept.left()),
        losses=(got, expected),
        failed=failed,
    )


def _run(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, side: Side, results: Results
) -> float:
    """Run a copy forward and backward, and return its loss."""
    with isolated(model), contextlib.ExitStack() as stack:
        twin = fp32_copy(model)
        stack.callback(enable(twin, policy=side.policy, backend="eager").disable)
        stack.enter_context(named_failures(results, f"the run in {side.name}"))
        results.follow(twin)
        args, kwargs = tree_map_only(Tensor, lambda t: _input(t, side, results), tuple(batch))
        for name, parameter in twin.named_parameters():
            results.seen(_key("parameter", name, parameter), parameter)
        params = {name: p for name, p in twin.named_parameters() if p.requires_grad}
        with results:
            loss = loss_of(twin(*args, **kwargs), loss_fn)
            grads = _backward(loss, list(params.values()), side.scale)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                results.seen(_key("gradient", name, grad), grad, [grad])
    return float(loss.detach())


def _backward(loss: Tensor, params: list[Tensor], scale: float) -> Sequence[Tensor | None]:
    """Return the gradients of ``scale`` times the loss, None where it does not depend on one."""
    if not loss.requires_grad:
        return [None] * len(params)
    loss = loss.float()
    # private (torch 2.11 to 2.15): the first gradient is not an op of the run
    with _disable_current_modes():
        first = torch.full_like(loss, scale)
    Known(scaled=True).put_on(first)
    grads: Sequence[Tensor | None] = torch.autograd.grad(loss, params, first, allow_unused=True)
    return grads


def _key(op: str, name: str, tensor: Tensor) -> Key:
    """Return the key of a parameter or its gradient."""
    place = Location(name.rpartition(".")[0], "")
    return Key(place, op, tensor.numel(), op == "gradient", name)


def _input(tensor: Tensor, side: Side, results: Results) -> Tensor:
    copied = tensor.detach().clone()
    if copied.dtype in HALF_DTYPES and not _is_half(side.policy):
        copied = copied.float()
    if copied.is_floating_point() and copied.numel():
        results.seen(Key(Location("", ""), "input", copied.numel()), copied)
    return copied.requires_grad_(tensor.requires_grad)


def _is_half(policy: Policy) -> bool:
    return policy.cast_model or policy.op_policy

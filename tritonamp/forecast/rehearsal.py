"""A few steps under a policy, as training takes them, on copies of model and optimizers."""

import contextlib
import copy
import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from tritonamp.forecast.running import Batch, LossFn, isolated, loss_of, runs
from tritonamp.forecast.twin import fp32_copy
from tritonamp.nested import map_leaves
from tritonamp.policy import O0, Policy
from tritonamp.runtime import enable
from tritonamp.watched.graph import gradient_leaves, nodes

STEPS = 3
logger = logging.getLogger("tritonamp")


@dataclass(frozen=True)
class Rehearsal:
    """Some steps on one batch. ``str()`` returns a sentence about them.

    Attributes:
        losses: loss of each step, before the step.
        skipped: number of skipped steps; without an optimizer, 1 if gradients are inf or NaN.
        optimizer: whether there was an optimizer; without one, only forward and backward ran.
        failed: error that ended the steps; "" without one.
        in_fp32: the same steps in FP32 (O0), if these did not go well; else None.
        unrun: reason why no step ran; "" if one did.
    """

    losses: tuple[float, ...] = ()
    skipped: int = 0
    optimizer: bool = True
    failed: str = ""
    in_fp32: "Rehearsal | None" = None
    unrun: str = ""

    @property
    def went_well(self) -> bool:
        """Whether every loss was finite, and no step was skipped."""
        return not self.failed and not self.skipped and all(map(math.isfinite, self.losses))

    @property
    def seen(self) -> str:
        """The losses, skips and error in words."""
        ends = (self.losses[0], self.losses[-1]) if len(self.losses) > 1 else self.losses
        parts = [f"loss {' -> '.join(f'{loss:.4g}' for loss in ends)}"] if ends else []
        if self.skipped and self.optimizer:
            parts.append(f"{self.skipped} of {len(self.losses)} steps skipped")
        elif self.skipped:
            parts.append("gradients are inf or NaN")
        if self.failed:
            parts.append(self.failed)
        return ", ".join(parts)

    def __str__(self) -> str:
        if self.unrun:
            return f"the policy was not run: {self.unrun}"
        ran = f"{len(self.losses)} steps" if self.optimizer else "forward and backward"
        if self.went_well:
            return f"the policy ran {ran} on this batch: {self.seen}"
        fp32, failure = self.in_fp32, f"the policy fails on this batch: {self.seen}"
        if fp32 is None:
            return failure
        if fp32.went_well:
            return f"{failure}. FP32 passes: {fp32.seen}"
        begins_well = self.optimizer and math.isfinite((*fp32.losses, math.nan)[0])
        lr = ". The first loss is finite, so look at the learning rate" if begins_well else ""
        return f"{failure}. FP32 fails as well: {fp32.seen}{lr}"


def rehearse(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batch: Batch,
    loss_fn: LossFn | None,
    policy: Policy,
) -> Rehearsal:
    """Train copies of a model and its optimizers on one batch, as after ``enable``.

    Model, optimizers, gradients and random states keep every bit. Steps that do not go well run
    again in FP32. With several ranks nothing runs, because steps wait for all of them.
    """
    together = distributed.is_available() and distributed.is_initialized()
    if together and distributed.get_world_size() > 1:
        return Rehearsal(unrun="its steps would wait for other ranks")
    run = _Steps(model, optimizers, batch, loss_fn)
    done = run.under(dataclasses.replace(policy, on_nonfinite="skip"))
    return done if done.went_well else dataclasses.replace(done, in_fp32=run.under(O0))


class _Steps:
    """The steps of one batch, under policies."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        batch: Batch,
        loss_fn: LossFn | None,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._batch, self._loss_fn = batch, loss_fn

    def under(self, policy: Policy) -> Rehearsal:
        """Take the steps under a policy."""
        losses: list[float] = []
        skipped, failed = 0, ""
        runs.debug("steps under the policy")
        with isolated(self._model), _quiet(), contextlib.ExitStack() as stack:
            try:
                memo: dict[int, Any] = {}
                twin = fp32_copy(self._model, memo)
                optimizers = [_copied(each, memo) for each in self._optimizers]
                amp = enable(twin, optimizers or None, policy=policy)
                stack.callback(amp.disable)
                for _ in range(STEPS if optimizers else 1):
                    args, kwargs = map_leaves(_given, self._batch)
                    loss, _ = loss_of(twin(*args, **kwargs), self._loss_fn)
                    losses.append(float(loss.detach()))
                    with _grads_kept(loss, twin):
                        if optimizers:
                            amp.backward(loss)
                        elif loss.requires_grad:
                            (loss.float() * _scale(policy)).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    # the outer autocast of ``isolated`` keeps casts of weights that have changed
                    torch.clear_autocast_cache()
                if optimizers:
                    skipped = amp.stats()["skipped"]
                else:
                    grads = [p.grad for p in twin.parameters() if p.grad is not None]
                    skipped = int(not all(bool(grad.isfinite().all()) for grad in grads))
            except Exception as error:  # of the user's code, or of torch
                failed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return Rehearsal(tuple(losses), skipped, bool(self._optimizers), failed)


def _scale(policy: Policy) -> float:
    return policy.init_scale if policy.loss_scale == "dynamic" else float(policy.loss_scale)


def _given(leaf: Any) -> Any:
    """Return a copy of a tensor of the batch, because the model may write to it."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy of an optimizer, for the copies of parameters in ``memo``.

    Its hooks stay behind, and so does a ``step`` that a scheduler of learning rates has put on it,
    because both reach the user's own optimizer. Launches that tritonamp's optimizers keep would
    write to the user's own tensors.
    """
    copied = copy.deepcopy(optimizer, memo)
    if any(kind.__module__.startswith("tritonamp.") for kind in type(optimizer).__mro__):
        return copied
    for name, value in vars(optimizer).items():
        if name not in vars(copied) and name != "step":
            vars(copied)[name] = copy.deepcopy(value, memo)
    return copied


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep messages about copies from the user's log."""
    before = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _grads_kept(loss: Tensor, twin: nn.Module) -> Iterator[None]:
    """Put back the gradients of tensors that are not the copy's, such as those of ``loss_fn``."""
    own = {id(parameter) for parameter in twin.parameters()}
    others = [leaf for leaf in gradient_leaves(nodes(loss)) if id(leaf) not in own]
    before = [leaf.grad for leaf in others]
    for leaf in others:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in zip(others, before, strict=True):
            leaf.grad = grad

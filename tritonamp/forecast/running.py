"""Runs a copy of a model under observation, without effects on the model itself."""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from tritonamp.ambient import preserve
from tritonamp.casts.inputs import tensors_in
from tritonamp.casts.user_functions import disable_casts
from tritonamp.forecast.twin import fp32_copy
from tritonamp.nested import map_leaves
from tritonamp.policy import Policy
from tritonamp.runtime import enable
from tritonamp.watched.frames import Role, plays
from tritonamp.watched.places import PlacedOps

logger = logging.getLogger("tritonamp")
runs = logging.getLogger("tritonamp.check")  # at level DEBUG a line for each run, when it starts
LossFn = Callable[[Any], Tensor]
GIVEN = "loss_fn(output)"  # the name of a loss that was not searched for


class Misuse(ValueError):
    """Raised if the arguments are wrong, not the model."""


Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a model's forward, by position and by name."""


@contextlib.contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Restore random states at the end, and ignore the caller's autocast and no_grad."""
    with (
        preserve({p.device for p in model.parameters() if p.is_cuda}),
        torch.inference_mode(False),
        torch.enable_grad(),
        disable_casts(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


class WatchedCopy(PlacedOps):
    """Sees each op that a copy runs, and the tensors that no op of the run computes.

    ``title`` names the run in errors, and ``scale`` is the loss scale of its backward.
    ``loss_name`` says which value was the loss.
    """

    loss_name = ""

    def __init__(self, title: str, scale: float = 1.0) -> None:
        super().__init__({})
        self.title = title
        self.scale = scale

    def begin(self, twin: nn.Module) -> None:
        """Prepare for a run of ``twin``, an enabled copy."""
        self.names = {module: path for path, module in twin.named_modules()}

    def given(self, batch: Batch) -> Batch:
        """Return the batch that the copy gets."""
        return map_leaves(lambda v: self.given_tensor(v) if isinstance(v, Tensor) else v, batch)

    def given_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the copy gets for a tensor of the batch."""
        copied = self.in_its_dtype(tensor.detach().clone())
        if copied.is_floating_point() and copied.numel():
            self.marked("input", copied)
        return copied.requires_grad_(tensor.requires_grad)

    def in_its_dtype(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the batch in the dtype that the run takes it in."""
        raise NotImplementedError

    def marked(self, op: str, tensor: Tensor, parameter: str = "") -> None:
        """Record a tensor that no op of the run computes.

        Args:
            op: "input", "loss gradient", "parameter" or "gradient".
            tensor: the tensor.
            parameter: full name, for a parameter or its gradient.
        """
        raise NotImplementedError


@contextlib.contextmanager
def _named_failures(watch: WatchedCopy) -> Iterator[None]:
    """Replace exceptions other than ``Misuse`` by one that names the failed module and the run."""
    try:
        yield
    except Misuse:
        raise
    except Exception as error:
        module = "" if watch.failed is None else watch.names[watch.failed]
        of = f"module {module!r}" if module else "the model, the loss or the backward"
        raise RuntimeError(
            f"tritonamp.check: {of} failed in {watch.title}: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _without_backend_line() -> Iterator[None]:
    """Keep the backend of a copy, which is not that of the model, from the user's log."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("backend ")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@plays(Role.RUN)
def run_copy(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, policy: Policy, watch: WatchedCopy
) -> Tensor:
    """Run a copy of a model forward and backward, and return its loss, with its graph.

    The copy has FP32 parameters and is enabled with ``policy``. Model, batch, gradients and random
    states keep every bit.

    Raises:
        Misuse: the loss is not a scalar.
        RuntimeError: replaces every other exception, and names the module and the run.
    """
    with isolated(model), contextlib.ExitStack() as stack:
        if any(p.is_cuda for p in model.parameters()):
            # cuDNN reads raw memory, and flash attention takes half only
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        twin = fp32_copy(model)
        runs.debug("%s", watch.title)
        with _without_backend_line():
            stack.callback(enable(twin, policy=policy, backend="eager").disable)
        stack.enter_context(_named_failures(watch))
        watch.begin(twin)
        args, kwargs = watch.given(batch)
        for name, parameter in twin.named_parameters():
            watch.marked("parameter", parameter, name)
        params = {name: p for name, p in twin.named_parameters() if p.requires_grad}
        with watch:
            loss, watch.loss_name = loss_of(twin(*args, **kwargs), loss_fn)
            grads = _gradients(loss, list(params.values()), watch)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                watch.marked("gradient", grad, name)
    return loss


def _gradients(loss: Tensor, params: list[Tensor], watch: WatchedCopy) -> Sequence[Tensor | None]:
    """Return the gradients of the scaled loss, None for parameters that do not affect the loss."""
    if not loss.requires_grad:
        return [None] * len(params)
    loss = loss.float()
    # private (torch 2.11 to 2.15): the first gradient is not an op of the run
    with _disable_current_modes():
        first = torch.full_like(loss, watch.scale)
        watch.marked("loss gradient", first)
    grads: Sequence[Tensor | None] = torch.autograd.grad(loss, params, first, allow_unused=True)
    return grads


def loss_of(output: Any, loss_fn: LossFn | None) -> tuple[Tensor, str]:
    """Return the scalar loss of a model's output and its name, or raise ``Misuse``.

    A copy of ``loss_fn`` runs if it is a module. Without ``loss_fn``, the loss is the output's own
    ``loss``, or without one the first 0-dimensional tensor in a tuple or list, with a gradient
    before one without, or else the mean of the output's floating tensors.
    """
    if loss_fn is None:
        return _own_loss(output)
    own = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    loss: Any = own(output)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss, GIVEN
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
    raise Misuse(f"loss_fn(output): expected a scalar tensor, got {got or type(loss).__name__}")


def _own_loss(output: Any) -> tuple[Tensor, str]:
    mapped, listed = isinstance(output, Mapping), isinstance(output, (tuple, list))
    loss = output.get("loss") if mapped else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.is_floating_point():
        name = 'output["loss"]' if mapped else "output.loss"
        return loss if loss.numel() == 1 else loss.float().mean(), name
    scalars = [
        (each, f"output[{i}]")
        for i, each in enumerate(output if listed else ())
        if isinstance(each, Tensor) and each.is_floating_point() and not each.dim()
    ]
    if scalars:
        return min(scalars, key=lambda scalar: not scalar[0].requires_grad)
    means = [t.float().mean() for t in tensors_in(output) if t.is_floating_point()]
    if not means:
        raise Misuse(
            f"the model's output ({type(output).__name__}) has no floating tensor: pass loss_fn"
        )
    return torch.stack(means).mean(), "the mean of the output, because loss_fn is None"

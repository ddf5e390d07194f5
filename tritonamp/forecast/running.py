"""How a copy of a model is run for a look: what it is given, what stays as it was, its loss."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tritonamp.ambient import preserve
from tritonamp.casts.user_functions import disable_casts
from tritonamp.forecast.places import PlacedOps

LossFn = Callable[[Any], Tensor]


class Misuse(ValueError):
    """Raised where the arguments are wrong, not the model."""


class Batch(NamedTuple):
    """What a model's forward is given.

    Attributes:
        args: by position.
        kwargs: by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextlib.contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Put random states back at the end; autocast and no_grad around the call do not count."""
    devices = {p.device for p in model.parameters() if p.is_cuda}
    nothing = contextlib.nullcontext()
    with (
        preserve(devices),
        # cuDNN reads raw memory, and flash attention takes half only
        torch.backends.cudnn.flags(enabled=False) if devices else nothing,
        sdpa_kernel(SDPBackend.MATH) if devices else nothing,
        torch.inference_mode(False),
        torch.enable_grad(),
        disable_casts(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


@contextlib.contextmanager
def named_failures(ops: PlacedOps, run: str) -> Iterator[None]:
    """Say which module failed, and in which run.

    Raises:
        RuntimeError: in the place of every exception but ``Misuse``.
    """
    try:
        yield
    except Misuse:
        raise
    except Exception as error:
        failed = f"module {ops.failed!r}" if ops.failed else "the model, the loss or the backward"
        raise RuntimeError(
            f"tritonamp.check: {failed} failed in {run}: {type(error).__name__}: {error}"
        ) from error


def loss_of(output: Any, loss_fn: LossFn | None) -> Tensor:
    """Return the scalar loss of a model's output.

    Args:
        output: of the model.
        loss_fn: gives the loss; where it is a module, a copy of it runs. None: the loss that the
            model has computed itself, else the mean of its floating tensors.

    Raises:
        Misuse: no scalar.
    """
    if loss_fn is None:
        return _own_loss(output)
    own = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    loss: Any = own(output)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
    raise Misuse(f"loss_fn(output): expected a scalar tensor, got {got or type(loss).__name__}")


def _own_loss(output: Any) -> Tensor:
    mapped = isinstance(output, Mapping)
    loss = output.get("loss") if mapped else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.is_floating_point():
        return loss if loss.numel() == 1 else loss.float().mean()
    means = [t.float().mean() for t in _floating(output)]
    if not means:
        raise Misuse(
            f"the model's output ({type(output).__name__}) has no floating tensor: pass loss_fn"
        )
    return torch.stack(means).mean()


def _floating(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = vars(output)
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        for item in output:
            yield from _floating(item)

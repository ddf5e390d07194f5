"""Steps in two ways, with the same bits: like the last step where it may be, or plainly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonamp.kernels import _facts, _multi_tensor, _native
from tritonamp.step.steady_step import SteadyStep


def plainly(patch: pytest.MonkeyPatch) -> None:
    """Have each step look at everything, in Python, as with ``TRITONAMP_PLAIN_STEPS=1``."""
    patch.setattr(_multi_tensor, "PLAIN_STEPS", True)
    patch.setattr(_facts, "PLAIN_STEPS", True)
    patch.setattr(_facts, "_native", _facts._InPython)


def quickly(patch: pytest.MonkeyPatch) -> None:
    """Have steps repeat the last one where they may, in C++ if there is a compiler."""
    patch.setattr(_multi_tensor, "PLAIN_STEPS", False)
    patch.setattr(_facts, "PLAIN_STEPS", False)
    patch.setattr(_facts, "_native", _native.build().module or _facts._InPython)


@contextmanager
def repeats() -> Iterator[list[Any]]:
    """Yield a list to which each step that repeats the last one adds itself."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        run = SteadyStep.run

        def noted(step: SteadyStep, *given: Any) -> None:
            run(step, *given)
            found.append(step)

        patch.setattr(SteadyStep, "run", noted)
        yield found


@contextmanager
def steps(plain: bool) -> Iterator[None]:
    """Take the steps inside the ``with`` block plainly, or as quickly as they may be."""
    with pytest.MonkeyPatch.context() as patch:
        (plainly if plain else quickly)(patch)
        yield


def bits_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that makes a tensor's bits, also where they are NaN."""
    flat = tensor.detach().to(memory_format=torch.contiguous_format, copy=True).reshape(-1)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.view(torch.uint8).tolist())


def stored_bits(run: Any) -> dict[str, Any]:
    """Return the bits of parameters, masters and optimizer state of a ``Training``.

    Nothing is asked of the handle, because its answers may bring masters up to date.
    """
    found = {f"model.{name}": p for name, p in run.model.named_parameters()}
    for o, optimizer in enumerate(run.optimizers):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        found |= {f"optimizer {o}, parameter {i}": p for i, p in enumerate(params)}
        for i, p in enumerate(params):
            own = vars(optimizer)["state"].get(p, {})
            found |= {f"optimizer {o}, state {i}, {key}": value for key, value in own.items()}
    return {name: bits_of(x) if isinstance(x, Tensor) else x for name, x in found.items()}

"""Arguments of ``enable`` in the wrong place: errors that say where they belong."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tritonamp.policy import LEVELS, Policy

_ORDER = "the order is tritonamp.enable(model, optimizer, level='O2')"


def check_places(models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Refuse models and optimizers of another kind.

    Args:
        models: models as the caller gave them.
        optimizers: optimizers as the caller gave them.

    Raises:
        ValueError: names the kind, and says where such an argument belongs.
    """
    for model in models:
        if not isinstance(model, nn.Module):
            raise ValueError(
                "model: expected a torch.nn.Module or a list of them, got "
                f"{_kind(model)}{_colon(_place_of_model(model))}"
            )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                "optimizer: expected a torch.optim.Optimizer or a list of them, got "
                f"{_kind(optimizer)}{_colon(_place_of_optimizer(optimizer))}"
            )


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"str {value!r}" if isinstance(value, str) else type(value).__name__


def _colon(hint: str) -> str:
    return f": {hint}" if hint else ""


def _place_of_model(value: Any) -> str:
    if isinstance(value, Optimizer):
        return _ORDER
    if isinstance(value, type) and issubclass(value, nn.Module):
        return f"make an instance of it, model = {value.__name__}(...)"
    if isinstance(value, (Tensor, Iterator)):
        return "give the model itself, not model.parameters(); several models are a list"
    if isinstance(value, dict):
        return "give the model itself, not its state_dict(); several models are a list"
    return "build the model first, and give the object" if isinstance(value, str) else ""


def _place_of_optimizer(value: Any) -> str:
    if isinstance(value, nn.Module):
        return f"{_ORDER}, and several models are a list, tritonamp.enable([model, criterion], ...)"
    if isinstance(value, LRScheduler):
        return "give its optimizer, and step the scheduler by amp.step_schedulers(scheduler)"
    if isinstance(value, Policy) or (isinstance(value, str) and value in LEVELS):
        return f"{_ORDER}, or tritonamp.enable(model, level='O2') for inference"
    if isinstance(value, torch.dtype):
        return f"write dtype={value}"
    if isinstance(value, torch.amp.GradScaler):
        return (
            "the handle has a scaler, amp.scaler. For settings of your own write "
            "scaler=tritonamp.GradScaler(...)"
        )
    if isinstance(value, type) and issubclass(value, Optimizer):
        return f"make an instance of it, {value.__name__}(model.parameters(), lr=...)"
    if isinstance(value, (Tensor, Iterator)):
        return "give the optimizer that was built from model.parameters()"
    return ""

"""``handle``: the ``Amp`` that a model belongs to."""

from torch import nn
from torch.nn.parallel import DataParallel

from tritonamp.casts.enabled_module import EnabledModule
from tritonamp.distributed.ddp import unwrapped
from tritonamp.runtime.amp import Amp


def handle(model: nn.Module) -> Amp | None:
    """Return the ``Amp`` of an enabled model, as ``enable`` returned it; None for other modules.

    A model in DistributedDataParallel, DataParallel or ``torch.compile``'s wrapper counts as the
    model itself. Other modules are models that were never enabled or are disabled, and copies and
    parts of enabled models.

    Raises:
        ValueError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    inner = unwrapped(model)
    if isinstance(inner, DataParallel) and not isinstance(inner, EnabledModule):
        return handle(inner.module)
    if not isinstance(inner, EnabledModule):
        return None
    found: Amp | None = inner._tritonamp_context.handle
    return found

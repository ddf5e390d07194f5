"""``amp.init``, and registration of the user's functions in the lists."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritonamp.apex.amp import lists, wrap
from tritonamp.apex.amp._amp_state import _amp_state
from tritonamp.apex.amp.casts import Listed
from tritonamp.apex.amp.handle import AmpHandle, NoOpHandle
from tritonamp.apex.amp.wrap import F
from tritonamp.apex.amp.wrap import float_function as float_function
from tritonamp.apex.amp.wrap import promote_function as promote_function

_registered: list[Listed] = []  # for the next ``init``


def half_function(function: F) -> F:
    """Return ``function`` wrapped to get floating tensors in float16 while casts are on."""
    return wrap.half(function, torch.float16)


def bfloat16_function(function: F) -> F:
    """Return ``function`` wrapped to get floating tensors in bfloat16 while casts are on."""
    return wrap.half(function, torch.bfloat16)


def _register(module: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(
            f"No function named {name} in module {module}: expected the name of a function that it "
            "has"
        )
    _registered.append((module, name, wrapper))


def register_half_function(module: Any, name: str) -> None:
    """Make the next ``amp.init`` or ``amp.initialize`` put ``module.name`` on the half list.

    It stays there, wrapped once, through later such calls, until the casts are removed.

    Raises:
        ValueError: ``module`` has no attribute ``name``.
    """
    _register(module, name, half_function)


def register_bfloat16_function(module: Any, name: str) -> None:
    """Make the next ``amp.init`` or ``amp.initialize`` put ``module.name`` on the bfloat16 list."""
    _register(module, name, bfloat16_function)


def register_float_function(module: Any, name: str) -> None:
    """Make the next ``amp.init`` or ``amp.initialize`` put ``module.name`` on the FP32 list."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Make the next ``amp.init`` or ``amp.initialize`` put ``module.name`` on the promote list."""
    _register(module, name, promote_function)


def init(
    enabled: bool = True,
    loss_scale: str | float = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle:
    """Cast around torch's functions in the whole process; the casts of an earlier call end.

    Args:
        enabled: whether to cast at all; with False the handle does nothing.
        loss_scale: loss scale of the optimizers passed to ``handle.wrap_optimizer`` or
            ``handle.scale_loss``.
        enable_caching: whether to cast each parameter once per iteration.
        verbose: accepted and ignored.
        allow_banned: whether banned functions get FP32 arguments instead of refusing half ones.
        patch_type: the half dtype, torch.float16 or torch.bfloat16.

    Returns:
        The handle. ``handle._deactivate()`` removes the casts.
    """
    earlier = _amp_state.handle
    carried = earlier.user_functions if earlier.is_active() else []
    earlier._deactivate()
    if not enabled:
        nothing = _amp_state.handle = NoOpHandle()
        return nothing
    handle = _amp_state.handle = AmpHandle(loss_scale, enable_caching, verbose, patch_type)
    functions = [*carried, *_registered]
    last = {(id(module), name): (module, name, wrapper) for module, name, wrapper in functions}
    handle.user_functions = list(last.values())  # of the entries for one function
    _registered.clear()
    _patch(handle, allow_banned)
    return handle


def _patch(handle: AmpHandle, allow_banned: bool) -> None:
    """Put wrappers around the functions of the lists, the user's own first."""
    for module, name, wrapper in handle.user_functions:
        handle._replace(module, [name], wrapper)
    every = (
        lists.functional_overrides,
        lists.torch_overrides,
        lists.tensor_overrides,
        lists.rnn_overrides,
    )
    for overrides in every:
        replace = functools.partial(handle._replace, overrides.MODULE)
        ops = (name for name in overrides.FP16_FUNCS if name not in lists.LAYERS)
        replace(ops, wrap.half_op)
        replace(overrides.FP32_FUNCS, float_function)
        replace([*overrides.CASTS, *overrides.SEQUENCE_CASTS], promote_function)
        if overrides is not lists.functional_overrides:
            replace((name + "_" for name in overrides.FP32_FUNCS), wrap.refuse_half)
            replace((name + "_" for name in overrides.FP16_FUNCS), wrap.match_first)
        for name, message in overrides.BANNED_FUNCS:
            refuse = functools.partial(wrap.refuse_half, message=message)
            replace([name], float_function if allow_banned else refuse)
    handle._replace(lists.rnn_overrides.MODULE, lists.LAYERS, wrap.half_layer)
    handle._replace(torch.nn.RNNBase, ["check_input"], wrap.any_input_dtype)

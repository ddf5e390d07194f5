"""The modules of a model that stay FP32, and changes of tensors' dtypes in place."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.casts.norm_layers import is_norm, kept_modules
from tritonamp.casts.selection import own_policies, selected, with_forward
from tritonamp.kernels._shards import is_sharded, set_local
from tritonamp.names import short
from tritonamp.policy import Policy


def fp32_modules(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the modules inside ``model`` that stay FP32 under its own policy.

    ``policy.fp32_modules`` names them, or the model asks for them. Without an op policy, norm
    layers that stay FP32 are in the result, too.

    Raises:
        ValueError: a name or class matches nothing in ``model``.
    """
    found = selected(model, policy, "fp32_modules")
    found |= dict.fromkeys(m for kept in kept_modules(model, policy) for m in with_forward(kept))
    if policy.keep_norms_fp32 and not policy.op_policy:
        found |= dict.fromkeys(m for m in model.modules() if m is not model and is_norm(m))
    return list(found)


def all_fp32_modules(models: Sequence[nn.Module], policy: Policy) -> list[nn.Module]:
    """Return the modules inside all ``models`` that stay FP32 under the policy of all."""
    each = zip(models, own_policies(models, policy), strict=True)
    return [m for model, own in each for m in fp32_modules(model, own)]


def modules_with_fp32_results(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the modules inside ``model`` that ``policy.fp32_results`` names.

    Raises:
        ValueError: a name or class matches nothing in ``model``.
    """
    return list(selected(model, policy, "fp32_results"))


def set_data(tensor: Tensor, data: Tensor, grad_dtype: torch.dtype | None = None) -> None:
    """Give ``tensor`` other storage and dtype, and its gradient ``grad_dtype``; None: its dtype.

    ``Tensor.grad_dtype`` has to follow, because autograd refuses a gradient of another dtype.
    """
    if not tensor.is_leaf:
        tensor.data = data
        return
    grad = tensor.grad
    if grad is not None:
        tensor.grad = None
    tensor.data = data
    if is_sharded(tensor):
        set_local(tensor, data)
    tensor.grad_dtype = grad_dtype = grad_dtype or data.dtype
    if grad is not None:
        tensor.grad = grad.to(grad_dtype)


def flatten_rnns(model: nn.Module) -> None:
    """Put the weights of each RNN back into one block for cuDNN, because new storage split it."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def refuse_scripted(model: nn.Module) -> None:
    """Raise ValueError if modules, or functions that a ``forward`` names, are scripted.

    torch.jit gives such code casts of its own.
    """
    kind = type(model).__name__
    scripted_global = functools.cache(_scripted_global)  # modules of one class share a forward
    for name, module in model.named_modules():
        where = f"submodule {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            got = f"{where}, a ScriptModule"
        elif function := _first_scripted(vars(module)) or scripted_global(type(module).forward):
            got = f"{function}, a ScriptFunction in the forward of {where}"
        else:
            continue
        raise ValueError(
            f"model: {kind} cannot be enabled, expected modules and functions in Python, got {got}"
            ": enable a model with the original, and call torch.jit.script after amp.disable()"
        )


def _scripted_global(forward: Callable[..., Any]) -> str | None:
    """Return a name in ``forward`` that stands for a scripted function."""
    function = inspect.unwrap(forward)
    if not inspect.isfunction(function):
        return None
    try:
        named = inspect.getclosurevars(function)
    except ValueError:  # a variable around the class has no value yet
        return None
    return _first_scripted({**named.globals, **named.nonlocals})


def _first_scripted(values: Mapping[str, Any]) -> str | None:
    scripted = torch.jit.ScriptFunction
    if scripted not in map(type, values.values()):  # in most cases, and in less time
        return None
    return next(n for n, v in values.items() if type(v) is scripted)


def refuse_cast(module: Any, fn: Callable[[Tensor], Any]) -> None:
    """Raise RuntimeError if ``fn`` would change the dtype of an enabled module's tensors."""
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    for dtype, device in dict.fromkeys((t.dtype, t.device) for t in tensors):
        to = getattr(fn(torch.empty(0, dtype=dtype, device=device)), "dtype", dtype)
        if to is not dtype:
            raise RuntimeError(
                f"{type(module).__name__} is enabled: expected a call that keeps the dtypes of its "
                f"weights, got one that makes {short(dtype)} ones {short(to)}, as half(), float(), "
                "double(), bfloat16() and to(dtype) do. The level decides on dtypes: call "
                "tritonamp.enable with another level or dtype, or amp.disable() before the cast"
            )

"""batch_norm of half inputs with FP32 weights under vmap, computed in FP32.

vmap runs before autocast, and decomposes batch_norm into ops that no rule of the op table sees. A
backward may run under vmap although its forward did not: in a batch of gradients. torch multiplies
some of the tensors first, and its kernels refuse the FP32 products together with the half input.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet

from tritonamp.casts.op_rules import AUTOCAST

KEY = "FuncTorchBatched"
_FORWARDS = "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit"
# positions of the input and of the gradient among the arguments
_BACKWARDS = {
    "native_batch_norm_backward": (1, 0),
    "cudnn_batch_norm_backward": (0, 1),
    "miopen_batch_norm_backward": (0, 1),
}


def register(library: torch.library.Library) -> None:
    """Register rules for the forwards and backwards of batch_norm in a library of aten."""
    for op in _FORWARDS:
        library.impl(op, functools.partial(_forward, _kernel(op)), KEY, with_keyset=True)
    for op, places in _BACKWARDS.items():
        backward = functools.partial(_backward, _kernel(op), *places)
        library.impl(op, backward, KEY, with_keyset=True)


def _kernel(op: str) -> Any:
    return torch.library.get_kernel(getattr(torch.ops.aten, op).default, KEY)


def _are_mixed(tensors: tuple[Any, ...]) -> bool:
    found = {t.dtype for t in tensors if isinstance(t, Tensor)}
    return len(found) > 1 and found <= {*AUTOCAST}


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.float() for t in tensors]


def _forward(kernel: Any, keyset: DispatchKeySet, *args: Any) -> Any:
    if not _are_mixed(args[:5]):
        return kernel.call_boxed(keyset, *args)
    result, *statistics = kernel.call_boxed(keyset, *_wide(*args[:5]), *args[5:])
    return (result.to(args[0].dtype), *statistics)


def _backward(kernel: Any, input: int, grad: int, keyset: DispatchKeySet, *args: Any) -> Any:
    if not _are_mixed(args[:5]):
        return kernel.call_boxed(keyset, *args)
    mean, var = args[5:7]
    train, eps, wanted = args[7:] if grad == 0 else (True, args[7], [True] * 3)
    # cuDNN's own would also need the memory that its forward of this dtype has reserved
    backward = torch.ops.aten.native_batch_norm_backward.default
    wide = _wide(args[grad], args[input], *args[2:5])
    to_input, *to_weights = backward(*wide, mean, var, train, eps, wanted)
    return (None if to_input is None else to_input.to(args[input].dtype), *to_weights)

"""Calls whose kernels ``bench/static.py`` builds without a GPU, and the limits that it checks."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

from tritonamp.kernels._multi_tensor import TensorLists

HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
LEVELS = (
    (WIDE, HALF, HALF),
    (WIDE, BF16, BF16),
    (WIDE, WIDE, HALF),
    (WIDE, WIDE, None),
    (HALF, HALF, None),
)
"""Dtypes of parameters, gradients and copies at the levels: FP32 masters with half copies, FP32
parameters without a copy (None), half parameters alone.
"""


class Shipped(NamedTuple):
    """A call whose kernels ``bench/static.py`` builds, and the limits for the builds.

    Attributes:
        name: a unique name, for the user.
        function: the Triton form of an operation.
        args: arguments of the call, tensors on the meta device.
        max_registers: largest number of registers of a thread.
        max_instructions: largest number of instructions for each element, or None if a tile is too
            small for that number to matter.
        exp2: number of MUFU.EX2 instructions for each element.
        max_shared: largest number of bytes of shared memory, or None for no limit.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    max_registers: int = 64
    max_instructions: float | None = None
    exp2: int = 0
    max_shared: int | None = None


def build_name(*words: object) -> str:
    """Return the words, without those that are False, joined by spaces; dtypes without "torch."."""
    return " ".join(str(word) for word in words if word is not False).replace("torch.", "")


def shipped_lists(
    aligned: bool,
    may_repeat: Iterable[str] = ("copies",),
    scalars: Collection[str] = (),
    **dtypes: torch.dtype | str,
) -> TensorLists:
    """Return lists of one small tensor each for ``shipped``.

    Args:
        aligned: all pointers are multiples of 16 bytes.
        may_repeat: names of lists that may repeat "params".
        scalars: names of lists of 0-d tensors.
        dtypes: dtype of each list by name, or the name of the list that it repeats.
    """
    lists: dict[str, Any] = {}
    for name, dtype in dtypes.items():
        if isinstance(dtype, str):
            # the same tensors, which is how a step says that parameters have no copies
            lists[name] = lists[dtype]
        else:
            # one element in, the address of a half or FP32 tensor is no multiple of 16
            lists[name] = [torch.empty(4096 + 8, dtype=dtype)[0 if aligned else 1 :][:4096]]
    return TensorLists(may_repeat=may_repeat, scalars=scalars, **lists)

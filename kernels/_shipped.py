"""Calls whose kernels ``bench/static.py`` builds without a GPU, and the limits that it checks."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._update_lists import Hyperparameters, UpdateLists

HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
LEVELS = (
    (WIDE, HALF, HALF),
    (WIDE, BF16, BF16),
    (WIDE, WIDE, HALF),
    (WIDE, WIDE, None),
    (HALF, HALF, None),
)
"""Dtypes of parameters, gradients and copies at the levels: masters with copies, FP32 parameters
without any (None), half ones alone.
"""


class Shipped(NamedTuple):
    """A call whose kernels ``bench/static.py`` builds, and the limits of the builds.

    Attributes:
        name: a unique name, for people.
        function: an operation's Triton form.
        args: the arguments of the call, tensors on the meta device.
        max_registers: registers of a thread.
        max_instructions: for each element, None where a tile is too small to judge.
        exp2: MUFU.EX2 instructions for each element.
        max_shared: bytes of shared memory; None: any.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    max_registers: int = 64
    max_instructions: float | None = None
    exp2: int = 0
    max_shared: int | None = None


def build_name(*words: object) -> str:
    """Return the words that are not False in a row, dtypes without "torch."."""
    return " ".join(str(word) for word in words if word is not False).replace("torch.", "")


def shipped_update(
    aligned: bool,
    level: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    states: Mapping[str, torch.dtype | str],
    rule: Hyperparameters,
    track_lost: bool = False,
    state: str = "fp32",
    optional: Iterable[str] = (),
) -> UpdateLists:
    """Return lists of one group for an update, of small tensors.

    Args:
        aligned: all pointers are multiples of 16 bytes.
        level: one of ``LEVELS``.
        states: dtypes of the optimizer's state by name; "params": there is no such state.
        rule: of the group.
        track_lost: see ``UpdateLists``.
        state: see ``UpdateLists``.
        optional: names of states that a group may lack.
    """
    param, grad, copy = level
    of_lists = {"params": param, "grads": grad, **states, "copies": copy or "params", "steps": WIDE}
    tensors = shipped_lists(aligned, ("copies", *optional), ("steps",), **of_lists)
    return UpdateLists(tensors, [rule], [0], track_lost, state)


def shipped_lists(
    aligned: bool,
    may_repeat: Iterable[str] = ("copies",),
    scalars: Collection[str] = (),
    **dtypes: torch.dtype | str,
) -> TensorLists:
    """Return lists of one small tensor each, for ``shipped``; a name repeats that list."""
    lists: dict[str, Any] = {}  # of tensors
    for name, dtype in dtypes.items():
        if isinstance(dtype, str):
            lists[name] = lists[dtype]
        else:
            lists[name] = [torch.empty(4096 + 8, dtype=dtype)[0 if aligned else 1 :][:4096]]
    return TensorLists(may_repeat=may_repeat, scalars=scalars, **lists)

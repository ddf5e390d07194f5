"""The data of recorded forwards."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from tritonamp.step.snapshots import BatchGoneError, Snapshot


def data_in(snapshots: Iterable[Snapshot]) -> list[list[tuple[str, Tensor]]]:
    """Return, for each forward, the floating tensors that came in from outside the models.

    Each tensor comes after its place among the arguments ("0", "images", "0['mask']"). Forwards
    whose batch was written to since are left out.
    """
    found = []
    for snapshot in snapshots:
        with contextlib.suppress(BatchGoneError):
            found.append(list(_floating(snapshot.arguments(), without=snapshot.made())))
    return found


def _floating(arguments: Any, without: set[int]) -> Iterator[tuple[str, Tensor]]:
    for i, (path, leaf) in enumerate(tree_flatten_with_path(arguments)[0]):
        if i in without or not isinstance(leaf, Tensor):
            continue
        if leaf.is_floating_point() and leaf.layout is torch.strided:
            keys = [getattr(key, "key", getattr(key, "idx", key)) for key in path[1:]]
            yield "".join(f"[{key!r}]" if k else str(key) for k, key in enumerate(keys)), leaf

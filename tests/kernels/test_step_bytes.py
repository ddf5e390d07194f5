"""The bytes of a step that ``bench/step_bytes.py`` states, counted in Triton's interpreter."""

from typing import Any

import pytest
import step_bytes
import torch
from torch import Tensor

from tests.kernels.conftest import Traffic, numpy_warns
from tritonamp.kernels import adamw, grad_stats, lion, rmsprop, sgd
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._update_samples import update_lists

pytestmark = numpy_warns

HALF = torch.float16
SIZE = 1 << 15
UPDATES = {
    "adamw": (adamw.ADAMW, adamw.AdamRule(0.01, 0.9, 0.99, 1e-8, 0.01, True, False, False)),
    "lion": (lion.LION, lion.LionRule(0.01, 0.9, 0.99, 0.01, False)),
    "sgd": (sgd.SGD, sgd.SGDRule(0.01, 0.9, 0.0, 0.01, True, False)),
    "rmsprop": (rmsprop.RMSPROP, rmsprop.RMSpropRule(0.01, 0.99, 1e-8, 0.01, 0.0, False, False)),
}


def tensors(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [torch.ones(SIZE, dtype=dtype, device=device)]


@pytest.mark.parametrize(
    "row", step_bytes.OURS, ids=lambda row: f"{row.operation} {row.state} {row.packed}"
)
def test_bytes_of_a_step(triton_device: torch.device, traffic: Traffic, row: Any) -> None:
    """Statistics of gradients, which check and clip, and the update.

    The interpreter holds bfloat16 in FP32, and counts its bytes twice.
    """
    update, rule = UPDATES[row.operation]
    params = tensors(triton_device, HALF if row.packed else torch.float32)
    grads = tensors(triton_device, HALF)
    copies = None if row.packed else tensors(triton_device, HALF)
    lists = update_lists(update, rule, params, grads, copies, row.state, row.packed)
    names = "params", "grads", "copies", "remainders", *update.states
    kept = {id(t): t.nbytes for name in names for t in lists.tensors.get(name) or ()}
    assert sum(kept.values()) == row.kept * SIZE

    more = 2 * row.states * torch.bfloat16.itemsize if row.state == "bf16" else 0
    update(lists, None, torch.zeros((), device=triton_device), "triton")
    moved = (traffic.read + traffic.written) / SIZE - more
    assert row.update <= moved <= 1.01 * row.update
    grad_stats.grad_stats(TensorLists(grads=grads), triton_device, "triton")
    moved = (traffic.read + traffic.written) / SIZE - more
    assert row.moved <= moved <= 1.01 * row.moved


@pytest.mark.parametrize(("packed", "bytes_of_changes"), [(True, 0.375), (False, 2.375)])
def test_bytes_of_changes(
    triton_device: torch.device, traffic: Traffic, packed: bool, bytes_of_changes: float
) -> None:
    """Two bits are written and one is read; with FP32 masters the old half copy is read, too."""
    update, rule = UPDATES["adamw"]
    moved = []
    for changes in (False, True):
        traffic.read = traffic.written = 0
        params = tensors(triton_device, HALF if packed else torch.float32)
        grads = tensors(triton_device, HALF)
        copies = None if packed else tensors(triton_device, HALF)
        lists = update_lists(update, rule, params, grads, copies, "fp32", packed, changes)
        update(lists, None, torch.zeros((), device=triton_device), "triton")
        moved.append((traffic.read + traffic.written) / SIZE)
    assert moved[1] - moved[0] == pytest.approx(bytes_of_changes, abs=0.02)

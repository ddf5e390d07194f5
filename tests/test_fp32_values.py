"""FP32 values beside half tensors: what is noticed of the half ones."""

import torch

from tritonamp.fp32_values import Fp32Values


def test_moves_to_other_memory_are_counted() -> None:
    values = Fp32Values()
    halves = [torch.ones(3).half(), torch.ones(2).half()]
    for half in halves:
        values.adopt(half, half.float())
    before = values.moves
    values.refresh()
    assert values.moves == before
    for half in halves:
        half.data = torch.full_like(half, 2.0)
    values.refresh()
    assert values.moves == before + 2
    assert all((values.get(half) == 2).all() for half in halves)

"""FP32 values of half tensors: which writes to the half ones are noticed."""

import torch
from torch import nn

from tritonamp.fp32_values import Fp32Values


def test_moves_to_other_memory_are_noticed() -> None:
    values = Fp32Values()
    halves = [torch.ones(3).half(), torch.ones(2).half()]
    for half in halves:
        values.adopt(half, half.float())
    assert not values.refresh(values.indices(halves))
    for half in halves:
        half.data = torch.full_like(half, 2.0)
    assert values.refresh(values.indices(halves))
    assert not values.refresh(values.indices(halves))
    assert all((values.get(half) == 2).all() for half in halves)


def test_only_values_that_somebody_wrote_to_are_rounded_into_their_halves() -> None:
    values = Fp32Values()
    halves = [nn.Parameter(torch.ones(size).half()) for size in (3, 2)]
    for half in halves:
        values.adopt(half, half.float())
    values.get(halves[0]).fill_(3.0)  # of a parameter: batch_norm writes to buffers unseen
    versions = [half._version for half in halves]
    values.push()
    assert (halves[0] == 3).all() and (halves[1] == 1).all()
    assert halves[0]._version > versions[0] and halves[1]._version == versions[1]


def test_a_step_brings_up_to_date_its_own_values_alone() -> None:
    """Those of the others are far from their half tensors: they follow when asked for."""
    values = Fp32Values()
    halves = [nn.Parameter(torch.ones(3).half()) for _ in range(2)]
    exact = [torch.full((3,), 1.0001), torch.full((3,), 1.0002)]
    for half, value in zip(halves, exact, strict=True):
        values.add(half, value)
    with torch.no_grad():
        for half in halves:
            half[0] = 2.0
    values.refresh(values.indices(halves[:1]))
    assert exact[0].tolist() == [2.0, exact[0][1], exact[0][1]]
    assert (exact[1] == exact[1][0]).all() and exact[1][0] != 2.0
    values.push()  # no value was written to
    assert halves[1].tolist() == [2.0, 1.0, 1.0]
    assert values.get(halves[1]).tolist() == [2.0, exact[1][1], exact[1][1]]
    assert exact[1][1] != 1.0

"""A flipped bit on one rank: all ranks name it, under DDP and FSDP2.

The ranks are this file run as a script, see two_ranks.py.
"""

import math
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Replica, Shared, alike, joint, listening, mesh_of, sharded
from runs import batch
from torch import Tensor, nn
from two_ranks import Pair, of_ranks, on_ranks, serve

pytestmark = of_ranks
ENGINES = "DDP", "FSDP2"


class Flip(torch.autograd.Function):
    """Makes one row NaN in the forward, or one row of the gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        return spoilt(x) if where == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return spoilt(grad) if ctx.where == "backward" else grad, None


def spoilt(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = math.nan  # a whole row, because relu masks single elements
    return x


class Planted(nn.Module):
    """A model with BatchNorm, one of whose runs has a flip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        where, self.where = self.where, ""
        return self.last(Flip.apply(h, where) if where else h)


@on_ranks
def flipped(engine: str, where: str, culprit: int, level: str, half: str) -> dict[str, Any]:
    """One rank has a flip in the third step."""
    net = Planted()
    fields = {"level": level, "on_nonfinite": "explain", "dtype": getattr(torch, half)}
    run: Any
    if engine == "DDP":
        run = Replica(net, "SGD", share=joint, **fields)
    else:
        run = Shared(sharded(net, mesh=mesh_of(None)), "SGD", share=joint, **fields)
    with listening() as texts:
        for i in range(4):
            if i == 2 and dist.get_rank() == culprit:
                net.where = where
            run.step(batch(10 * i + dist.get_rank()))
    said = [text for text in texts if text.startswith("step 3 skipped")]
    return {
        "said": said,
        "explained": run.amp.explain(replay=True),
        "skipped": run.counts("skipped"),
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_flip_in_a_forward_names_its_rank(pair: Pair, engine: str, level: str, half: str) -> None:
    answers = flipped(pair, engine=engine, where="forward", culprit=1, level=level, half=half)
    first = alike(answers)
    (said,) = first["said"]
    assert said.startswith("step 3 skipped (1 of 3): forward fault: ")
    assert "\nother bits on rank 1: two more runs of this batch agree, and differ from the" in said
    assert "the hardware of rank 1 is suspected" in said and "rank 0" not in said
    assert "outside of the model" not in said and "Look in" not in said
    assert first["explained"] == said and first["skipped"] == [1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flip_in_a_backward_names_the_ranks(pair: Pair, engine: str) -> None:
    """The ranks have exchanged their gradients, so no rank knows its own any more."""
    how = {"engine": engine, "level": "O2", "half": "bfloat16"}
    first = alike(flipped(pair, where="backward", culprit=0, **how))
    (said,) = first["said"]
    assert "\nother bits on one of ranks 0, 1: gradients" in said
    assert "are finite in two more runs, which agree, on each rank. Torch lists no op" in said
    assert "outside of the model" not in said and first["skipped"] == [1]


def test_a_fault_of_one_rank_is_reproduced(pair: Pair) -> None:
    said = alike(reproduced(pair))
    assert "matmul overflow" in said or "overflow, forward" in said
    assert ", on rank 1\n" in said and "\n  replay:  reproduced" in said
    assert "other bits" not in said


@on_ranks
def reproduced() -> str:
    """Rank 1 has a batch that overflows float16."""
    net = Planted()
    run = Replica(net, "SGD", share=joint, on_nonfinite="explain")
    for i in range(3):
        run.step(batch(i) * (1e6 if i == 2 and dist.get_rank() == 1 else 1.0))
    return str(run.amp.explain())


if __name__ == "__main__":
    serve(*sys.argv[1:])

"""Two gloo ranks on CPU train a model with a product beyond float16, which has an FP32 result.

The ranks are this file run as a script, see two_ranks.py.
"""

import sys
from typing import Any

import pytest
import torch
from ranks import Shared, distance, joint, joint_batches, sharded
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Pair, of_ranks, on_ranks, serve

pytestmark = of_ranks

STEPS = 4
FIELDS = {"dtype": torch.float16, "fp32_results": ["block.2"], "on_nonfinite": "raise"}


class Net(nn.Module):
    """A residual block whose last layer leaves float16, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        with torch.no_grad():
            self.block[2].weight.mul_(2e5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.block(x)
        self.stream = float(x.detach().abs().max()), str(x.dtype)
        return self.head(self.norm(x))


@on_ranks
def trained(how: str) -> list[Any]:
    net = Net()
    fields = FIELDS if how != "plain" else {"dtype": torch.float16}
    if how == "FSDP2":
        model: Any = sharded(net, [net.block[2]], {"param_dtype": torch.float16})
    else:
        model = DistributedDataParallel(net)
    run = Shared(model, "SGD", **fields).walk(joint_batches(STEPS))
    alone = Shared(Net(), "SGD", share=joint, **fields).walk(joint_batches(STEPS))
    return [run.outcome(), alone.outcome(), net.stream]


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_as_one_process(pair: Pair, how: str) -> None:
    first, second = trained(pair, how=how)
    assert first[:2] == second[:2]
    found, alone, (largest, dtype) = first
    assert (found["steps"], found["skipped"]) == (STEPS, 0)
    assert largest > 65504
    assert dtype == "torch.float32"
    assert distance(found["masters"], alone["masters"]) < 0.01


def test_without_fp32_results_every_step_is_skipped(pair: Pair) -> None:
    for found, *_ in trained(pair, how="plain"):
        assert found["skipped"] == STEPS


if __name__ == "__main__":
    serve(*sys.argv[1:])

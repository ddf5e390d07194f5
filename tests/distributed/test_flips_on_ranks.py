"""A bit flips on one of two gloo ranks on CPU. The text names the rank, and its advice is for both.

The ranks are this file run as a script, see two_ranks.py.
"""

import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import alike
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Pair, of_ranks, on_ranks, serve

import tritonamp
from tritonamp.testing import Fault, FaultInjector

pytestmark = of_ranks


@on_ranks
def flipped(target: str, bit: int) -> Any:
    """Follow the advice on both ranks, and return the causes, the text and the masters."""
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    fields: dict[str, Any] = {"dtype": torch.bfloat16, "on_nonfinite": "explain"}
    amp = tritonamp.enable(net, optimizer, level="O2", **fields)
    model = DistributedDataParallel(net)
    injector = FaultInjector(model, optimizer)

    def step(number: int, fault: Fault | None = None) -> None:
        seed = 2 * number + dist.get_rank()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        with injector.step(fault):
            amp.backward(model(x).float().square().mean())
            optimizer.step()
        optimizer.zero_grad()

    fault = Fault("bitflip", "module.0.weight", target=target, bit=bit, element=5)
    for number in range(8):
        step(number, fault if number == 5 and dist.get_rank() == 1 else None)
    text = amp.explain()
    code = re.search(r"repair it on all ranks: (with torch.*)$", text)
    assert code is not None, text
    exec(code[1], {"torch": torch, "amp": amp, "optimizer": optimizer})
    for number in range(8, 12):
        step(number)
    masters = [master.detach().tolist() for master in amp.master_params()]
    return [record.cause for record in amp.history], text, masters


@pytest.mark.parametrize(("target", "bit"), [("weight", 14), ("master", 30), ("exp_avg", 30)])
def test_the_rank_of_a_flip_is_named_and_ranks_stay_equal(
    pair: Pair, target: str, bit: int
) -> None:
    causes, text, _ = alike(flipped(pair, target=target, bit=bit))
    after = 5 if target == "weight" else 6
    assert causes == [None] * after + ["bad parameters"] * (8 - after) + [None] * 4
    assert "value of 0.weight" in text and f"seen since step {after + 1} on rank 1. A bit" in text


if __name__ == "__main__":
    serve(*sys.argv[1:])

"""Copies and averages of a model under DistributedDataParallel: two gloo ranks on CPU.

The ranks are this file run as a script, see two_ranks.py.
"""

import copy
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Net, take_step
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from two_ranks import Pair, of_ranks, on_ranks, serve

import tritonamp

pytestmark = of_ranks


@on_ranks
def copied(level: str) -> list[Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    amp = tritonamp.enable(net, optimizer, level=level, loss_scale=64.0)
    model = DistributedDataParallel(net)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    x = torch.randn(4, 6) + dist.get_rank()
    for _ in range(2):
        take_step(amp, optimizer, model(x).float().square().mean())
        average.update_parameters(model)
    assert tritonamp.handle(model) is amp
    found = [copy.deepcopy(model.module), copy.deepcopy(model).module]
    for each in (*found, average.module.module):
        assert tritonamp.handle(each) is None
        assert {p.dtype for p in each.parameters()} == {torch.float32}
    state = net.state_dict()
    for each in found:
        assert all(torch.equal(v, state[name]) for name, v in each.state_dict().items())
    assert not any("_tritonamp_ranks" in vars(m) for m in copy.deepcopy(model).modules())
    # the copy of a DDP is one
    second = copy.deepcopy(model)
    theirs = torch.optim.AdamW(second.parameters(), lr=1e-2)
    with tritonamp.enable(second, theirs, level=level, loss_scale=64.0) as other:
        take_step(other, theirs, second(x).float().square().mean())
        trained = [p.tolist() for p in other.master_params()]
    averages = [p.tolist() for p in average.parameters()]
    amp.disable()
    return [trained, averages]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_copies_are_fp32_and_train(pair: Pair, level: str) -> None:
    first, second = copied(pair, level=level)
    assert first == second


if __name__ == "__main__":
    serve(*sys.argv[1:])

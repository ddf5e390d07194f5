"""Two gloo ranks on CPU sleep between phases of training, under DDP and FSDP2.

Nothing would move on a CPU: the ranks take its tensors for those of a device. They are this file
run as a script, see two_ranks.py.
"""

import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import RANKS, Pair, of_ranks, on_ranks, serve

import tritonamp
from tritonamp.step import sleep

pytestmark = of_ranks


def wrapped(how: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 1))
    if how == "FSDP2":
        policy = MixedPrecisionPolicy(param_dtype=torch.float16)
        return fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    return DistributedDataParallel(model, gradient_as_bucket_view=how == "DDP views")


def part(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def trained(how: str, weights: bool | None) -> tuple[list[float], list[int]]:
    """Train; asleep after each backward and step, unless ``weights`` is None."""
    model = wrapped(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp = tritonamp.enable(model, optimizer, level="O2")
    ema, moved = amp.ema(0.5), []

    def maybe_sleep() -> None:
        if weights is not None:
            moved.append(amp.sleep(weights=weights))
            amp.wake()

    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = (model(x[dist.get_rank() :: RANKS]).float() - 1).square().mean()
        bad = step == 1 and dist.get_rank() == 0
        amp.backward(loss * torch.inf if bad else loss)
        maybe_sleep()
        amp.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        maybe_sleep()
    values = [*amp.master_params(), *model.parameters(), *ema.state_dict().values()]
    values += [x for state in optimizer.state.values() for x in state.values()]
    amp.disable()
    return torch.cat([part(x).double().reshape(-1) for x in values]).tolist(), moved


@on_ranks
def sleeping(how: str, weights: bool) -> bool:
    with mock.patch.object(sleep, "_is_on_device", lambda tensor: tensor.layout is torch.strided):
        never, _ = trained(how, None)
        slept, moved = trained(how, weights)
    return never == slept and all(moved) and len(moved) == 8


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("how", ["DDP", "DDP views", "FSDP2"])
def test_ranks_go_on_with_the_same_bits(pair: Pair, how: str, weights: bool) -> None:
    assert sleeping(pair, how=how, weights=weights) == [True, True]


if __name__ == "__main__":
    serve(*sys.argv[1:])

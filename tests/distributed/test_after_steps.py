"""Two gloo ranks on CPU: moving averages and schedulers are alike on both, under DDP and FSDP2.

The ranks are this file run as a script, see two_ranks.py.
"""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from two_ranks import RANKS, Pair, of_ranks, on_ranks, serve

import tritonamp

pytestmark = of_ranks
DECAY = 0.5
SKIPPED = [0, 3]
STEPS = 6


def net() -> nn.Sequential:
    """With shapes that two ranks cannot share evenly, and a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 1))
    model.register_buffer("count", torch.zeros(2))
    return model


def sharded() -> nn.Sequential:
    model = net()
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(model: nn.Module) -> dict[str, Any]:
    """Train on this rank's half; a step is skipped where one of them has a bad loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scheduler = LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
    scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10)
    wrapped = model if hasattr(model, "unshard") else DistributedDataParallel(model)
    amp = tritonamp.enable(wrapped, optimizer, level="O2", scaler=scaler)
    ema = amp.ema(DECAY)
    expected = [full(p).detach().double() for p in amp.master_params()]
    rates = []
    for step in range(STEPS):
        model.count += 1
        bad = step in SKIPPED and dist.get_rank() == step % RANKS
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = (wrapped(x[dist.get_rank() :: RANKS]) - 1).square().mean()
        amp.backward(loss * math.inf if bad else loss)
        optimizer.step()
        optimizer.zero_grad()
        amp.step_schedulers(scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
        ema.update()
        values = [full(p).detach().double() for p in amp.master_params()]
        if step not in SKIPPED:
            pairs = zip(expected, values, strict=True)
            expected = [DECAY * a + (1 - DECAY) * v for a, v in pairs]
    return {"ema": ema, "amp": amp, "model": model, "expected": expected, "rates": rates}


@on_ranks
def averages(kind: str) -> list[Any]:
    run = train(net() if kind == "DDP" else sharded())
    names = [name for name, _ in run["model"].named_parameters()]
    state = run["ema"].state_dict()
    found = [full(state[name]) for name in names]
    for average, right in zip(found, run["expected"], strict=True):
        assert (average.double() - right).abs().max() <= 2 * STEPS * 2.0**-24
    target = net()
    run["ema"].copy_to(target)
    assert all(map(torch.equal, found, [target.state_dict()[name] for name in names]))
    assert target.count.tolist() == [STEPS, STEPS]
    run["amp"].disable()
    return [run["rates"], [a.tolist() for a in found]]


@on_ranks
def averages_of_shards_are_saved(folder: str) -> bool:
    run = train(sharded())
    tritonamp.save_sharded(folder, ema=run["ema"])
    model = sharded()
    amp = tritonamp.enable(model, torch.optim.SGD(model.parameters(), lr=0.25), level="O2")
    new = amp.ema(DECAY)
    tritonamp.load_sharded(folder, ema=new)
    before, after = run["ema"].state_dict(), new.state_dict()
    equal = [torch.equal(full(before[name]), full(after[name])) for name in before]
    new.copy_to(model)
    value = full(dict(model.named_parameters())["0.weight"])
    equal.append(torch.equal(value, full(after["0.weight"])))
    for used in (amp, run["amp"]):
        used.disable()
    return all(equal)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_averages_and_learning_rates(pair: Pair, kind: str) -> None:
    first, second = averages(pair, kind=kind)
    assert first == second
    assert first[0] == [0.25 / n for n in (1, 2, 3, 3, 4, 5)]


def test_averages_of_shards_are_saved(pair: Pair, tmp_path: Path) -> None:
    assert averages_of_shards_are_saved(pair, folder=str(tmp_path / "run")) == [True, True]


if __name__ == "__main__":
    serve(*sys.argv[1:])

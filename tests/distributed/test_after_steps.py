"""Two gloo ranks on CPU: moving averages and schedulers are alike on both, under DDP and FSDP2.

The ranks are this file run as a script, see two_ranks.py.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Shared, sharded
from small_models import uneven_net
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from two_ranks import RANKS, Pair, enable, of_ranks, on_ranks, serve

import tritonamp

pytestmark = of_ranks
DECAY = 0.5
SKIPPED = [0, 3]
STEPS = 6


def net_with_buffer() -> nn.Sequential:
    model = uneven_net()
    model.register_buffer("count", torch.zeros(2))
    return model


def model_by(kind: str) -> nn.Module:
    model = net_with_buffer()
    if kind == "DDP":
        return DistributedDataParallel(model)
    return sharded(model, policy={"param_dtype": torch.float16})  # type: ignore[no-any-return]


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Averaged(Shared):
    """A run with an average and a scheduler; some steps are skipped, for one rank has a bad loss.

    Attributes:
        ema: the average.
        expected: what it must be.
        rates: the learning rate after each step.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(
            model_by(kind),
            lambda params: torch.optim.SGD(params, lr=0.25),
            share=lambda x: x[dist.get_rank() :: RANKS],
        )
        self.net: Any = getattr(self.model, "module", self.model)
        self.ema, self.rates = self.amp.ema(DECAY), list[float]()
        scheduler = LambdaLR(self.optimizer, lambda n: 1.0 / (1 + n))
        self.expected = self.doubles()
        for step in range(STEPS):
            self.net.count += 1
            bad = step in SKIPPED and dist.get_rank() == step % RANKS
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            self.walk([x], {0: "loss"} if bad else {})
            self.amp.step_schedulers(scheduler)
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.ema.update()
            if step not in SKIPPED:
                pairs = zip(self.expected, self.doubles(), strict=True)
                self.expected = [DECAY * a + (1 - DECAY) * v for a, v in pairs]

    def doubles(self) -> list[Tensor]:
        return [full(p).detach().double() for p in self.amp.master_params()]


@on_ranks
def averages(kind: str) -> list[Any]:
    run = Averaged(kind)
    names = [name for name, _ in run.net.named_parameters()]
    state = run.ema.state_dict()
    found = [full(state[name]) for name in names]
    for average, right in zip(found, run.expected, strict=True):
        assert (average.double() - right).abs().max() <= 2 * STEPS * 2.0**-24
    target = net_with_buffer()
    run.ema.copy_to(target)
    assert all(map(torch.equal, found, [target.state_dict()[name] for name in names]))
    assert target.count.tolist() == [STEPS, STEPS]
    return [run.rates, [a.tolist() for a in found]]


@on_ranks
def averages_of_shards_are_saved(folder: str) -> bool:
    run = Averaged("FSDP2")
    tritonamp.save_sharded(folder, ema=run.ema)
    model = model_by("FSDP2")
    amp = enable(model, torch.optim.SGD(model.parameters(), lr=0.25), level="O2")
    new = amp.ema(DECAY)
    tritonamp.load_sharded(folder, ema=new)
    before, after = run.ema.state_dict(), new.state_dict()
    equal = [torch.equal(full(before[name]), full(after[name])) for name in before]
    new.copy_to(model)
    value = full(dict(model.named_parameters())["0.weight"])
    return all([*equal, torch.equal(value, full(after["0.weight"]))])


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_averages_and_learning_rates(pair: Pair, kind: str) -> None:
    first, second = averages(pair, kind=kind)
    assert first == second
    assert first[0] == [0.25 / n for n in (1, 2, 3, 3, 4, 5)]


def test_averages_of_shards_are_saved(pair: Pair, tmp_path: Path) -> None:
    assert averages_of_shards_are_saved(pair, folder=str(tmp_path / "run")) == [True, True]


if __name__ == "__main__":
    serve(*sys.argv[1:])

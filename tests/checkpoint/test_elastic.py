"""A run of two ranks goes on on one, on four, and back: its values to the last bit, its losses to
rounding. And saving at any moment disturbs nothing.

The ranks are this file run as a script, see two_ranks.py: two of them, and four.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from two_ranks import Pair, of_ranks, on_ranks, serve

import tritonamp
from tritonamp import load_sharded, save_sharded

pytestmark = of_ranks

STEPS, BAD = 3, 1  # between saves; an overflow in each stretch
ROUNDINGS = 4
"""Between weights and loss: of two layers' weights, and of what they return."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Pair]]:
    """Jobs by their number of ranks."""
    made = {n: Pair(tmp_path_factory.mktemp(f"ranks{n}"), __file__, n) for n in (2, 4)}
    yield made
    for pair in made.values():
        pair.stop()


class Run:
    """A run at O2.

    Args:
        seed: of the weights.
        across: how many ranks share a layer; 0: no ranks, a single process.
        hidden: rows of a weight; 7 that no number of ranks shares evenly, or 8 for layers that are
            shared.
    """

    def __init__(self, seed: int, across: int, hidden: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        if across:
            shape = dist.get_world_size() // across, across
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
            if across > 1:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(self.model, mesh["tensor"], plan)
            policy = MixedPrecisionPolicy(param_dtype=torch.float16)
            # of layers that are shared FSDP2 warns that they return views
            for part in (self.model[0], self.model) if across == 1 else (self.model,):
                fully_shard(part, mesh=mesh["data"], mp_policy=policy)
            self.data = mesh["data"]
        self.across, self.losses = across, list[float]()
        self.saves_after, self.saves_to = "", ""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=0.25)
        scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10)
        self.amp = tritonamp.enable(self.model, self.optimizer, level="O2", scaler=scaler)

    def train(self, start: int) -> None:
        """Take the steps from ``start``; the losses are those of all ranks."""
        for i in range(start, start + STEPS):
            generator = torch.Generator().manual_seed(i)
            x, y = (torch.randn(8, n, generator=generator) for n in (6, 3))
            parts, part = (self.data.size(), self.data.get_local_rank()) if self.across else (1, 0)
            output = self.model(x.chunk(parts)[part])
            self.moment("forward")
            if i == start + BAD and part == parts - 1:
                output.register_hook(lambda grad: grad * math.inf)
            loss = nn.functional.mse_loss(output, y.chunk(parts)[part])
            self.amp.backward(loss)
            self.moment("backward")
            self.amp.clip_grad_norm_(1.0)
            self.moment("clipping")
            self.optimizer.step()
            self.moment("step")
            self.optimizer.zero_grad()
            total = loss.detach().clone()
            if self.across:
                dist.all_reduce(total)
                total /= dist.get_world_size()
            self.losses.append(float(total))

    def moment(self, name: str) -> None:
        """Save, if asked to after this part of a step."""
        if name == self.saves_after:
            save_sharded(self.saves_to, **self.parts())

    def end(self) -> dict[str, Any]:
        stats = self.amp.stats()
        found = {
            "losses": self.losses,
            "values": values(self.model, self.optimizer),
            "counts": [stats[key] for key in ("steps", "skipped", "scale", "growth_tracker")],
        }
        self.amp.disable()
        return found

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "amp": self.amp}


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Return all FP32 values, whole."""
    state = optimizer.state_dict()["state"]
    tensors: list[Any] = [*model.state_dict().values()]
    tensors += [state[i][key] for i in sorted(state) for key in sorted(state[i])]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return [t.double().flatten().tolist() for t in whole]


def go(load: str | None, save: str, across: int, hidden: int, start: int) -> dict[str, Any]:
    """Load or begin, train, save."""
    run = Run(start, across, hidden)
    if load is not None:
        load_sharded(load, **run.parts())
    loaded = values(run.model, run.optimizer)
    run.train(start)
    save_sharded(save, **run.parts())
    return {"loaded": loaded, **run.end()}


@on_ranks
def stretch(**how: Any) -> dict[str, Any]:
    return go(**how)


# ranks, and how many of them share a layer
CHAINS = {
    "2, 1": [(2, 1), (1, 0)],
    "2, 4, 2": [(2, 1), (4, 1), (2, 1)],
    "1, 4": [(1, 0), (4, 1)],
    "4 of which 2 share layers, 2, 2 that share layers": [(4, 2), (2, 1), (2, 2)],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_other_numbers_of_ranks_go_on(jobs: dict[int, Pair], tmp_path: Path, chain: str) -> None:
    links = CHAINS[chain]
    hidden = 7 if max(across for _, across in links) < 2 else 8
    losses, end, load = list[float](), None, None
    for number, (ranks, across) in enumerate(links):
        start, save = number * STEPS, str(tmp_path / str(number))
        how: dict[str, Any] = dict(load=load, save=save, across=across, hidden=hidden, start=start)
        answers = stretch(jobs[ranks], **how) if ranks > 1 else [go(**how)]
        assert all(answer == answers[0] for answer in answers)
        if end is not None:
            assert answers[0]["loaded"] == end["values"]
        end, load = answers[0], save
        losses += end["losses"]
        assert end["counts"][:3] == [(number + 1) * (STEPS - 1), number + 1, 2.0 ** (9 - number)]
    run = Run(0, 0, hidden)
    for number in range(len(links)):
        run.train(number * STEPS)
    expected = run.end()
    assert end is not None and end["counts"] == expected["counts"]
    for a, b in zip(losses, expected["losses"], strict=True):
        assert abs(a - b) <= ROUNDINGS * 2.0**-11 * b


@on_ranks
def saving(path: str, moment: str) -> list[Any]:
    """The end of a run that saves in each step, and what was saved last."""
    run = Run(0, 1, 7)
    run.saves_after, run.saves_to = moment, path
    run.train(0)
    found = run.end()
    if not moment:
        return [found, found["values"]]
    loaded = Run(1, 1, 7)
    load_sharded(path, **loaded.parts())
    return [found, loaded.end()["values"]]


def test_saving_at_any_moment_disturbs_nothing(jobs: dict[int, Pair], tmp_path: Path) -> None:
    (plain, after), _ = saving(jobs[2], path="", moment="")
    for moment in ("forward", "backward", "clipping", "step"):
        for found, saved in saving(jobs[2], path=str(tmp_path / moment), moment=moment):
            assert found == plain, moment
            assert (saved == after) is (moment == "step")  # else it is of the step before


if __name__ == "__main__":
    serve(*sys.argv[1:])

"""A run of two ranks is resumed on one rank, on four, and back: its values are equal to the last
bit, its losses up to rounding. And saving at any moment disturbs nothing.

The ranks are this file run as a script, see two_ranks.py: two of them, and four.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Shared, sharded
from runs import batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from two_ranks import Pair, of_ranks, on_ranks, serve

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


class Elastic(Shared):
    """A run at O2 on any number of ranks.

    Args:
        seed: seed of the weights.
        across: how many ranks share a layer; 0: there is a single process.
        hidden: rows of a weight; 7 that no number of ranks shares evenly, or 8 for layers that are
            shared.
    """

    def __init__(self, seed: int, across: int, hidden: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        parts, part = 1, 0
        if across:
            shape = dist.get_world_size() // across, across
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
            data, policy = mesh["data"], {"param_dtype": torch.float16}
            if across > 1:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(model, mesh["tensor"], plan)
            # of layers that are shared FSDP2 warns that they return views
            sharded(model, [model[0]] if across == 1 else [], policy, mesh=data)
            parts, part = data.size(), data.get_local_rank()
        super().__init__(model, share=lambda x: x.chunk(parts)[part])
        self.is_last, self.is_shared = part == parts - 1, across > 0
        self.saves_after, self.saves_to = "", ""

    def go_on(self, start: int) -> "Elastic":
        """Take the steps from ``start``; the losses are those of all ranks."""
        for i in range(start, start + STEPS):
            self.step(batch(i), "gradient" if i == start + BAD and self.is_last else None)
            total = torch.tensor(self.losses[-1])
            if self.is_shared:
                dist.all_reduce(total)
                total /= dist.get_world_size()
            self.losses[-1] = float(total)
        return self

    def step(self, x: Tensor, fault: str | None) -> None:  # type: ignore[override]
        loss = self.loss(x, fault)
        self.moment("forward")
        self.backward(loss)
        self.moment("backward")
        self.amp.clip_grad_norm_(1.0)
        self.moment("clipping")
        self.optimizer.step()
        self.moment("step")
        self.optimizer.zero_grad()

    def moment(self, name: str) -> None:
        """Save, if this part of a step is the one to save after."""
        if name == self.saves_after:
            save_sharded(self.saves_to, **self.objects())

    def last_word(self) -> dict[str, Any]:
        """Return losses, values and counts, and disable."""
        counts = self.counts("steps", "skipped", "scale", "growth_tracker")
        found = {"losses": self.losses, "values": self.saved(), "counts": counts}
        self.end()
        return found


def load_train_save(
    load: str | None, save: str, across: int, hidden: int, start: int
) -> dict[str, Any]:
    """Load or begin, train, save."""
    run = Elastic(start, across, hidden)
    if load is not None:
        load_sharded(load, **run.objects())
    loaded = run.saved()
    run.go_on(start)
    save_sharded(save, **run.objects())
    return {"loaded": loaded, **run.last_word()}


@on_ranks
def stretch(**how: Any) -> dict[str, Any]:
    return load_train_save(**how)


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
        answers = stretch(jobs[ranks], **how) if ranks > 1 else [load_train_save(**how)]
        assert all(answer == answers[0] for answer in answers)
        if end is not None:
            assert answers[0]["loaded"] == end["values"]
        end, load = answers[0], save
        losses += end["losses"]
        assert end["counts"][:3] == [(number + 1) * (STEPS - 1), number + 1, 2.0 ** (9 - number)]
    run = Elastic(0, 0, hidden)
    for number in range(len(links)):
        run.go_on(number * STEPS)
    expected = run.last_word()
    assert end is not None and end["counts"] == expected["counts"]
    for a, b in zip(losses, expected["losses"], strict=True):
        assert abs(a - b) <= ROUNDINGS * 2.0**-11 * b


@on_ranks
def saving(path: str, moment: str) -> list[Any]:
    """The end of a run that saves in each step, and what was saved last."""
    run = Elastic(0, 1, 7)
    run.saves_after, run.saves_to = moment, path
    found = run.go_on(0).last_word()
    if not moment:
        return [found, found["values"]]
    resumed = Elastic(1, 1, 7)
    load_sharded(path, **resumed.objects())
    return [found, resumed.saved()]


def test_saving_at_any_moment_disturbs_nothing(jobs: dict[int, Pair], tmp_path: Path) -> None:
    (plain, after), _ = saving(jobs[2], path="", moment="")
    for moment in ("forward", "backward", "clipping", "step"):
        for found, saved in saving(jobs[2], path=str(tmp_path / moment), moment=moment):
            assert found == plain, moment
            assert (saved == after) is (moment == "step")  # else it is of the step before


if __name__ == "__main__":
    serve(*sys.argv[1:])

"""Lightning Fabric on two gloo ranks: DDP takes the steps of a loop by hand; under FSDP2, losses of
one process on the joint batch, one decision of both ranks, and a resume that is not a stop.

The ranks are this file run as a script, see two_ranks.py.
"""

import contextlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clients import LOSS, client_batches, client_net, optimizer_and_scheduler
from helpers import assert_same
from lightning_models import IGNORED, on_this_rank
from ranks import SMALL_STEPS, Shared, joint, joint_batches, scaler, sharded, share
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from two_ranks import RANKS, Pair, enable, of_ranks, on_ranks, serve, whole

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

from tritonamp.integrations.fabric import MixedPrecision

pytestmark = [pytest.mark.clients, *of_ranks, *map(pytest.mark.filterwarnings, IGNORED)]

BATCHES, STEPS, BAD = 8, 6, 2
ROUNDINGS = 4
"""Between weights and loss: of two layers' weights, and of what they return."""


def fabric_of(strategy: Any, **settings: Any) -> Any:
    on_this_rank()
    plugin = MixedPrecision(**settings)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, plugins=plugin)
    fabric.launch()
    return fabric


def batches_of_rank() -> list[Any]:
    """Every other batch; the third of all has an inf, so that one rank alone sees it."""
    return client_batches(BATCHES, BAD)[dist.get_rank() :: 2]


@on_ranks
def by_ddp(level: str, accumulate: int, folder: str) -> dict[str, Any]:
    fabric, net = fabric_of(DDPStrategy(process_group_backend="gloo"), level=level), client_net()
    plain, scheduler = optimizer_and_scheduler(net)
    model, optimizer = fabric.setup(net, plain)
    hand = client_net()
    by_hand, schedule = optimizer_and_scheduler(hand)
    wrapped = nn.parallel.DistributedDataParallel(hand)
    amp = enable(wrapped, by_hand, level=level)
    for i, (x, y) in enumerate(batches_of_rank()):
        last = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(LOSS(model(x), y) / accumulate)
        with contextlib.nullcontext() if last else wrapped.no_sync():
            amp.backward(LOSS(wrapped(x), y) / accumulate)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            amp.clip_grad_norm_(0.1)
            for o, s in ((optimizer, scheduler), (by_hand, schedule)):
                o.step()
                o.zero_grad()
                s.step()
    assert_same(model.state_dict(), hand.state_dict())
    stats = fabric.strategy.precision.amp.stats()
    assert stats == amp.stats()

    fabric.save(folder, {"model": model, "optimizer": optimizer})
    net = client_net()
    again = fabric_of(DDPStrategy(process_group_backend="gloo"), level=level)
    model, optimizer = again.setup(net, optimizer_and_scheduler(net)[0])
    again.load(folder, {"model": model, "optimizer": optimizer})
    assert_same(model.state_dict(), hand.state_dict())
    assert again.strategy.precision.amp.scaler.get_scale() == stats["scale"]
    for each in (fabric, again):
        each.strategy.precision.teardown()
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    return {"state": state, "skipped": stats["skipped"]}


@pytest.mark.parametrize(("level", "accumulate"), [("O1", 1), ("O2", 2)])
def test_ddp(pair: Pair, tmp_path: Path, level: str, accumulate: int) -> None:
    first, second = by_ddp(
        pair, level=level, accumulate=accumulate, folder=str(tmp_path / "run.pt")
    )
    assert first == second
    assert first["skipped"] > 0


class Fabricated:
    """A training under ModelParallelStrategy on the share of this rank, with ``micro`` batches in
    a step.
    """

    def __init__(
        self, level: str, policy: bool, half: bool, saves_shards: bool, micro: int
    ) -> None:
        self.micro = micro
        given = MixedPrecisionPolicy(param_dtype=torch.float16 if policy else None)
        strategy = ModelParallelStrategy(
            lambda net, mesh: sharded(net, [net[0]], mesh=mesh["data_parallel"], mp_policy=given),
            data_parallel_size=RANKS,
            tensor_parallel_size=1,
            save_distributed_checkpoint=saves_shards,
            process_group_backend="gloo",
        )
        self.fabric = fabric_of(strategy, level=level, scaler=scaler())
        with self.fabric.init_module(empty_init=False):
            net = client_net().to(torch.float16 if half else None)
        self.model = self.fabric.setup(net)
        self.optimizer = self.fabric.setup_optimizers(SMALL_STEPS["AdamW"](net.parameters()))
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def go_on(self, start: int, end: int) -> list[list[float]]:
        for i, x in list(enumerate(joint_batches(STEPS)))[start:end]:
            last = (i + 1) % self.micro == 0
            with self.fabric.no_backward_sync(self.model, enabled=not last):
                output = self.model(share(x))
                if i == BAD and dist.get_rank() == 1:
                    output.register_hook(lambda grad: grad * math.inf)
                loss = (output - 1).square().mean()
                self.fabric.backward(loss / self.micro)
            self.losses.append(loss.item())
            if last:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return [whole(value) for value in self.model.state_dict().values()]


@on_ranks
def by_model_parallel(folder: str, **how: Any) -> dict[str, Any]:
    run = Fabricated(**how)
    assert {type(p).__name__ for p in run.model.parameters()} == {"DTensor"}
    run.go_on(0, BAD + 2)
    run.fabric.save(folder, {**run.state, "step": BAD + 2})
    assert Path(folder).is_dir() is how["saves_shards"]
    end = run.go_on(BAD + 2, STEPS)
    amp = run.fabric.strategy.precision.amp
    again = Fabricated(**how)
    state = {**again.state, "step": 0}
    assert again.fabric.load(folder, state) == {}
    assert again.go_on(state["step"], STEPS) == end
    assert again.losses == run.losses[BAD + 2 :]
    assert again.fabric.strategy.precision.amp.scaler.get_scale() == amp.scaler.get_scale()
    result = {"losses": run.losses, "causes": [str(r.cause) for r in amp.history], "end": end}
    for each in (run, again):
        each.fabric.strategy.precision.teardown()
    return result


@pytest.mark.parametrize(
    ("level", "policy", "half", "saves_shards", "micro"),
    [
        ("O2", True, False, True, 1),
        ("O2", False, False, False, 2),
        ("O1", False, False, False, 1),
        ("O2", False, True, True, 2),
    ],
)
def test_model_parallel_strategy(
    pair: Pair, tmp_path: Path, level: str, policy: bool, half: bool, saves_shards: bool, micro: int
) -> None:
    how = dict(level=level, policy=policy, half=half, saves_shards=saves_shards, micro=micro)
    answers = by_model_parallel(pair, folder=str(tmp_path / "saved"), **how)
    net = client_net().to(torch.float16 if half else None)
    alone = Shared(net, level=level, share=joint)
    alone.walk(joint_batches(STEPS), {BAD: "gradient"}, max_norm=1.0, micro=micro)
    causes = [str(record.cause) for record in alone.amp.history]
    alone.end()
    for answer in answers:
        assert answer["end"] == answers[0]["end"]
        assert answer["causes"] == causes
    assert causes[BAD // micro] == "scale overflow"
    pairs = zip(*(answer["losses"] for answer in answers), alone.losses, strict=True)
    for one, other, whole_loss in pairs:
        assert one != other
        assert abs((one + other) / 2 - whole_loss) <= ROUNDINGS * 2.0**-11 * whole_loss


if __name__ == "__main__":
    serve(*sys.argv[1:])

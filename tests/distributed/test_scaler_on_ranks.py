"""A loop of torch.amp's with our GradScaler under DistributedDataParallel, without
``tritonamp.enable``, on two ranks.

The ranks are this file run as a script, see two_ranks.py.
"""

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import SCALE, scaler, share
from runs import batch, named
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Pair, of_ranks, on_ranks, serve

import tritonamp

pytestmark = of_ranks

OPTIMIZERS = named("SGD", "AdamW", "our AdamW")
STEPS, BAD = 4, 1


def harmed(kind: str, loss: Tensor, model: nn.Module) -> Tensor:
    """A loss that is NaN and takes the gradients along, one that is inf and leaves them alone, or
    inf gradients.
    """
    if kind == "nan loss":
        return loss * math.nan
    if kind == "inf loss":
        return loss + math.inf
    if kind == "gradient":
        next(model.parameters()).register_hook(lambda grad: torch.full_like(grad, math.inf))
    return loss


class ByScaler:
    """A loop with a scaler alone, whose fault is in its second step, on rank 1.

    Attributes:
        moved: whether each step has changed parameters.
        buckets: addresses of the gradients of each step.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: str, group: Any = None) -> None:
        self.model = model
        self.stepper = OPTIMIZERS[optimizer](model.parameters(), lr=0.1)
        self.scaler = tritonamp.GradScaler(
            "cpu", init_scale=SCALE, growth_interval=100, process_group=group
        )
        self.moved, self.buckets = list[bool](), list[list[int]]()

    def walk(
        self,
        loss_of: Callable[[Tensor, bool], Tensor],
        after_backward: Callable[[], None] = lambda: None,
        unscale: bool = True,
        **zeroing: bool,
    ) -> None:
        """Take the steps.

        Args:
            loss_of: gives the loss of a batch, with or without the fault.
            after_backward: what happens after the faulty backward.
            unscale: whether gradients are unscaled and clipped by hand.
            zeroing: arguments of ``zero_grad``.
        """
        for step in range(STEPS):
            before = [p.detach().clone() for p in self.model.parameters()]
            bad = step == BAD and dist.get_rank() == 1
            self.scaler.scale(loss_of(share(batch(step, 6, 4)), bad)).backward()
            if bad:
                after_backward()
            self.buckets.append([p.grad.data_ptr() for p in self.model.parameters()])
            if unscale:
                self.scaler.unscale_(self.stepper)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.stepper)
            self.scaler.update()
            self.stepper.zero_grad(**zeroing)
            pairs = zip(before, self.model.parameters(), strict=True)
            self.moved.append(any(not torch.equal(p, q) for p, q in pairs))
            if step == BAD:
                next(self.model.parameters())._backward_hooks = None

    def values(self) -> list[Any]:
        return [p.tolist() for p in self.model.parameters()]


@on_ranks
def with_a_fault(kind: str, optimizer: str, grouped: bool, unscale: bool) -> dict[str, Any]:
    model = DistributedDataParallel(nn.Linear(4, 3))
    run = ByScaler(model, optimizer, dist.group.WORLD if grouped else None)

    def loss_of(x: Tensor, bad: bool) -> Tensor:
        loss = model(x).square().mean()
        return harmed(kind, loss, model) if bad else loss

    def spoil() -> None:  # after the reduction
        if kind == "own gradient":
            next(model.parameters()).grad[0] = math.inf

    run.walk(loss_of, spoil, unscale)
    return {"moved": run.moved, "scale": run.scaler.get_scale(), "params": run.values()}


@pytest.mark.parametrize("unscale", [True, False], ids=["unscale", "step"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("kind", "grouped"),
    [(kind, grouped) for kind in ("nan loss", "inf loss", "gradient") for grouped in (True, False)]
    + [("own gradient", True)],
)
def test_ranks_agree(pair: Pair, kind: str, grouped: bool, optimizer: str, unscale: bool) -> None:
    first, second = with_a_fault(
        pair, kind=kind, optimizer=optimizer, grouped=grouped, unscale=unscale
    )
    assert first == second
    # without a group no other rank has seen an inf loss whose gradients are finite
    skipped = grouped or kind != "inf loss"
    assert first["moved"] == [step != BAD or not skipped for step in range(STEPS)]
    fault = grouped and kind.endswith("loss")
    assert first["scale"] == (SCALE if fault or not skipped else SCALE / 2)


@on_ranks
def train_in_half(views: bool) -> list[Any]:
    """Rank 1 alone sees an inf, in the second step; the gradients stay in the buckets."""
    model = DistributedDataParallel(nn.Linear(4, 3).half(), gradient_as_bucket_view=views)
    run = ByScaler(model, "our AdamW")

    def loss_of(x: Tensor, bad: bool) -> Tensor:
        return model(x.half()).float().square().mean() * (2.0**15 if bad else 1.0)

    run.walk(loss_of, set_to_none=False)
    assert not views or run.buckets[1] == run.buckets[2] == run.buckets[3]  # DDP rebuilds once
    assert run.moved == [step != BAD for step in range(STEPS)]
    assert run.scaler.get_scale() == SCALE / 2
    return run.values()


@on_ranks
def scale_summands(value: float) -> list[float]:
    """Each rank holds a summand of the loss, as a row-parallel layer leaves it."""
    mesh = init_device_mesh("cpu", (2,))
    summand = torch.tensor(value if dist.get_rank() else 1.0)
    ours = scaler()
    scaled: Any = ours.scale(DTensor.from_local(summand, mesh, [Partial()]))
    assert ours.loss_nonfinite is not None
    return [float(scaled.full_tensor()), float(ours.loss_nonfinite)]


def test_a_loss_of_which_each_rank_has_a_summand(pair: Pair) -> None:
    assert scale_summands(pair, value=2.0) == [[3 * SCALE, 0.0]] * 2
    assert scale_summands(pair, value=math.inf) == [[math.inf, 1.0]] * 2


@pytest.mark.parametrize("views", [False, True])
def test_half_parameters_under_ddp(pair: Pair, views: bool) -> None:
    first, second = train_in_half(pair, views=views)
    assert first == second


@on_ranks
def copies() -> list[Any]:
    ours = tritonamp.GradScaler("cpu", init_scale=SCALE, process_group=dist.group.WORLD)
    return [s.state_dict() == ours.state_dict() for s in (ours.clone(), copy.deepcopy(ours))]


def test_a_scaler_with_a_group_can_be_copied(pair: Pair) -> None:
    assert copies(pair) == [[True, True]] * 2


@on_ranks
def with_a_penalty(enabled: bool) -> dict[str, Any]:
    """Rank 1 alone scales the outputs of a gradient penalty, which overflows at first."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    if enabled:
        by = {"level": "O2", "dtype": torch.float16}
        loss_scale = tritonamp.enable(critic, optimizer, **by).scaler
    else:
        loss_scale = tritonamp.GradScaler("cpu", process_group=dist.group.WORLD)
    model = DistributedDataParallel(critic)
    scales = []
    for step in range(STEPS):
        x = share(batch(step, 6, 4)).requires_grad_()
        loss = model(x).float().square().mean()
        if dist.get_rank() == 1:
            scores = critic(x).float().sum()
            (grad,) = torch.autograd.grad(loss_scale.scale(scores), x, create_graph=True)
            grad = grad / loss_scale.get_scale()
            loss = loss + grad.norm()
            if not enabled and step == 0:  # FP32 does not overflow by itself
                loss = loss * math.nan
        loss_scale.scale(loss).backward()
        loss_scale.step(optimizer)
        loss_scale.update()
        optimizer.zero_grad()
        scales.append(loss_scale.get_scale())
    if enabled:
        tritonamp.handle(critic).disable()
    return {"scales": scales, "values": [p.tolist() for p in critic.parameters()]}


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaled_penalty_on_one_rank_moves_all_scales(pair: Pair, enabled: bool) -> None:
    first, second = with_a_penalty(pair, enabled=enabled)
    assert first == second
    assert first["scales"][0] == 2.0**15


if __name__ == "__main__":
    serve(*sys.argv[1:])

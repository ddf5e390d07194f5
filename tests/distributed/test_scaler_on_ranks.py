"""A loop of torch.amp's with our GradScaler under DistributedDataParallel, without
``tritonamp.enable``, on two ranks.

The ranks are this file run as a script, see two_ranks.py.
"""

import copy
import math
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Pair, of_ranks, on_ranks, serve

import tritonamp

pytestmark = of_ranks

OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
    "optim.AdamW": tritonamp.optim.AdamW,
}
SCALE, STEPS, BAD = 2.0**10, 4, 1


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


@on_ranks
def train(kind: str, optimizer: str, grouped: bool, unscale: bool) -> dict[str, Any]:
    """Rank 1 alone has the fault, in its second step."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    model = DistributedDataParallel(copy.deepcopy(net))
    stepper = OPTIMIZERS[optimizer](model.parameters(), lr=0.1)
    scaler = tritonamp.GradScaler(
        "cpu",
        init_scale=SCALE,
        growth_interval=100,
        process_group=dist.group.WORLD if grouped else None,
    )
    moved = []
    for step in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).chunk(2)[
            dist.get_rank()
        ]
        loss = model(x).square().mean()
        if step == BAD and dist.get_rank() == 1:
            loss = harmed(kind, loss, model)
        scaler.scale(loss).backward()
        if step == BAD and dist.get_rank() == 1 and kind == "own gradient":  # after the reduction
            next(model.parameters()).grad[0] = math.inf
        if unscale:
            scaler.unscale_(stepper)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        moved.append(
            any(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        )
        if step == BAD:
            next(model.parameters())._backward_hooks = None
    return {
        "moved": moved,
        "scale": scaler.get_scale(),
        "params": [p.tolist() for p in model.parameters()],
    }


@pytest.mark.parametrize("unscale", [True, False], ids=["unscale", "step"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("kind", "grouped"),
    [(kind, grouped) for kind in ("nan loss", "inf loss", "gradient") for grouped in (True, False)]
    + [("own gradient", True)],
)
def test_ranks_agree(pair: Pair, kind: str, grouped: bool, optimizer: str, unscale: bool) -> None:
    first, second = train(pair, kind=kind, optimizer=optimizer, grouped=grouped, unscale=unscale)
    assert first == second
    # whose gradients are good: nobody else has seen anything
    skipped = grouped or kind != "inf loss"
    assert first["moved"] == [step != BAD or not skipped for step in range(STEPS)]
    fault = grouped and kind.endswith("loss")
    assert first["scale"] == (SCALE if fault or not skipped else SCALE / 2)


@on_ranks
def train_in_half(views: bool) -> list[list[list[float]]]:
    """Rank 1 alone sees an inf, in the second step; the gradients stay in the buckets."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 3).half(), gradient_as_bucket_view=views)
    stepper = tritonamp.optim.AdamW(model.parameters(), lr=0.1)
    scaler, buckets, moved = tritonamp.GradScaler("cpu", init_scale=SCALE), [], []
    for step in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).chunk(2)
        bad = step == BAD and dist.get_rank() == 1
        loss = model(x[dist.get_rank()].half()).float().square().mean()
        scaler.scale(loss * (2.0**15 if bad else 1.0)).backward()
        buckets.append([p.grad.data_ptr() for p in model.parameters()])
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad(set_to_none=False)
        moved.append(
            not all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        )
    assert not views or buckets[1] == buckets[2] == buckets[3]  # DDP makes them anew after one
    assert moved == [step != BAD for step in range(STEPS)]
    assert scaler.get_scale() == SCALE / 2
    return [p.tolist() for p in model.parameters()]


@on_ranks
def scale_summands(value: float) -> list[float]:
    """Each rank holds a summand of the loss, as a row-parallel layer leaves it."""
    mesh = init_device_mesh("cpu", (2,))
    summand = torch.tensor(value if dist.get_rank() else 1.0)
    scaler = tritonamp.GradScaler("cpu", init_scale=SCALE)
    scaled: Any = scaler.scale(DTensor.from_local(summand, mesh, [Partial()]))
    assert scaler.loss_nonfinite is not None
    return [float(scaled.full_tensor()), float(scaler.loss_nonfinite)]


def test_a_loss_of_which_each_rank_has_a_summand(pair: Pair) -> None:
    assert scale_summands(pair, value=2.0) == [[3 * SCALE, 0.0]] * 2
    assert scale_summands(pair, value=math.inf) == [[math.inf, 1.0]] * 2


@pytest.mark.parametrize("views", [False, True])
def test_half_parameters_under_ddp(pair: Pair, views: bool) -> None:
    first, second = train_in_half(pair, views=views)
    assert first == second


@on_ranks
def copies() -> list[Any]:
    scaler = tritonamp.GradScaler("cpu", init_scale=SCALE, process_group=dist.group.WORLD)
    return [s.state_dict() == scaler.state_dict() for s in (scaler.clone(), copy.deepcopy(scaler))]


def test_a_scaler_with_a_group_can_be_copied(pair: Pair) -> None:
    assert copies(pair) == [[True, True]] * 2


if __name__ == "__main__":
    serve(*sys.argv[1:])

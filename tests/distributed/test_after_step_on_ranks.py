"""Two gloo ranks on CPU call functions after a step, which write the same on both.

The ranks are this file run as a script, see two_ranks.py.
"""

import sys
from typing import Any

import pytest
import torch
from ranks import Shared, alike, sharded, whole
from small_models import uneven_net
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Pair, of_ranks, on_ranks, serve

pytestmark = of_ranks
FACTOR = 0.75
FAULTS = {1: 0, 3: 1}
"""By number of the batch, the rank with a bad loss."""


def training(how: str, level: str, fields: dict[str, Any]) -> Shared:
    model: nn.Module = uneven_net()
    if how == "DDP":
        model = DistributedDataParallel(model)
    elif how == "FSDP2":
        model = sharded(model, policy={"param_dtype": torch.float16})
    return Shared(model, "SGD" if level == "O1" else "AdamW", level, **fields)


def shrink(run: Shared, factor: Any) -> None:
    with torch.no_grad():
        for master in run.amp.master_params():
            master.mul_(factor)


@on_ranks
def hooked(how: str, level: str, fields: dict[str, Any]) -> Any:
    told = list[bool]()

    def function(taken: Tensor) -> None:
        told.append(bool(taken))
        shrink(ours, torch.where(taken, FACTOR, 1.0))

    ours, plain = training(how, level, fields), training(how, level, fields)
    ours.amp.after_step(function)
    for number in range(5):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        bad = FAULTS.get(number) == torch.distributed.get_rank()
        for run in (ours, plain):
            run.walk([x], {0: "loss"} if bad else {})
        if number not in FAULTS:
            shrink(plain, FACTOR)
    assert ours.values() == plain.values()
    stored = dict(getattr(ours.model, "module", ours.model).named_parameters())
    for name, master in ours.amp.named_master_params():
        assert whole(stored[name]) == whole(master.to(stored[name].dtype))
    return told, ours.values()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(6, 6, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).view(1, -1, 2, 3).transpose(1, 2) for p in (self.q, self.k))
        y = nn.functional.scaled_dot_product_attention(q, k, k)
        return y.transpose(1, 2).reshape(-1, 6)


@on_ranks
def clipped(tau: float) -> Any:
    """QK-clip of ranks whose batches differ, with weights that need it."""
    torch.manual_seed(0)
    net = nn.Sequential(Attention())
    run = Shared(DistributedDataParallel(net), "SGD", "O2")
    watch, seen = run.amp.watch(every=1), list[Tensor]()

    def clip(taken: Tensor) -> None:
        masters = dict(run.amp.named_master_params())
        for name, largest in watch.logits().items():
            seen.append(largest.clone())
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
            factor = torch.where(taken, (tau / largest).clamp(max=1.0).sqrt(), 1.0)
            for projection in ("q", "k"):
                weight = masters[f"{name}.{projection}.weight"]
                weight.view(len(largest), -1).mul_(factor[:, None])

    run.amp.after_step(clip)
    run.optimizer.param_groups[0]["lr"] = 0.0
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    x[:4] *= 4.0  # of the first rank
    run.walk([x, x])
    return [t.tolist() for t in seen], run.values()


def test_qk_clip(pair: Pair) -> None:
    (first, ours), (second, theirs) = clipped(pair, tau=2.0)
    assert ours == theirs
    assert min(first[0]) > 2.0 > max(second[0])
    assert first[1] == pytest.approx([2.0, 2.0], rel=1e-2)


@pytest.mark.parametrize(
    ("how", "level", "fields"),
    [
        ("DDP", "O1", {}),
        ("DDP", "O2", {}),
        ("DDP", "O2", {"masters": "packed"}),
        ("FSDP2", "O1", {}),
        ("FSDP2", "O2", {}),
    ],
)
def test_the_same_on_all_ranks(pair: Pair, how: str, level: str, fields: dict[str, Any]) -> None:
    told, _ = alike(hooked(pair, how=how, level=level, fields=fields))
    assert told == [number not in FAULTS for number in range(5)]


if __name__ == "__main__":
    serve(*sys.argv[1:])

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

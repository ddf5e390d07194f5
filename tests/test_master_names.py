"""amp.named_master_params(): name and master, in the model's order."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Net
from runs import LEVELS
from small_models import Language
from torch import nn

import tritonamp


def backwards(model: nn.Module) -> list[Any]:
    """Groups in another order than the model's."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": params[2:]}, {"params": params[1::-1]}]


@pytest.mark.parametrize("level", LEVELS)
def test_the_models_order(level: str, device: torch.device) -> None:
    model = Net().to(device)
    optimizer = torch.optim.AdamW(backwards(model))
    with tritonamp.enable(model, optimizer, level=level) as amp:
        found = dict(amp.named_master_params())
        plain = dict(model.named_parameters())
        assert list(found) == list(plain)
        assert set(found.values()) == set(amp.master_params())
        assert level != "O2" or all(master.dtype is torch.float32 for master in found.values())
        for name, master in found.items():
            own = level != "O2" or "norm" in name
            assert (master is plain[name]) is own
            assert torch.equal(master.to(plain[name].dtype), plain[name])
        with torch.no_grad():
            model.first.weight.zero_()  # a write of the caller counts
        assert not dict(amp.named_master_params())["first.weight"].any()
    with pytest.raises(RuntimeError, match=r"amp.named_master_params\(\): this model was disabled"):
        next(amp.named_master_params())


@pytest.mark.parametrize("all_in_the_optimizer", [False, True])
def test_tied_weights_come_once_and_frozen_ones_stand_for_themselves(
    all_in_the_optimizer: bool, device: torch.device
) -> None:
    model = Language().to(device)
    model.hidden.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad or all_in_the_optimizer]
    optimizer = torch.optim.SGD(params, lr=0.1)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        found = dict(amp.named_master_params())
        assert list(found) == [name for name, _ in model.named_parameters()]
        assert found["embed.weight"].dtype is torch.float32
        if not all_in_the_optimizer:
            assert found["hidden.weight"] is model.hidden.weight
        assert set(amp.master_params()) <= set(found.values())


def test_two_models(device: torch.device) -> None:
    """Numbered as in a ModuleList; what they share comes once."""
    first, second = nn.Linear(2, 2).to(device), nn.Linear(2, 2).to(device)
    second.bias = first.bias
    optimizer = torch.optim.SGD([*first.parameters(), second.weight], lr=0.1)
    with tritonamp.enable([first, second], optimizer, level="O2") as amp:
        found = dict(amp.named_master_params())
        assert list(found) == ["0.weight", "0.bias", "1.weight"]
        assert list(found.values()) == list(amp.master_params())


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize(
    "wrap",
    [nn.parallel.DistributedDataParallel, lambda model: torch.compile(model, backend="eager")],
    ids=["DDP", "compiled"],
)
def test_inside_of_a_wrapper(wrap: Callable[[nn.Module], nn.Module], one_rank: None) -> None:
    """The names are those of the module inside, as in its state dict."""
    inner = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    with tritonamp.enable(wrap(inner), optimizer, level="O2") as amp:
        found = dict(amp.named_master_params())
        assert list(found) == ["weight", "bias"]
        assert list(found.values()) == list(amp.master_params())

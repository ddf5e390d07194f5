"""Activation checkpointing next to an enabled model, and inside one."""

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import same
from small_models import EveryList
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp

LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O3"])
KINDS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [x.grad, *(p.grad for p in model.parameters())]


def gradients_of_block(run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    block, x = EveryList().cuda(), torch.randn(3, 4, device="cuda", requires_grad=True)
    run(block, x).float().square().sum().backward()
    return gradients(block, x)


@pytest.fixture
def enabled_softmax(cuda: torch.device, level: str) -> Iterator[nn.Module]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)).cuda()
    amp = tritonamp.enable(model, level=level)
    yield model
    amp.disable()


@LEVELS
@KINDS
def test_stock_autocast_beside_an_enabled_model(
    cuda: torch.device, level: str, use_reentrant: bool, request: pytest.FixtureRequest
) -> None:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return checkpoint(block, x, use_reentrant=use_reentrant)

    expected = gradients_of_block(run)
    model = request.getfixturevalue("enabled_softmax")
    assert same(gradients_of_block(run), expected)
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    assert same(gradients_of_block(run), expected)


@LEVELS
@KINDS
def test_checkpoints_inside_of_an_enabled_model(
    cuda: torch.device, level: str, use_reentrant: bool
) -> None:
    class Net(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.block, self.depth = EveryList(), depth

        def run(self, x: Tensor, depth: int) -> Tensor:
            if not depth:
                return self.block(x)
            return checkpoint(self.run, x, depth - 1, use_reentrant=use_reentrant)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x, self.depth)

    def of(depth: int) -> list[Tensor]:
        torch.manual_seed(1)
        model, x = Net(depth).cuda(), torch.randn(3, 4, device="cuda", requires_grad=True)
        amp = tritonamp.enable(model, level=level)
        loss = model(x).float().square().sum()
        with torch.autocast("cuda", torch.float16):  # another model's, in between
            checkpoint(nn.Linear(4, 4).cuda(), x.detach(), use_reentrant=False)
        loss.backward()
        amp.disable()
        return gradients(model, x)

    expected = of(0)
    assert same(of(1), expected)
    assert same(of(2), expected)


@pytest.mark.filterwarnings("error")
@LEVELS
@KINDS
def test_autocasts_of_the_cpu_inside_of_an_enabled_model(
    cuda: torch.device, level: str, use_reentrant: bool
) -> None:
    """They take torch's dtype where they are given none, and leave the GPU's ops to the policy."""

    class Net(EveryList):
        again = False

        def run(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu"):
                seen.append(torch.ones(2, 2) @ torch.ones(2, 2))
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

        def forward(self, x: Tensor) -> Tensor:
            if not self.again:
                return self.run(x)
            return checkpoint(self.run, x, use_reentrant=use_reentrant)

    found, seen = [], []
    for again in (False, True):
        torch.manual_seed(1)
        model, x = Net().cuda(), torch.randn(3, 4, device="cuda", requires_grad=True)
        model.again = again
        amp = tritonamp.enable(model, level=level)
        model(x).float().square().sum().backward()
        amp.disable()
        found.append(gradients(model, x))
    assert [y.dtype for y in seen] == [torch.bfloat16] * 3
    assert same(*found)


@LEVELS
@KINDS
def test_stock_autocast_without_a_cache_beside_an_enabled_model(
    cuda: torch.device, level: str, use_reentrant: bool, request: pytest.FixtureRequest
) -> None:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            return checkpoint(block, x, use_reentrant=use_reentrant)

    expected = gradients_of_block(run)
    model = request.getfixturevalue("enabled_softmax")
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    assert same(gradients_of_block(run), expected)


def test_what_others_put_over_torchs_function_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch.utils.checkpoint._get_autocast_kwargs
    model = nn.Linear(2, 2)
    amp = tritonamp.enable(model, level="O1")
    ours = torch.utils.checkpoint._get_autocast_kwargs
    assert ours is not stock
    amp.disable()
    assert torch.utils.checkpoint._get_autocast_kwargs is stock
    amp = tritonamp.enable(model, level="O1")

    def theirs(device_type: str = "cuda") -> object:
        return ours(device_type)

    monkeypatch.setattr(torch.utils.checkpoint, "_get_autocast_kwargs", theirs)
    amp.disable()
    assert torch.utils.checkpoint._get_autocast_kwargs is theirs
    monkeypatch.setattr(torch.utils.checkpoint, "_get_autocast_kwargs", stock)

"""torch.optim.SGD under enable, and optim.SGD, against torch's own: bits, first steps, state."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.5, "maximize": True},
}
each_setting = pytest.mark.parametrize("setting", SETTINGS)


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    device = next(model.parameters()).device
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(device)
    return model(x).float().square().sum()


def plain(device: torch.device, steps: Any, **setting: Any) -> tuple[nn.Module, Any]:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), **setting)
    for seed in steps:
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
    return model, optimizer


def same(a: Any, b: Any) -> bool:
    """The bits of parameters and momentum, and the same keys of state."""
    pairs = zip(a[0].parameters(), b[0].parameters(), strict=True)
    states = [optimizer.state_dict()["state"] for _, optimizer in (a, b)]
    buffers = [[s["momentum_buffer"] for s in state.values() if s] for state in states]
    momentum = len(buffers[0]) == len(buffers[1])
    return (
        momentum
        and all(map(torch.equal, *buffers))
        and all(torch.equal(x, y) for x, y in pairs)
        and [k for k, s in states[0].items() if s] == [k for k, s in states[1].items() if s]
    )


@each_setting
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_torchs_bits_with_skips_in_between(
    setting: str, lr: float | Tensor, device: torch.device
) -> None:
    """The first step, too, is skipped; then torch's own optimizer goes on, and ours again."""
    options = {"lr": lr, "foreach": False, **SETTINGS[setting]}
    expected = plain(device, range(6), **options)
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for steps in ([None, 0, 1, None, 2], [None, 3]):
        with tritonamp.enable(model, optimizer, level="O0", backend="eager") as amp:
            for seed in steps:
                optimizer.zero_grad()
                amp.backward(loss_of(model, seed or 0) * (float("nan") if seed is None else 1.0))
                optimizer.step()
    for seed in (4, 5):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
    assert same((model, optimizer), expected)


@each_setting
def test_a_skipped_first_step_leaves_torch_a_first_step(setting: str, device: torch.device) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SETTINGS[setting])
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        amp.backward(loss_of(model, 0) * float("nan"))
        optimizer.step()
        optimizer.zero_grad()
        state = copy.deepcopy(optimizer.state_dict())
    expected = plain(device, range(2), lr=0.1, **SETTINGS[setting])
    other = torch.optim.SGD(model.parameters(), lr=0.1, **SETTINGS[setting])
    other.load_state_dict(state)
    for seed in range(2):
        other.zero_grad()
        loss_of(model, seed).backward()
        other.step()
    assert same((model, other), expected)


@each_setting
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ours_alone_has_torchs_bits(setting: str, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the kernel contracts multiplications and additions in another way")
    runs = []
    for kind in (torch.optim.SGD, tritonamp.optim.SGD):
        model = net(device).to(dtype)
        kinds = {"foreach": False} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.1, **SETTINGS[setting], **kinds)
        for seed in range(4):
            for k, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * seed + k)
                p.grad = torch.randn(p.shape, generator=generator).to(p)
            optimizer.step()
        runs.append((model, optimizer))
    assert same(*runs)


def test_complex_parameters_and_dampening(device: torch.device) -> None:
    """torch multiplies by a complex learning rate, which rounds otherwise: two ulps."""
    results = []
    for kind in (torch.optim.SGD, tritonamp.optim.SGD):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(5, dtype=torch.complex64, device=device))
        optimizer = kind([param], lr=0.1, momentum=0.9, dampening=0.5)
        for _ in range(3):
            param.grad = param.detach() * (0.5 + 1j)
            optimizer.step()
        results.append(param.detach())
    assert (results[0] - results[1]).abs().max() <= 4 * torch.finfo(torch.float32).eps


def test_negative_zeros_in_torchs_buffers_are_momentum(device: torch.device) -> None:
    runs = []
    for enables in (False, True):
        model = net(device)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, foreach=False
        )
        for p in model.parameters():
            p.grad = torch.full_like(p, -0.0)
        optimizer.step()
        optimizer.zero_grad()
        if enables:
            with tritonamp.enable(model, optimizer, level="O0", backend="eager") as amp:
                amp.backward(loss_of(model, 0))
                optimizer.step()
        else:
            loss_of(model, 0).backward()
            optimizer.step()
        runs.append((model, optimizer))
    assert same(*runs)


class Words(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(6, 4, sparse=True, device=device)
        self.last = nn.Linear(4, 2, device=device)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.words(words))


@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.5)], ids=str)
def test_sparse_gradients(momentum: float, dampening: float, device: torch.device) -> None:
    """torch's own step takes them, after skips as before."""
    runs = []
    options = {"lr": 0.1, "momentum": momentum, "dampening": dampening, "foreach": False}
    words = torch.tensor([[0, 2, 2], [5, 0, 1]], device=device)
    for enables, skips in itertools.product((False, True), (False, True)):
        model = Words(device)
        optimizer = torch.optim.SGD(model.parameters(), **options)
        amp = tritonamp.enable(model, optimizer, level="O0", backend="eager") if enables else None
        for step in range(4):
            optimizer.zero_grad()
            loss = model(words).square().sum()
            if amp is None:
                loss.backward()
            else:
                amp.backward(loss * (float("nan") if skips and step == 0 else 1.0))
            if amp is not None or not (skips and step == 0):
                optimizer.step()
        if amp is not None:
            amp.disable()
        runs.append([p.detach().clone() for p in model.parameters()])
    for skips in (0, 1):
        for a, b in zip(runs[skips], runs[2 + skips], strict=True):
            assert (a - b).abs().max() <= 8 * torch.finfo(torch.float32).eps * a.abs().max()


def test_no_state_without_momentum(device: torch.device) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        amp.backward(loss_of(model, 0))
        optimizer.step()
    assert optimizer.state_dict()["state"] == {}


def test_dampening_that_begins_later_dampens(device: torch.device) -> None:
    """A first step is one without state, not the first one with dampening."""
    runs = []
    for enables in (False, True):
        model = net(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        amp = tritonamp.enable(model, optimizer, level="O0", backend="eager") if enables else None
        for step, dampening in enumerate((0.0, 0.5, 0.5)):
            optimizer.param_groups[0]["dampening"] = dampening
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward() if amp is None else amp.backward(loss)
            optimizer.step()
        if amp is not None:
            amp.disable()
        runs.append((model, optimizer))
    assert same(*runs)

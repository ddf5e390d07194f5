"""torch.optim.SGD under enable, and optim.SGD, against torch's own: bits, first steps, state."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import same_bits
from runs import Training, batch, grouped
from torch import Tensor, nn

import tritonamp

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.5, "maximize": True},
}
each_setting = pytest.mark.parametrize("setting", SETTINGS)


class OfSgd(Training):
    """Trains with an SGD of a test's setting, in FP32 by torch if it is not enabled."""

    def __init__(
        self, device: torch.device, kind: Callable[..., Any] = torch.optim.SGD, **setting: Any
    ) -> None:
        model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # noqa: E731
        sgd = partial(kind, **{"lr": 0.1, **setting})
        super().__init__(model, sgd, None, device, lr=None)

    def enabled(self, level: str = "O0") -> Any:
        """Return a block in which the model is enabled."""
        backend = "eager" if level == "O0" else "auto"
        self.amp = tritonamp.enable(self.model, self.optimizer, level=level, backend=backend)
        return self.amp

    def loss(self, x: Any = 0) -> Tensor:
        x = batch(x, 5, 6, device=self.device)
        return self.model(x).float().square().sum()

    def steps(self, *seeds: int | None) -> "OfSgd":
        """Take a step on the batch of each seed; None: one that is skipped."""
        for seed in seeds:
            self.step(seed or 0, bad=seed is None)
        return self

    def found(self) -> dict[str, Any]:
        """The bits of parameters and momentum, and the keys of state."""
        state = self.optimizer.state_dict()["state"]
        momentum = {k: s["momentum_buffer"] for k, s in state.items() if s}
        return {"parameters": list(self.model.parameters()), "momentum": momentum}


@each_setting
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_torchs_bits_with_skips_in_between(
    setting: str, lr: float | Tensor, device: torch.device
) -> None:
    """The first step, too, is skipped; then torch's own optimizer goes on, and ours again."""
    options = {"lr": lr, "foreach": False, **SETTINGS[setting]}
    expected = OfSgd(device, **options).steps(*range(6))
    run = OfSgd(device, **options)
    for steps in ([None, 0, 1, None, 2], [None, 3]):
        with run.enabled():
            run.steps(*steps)
    run.amp = None
    run.steps(4, 5)
    assert same_bits(run.found(), expected.found())


def test_one_group_of_two_is_dampened(device: torch.device) -> None:
    """The first step that is taken sets the momentum of this group to the gradient, undampened."""
    how = {"kind": grouped("SGD", dampening=0.5), "momentum": 0.9, "foreach": False}
    expected = OfSgd(device, **how).steps(0, 1)
    run = OfSgd(device, **how)
    with run.enabled():
        run.steps(None, 0, 1)
    assert same_bits(run.found(), expected.found())


@each_setting
def test_a_skipped_first_step_leaves_torch_a_first_step(setting: str, device: torch.device) -> None:
    options = SETTINGS[setting]
    run = OfSgd(device, **options)
    with run.enabled("O2"):
        run.steps(None)
        state = copy.deepcopy(run.optimizer.state_dict())
    other = OfSgd(device, **options)
    other.optimizer.load_state_dict(state)
    other.model.load_state_dict(run.model.state_dict())
    other.steps(0, 1)
    assert same_bits(other.found(), OfSgd(device, **options).steps(0, 1).found())


@each_setting
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ours_alone_has_torchs_bits(setting: str, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the kernel contracts multiplications and additions in another way")
    runs = [OfSgd(device, **SETTINGS[setting], foreach=False) for _ in range(2)]
    params = runs[1].model.to(dtype).parameters()
    runs[1].optimizer = tritonamp.optim.SGD(params, lr=0.1, **SETTINGS[setting])
    runs[0].model.to(dtype)
    for run in runs:
        for seed in range(4):
            for k, p in enumerate(run.model.parameters()):
                p.grad = batch(10 * seed + k, *p.shape, dtype=dtype)
            run.optimizer.step()
    assert same_bits(*(run.found() for run in runs))


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
    runs = [OfSgd(device, momentum=0.9, dampening=0.5, foreach=False) for _ in range(2)]
    for run in runs:
        for p in run.model.parameters():
            p.grad = torch.full_like(p, -0.0)
        run.finish()
    with runs[1].enabled():
        for run in runs:
            run.step()
    assert same_bits(*(run.found() for run in runs))


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


@pytest.mark.parametrize("unscales", [False, True])
def test_sparse_fp32_gradients_of_half_parameters(unscales: bool, device: torch.device) -> None:
    """Without masters a parameter's gradient keeps the dtype that ``grad_dtype`` asks for."""
    runs, words = [], torch.tensor([[0, 2, 2], [5, 0, 1]], device=device)
    for grad_dtype in (None, torch.float32):
        model = Words(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        fields = {"loss_scale": "dynamic", "grad_dtype": grad_dtype, "backend": "eager"}
        with tritonamp.enable(model, optimizer, level="O3", **fields) as amp:
            amp.backward(model(words).float().square().sum())
            if unscales:
                amp.unscale_()
                assert model.words.weight.grad.dtype is (grad_dtype or torch.float16)
            optimizer.step()
            runs.append([p.detach().float() for p in model.parameters()])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-9, atol=2**-11)


def test_no_state_without_momentum(device: torch.device) -> None:
    run = OfSgd(device)
    with run.enabled("O2"):
        run.step()
    assert run.optimizer.state_dict()["state"] == {}


def test_dampening_that_begins_later_dampens(device: torch.device) -> None:
    """A first step is one without state, not the first one with dampening."""
    runs = [OfSgd(device, momentum=0.9, foreach=False) for _ in range(2)]
    with runs[1].enabled():
        for run, (step, dampening) in itertools.product(runs, enumerate((0.0, 0.5, 0.5))):
            run.optimizer.param_groups[0]["dampening"] = dampening
            run.steps(step)
    assert same_bits(*(run.found() for run in runs))

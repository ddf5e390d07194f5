"""Changes that users make to an optimizer between two steps, against torch's own in FP32."""

import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import tritonamp
from tritonamp.kernels.device import INTERPRETED

# the interpreter computes with inf and NaN in NumPy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BACKENDS = ["eager"] + ["triton"] * (INTERPRETED or torch.cuda.is_available())


def rate_to_float(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.0


def to_another_group(optimizer: Optimizer) -> None:
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop(0))


def out_of_the_optimizer(optimizer: Optimizer) -> None:
    optimizer.param_groups.pop()


def gradient_by_a_hook(optimizer: Optimizer) -> None:
    def replace(optimizer: Optimizer, args: object, kwargs: object) -> None:
        weight = optimizer.param_groups[0]["params"][0]
        weight.grad = -weight.grad

    optimizer.register_step_pre_hook(replace)


def no_gradient_by_a_hook(optimizer: Optimizer) -> None:
    def remove(optimizer: Optimizer, args: object, kwargs: object) -> None:
        optimizer.param_groups[0]["params"][0].grad = None

    optimizer.register_step_pre_hook(remove)


def half_step_counts(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = state["step"].half()


def other_layout_of_moments(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if value.dim() == 2:
                state[name] = value.t().contiguous().t()


ACTS = [
    rate_to_float,
    to_another_group,
    out_of_the_optimizer,
    gradient_by_a_hook,
    no_gradient_by_a_hook,
    half_step_counts,
    other_layout_of_moments,
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("act", ACTS)
def test_the_next_steps_are_torchs(
    act: Callable[[Optimizer], None], backend: str, device: torch.device
) -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)
        groups = [
            {"params": model[0].parameters(), "lr": torch.tensor(0.1)},
            {"params": model[2].parameters()},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02, foreach=False)
        amp = tritonamp.enable(model, optimizer, level="O0", backend=backend) if enabled else None
        for i in range(4):
            loss = model(torch.randn(6, 5, device=device)).square().mean()
            if amp is None:
                loss.backward()
            else:
                amp.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if i == 1:
                act(optimizer)
        results.append([p.detach().clone() for p in model.parameters()])
        if amp is not None:
            amp.disable()
    for ours, theirs in zip(results[1], results[0], strict=True):
        # a few FP32 ulps in each of four steps
        torch.testing.assert_close(ours, theirs, rtol=2**-20, atol=2**-22)


@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_that_take_turns_have_their_skips_logged(
    backend: str,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GAN's loop. Tensors are read for the two faults only: which samples were bad?"""
    models = [nn.Linear(3, 2).to(device) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters()) for m in models]
    amp = tritonamp.enable(models, optimizers, level="O2", backend=backend, loss_scale=8.0)
    reads, tolist = [], torch.Tensor.tolist
    with caplog.at_level(logging.INFO, "tritonamp"):
        for i in range(6):
            if i == 2:
                monkeypatch.setattr(
                    torch.Tensor, "tolist", lambda t: (reads.append(t), tolist(t))[1]
                )
            for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                x = torch.randn(4, 3, device=device)
                if (i, k) in [(2, 0), (4, 1)]:
                    x[0, 0] = float("nan")
                amp.backward(model(x).square().mean(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
    monkeypatch.undo()
    assert [t.flatten().tolist() for t in reads] == [[0], [0]]
    skips = [line for line in caplog.messages if " skipped (" in line]
    assert [line.split(":")[0] for line in skips] == [
        "step 5 skipped (1 of 5)",
        "step 10 skipped (2 of 10)",
    ]
    amp.disable()


def test_gradients_that_nobody_steps_with_are_let_go(device: torch.device) -> None:
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = tritonamp.enable(model, optimizer, level="O2")
    amp.backward(model(torch.randn(4, 3, device=device)).sum())
    amp.clip_grad_norm_(1.0)
    assert model.weight.grad is not None
    grad = weakref.ref(model.weight.grad)
    optimizer.zero_grad()
    assert grad() is None
    amp.disable()


REPLACEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "none": lambda grad: None,  # DINO keeps its last layer still in the first epochs
    "another": lambda grad: -2 * grad,
    "in place": lambda grad: grad.mul_(3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("then", ["step", "clip", "another backward"])
@pytest.mark.parametrize("act", REPLACEMENTS)
def test_true_gradients_may_be_replaced(
    device: torch.device, backend: str, act: str, then: str
) -> None:
    """Those of the model's parameters, between ``unscale_`` and the step, at O2 as at O1."""
    trained = []
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device)
        x = torch.randn(8, 4, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how = {"level": level, "backend": backend, "loss_scale": 256.0}
        with tritonamp.enable(model, optimizer, **how) as amp:
            for _ in range(2):
                amp.backward(model(x).square().mean())
                amp.unscale_()
                weight = model[0].weight
                weight.grad = REPLACEMENTS[act](weight.grad)
                if then == "clip":
                    amp.clip_grad_norm_(0.1)
                if then == "another backward":
                    amp.backward(model[1].weight.float().square().sum())
                optimizer.step()
                optimizer.zero_grad()
            assert amp.stats()["skipped"] == 0
            trained.append(model.state_dict())
    for name, value in trained[0].items():
        # weights are half in the forwards of O2 and in those of O1, gradients too: what parts them
        # is when sums of gradients are rounded
        torch.testing.assert_close(trained[1][name], value, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("cleared_by", ["optimizer", "model", "no call"])
@pytest.mark.parametrize("own", [None, torch.float32])
def test_half_parameters_have_their_own_gradients_again(
    device: torch.device, cleared_by: str, own: torch.dtype | None
) -> None:
    """After true ones were shown, whoever clears these, and also where the user has set a dtype."""
    model = nn.Linear(3, 2, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp = tritonamp.enable(model, optimizer, level="O2", dtype=torch.float16)
    if own is not None:
        model.weight.grad_dtype = own
    expected = model.weight.grad_dtype
    for _ in range(2):
        amp.backward(model(torch.ones(1, 3, device=device)).sum())
        written = model.weight.grad
        assert written is not None and written.dtype is expected
        amp.unscale_()
        assert model.weight.grad.dtype is torch.float32
        if cleared_by == "model":
            model.zero_grad()
            assert model.weight.grad is None
        optimizer.step()
        if cleared_by != "model":
            assert model.weight.grad is written
        optimizer.zero_grad() if cleared_by == "optimizer" else model.zero_grad()
        assert model.weight.grad_dtype is expected
    amp.disable()

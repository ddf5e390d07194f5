"""Finite gradients whose squares FP32 does not hold: the optimizer would keep inf for ever."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Net, disabled_after, same, snapshot
from torch import Tensor

import tritonamp
from tritonamp.apex import optimizers as apex
from tritonamp.kernels._squares import LARGEST_SQUARE

BF16 = torch.bfloat16


class Run:
    def __init__(
        self, kind: Callable[..., Any] = torch.optim.AdamW, options: Any = None, **fields: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = Net().to(fields.pop("device", "cpu"))
        self.optimizer = kind(self.model.parameters(), lr=1e-3, **(options or {}))
        self.amp = tritonamp.enable(self.model, self.optimizer, **{"level": "O2", **fields})
        self.x = torch.ones(2, 6, device=next(self.model.parameters()).device)

    def step(self, largest: float = 0.0, clip: float | None = None) -> None:
        """Take a step on usual gradients, but for one value of a norm's."""
        self.amp.backward(self.model(self.x).float().square().mean())
        if largest:
            self.grad.view(-1)[1] = largest * self.scale
        if clip is not None:
            self.norm = self.amp.clip_grad_norm_(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def grad(self) -> Tensor:
        """The gradient of the norm: FP32, or bfloat16."""
        return self.model.norm.weight.grad

    @property
    def scale(self) -> float:
        return self.amp.stats()["scale"]

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.amp.master_params()]

    def state(self) -> list[Tensor]:
        return snapshot(self.model, self.optimizer)

    def skips_by_cause(self) -> list[str | None]:
        return [record.cause for record in (self.amp.stats() and self.amp.history)]


@pytest.fixture
def start() -> Any:
    yield from disabled_after(Run)


def edge(gain: float) -> float:
    """The largest gradient whose square an optimizer may add to a state of zeros."""
    return (LARGEST_SQUARE / gain) ** 0.5


MEAN = edge(0.001)
SQUARING = {
    "Adam": (torch.optim.Adam, {}, MEAN),
    "AdamW": (torch.optim.AdamW, {}, MEAN),
    "AdamW beta2=0.9": (torch.optim.AdamW, {"betas": (0.9, 0.9)}, edge(0.1)),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}, MEAN),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}, MEAN),
    "AdamW maximize": (torch.optim.AdamW, {"maximize": True}, MEAN),
    "ours": (tritonamp.optim.AdamW, {}, MEAN),
    "NAdam": (torch.optim.NAdam, {}, MEAN),
    "RAdam": (torch.optim.RAdam, {}, MEAN),
    "RMSprop": (torch.optim.RMSprop, {}, edge(0.01)),
    "RMSprop centered": (torch.optim.RMSprop, {"centered": True}, edge(0.01)),
    "Adagrad": (torch.optim.Adagrad, {}, edge(1.0)),
    "Adadelta": (torch.optim.Adadelta, {}, edge(0.1)),
    "FusedAdam": (apex.FusedAdam, {}, MEAN),
    "FusedAdagrad": (apex.FusedAdagrad, {}, edge(1.0)),
}
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0"},
    "O1": {"level": "O1"},
    "O1 bf16": {"level": "O1", "dtype": BF16},
    "O2": {},
    "O2 bf16": {"dtype": BF16, "keep_norms_fp32": False},
    "O2 wide": {"dtype": BF16, "keep_norms_fp32": False, "grad_dtype": torch.float32},
}


def skipped_then_taken(run: Run, largest: float) -> None:
    """A gradient beyond the edge is a skip that changes nothing, and the next step is one."""
    run.step()
    before, scaler = run.state(), run.amp.scaler.state_dict()
    run.step(1.02 * largest)
    assert same(run.state(), before) and run.amp.scaler.state_dict() == scaler
    weights = run.weights()
    run.step()
    assert all(bool((a != b).any()) for a, b in zip(run.weights(), weights, strict=True))
    assert run.skips_by_cause() == [None, "huge gradient", None]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", SQUARING)
def test_a_square_beyond_fp32_is_skipped(start: Callable[..., Run], kind: str, level: str) -> None:
    optimizer, options, largest = SQUARING[kind]
    skipped_then_taken(start(optimizer, options, **LEVELS[level]), largest)


NORMS = torch.optim.Adafactor, apex.FusedLAMB, apex.FusedNovoGrad


@pytest.mark.parametrize("kind", NORMS)
def test_squares_of_whole_parameters(start: Callable[..., Run], kind: Any) -> None:
    skipped_then_taken(start(kind, level="O0"), 2e30)


def test_sparse_gradients() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    with tritonamp.enable(embedding, optimizer, level="O1", dtype=BF16) as amp:
        for largest in (1.0, 2e30, 1.0):
            amp.backward(embedding(torch.tensor([1, 2, 1])).sum() * largest)
            optimizer.step()
            optimizer.zero_grad()
        causes = [record.cause for record in (amp.stats() and amp.history)]
    assert causes == [None, "huge gradient", None]


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_muon_squares_what_adamw_steps(part: str) -> None:
    model = torch.nn.Linear(4, 4)
    rest = [{"params": [model.bias], "lr": 1e-3}]
    optimizer = tritonamp.optim.Muon([model.weight], lr=1e-2, adamw_params=rest)
    with tritonamp.enable(model, optimizer, level="O0") as amp:
        amp.backward(model(torch.ones(2, 4)).sum())
        getattr(model, part).grad.view(-1)[0] = 2e30
        optimizer.step()
        optimizer.zero_grad()
        assert amp.stats()["last_skip_reason"] == "huge gradient"


def test_a_decay_on_the_device_is_not_read(start: Callable[..., Run]) -> None:
    """The limit is that of all decays, at which a mean of squares is finite."""
    betas = torch.tensor(0.9), torch.tensor(0.999)
    run = start(options={"betas": betas}, level="O0")
    run.step(0.98 * edge(1.0))
    run.step(1.02 * edge(1.0))
    assert run.skips_by_cause() == [None, "huge gradient"]


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "AdamW beta2=0.9", "ours"])
def test_in_every_state(start: Callable[..., Run], kind: str, level: str, state: str) -> None:
    optimizer, options, largest = SQUARING[kind]
    if kind == "ours":
        optimizer = tritonamp.optim.Adam
    skipped_then_taken(start(optimizer, options, state=state, **LEVELS[level]), largest)


@pytest.mark.parametrize("kind", SQUARING)
def test_a_square_within_fp32_is_a_step(start: Callable[..., Run], kind: str) -> None:
    """The state stays finite, also where such gradients come one after another."""
    optimizer, options, largest = SQUARING[kind]
    run = start(optimizer, options, level="O0")
    for _ in range(5):
        run.step(0.98 * largest)
        assert all(bool(t.isfinite().all()) for t in run.state())
    first, *others = run.skips_by_cause()
    assert first is None and "huge gradient" in others


TORCHS = torch.optim.SGD, torch.optim.Rprop, torch.optim.Adamax


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [*TORCHS, tritonamp.optim.SGD, tritonamp.optim.Lion])
def test_optimizers_that_do_not_square_step(
    start: Callable[..., Run], kind: Any, level: str
) -> None:
    run = start(kind, **LEVELS[level])
    run.step(1e30)
    assert run.skips_by_cause() == [None]
    assert run.amp.stats()["grad_norm"] == float("inf"), "which is no skip by itself"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_norm_that_is_inf_clips_to_zero(start: Callable[..., Run], kind: Any) -> None:
    """As torch's own clipping does: the step works with gradients of zero."""
    run, still = start(kind, {"weight_decay": 0.0}), start(kind, {"weight_decay": 0.0})
    run.step(2e30, clip=1.0)
    assert float(run.norm) == float("inf") and run.skips_by_cause() == [None]
    assert same(run.weights(), still.weights())


@pytest.mark.parametrize("early", ["clip_grad_norm_", "unscale_", "by hand"])
def test_after_an_early_decision(start: Callable[..., Run], early: str) -> None:
    run = start(dtype=BF16, keep_norms_fp32=False, loss_scale="dynamic")
    run.step()
    before = run.state()
    loss = run.model(run.x).float().square().mean()
    scaler = run.amp.scaler
    (scaler.scale(loss).backward if early == "by hand" else lambda: run.amp.backward(loss))()
    run.grad.view(-1)[1] = 2e30
    scale = run.scale
    if early == "by hand":
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
    else:
        run.amp.unscale_() if early == "unscale_" else run.amp.clip_grad_norm_(1e-3)
        run.optimizer.step()
    clipped = early == "clip_grad_norm_"  # to zero
    assert run.skips_by_cause() == [None, None if clipped else "huge gradient"]
    assert clipped or same(run.state(), before)
    assert run.scale == scale


def test_micro_batches_are_one_decision(start: Callable[..., Run]) -> None:
    run = start(dtype=BF16, keep_norms_fp32=False)
    for largest in (2e30, 1.0):
        run.amp.backward(run.model(run.x).float().square().mean())
        run.grad.view(-1)[1] += largest
    run.optimizer.step()
    assert run.skips_by_cause() == ["huge gradient"]


def test_one_of_two_losses(start: Callable[..., Run]) -> None:
    run = start(dtype=BF16, keep_norms_fp32=False)
    run.step()
    before = run.state()
    for loss_id, largest in enumerate((2e30, 1.0)):
        run.amp.backward(run.model(run.x).float().square().mean(), loss_id=loss_id)
        run.grad.view(-1)[1] += largest
    run.optimizer.step()
    assert run.skips_by_cause() == [None, "huge gradient", None]
    assert same(run.state(), before)


def test_an_outlier_is_told_first(start: Callable[..., Run]) -> None:
    run = start(level="O0", skip_outliers=6.0)
    for _ in range(64):
        run.step()
    run.step(2e30)
    assert run.skips_by_cause()[-1] == "outlier"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, tritonamp.optim.AdamW])
def test_a_scaler_alone_skips_it_too(kind: Any) -> None:
    """And its scale stays, at which the next step is one."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = kind([weight], lr=0.1), tritonamp.GradScaler("cpu", init_scale=8.0)
    for largest in (1.0, 2e30, 1.0):
        before = weight.detach().clone()
        scaler.scale((weight * largest).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(weight, before) == (largest > 1.0)
        assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("on_nonfinite", ["explain", "heal", "raise"])
def test_the_text_names_the_parameter(start: Callable[..., Run], on_nonfinite: str) -> None:
    run = start(dtype=BF16, keep_norms_fp32=False, on_nonfinite=on_nonfinite, raise_after=1)
    if on_nonfinite == "raise":
        with pytest.raises(tritonamp.NonFiniteError, match=r"huge gradient: .*norm\.weight"):
            run.step(2e30)
    else:
        run.step(2e30)
    assert "step 1 skipped (1 of 1): huge gradient: " in run.amp.explain()
    assert "norm.weight (2e+30). A step would leave inf" in run.amp.explain()
    stats = run.amp.stats()
    assert (stats["huge_gradients"], stats["scale_overflows"], stats["steps"]) == (1, 0, 0)
    assert run.amp.history[-1].parameters == ("norm.weight",)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of an inf norm
def test_kernels_and_twins(device: torch.device, backend: str, start: Callable[..., Run]) -> None:
    for state, beta2 in itertools.product(("fp32", "bf16", "8bit"), (0.999, 0.9)):
        run = start(options={"betas": (0.9, beta2)}, state=state, backend=backend, device=device)
        skipped_then_taken(run, edge(1 - beta2))

"""Finite gradients whose squares FP32 does not hold: the optimizer would keep inf for ever."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from helpers import same
from runs import Training, started_on_cpu
from torch import Tensor

import tritonamp
from tritonamp.apex import optimizers as apex
from tritonamp.kernels._squares import LARGEST_SQUARE

BF16 = torch.bfloat16


class Huge(Training):
    """Steps on usual gradients, but for one value of a norm's."""

    def __init__(self, optimizer: Any = "AdamW", **fields: Any) -> None:
        super().__init__(optimizer=optimizer, lr=1e-3, **fields)

    def step_on(self, largest: float) -> None:
        self.backward()
        self.grad.view(-1)[1] = largest * self.amp.stats()["scale"]
        self.finish()

    @property
    def grad(self) -> Tensor:
        """The gradient of the norm: FP32, or bfloat16."""
        return self.model.norm.weight.grad

    def causes_so_far(self) -> list[str | None]:
        self.amp.stats()
        return self.causes


start = started_on_cpu(Huge)


def edge(gain: float) -> float:
    """The largest gradient whose square an optimizer may add to a state of zeros."""
    return (LARGEST_SQUARE / gain) ** 0.5


MEAN = edge(0.001)
SQUARING = {
    "Adam": (torch.optim.Adam, MEAN),
    "AdamW": (torch.optim.AdamW, MEAN),
    "AdamW beta2=0.9": (partial(torch.optim.AdamW, betas=(0.9, 0.9)), edge(0.1)),
    "Adam amsgrad": (partial(torch.optim.Adam, amsgrad=True), MEAN),
    "AdamW amsgrad": (partial(torch.optim.AdamW, amsgrad=True), MEAN),
    "AdamW maximize": (partial(torch.optim.AdamW, maximize=True), MEAN),
    "ours": (tritonamp.optim.AdamW, MEAN),
    "NAdam": (torch.optim.NAdam, MEAN),
    "RAdam": (torch.optim.RAdam, MEAN),
    "RMSprop": (torch.optim.RMSprop, edge(0.01)),
    "RMSprop centered": (partial(torch.optim.RMSprop, centered=True), edge(0.01)),
    "Adagrad": (torch.optim.Adagrad, edge(1.0)),
    "Adadelta": (torch.optim.Adadelta, edge(0.1)),
    "FusedAdam": (apex.FusedAdam, MEAN),
    "FusedAdagrad": (apex.FusedAdagrad, edge(1.0)),
}
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0"},
    "O1": {"level": "O1"},
    "O1 bf16": {"level": "O1", "dtype": BF16},
    "O2": {},
    "O2 bf16": {"dtype": BF16, "keep_norms_fp32": False},
    "O2 wide": {"dtype": BF16, "keep_norms_fp32": False, "grad_dtype": torch.float32},
}


def skipped_then_taken(run: Huge, largest: float) -> None:
    """A gradient beyond the edge is a skip that changes nothing, and the next step is one."""
    run.step()
    before, scaler = run.stored(), run.amp.scaler.state_dict()
    run.step_on(1.02 * largest)
    assert same(run.stored(), before) and run.amp.scaler.state_dict() == scaler
    weights = run.masters()
    run.step()
    assert all(bool((a != b).any()) for a, b in zip(run.masters(), weights, strict=True))
    assert run.causes_so_far() == [None, "huge gradient", None]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", SQUARING)
def test_a_square_beyond_fp32_is_skipped(start: Any, kind: str, level: str) -> None:
    optimizer, largest = SQUARING[kind]
    skipped_then_taken(start(optimizer, **LEVELS[level]), largest)


NORMS = torch.optim.Adafactor, apex.FusedLAMB, apex.FusedNovoGrad


@pytest.mark.parametrize("kind", NORMS)
def test_squares_of_whole_parameters(start: Any, kind: Any) -> None:
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


def test_a_decay_on_the_device_is_not_read(start: Any) -> None:
    """The limit is that of all decays, at which a mean of squares is finite."""
    betas = torch.tensor(0.9), torch.tensor(0.999)
    run = start(partial(torch.optim.AdamW, betas=betas), level="O0")
    run.step_on(0.98 * edge(1.0))
    run.step_on(1.02 * edge(1.0))
    assert run.causes_so_far() == [None, "huge gradient"]


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "AdamW beta2=0.9", "ours"])
def test_in_every_state(start: Any, kind: str, level: str, state: str) -> None:
    optimizer, largest = SQUARING[kind]
    if kind == "ours":
        optimizer = tritonamp.optim.Adam
    skipped_then_taken(start(optimizer, state=state, **LEVELS[level]), largest)


@pytest.mark.parametrize("kind", SQUARING)
def test_a_square_within_fp32_is_a_step(start: Any, kind: str) -> None:
    """The state stays finite, also where such gradients come one after another."""
    optimizer, largest = SQUARING[kind]
    run = start(optimizer, level="O0")
    for _ in range(5):
        run.step_on(0.98 * largest)
        assert all(bool(t.isfinite().all()) for t in run.stored())
    first, *others = run.causes_so_far()
    assert first is None and "huge gradient" in others


TORCHS = torch.optim.SGD, torch.optim.Rprop, torch.optim.Adamax


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [*TORCHS, tritonamp.optim.SGD, tritonamp.optim.Lion])
def test_optimizers_that_do_not_square_step(start: Any, kind: Any, level: str) -> None:
    run = start(kind, **LEVELS[level])
    run.step_on(1e30)
    assert run.causes_so_far() == [None]
    assert run.amp.stats()["grad_norm"] == float("inf"), "which is no skip by itself"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_norm_that_is_inf_clips_to_zero(start: Any, kind: Any) -> None:
    """As torch's own clipping does: the step works with gradients of zero."""
    run, still = (start(partial(kind, weight_decay=0.0)) for _ in range(2))
    run.backward()
    run.grad.view(-1)[1] = 2e30 * run.amp.stats()["scale"]
    assert float(run.amp.clip_grad_norm_(1.0)) == float("inf")
    run.finish()
    assert run.causes_so_far() == [None]
    assert same(run.masters(), still.masters())


@pytest.mark.parametrize("early", ["clip_grad_norm_", "unscale_", "by hand"])
def test_after_an_early_decision(start: Any, early: str) -> None:
    run = start(dtype=BF16, keep_norms_fp32=False, loss_scale="dynamic")
    run.step()
    before = run.stored()
    by_hand = early == "by hand"
    run.backward(by_scaler=by_hand)
    run.grad.view(-1)[1] = 2e30
    scale = run.amp.stats()["scale"]
    if by_hand:
        run.amp.scaler.unscale_(run.optimizer)
    else:
        run.amp.unscale_() if early == "unscale_" else run.amp.clip_grad_norm_(1e-3)
    run.finish(by_scaler=by_hand)
    clipped = early == "clip_grad_norm_"  # to zero
    assert run.causes_so_far() == [None, None if clipped else "huge gradient"]
    assert clipped or same(run.stored(), before)
    assert run.amp.stats()["scale"] == scale


def test_micro_batches_are_one_decision(start: Any) -> None:
    run = start(dtype=BF16, keep_norms_fp32=False)
    for largest in (2e30, 1.0):
        run.backward()
        run.grad.view(-1)[1] += largest
    run.optimizer.step()
    assert run.causes_so_far() == ["huge gradient"]


def test_one_of_two_losses(start: Any) -> None:
    run = start(dtype=BF16, keep_norms_fp32=False)
    run.step()
    before = run.stored()
    for loss_id, largest in enumerate((2e30, 1.0)):
        run.amp.backward(run.loss(), loss_id=loss_id)
        run.grad.view(-1)[1] += largest
    run.optimizer.step()
    assert run.causes_so_far() == [None, "huge gradient", None]
    assert same(run.stored(), before)


def test_an_outlier_is_told_first(start: Any) -> None:
    run = start(level="O0", skip_outliers=6.0)
    for _ in range(64):
        run.step()
    run.step_on(2e30)
    assert run.causes_so_far()[-1] == "outlier"


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
def test_the_text_names_the_parameter(start: Any, on_nonfinite: str) -> None:
    run = start(dtype=BF16, keep_norms_fp32=False, on_nonfinite=on_nonfinite, raise_after=1)
    if on_nonfinite == "raise":
        with pytest.raises(tritonamp.NonFiniteError, match=r"huge gradient: .*norm\.weight"):
            run.step_on(2e30)
    else:
        run.step_on(2e30)
    assert "step 1 skipped (1 of 1): huge gradient: " in run.amp.explain()
    assert "norm.weight (2e+30). A step would leave inf" in run.amp.explain()
    stats = run.amp.stats()
    assert (stats["huge_gradients"], stats["scale_overflows"], stats["steps"]) == (1, 0, 0)
    assert run.amp.history[-1].parameters == ("norm.weight",)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of an inf norm
def test_kernels_and_twins(device: torch.device, backend: str, start: Any) -> None:
    for state, beta2 in itertools.product(("fp32", "bf16", "8bit"), (0.999, 0.9)):
        adamw = partial(torch.optim.AdamW, betas=(0.9, beta2))
        run = start(adamw, state=state, backend=backend, device=device)
        skipped_then_taken(run, edge(1 - beta2))

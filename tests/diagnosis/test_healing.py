"""FP32 cures modules that are healed by hand or after faults; a report says where it does not."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import Training
from small_models import WrittenNorm
from torch import Tensor, nn

import tritonamp

FP16, FP32 = torch.float16, torch.float32


class BranchingNorm(WrittenNorm):
    """Runs as it is written."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 9:
            return x
        normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class AddNorm(BranchingNorm):
    """Returns a residual stream, too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.float()


class Scale(WrittenNorm):
    """No norm."""

    def forward(self, x: Tensor) -> Tensor:
        return 4 * x * self.weight.to(x.dtype)


class Listed(nn.Module):
    """The module to heal is inside a container, which has no forward."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.LayerNorm(size)])
        self.weight = self.parts[0].weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts[0](x)
        return y


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "GroupNorm": lambda size: nn.GroupNorm(4, size),
    "BatchNorm": nn.BatchNorm1d,
    "fused": WrittenNorm,
    "written": BranchingNorm,
    "two results": AddNorm,
    "no norm": Scale,
    "in a list": Listed,
}


class Overflowing(nn.Module):
    """The weight of its inner module makes a result that float16 does not hold."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(16, 16), KINDS[kind](16)
        nn.init.constant_(self.inner.weight, 6e4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(self.first(x))
        y = found[0] if isinstance(found, tuple) else found
        self.dtypes.append(y.dtype)
        return (y.float() * 1e-4).square().mean()


X = 2 * torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def fp32_loss(kind: str) -> float:
    return float(Overflowing(kind)(X).detach())


LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O2, unfused": {"level": "O2", "fuse_norms": False},
}


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_by_hand_it_computes_in_fp32_and_then_as_before(
    handles: Any, device: torch.device, kind: str, level: str, backend: str
) -> None:
    model, x = Overflowing(kind).to(device), X.to(device)
    amp = handles(model, backend=backend, **LEVELS[level])
    classes, losses = [], []
    for change in (lambda _: None, amp.heal, amp.heal, amp.unheal):
        change("inner.parts" if kind == "in a list" else "inner")
        losses.append(float(model(x).detach()))
        classes.append([type(m) for m in model.modules()])
    # what comes in is half: two roundings of it, and the squares of them
    assert losses[1] == pytest.approx(fp32_loss(kind), rel=8 * torch.finfo(FP16).eps)
    assert losses[2] == losses[1] and model.dtypes[1] is FP32
    assert (losses[3], classes[3], model.dtypes[3]) == (losses[0], classes[0], model.dtypes[0])


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged lines about healing."""
    lines = [line for text in caplog.messages for line in text.splitlines()]
    return [line for line in lines if line.startswith(("Healed", "Not healed"))]


class OwnLoss(Training):
    """The model returns its loss."""

    def loss(self, x: Any = None) -> Tensor:
        return self.model(x)


def heal_in_training(model: nn.Module, caplog: Any, **fields: Any) -> tuple[float, tritonamp.Amp]:
    """Take eight steps that change next to nothing; return the last loss."""
    run = OwnLoss(model, "SGD", lr=1e-9, on_nonfinite="heal", **fields)
    with run, caplog.at_level(logging.INFO, "tritonamp"):
        for _ in range(8):
            loss = float(run.step(X))
    return loss, run.amp


@pytest.mark.parametrize("level", [*LEVELS, "O3"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_faults_training_goes_on_as_in_fp32(caplog: Any, kind: str, level: str) -> None:
    """At O3, where the module would hand half to the next, the whole model is healed."""
    model = Overflowing(kind)
    loss, amp = heal_in_training(model, caplog, **LEVELS.get(level, {"level": level}))
    assert loss == pytest.approx(fp32_loss(kind), rel=8 * torch.finfo(FP16).eps)
    faults = [record.cause for record in amp.history].count("forward fault")
    assert faults in (0, 2) and len(said(caplog)) == faults // 2
    inner = "inner.parts.0" if kind == "in a list" else "inner"
    assert amp.stats()["healed"] == [] if not faults else [""] if level == "O3" else [inner]


class Beyond(nn.Module):
    """Leaves the range of FP32, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.forward = lambda x: x.pow(64).pow(64)  # type: ignore[method-assign]
        self.first = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x) + 8).float().mean()


IN_VAIN = "Not healed: inner in FP32{} does not help, nor does all in FP32."


def test_what_no_precision_cures_is_not_healed(caplog: Any) -> None:
    _, amp = heal_in_training(Beyond(), caplog, level="O2")
    assert amp.stats()["healed"] == [] and amp.stats()["skipped"] == 8
    assert said(caplog) == 4 * [IN_VAIN.format("")]


@pytest.mark.parametrize("helps", [True, False])
def test_faults_that_come_again_widen_it_and_then_end_it(
    caplog: Any, monkeypatch: pytest.MonkeyPatch, helps: bool
) -> None:
    """Without memory for a trial, no remedy is known beforehand."""
    monkeypatch.setattr(tritonamp.diagnosis.replays, "remedy_of", lambda *_: None)
    _, amp = heal_in_training(Overflowing("LayerNorm") if helps else Beyond(), caplog, level="O3")
    assert amp.stats()["healed"] == ["inner", ""]
    assert amp.stats()["skipped"] == (4 if helps else 8)
    assert said(caplog) == [
        "Healed: inner computes in FP32 from now on, after 2 faults there; amp.unheal('inner') "
        "undoes it.",
        "Healed: the model computes in FP32 from now on, after 2 faults in inner; amp.unheal('') "
        "undoes it.",
        *([] if helps else 2 * [IN_VAIN.format(" already")]),
    ]
    assert ("Healed after this skip" in amp.explain()) is helps


def test_several_modules_are_healed_together(caplog: Any) -> None:
    class Chain(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float().mul(1e-3).square().mean()

    model = Chain(*(nn.Linear(16, 16, bias=False) for _ in range(3)), nn.LayerNorm(16))
    for link in model[:3]:
        link.weight.data.copy_(500 * torch.eye(16))
    _, amp = heal_in_training(model, caplog, level="O2")
    assert amp.stats()["healed"] == ["1", "2"] and amp.stats()["skipped"] == 2
    assert said(caplog) == [
        "Healed: 1 has FP32 results and 2 computes in FP32 from now on, after 2 faults in 1; "
        "amp.unheal('1'); amp.unheal('2') undoes it."
    ]
    assert amp.explain().endswith("\nHealed after this skip: 1, 2.")


def test_a_module_healed_by_hand_is_not_told_as_healed_by_a_skip() -> None:
    model = Overflowing("LayerNorm")
    with OwnLoss(model, "SGD", lr=1e-9, on_nonfinite="heal", level="O2") as run:
        for _ in range(2):
            run.step(X)
        run.amp.heal("first")
        assert run.amp.stats()["healed"] == ["inner", "first"]
        assert run.amp.explain().endswith("\nHealed after this skip: inner.")


def test_a_model_that_is_healed_before_its_first_forward(caplog: Any) -> None:
    """Its forward enters no op table, and no warning says that there was none."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        amp.heal("")
        with caplog.at_level(logging.WARNING, "tritonamp"):
            amp.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    assert caplog.messages == []


class Inner(nn.Module):
    """Applies a function whose argument half rounds out of its domain."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Rounded(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(16, 16), Inner(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x)).float().mean()


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "log of a product that is 0 in half": lambda x: ((x * 0 + 1e-4) * (x * 0 + 1e-5)).log(),
    "sqrt of a difference that half makes negative": lambda x: (
        (x * 0 + 2.0087) * 2.0087 - 4.03387
    ).sqrt(),
    "acos of a product that half rounds up": lambda x: (
        (x * 0 + 0.98075) * 1.02 * 1.02 * 0.97954
    ).acos(),
    "atanh of a tanh that is 1 in half": lambda x: (x * 0 + 5).tanh().atanh(),
    "a division by a square that is 0 in half": lambda x: 1 / ((x * 0 + 1e-4) * (x * 0 + 1e-4)),
}


@pytest.mark.parametrize("named", ROUNDED)
def test_a_value_that_only_half_puts_out_of_the_domain_is_cured(caplog: Any, named: str) -> None:
    model = Rounded(ROUNDED[named])
    expected = float(model(X).detach())
    loss, amp = heal_in_training(model, caplog, level="O2")
    assert amp.stats()["healed"] == ["inner"] and amp.stats()["skipped"] == 2
    assert loss == pytest.approx(expected, rel=1e-3), "the sums cancel by a factor of a hundred"


def test_what_only_bfloat16_cures_is_said(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tritonamp.diagnosis.replay.Remedy(bfloat16=True)
    monkeypatch.setattr(tritonamp.diagnosis.replays, "remedy_of", lambda *_: found)
    _, amp = heal_in_training(Beyond(), caplog, level="O2")
    assert amp.stats()["healed"] == []
    assert said(caplog) == 4 * [
        "Not healed: inner in FP32 does not help, but bfloat16 does: dtype=torch.bfloat16 (tried: "
        "the batch passes)."
    ]


class Branches(nn.Module):
    """Modules inside of others are given views of an input that half cannot hold."""

    def __init__(self, branches: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8)) for _ in range(branches)]
        self.parts, self.last = nn.ModuleList(parts), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (4, 4)).flatten(1)
        return self.last(sum(part(x) for part in self.parts)).float().square().mean()


@pytest.mark.parametrize("branches", [1, 2])
def test_the_modules_that_read_an_input_that_was_cast_are_healed(branches: int) -> None:
    model = Branches(branches)
    large = 1e5 * X
    expected = float(model(large).detach())
    run = OwnLoss(model, "SGD", lr=1e-9, on_nonfinite="heal", cast_inputs=True)
    with run:
        for _ in range(3):
            loss = float(run.step(large))
        assert run.amp.stats()["healed"] == [f"parts.{i}.0" for i in range(branches)]
    eps = torch.finfo(FP16).eps  # of the norm's input and the last layer, before a square
    assert loss == pytest.approx(expected, rel=16 * eps)


def test_at_o3_a_norm_that_reads_a_large_input_is_healed() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 1))
    with Training(model, level="O3", on_nonfinite="heal") as run:
        for _ in range(3):
            run.step(1e5 * X)
        assert run.amp.stats()["healed"] == ["0"] and run.amp.stats()["steps"] == 1


def test_a_square_in_a_small_module_heals_that_module(caplog: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.square = nn.Linear(16, 16), Inner(lambda x: x * x)
            self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.square(1000 * self.first(x)))).float().square().mean()

    _, amp = heal_in_training(Model(), caplog, level="O2")
    assert amp.stats()["healed"] == ["square"]

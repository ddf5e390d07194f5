"""Healing in tiers: FP32 results, then FP32, then the whole model; the cost of each."""

import logging
from typing import Any

import pytest
import torch
from runs import Training
from torch import Tensor, nn

import tritonamp

FP16, FP32 = torch.float16, torch.float32
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Mlp(nn.Module):
    """The product of its second layer is too large for float16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.down.weight.data.copy_(1e5 * (self.down.weight > 0) - 5e4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class ConvMlp(Mlp):
    """The same as a convolution."""

    def __init__(self) -> None:
        super().__init__()
        linear, self.down = self.down, nn.Conv1d(32, 16, 1)  # type: ignore[assignment]
        self.down.weight.data.copy_(linear.weight.data[:, :, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()[:, :, None])[:, :, 0]


class Twice(nn.Module):
    """An operand of its second product is too large for float16, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(6e4 * torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight @ self.weight * 1e-9


class Block(nn.Module):
    """A residual block, and the norm that reads its FP32 sum."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.norm = nn.Linear(16, 16), inner, nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.norm(x + self.inner(x)).float().square().mean()


class OwnLoss(Training):
    """The model returns its loss."""

    def loss(self, x: Any = None) -> Tensor:
        return self.model(x)


def start(inner: nn.Module, **fields: Any) -> OwnLoss:
    return OwnLoss(Block(inner), "SGD", lr=1e-9, **{"on_nonfinite": "heal", **fields})


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("inner", [Mlp, ConvMlp])
def test_a_product_is_healed_by_fp32_results(inner: type[Mlp], level: str, caplog: Any) -> None:
    torch.manual_seed(0)
    made = inner()
    expected = float(Block(made)(X).detach())
    with caplog.at_level(logging.WARNING, "tritonamp"), start(made, level=level) as run:
        losses = [float(run.step(X)) for _ in range(4)]
        assert run.amp.stats()["healed"] == ["inner.down"] and run.amp.stats()["skipped"] == 2
        policy = run.amp.policy
        assert (policy.fp32_results, policy.fp32_modules) == (("inner.down",), ())
        assert made.down.weight.dtype is (FP16 if level == "O2" else FP32)
        assert run.amp.explain().endswith("\nHealed after this skip: inner.down.")
        run.amp.unheal("inner.down")
        assert run.amp.policy.fp32_results == () and run.amp.stats()["healed"] == []
        assert not run.loss(X).isfinite()
    assert losses[-1] == pytest.approx(expected, rel=1e-2)
    (healed,) = [line for text in caplog.messages for line in text.splitlines() if "Healed" in line]
    assert healed == (
        "Healed: inner.down has FP32 results from now on, after 2 faults there; "
        "amp.unheal('inner.down') undoes it."
    )


COSTS = {
    Mlp: "no FP32 weights, 256 bytes more of results in a forward, 40 % of the forward's FLOPs at "
    "the rate of half products",
    ConvMlp: "no FP32 weights, 256 bytes more of results in a forward, 40 % of the forward's FLOPs "
    "at the rate of FP32, because torch has no half convolution with an FP32 result",
}


@pytest.mark.parametrize("inner", COSTS)
def test_the_cost_of_fp32_results(inner: type[Mlp]) -> None:
    torch.manual_seed(0)
    made, told = inner(), f"FP32 results: {COSTS[inner]}"
    forecast = tritonamp.check(Block(made), None, (X,))
    assert forecast.policy.fp32_results == ("inner.down",) and forecast.cost == told
    assert f"cost of {told}" in str(forecast).replace("\n    ", " ")
    with start(made) as run:
        run.step(X)
        report = run.amp.explain()
    assert "to do:   Let products have FP32 results: fp32_results=['inner.down'] (tried: " in report
    assert f"  cost:    {told}" in report.splitlines()


def test_what_fp32_results_do_not_cure_is_in_vain_and_fp32_follows() -> None:
    inner, told = Twice(), "{} more of weights, 67 % of the forward's FLOPs at its rate"
    forecast = tritonamp.check(Block(inner), None, (X,))
    assert (forecast.policy.fp32_results, forecast.policy.fp32_modules) == ((), ("inner",))
    assert forecast.cost == f"FP32: {told.format('512 bytes')}"
    with start(inner) as run:
        run.step(X)
        report = run.amp.explain()
        assert "to do:   Keep it in FP32: fp32_modules=['inner'] (tried: the batch passes" in report
        assert f"cost:    FP32: {told.format('1 KiB')}" in report  # with gradients
        run.step(X)
        assert run.amp.policy.fp32_modules == ("inner",)


class InPlace(Mlp):
    """Its own forward writes the FP32 results into a half tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone().add_(super().forward(x))


def test_a_module_in_fp32_has_no_tier_of_its_own_inside() -> None:
    with start(InPlace()) as run:
        run.step(X)
        assert "to do:   Keep it in FP32: fp32_modules=['inner'] (tried: " in run.amp.explain()
        run.step(X)
        policy = run.amp.policy
        assert (policy.fp32_results, policy.fp32_modules) == ((), ("inner",))


class OneDtype(Mlp):
    """Its code takes no FP32 results for half inputs."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if found.dtype is not x.dtype:
            raise TypeError(f"expected {x.dtype}, got {found.dtype}")
        return found


def test_code_that_refuses_both_tiers_is_healed_with_its_model() -> None:
    with start(OneDtype()) as run:
        for _ in range(4):
            run.step(X)
        assert run.amp.stats()["healed"] == [""] and run.amp.stats()["steps"] == 2


def test_without_a_trial_the_tiers_follow_one_another(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tritonamp.diagnosis.replays, "remedy_of", lambda *_: None)
    with caplog.at_level(logging.WARNING, "tritonamp"), start(Twice()) as run:
        tiers = []
        for _ in range(5):
            run.step(X)
            tiers.append((run.amp.policy.fp32_results, run.amp.policy.fp32_modules))
        assert "Healed after this skip: inner." in run.amp.explain()
        assert run.amp.stats()["steps"] == 1 and run.amp.stats()["healed"] == ["inner"]
    assert tiers == [((), ()), *2 * [(("inner",), ())], *2 * [((), ("inner",))]]
    lines = [line for text in caplog.messages for line in text.splitlines()]
    assert [line.partition(" from")[0] for line in lines if line.startswith("Healed")] == [
        "Healed: inner has FP32 results",
        "Healed: inner computes in FP32",
    ]


def test_by_hand_a_module_changes_its_tier_and_a_state_keeps_it() -> None:
    torch.manual_seed(0)
    inner = Mlp()
    with start(inner) as run:
        amp = run.amp
        amp.heal("inner.down", results=True)
        assert run.loss(X).isfinite() and inner.down.weight.dtype is FP16
        with_results = amp.state_dict()
        amp.heal("inner.down")
        assert run.loss(X).isfinite() and inner.down.weight.dtype is FP32
        assert (amp.policy.fp32_results, amp.policy.fp32_modules) == ((), ("inner.down",))
        amp.load_state_dict(with_results)
        assert run.loss(X).isfinite() and inner.down.weight.dtype is FP16
        assert amp.policy.fp32_results == ("inner.down",)
        older = {key: value for key, value in with_results.items() if key != "healed_results"}
        amp.load_state_dict({**older, "healed": ["inner"]})
        assert amp.stats()["healed"] == ["inner"] and amp.policy.fp32_results == ()


def test_a_module_with_fp32_results_by_policy_is_healed_in_fp32_and_back() -> None:
    inner = Twice()
    with start(inner, fp32_results=["inner"]) as run:
        for _ in range(3):
            run.step(X)
        assert run.amp.policy.fp32_modules == ("inner",) and run.amp.policy.fp32_results == ()
        assert run.amp.stats()["steps"] == 1
        run.amp.unheal("inner")
        assert run.amp.policy.fp32_results == ("inner",) and inner.weight.dtype is FP16


@pytest.mark.parametrize(
    ("level", "module", "message"),
    [
        ("O2", "", "module: expected one inside of a model for FP32 results, got ''"),
        ("O2", "other", "module: expected one of the model's, .* got 'other'"),
        ("O3", "inner", "fp32_results needs op_policy=True"),
    ],
)
def test_modules_that_cannot_have_fp32_results(level: str, module: str, message: str) -> None:
    with start(Mlp(), level=level) as run:
        with pytest.raises(ValueError, match=message):
            run.amp.heal(module, results=True)
        assert run.amp.stats()["healed"] == []


class Attention(nn.Module):
    """The gradients of its FP32 scores and queries are beyond half at a loss scale above 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ x


def large_layer() -> nn.Linear:
    """Return a layer whose weight has a true gradient of 1e6, which a half weight cannot have."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.mul_(1e3)
    return layer


def healed_in_four_steps(inner: nn.Module) -> tuple[Any, str]:
    model, x = nn.Sequential(inner), 500 * torch.randn(8, 5, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with tritonamp.enable(model, optimizer, level="O2", on_nonfinite="heal") as amp:
        for _ in range(4):
            amp.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        causes = [record.cause for record in amp.history]
        text = amp.explain(replay=lambda: model(x).square().mean())
        return (amp.policy.fp32_results, amp.policy.fp32_modules, causes[2:]), text


def test_gradients_of_fp32_results_are_fitted_into_half() -> None:
    healed, text = healed_in_four_steps(Attention())
    assert healed == (("0",), (), [None, None])
    assert "Run again, nothing" in text or "not reproduced" in text


def test_half_gradients_that_need_a_low_scale_heal_the_module_in_fp32(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "tritonamp"):
        healed, text = healed_in_four_steps(large_layer())
    assert healed == ((), ("0",), ["scale overflow", None])
    assert caplog.messages[-1].endswith(
        "\nHealed: 0 computes in FP32 from now on, because gradients of half products fit only at "
        "a loss scale below 256; amp.unheal('0') undoes it."
    )
    assert "Run again, nothing" in text or "not reproduced" in text


@pytest.mark.parametrize(
    ("inner", "advice"),
    [
        (Attention, "Let products have FP32 results: fp32_results=['0'] (tried: the batch passes)"),
        (large_layer, "Keep it in FP32: fp32_modules=['0'] (tried: the batch passes)"),
    ],
)
def test_a_trial_with_a_backward_sees_which_gradients_fit(inner: Any, advice: str) -> None:
    model, x = nn.Sequential(inner()), 500 * torch.randn(8, 5, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        amp.backward(model(x).square().mean())
        optimizer.step()
        report = amp.explain(replay=lambda: model(x).square().mean())
    assert f"to do:   {advice}" in report

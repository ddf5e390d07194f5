"""A skip names the operation, heals a module, or raises an error; nothing else changes."""

import copy
import logging
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import op_of_linear, take_step
from runs import Training, batch, started
from torch import Tensor, nn

import tritonamp
from tritonamp.diagnosis.replay import search
from tritonamp.diagnosis.replay.bundles import load_bundle
from tritonamp.diagnosis.replay.search import find_fault


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return scores.softmax(-1) @ self.v(x)


class Scores(nn.Module):
    """Its scores leave float16 on inputs of a few hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x).mean(1))


class Generator(Attention):
    """Its scores leave float16, too, and all is in the model itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


class Flat(nn.Module):
    """The same, all in the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return self.head((scores.softmax(-1) @ self.v(x)).mean(1))


class Large(Training):
    """Each step is on the batch of a seed, of inputs so large that scores leave float16."""

    def __init__(
        self, device: torch.device, model: type[nn.Module] = Scores, **fields: Any
    ) -> None:
        fields = {"scaler": tritonamp.GradScaler(device.type, init_scale=16.0), **fields}
        super().__init__(model, device=device, lr=1e-3, **fields)

    def loss(self, i: int, size: float = 600.0) -> Tensor:
        torch.manual_seed(i)
        x, y = (
            torch.randn(8, 5, 16, device=self.device) * size,
            torch.randint(0, 4, (8,), device=self.device),
        )
        return nn.functional.cross_entropy(self.model(x), y)

    def step(self, i: int, size: float = 600.0) -> float:
        loss = self.loss(i, size)
        self.backward(loss)
        self.finish()
        return loss.item()


start = started(Large)


NAMED = "matmul overflow, forward: attention, op "


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_explain_names_the_operation(
    start: Any, caplog: Any, level: str, device: torch.device
) -> None:
    run = start(level=level, on_nonfinite="explain")
    with caplog.at_level(logging.WARNING, "tritonamp"):
        run.step(0)
    (text,) = caplog.messages
    assert text.startswith("step 1 skipped (1 of 1): forward fault: the loss itself was inf or NaN")
    op = "matmul" if device.type == "cpu" else "bmm"  # CUDA's autocast shows what it runs
    assert f"{NAMED}{op} at " in text and "test_response.py" in text
    assert "scores = self.q(x) @ self.k(x).transpose(-1, -2)" in text
    assert "A lower scale cannot help." in text and "Look in" not in text, "the place is known"
    assert run.amp.explain() == text
    run.step(1, size=1.0)
    assert run.amp.explain() == text
    assert run.amp.stats()["healed"] == []


def test_the_replay_disturbs_nothing(start: Any) -> None:
    """With and without it a run ends in the same bits."""
    ends = []
    for mode in ("skip", "explain"):
        run = start(level="O2", on_nonfinite=mode)
        for i in range(6):
            run.step(i, size=600.0 if i == 2 else 1.0)
        ends.append([p.clone() for p in run.amp.master_params()] + [torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Augmenting(Scores):
    """Draws from every generator of the host in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1.0 + random.random() + np.random.rand()))


def test_a_replay_on_request_moves_no_generator(start: Any) -> None:
    run = start(model=Augmenting, level="O2")
    run.step(0)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    assert NAMED in run.amp.explain(replay=True)
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


def test_replay_on_request(start: Any) -> None:
    run = start(level="O2")
    first, second = run.amp.explain(replay=True).splitlines()
    assert first == "No step was skipped." == run.amp.explain()
    assert second.startswith("Not replayed: no batch of a step is known. print(amp.explain(replay=")
    run.step(0)
    assert NAMED not in run.amp.explain()
    assert NAMED in run.amp.explain(replay=True)
    text = run.amp.explain(replay=lambda: run.loss(0))
    assert NAMED in text and "the loss is NaN" in text
    assert "not reproduced" in run.amp.explain(replay=lambda: run.loss(0, size=1.0))
    assert "The replay failed: KeyError: 'gone'" in run.amp.explain(replay=lambda: {}["gone"])


def test_later_faults_run_again_at_powers_of_two(start: Any, caplog: Any) -> None:
    run = start(level="O2", on_nonfinite="explain")
    with caplog.at_level(logging.INFO, "tritonamp"):
        for i in range(9):
            run.step(i)
    *replayed, last = [text for text in caplog.messages if text.startswith("step ")]
    assert len(replayed) == 8 and all(NAMED in text for text in replayed)
    assert NAMED not in last
    assert last.endswith(". Of later faults, the 16th, 32nd, 64th... run again.")


def test_the_same_fault_has_one_report(start: Any, caplog: Any) -> None:
    """Later ones name the step of the report, until there was another fault."""
    run = start(level="O2", on_nonfinite="explain")
    with caplog.at_level(logging.INFO, "tritonamp"):
        for i in range(3):
            run.step(i)
        run.model.attention.forward = run.model.attention.q.forward
        run.model.head.forward = lambda x: x[:, :4] * 1e6
        run.step(3, size=1.0)
        del run.model.attention.forward, run.model.head.forward
        run.step(4)
    texts = [text for text in caplog.messages if text.startswith("step ")]
    assert ["to do:" in text for text in texts] == [True, False, False, True, True]
    assert [text.endswith(": as at step 1.") for text in texts] == [False, True, True, False, False]
    assert all(NAMED in text.splitlines()[1] for text in texts[1:3])
    assert "to do:" in run.amp.explain(), "the last report is at hand"


def test_a_fault_of_the_loss_is_not_blamed_on_the_model(start: Any, caplog: Any) -> None:
    run = start(level="O2", on_nonfinite="explain")
    with caplog.at_level(logging.WARNING, "tritonamp"):
        run.amp.backward(run.loss(0, size=1.0) * float("inf"))
        run.optimizer.step()
    (text,) = caplog.messages
    assert "overflow, forward" not in text and "Look in the model and the loss for" in text
    assert "The loss is computed from it outside of the model, and did not run again" in text


@pytest.mark.steps
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("model", [Scores, Flat])
def test_heal_trains_on(start: Any, caplog: Any, level: str, model: type[nn.Module]) -> None:
    """Two skips, then FP32 where it is needed, and losses close to those of FP32 training."""
    name = "attention" if model is Scores else ""
    plain = start(level="O0", model=model, scaler=None, loss_scale=1.0)
    run = start(level=level, model=model, on_nonfinite="heal")
    with caplog.at_level(logging.WARNING, "tritonamp"):
        for i in range(2):
            run.step(i)
    assert run.amp.stats()["healed"] == [name]
    assert run.amp.policy.fp32_results == ((name,) if name else ())
    assert run.amp.policy.fp32_modules == ()
    assert sum("Healed: " in text for text in caplog.messages) == 1
    for i in range(2, 32):
        expected, loss = plain.step(i), run.step(i)
        if run.amp.history[-1].cause is None and i < 8:
            assert loss == pytest.approx(expected, rel=0.05)
    assert run.amp.stats()["skipped"] <= 2 + 12, "what remains is the scale finding its level"
    stays_half = name and level == "O2"
    stored = torch.float16 if stays_half else torch.float32
    healed = run.model.attention if name else run.model
    assert {p.dtype for p in healed.parameters()} == {stored}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_healing_is_undone_kept_and_resumed(start: Any, level: str) -> None:
    run = start(level=level)
    run.step(0, size=1.0)
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    dtypes = [p.dtype for p in run.model.parameters()]
    run.amp.heal("attention")
    assert {p.dtype for p in run.model.attention.parameters()} == {torch.float32}
    assert all(torch.equal(state[name], value) for name, value in run.model.state_dict().items())
    for i in range(1, 4):
        run.step(i, size=1.0)
    saved, weights = run.amp.state_dict(), run.model.state_dict()
    assert saved["healed"] == ["attention"]

    other = start(level=level)
    other.amp.load_state_dict(saved)
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for i in range(4, 8):
        assert run.step(i, size=1.0) == other.step(i, size=1.0)
    assert all(
        torch.equal(a, b)
        for a, b in zip(run.amp.master_params(), other.amp.master_params(), strict=True)
    )

    run.amp.unheal("attention")
    assert [p.dtype for p in run.model.parameters()] == dtypes
    run.step(9, size=1.0)
    assert all(
        torch.equal(c, p.to(c.dtype))
        for c, p in zip(run.model.parameters(), run.amp.master_params(), strict=True)
    )
    run.amp.disable()
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    other.amp.disable()
    assert type(other.model) is Scores and type(other.model.attention) is Attention


def test_names_that_nothing_has(start: Any) -> None:
    run = start(level="O2")
    with pytest.raises(
        ValueError,
        match=r"module: expected one of the model's, '', 'attention'.* got 'atention': did you "
        r"mean 'attention'\?",
    ):
        run.amp.heal("atention")
    with pytest.raises(
        ValueError, match=r"module: expected one that is healed, \[\], got 'attention'"
    ):
        run.amp.unheal("attention")


def test_raise_after_some_in_a_row(start: Any) -> None:
    run = start(level="O2", on_nonfinite="raise", raise_after=3)
    for i in range(2):
        run.step(i)
    run.step(2, size=1.0)  # a clean one between
    for i in range(2):
        run.step(i)
    with pytest.raises(
        tritonamp.NonFiniteError, match=r"(?s)forward fault.*matmul overflow, forward: attention"
    ):
        run.step(0)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_raise_after_what(value: Any) -> None:
    with pytest.raises(ValueError, match=r"raise_after: expected a whole number from 1"):
        tritonamp.Policy(raise_after=value)


def test_two_optimizers_hear_of_one_fault_once(device: torch.device, caplog: Any) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).to(device)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in model]
    amp = tritonamp.enable(list(model), optimizers, level="O2", on_nonfinite="explain")
    x = torch.ones(1, 2, device=device)
    with caplog.at_level(logging.INFO, "tritonamp"):
        amp.backward(model[1](model[0](x)).sum() * float("nan"))
        for optimizer in optimizers:
            optimizer.step()
    assert len(caplog.messages) == 1
    amp.disable()


def test_a_bundle_of_the_failing_batch(start: Any, tmp_path: Path) -> None:
    run = start(level="O2")
    run.step(0, size=1.0)
    with pytest.raises(RuntimeError, match="expected a failing batch, got none: no step was"):
        run.amp.write_bundle(tmp_path / "a")
    run.step(1)
    folder = run.amp.write_bundle(tmp_path / "b")
    assert "matmul overflow, forward: attention" in (folder / "report.txt").read_text()
    model = Scores().to(run.device)
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    amp = tritonamp.enable(
        model, policy=tritonamp.Policy.from_json((folder / "policy.json").read_text())
    )
    fault = find_fault(model, load_bundle(folder, model).run)
    assert fault is not None
    assert (fault.kind, fault.module) == ("matmul_overflow", "attention")
    amp.disable()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) * 1000
        q = h * h
        return q / (q + 1)


@pytest.mark.parametrize("detached", [False, True])
def test_what_one_model_makes_is_not_the_data_of_the_next(
    device: torch.device, detached: bool
) -> None:
    torch.manual_seed(0)
    encoder, decoder = Encoder().to(device), nn.Linear(8, 2).to(device)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()])
    amp = tritonamp.enable([encoder, decoder], optimizer, level="O2", on_nonfinite="heal")
    for _ in range(4):
        h = encoder(torch.randn(4, 8, device=device))
        take_step(amp, optimizer, decoder(h.detach() if detached else h).square().mean())
    assert [record.cause for record in amp.history][:2] == ["forward fault"] * 2
    assert amp.stats()["healed"] == ["0"]
    assert "data" not in {record.cause for record in amp.history}
    amp.disable()


class Both(nn.Module):
    """First a logarithm of negative numbers, then an overflow in ``s``."""

    def __init__(self) -> None:
        super().__init__()
        self.s = Encoder()
        self.mode = "log"

    def forward(self, x: Tensor) -> Tensor:
        return (-x.abs() - 1).log() if self.mode == "log" else self.s(x)


def test_many_faults_of_another_kind_do_not_end_healing(device: torch.device) -> None:
    model = Both().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = tritonamp.enable(model, optimizer, level="O2", on_nonfinite="heal")
    for i in range(40):
        model.mode = "log" if i < 10 else "square"
        take_step(
            amp,
            optimizer,
            model(torch.randn(4, 8, device=device)).square().mean() + model.s.l.bias.sum(),
        )
    assert amp.stats()["healed"] == ["s"]
    assert amp.state_dict()["faults"]["seen"] == 0, "the next faults run again"
    assert "domain error" not in amp.explain(), "the last fault is another one"
    amp.disable()


def test_bad_batches_do_not_use_up_the_replays(start: Any, caplog: Any) -> None:
    run = start(level="O2", on_nonfinite="heal")
    for i in range(10):
        run.step(i, size=float("inf"))
    assert run.amp.history[-1].cause == "data"
    caplog.clear()
    for i in range(2):
        run.step(i)
    assert run.amp.stats()["healed"] == ["attention"]
    (record,) = [r for r in caplog.records if "Healed" in r.getMessage()]
    assert record.levelno == logging.WARNING, "though it is the twelfth skip in a row"


# What is advised has been tried


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Chain(nn.Module):
    """Each link multiplies by some hundreds; where all do, nothing but bfloat16 holds it."""

    def __init__(self, links: int) -> None:
        super().__init__()
        self.links = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(links))
        for link in self.links:
            link.weight.data.copy_(500 * torch.eye(8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x)
        return self.norm(x)


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (-1 - self.inner(x).square()).log()


def advice(device: torch.device, model: nn.Module, **fields: Any) -> str:
    """Return the advice for a first step that is skipped."""
    torch.manual_seed(0)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    amp = tritonamp.enable(model, optimizer, **{"level": "O2", **fields})
    pointers = [p.data_ptr() for p in model.parameters()]
    x = 4 + torch.rand(4, 8, device=device)
    amp.backward(model(x).float().square().mean())
    optimizer.step()
    classes, grads = [type(m) for m in model.modules()], [p.grad for p in model.parameters()]
    text = amp.explain(replay=True)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert [type(m) for m in model.modules()] == classes
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    amp.disable()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    return text.rpartition("to do:")[2].strip()


def first_line(text: str) -> str:
    return text.partition("\n")[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_module_that_cures_it_is_named(device: torch.device, level: str) -> None:
    assert first_line(advice(device, Chain(2), level=level)) == (
        "Let products have FP32 results: fp32_results=['links.1'] (tried: the forward passes); or "
        "scale the first factor of linear, and so its result, by 2^-6 (tried: the forward passes)."
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_chain_that_cures_it_is_named(device: torch.device, level: str) -> None:
    assert first_line(advice(device, Chain(4), level=level)).endswith(
        "et products have FP32 results, and keep links.2, links.3 in FP32: "
        "fp32_results=['links.1'], fp32_modules=['links.2', 'links.3'] (tried: the forward passes)."
    )


@pytest.mark.parametrize(("level", "links"), [("O2", 6), ("O3", 2)])
def test_bfloat16_is_named_where_no_few_modules_cure_it(
    device: torch.device, level: str, links: int
) -> None:
    """At O3 an FP32 module gives half to the next."""
    told = first_line(advice(device, Chain(links), level=level))
    assert 'ompute the whole model in FP32: level="O0" (tried: the forward passes)' in told
    assert told.endswith(
        "; or train in bfloat16: dtype=torch.bfloat16 (tried: the forward passes)."
    )


def test_no_precision_is_advised_where_none_helps(device: torch.device) -> None:
    assert advice(device, Logarithm()) == (
        "Clamp the argument: log(x.clamp(min=1e-06)) (tried: the forward passes).\n"
        "  in vain: write with tritonamp.disable_casts(): log(x.float()). FP32 does not help, nor "
        "does bfloat16: both were tried on this batch."
    )


class Scaled(nn.Sequential):
    """Reads its input before any of its modules does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1e-6)


@pytest.mark.parametrize(
    ("kind", "advised", "cures"),
    [
        (
            nn.Sequential,
            "Keep them in FP32: fp32_modules=['0', '1'] (tried: the forward passes; 0 alone only "
            "moves the fault); or set cast_inputs=False and fp32_modules=['0', '1'] (tried: the "
            "forward passes).",
            [
                {"cast_inputs": False, "fp32_modules": ["0", "1"]},
                {"cast_inputs": True, "fp32_modules": ["0", "1"]},
            ],
        ),
        (Scaled, "Set cast_inputs=False (tried: the forward passes)", [{"cast_inputs": False}]),
    ],
)
def test_what_is_advised_for_an_input_that_enable_casts_lets_the_batch_pass(
    kind: type[nn.Sequential], advised: str, cures: list[dict[str, Any]]
) -> None:
    def explained(**fields: Any) -> tuple[int, str]:
        model, x = kind(nn.Linear(8, 16), nn.Linear(16, 2)), torch.full((4, 8), 1e6)
        optimizer = torch.optim.AdamW(model.parameters())
        with tritonamp.enable(
            model, optimizer, level="O2", on_nonfinite="explain", **fields
        ) as amp:
            amp.backward(model(x).mul(1e-7).square().mean())
            optimizer.step()
            return amp.stats()["forward_faults"], amp.explain()

    faults, words = explained(cast_inputs=True)
    assert faults == 1 and advised in words
    assert [explained(**cure)[0] for cure in cures] == [0] * len(cures)


def test_a_remedy_is_tried_once_for_a_fault_that_repeats(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    find = tritonamp.diagnosis.replays.remedy_of
    monkeypatch.setattr(
        tritonamp.diagnosis.replays, "remedy_of", lambda *args: tried.append(1) or find(*args)
    )
    run = start(level="O2", on_nonfinite="explain")
    for _ in range(3):
        run.step(0)
    assert len(tried) == 1 and "(tried: the forward passes)" in run.amp.explain()


def test_a_factor_is_tried_again_for_a_larger_product(start: Any) -> None:
    run = start(level="O2")
    powers = []
    for size in (500.0, 8000.0):
        run.step(0, size=size)
        text = run.amp.explain(replay=True)
        multiple = float(re.search(r"([\d.e+]+) times the largest", text)[1])
        power = int(re.search(r"by 2\^(-\d+) \(tried", text)[1])
        assert multiple * 2**power <= 1
        powers.append(power)
    assert powers[1] <= powers[0] - 6


def test_a_trial_that_fails_promises_nothing(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(level="O2")
    run.step(0)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(run.amp._parts.enabled_models.dtypes, "widened", fail)
    monkeypatch.setattr(run.amp._parts.healing, "_give_fp32_results", fail)
    text = run.amp.explain(replay=True)
    assert (
        "Scale the first factor of matmul, and so its result, by 2^-" in text
        and "fp32_modules" not in text
        and "fp32_results" not in text
    )


# Scale overflows


def test_a_scale_overflow_needs_no_operation(start: Any) -> None:
    run = start(level="O2", scaler=tritonamp.GradScaler(init_scale=2.0**24))
    run.step(0, size=1.0)
    text = run.amp.explain(replay=True)
    assert "scale overflow" in text and "not reproduced" not in text
    assert "Its forward is finite: gradients overflowed at loss scale 1.67772e+07, and the" in text
    again = run.amp.explain(replay=lambda: run.loss(0, size=1.0))
    assert f"scale too high, backward: head, op {op_of_linear(run.device)}" in again
    assert "at loss scale 2^24" in again and "all gradients fit at 2^" in again
    assert "or begins there, with scaler=tritonamp.GradScaler(init_scale=2.0**" in again


def test_a_scale_overflow_runs_again_at_the_scale_it_had(start: Any) -> None:
    scaler = tritonamp.GradScaler(init_scale=2.0**24)
    run = start(level="O2", scaler=scaler, on_nonfinite="explain")
    run.step(0, size=1.0)
    text = run.amp.explain(replay=True)
    assert f"scale too high, backward: head, op {op_of_linear(run.device)}" in text
    assert "at loss scale 2^24" in text


# Overflow that vanished again


class HalfNorm(nn.Module):
    """An RMSNorm as people write it; above 256 its squares are inf in half, and the rest zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Lorentzian(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / (1 + x * x)


def saturating(device: torch.device, inner: nn.Module, size: float, **fields: Any) -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(16, 4))

    run = Training(model, level="O3", device=device, lr=1e-3, **fields)
    run.x = size * batch(0, 8, 16, device=device)
    return run


@pytest.mark.parametrize("inner", [HalfNorm, Lorentzian])
def test_overflow_that_vanished_is_found_when_asked(
    device: torch.device, inner: type[nn.Module]
) -> None:
    run = saturating(device, inner(), 2000.0)
    run.step()
    assert run.amp.explain() == "No step was skipped."
    for replay in (True, lambda: run.model(run.x).float().square().mean()):
        text = run.amp.explain(replay=replay)
        assert text.startswith("No step was skipped.\nsilent square overflow, forward: 1, op mul")
        assert "inf became a wrong finite number in 1, op " in text
        assert "fp32_modules=['1'] (tried: the " in text
    run.amp.disable()


def test_a_good_batch_is_said_to_be_good(device: torch.device) -> None:
    run = saturating(device, HalfNorm(), 1.0)
    run.step()
    assert "Run again, nothing overflows, nor does any overflow vanish" in run.amp.explain(True)
    run.x = None  # the batch is not kept for it
    assert run.amp.explain(replay=True) == (
        "No step was skipped.\n"
        "The last batch is gone, so it was not searched for overflows that vanish on the way: call "
        "this right after a step."
    )
    run.amp.disable()


@pytest.mark.parametrize(("mode", "looks"), [("skip", 0), ("explain", 1), ("heal", 1)])
def test_one_look_in_the_first_steps_and_none_later(
    device: torch.device, caplog: Any, monkeypatch: pytest.MonkeyPatch, mode: str, looks: int
) -> None:
    ran = []
    monkeypatch.setattr(
        search, "find_fault", lambda *args, **kwargs: ran.append(1) or find_fault(*args, **kwargs)
    )
    run = saturating(device, Lorentzian(), 1.0, on_nonfinite=mode)
    for _ in range(4):
        run.step()
    assert len(ran) == looks
    assert run.amp._parts.forwards.holds_recent is False
    run.amp.disable()
    with caplog.at_level(logging.WARNING, "tritonamp"):
        run = saturating(device, Lorentzian(), 2000.0, on_nonfinite=mode)
        for _ in range(4):
            run.step()
    said = [text for text in caplog.messages if "silent square overflow, forward: 1" in text]
    assert len(said) == looks
    assert ("silent square overflow" in run.amp.explain()) is (looks > 0)
    run.amp.disable()


def test_fakes_made_before_the_discriminators_step_are_the_generators(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each decision blames the generator, which is healed after the two of the first round."""
    torch.manual_seed(0)
    generator, discriminator = Generator(), nn.Linear(16, 1)
    opt_g, opt_d = (torch.optim.AdamW(m.parameters()) for m in (generator, discriminator))
    softplus = nn.functional.softplus
    models, optimizers = [generator, discriminator], [opt_g, opt_d]
    with tritonamp.enable(models, optimizers, level="O2", on_nonfinite="heal") as amp:
        fake = generator(500 * torch.randn(4, 5, 16))
        loss = softplus(-discriminator(torch.randn(4, 16))) + softplus(discriminator(fake.detach()))
        amp.backward(loss.mean(), opt_d, loss_id=0)
        opt_d.step()
        amp.backward(softplus(-discriminator(fake)).mean(), opt_g, loss_id=1)
        opt_g.step()
        assert amp.stats()["healed"] == ["0"]
        assert len(amp._parts.forwards._snapshots) == 0, "no forward outlives its decision"
    assert "data, forward" not in caplog.text


def test_a_remedy_for_one_of_several_models_runs_as_it_is_printed(device: torch.device) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(16, 16).to(device), Scores().to(device)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in models]
    with tritonamp.enable(models, optimizers, level="O2") as amp:
        x = 500 * torch.randn(4, 5, 16, device=device)
        amp.backward(models[1](x).square().mean(), optimizers[1])
        optimizers[1].step()
        report = amp.explain(replay=True)
        assert "fp32_results=['1.attention'] (tried: the forward passes)" in report
        amp.heal("1.attention", results=True)
        assert models[1](x).isfinite().all()
        healed = amp.policy
    for how in ({"level": "O2", "fp32_results": ["1.attention"]}, {"policy": healed}):
        with tritonamp.enable(models, optimizers, **how):
            assert models[1](x).isfinite().all()

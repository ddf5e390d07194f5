"""Who asks for rows with the same bits in every batch, and where a model without them is named."""

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import Net

import tritonamp
from tritonamp.casts import batch_invariance
from tritonamp.commands import doctor
from tritonamp.policy import O0, O1, O2, O3, resolve

LIBRARIES = {
    "batch_invariant_ops": "batch_invariant_ops",
    "sglang.srt.batch_invariant_ops": "SGLang's batch-invariant mode",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels": (
        "Megatron-Core's batch-invariant mode"
    ),
}
VLLM = "vllm.model_executor.layers.batch_invariant"
ACTIVE = (
    "is active, but tritonamp's kernels choose tiles by the number of rows, so the bits of a row "
    "depend on its batch"
)
ADVICE = "give batch_invariant=True to tritonamp.enable"
DETERMINISTIC = (
    "torch.use_deterministic_algorithms(True) is on, and the same batch gives the same bits: for "
    "the same bits of a row in every batch give batch_invariant=True to tritonamp.enable"
)


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    batch_invariance._log_once.cache_clear()
    yield
    batch_invariance._log_once.cache_clear()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def library(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


def activate(monkeypatch: pytest.MonkeyPatch, name: str = "batch_invariant_ops") -> None:
    library(monkeypatch, name, is_batch_invariant_mode_enabled=lambda: True)


def said(*args: Any) -> list[str]:
    return [str(note) for note in batch_invariance.notes(*args)]


def test_no_one_asks_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said() == said(O1) == []
    for name in LIBRARIES:
        library(monkeypatch, name, is_batch_invariant_mode_enabled=lambda: False)
    library(monkeypatch, VLLM, _batch_invariant_MODE=False)
    assert said() == []
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)  # an import that is refused
    assert said() == []


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_in_its_mode(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mode = [False]
    library(monkeypatch, name, is_batch_invariant_mode_enabled=lambda: mode[0])
    assert said() == []
    mode[0] = True
    assert said() == [f"{LIBRARIES[name]} {ACTIVE}: {ADVICE}"]
    assert [note.is_warning for note in batch_invariance.notes()] == [True]


def test_vllm_has_a_flag_and_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable also counts where vLLM runs in another process; it is named once."""
    library(monkeypatch, VLLM, _batch_invariant_MODE=True)
    assert said() == [f"vLLM's batch-invariant mode {ACTIVE}: {ADVICE}"]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert said() == [f"vLLM's VLLM_BATCH_INVARIANT=1 {ACTIVE}: {ADVICE}"]
    monkeypatch.delitem(sys.modules, VLLM)
    assert len(said()) == 1
    for value in ("0", "", "no"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert said() == []


def test_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may import others when it is asked for a name that it does not have."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    library(monkeypatch, "batch_invariant_ops", __getattr__=refuse)
    before = set(sys.modules)
    assert said() == []
    assert set(sys.modules) == before


def test_deterministic_algorithms_ask_for_less(deterministic: None) -> None:
    assert said() == said(O2) == [DETERMINISTIC]
    assert [note.is_warning for note in batch_invariance.notes()] == [False]


def test_whom_it_concerns(monkeypatch: pytest.MonkeyPatch, deterministic: None) -> None:
    """Models whose rows are this package's, unless they have what is asked for."""
    activate(monkeypatch)
    assert [len(said(policy)) for policy in (O0, O1, O2, O3)] == [0, 2, 2, 0]
    assert said(resolve("O2", None, batch_invariant=True)) == []


def test_enable_says_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, deterministic: None
) -> None:
    activate(monkeypatch)
    with caplog.at_level(logging.INFO, "tritonamp"):
        for policy in (resolve("O1", None, batch_invariant=True), O1, O2):
            tritonamp.enable(Net(), policy=policy).disable()
    found = [(r.levelno, r.message) for r in caplog.records if "batch_invariant=" in r.message]
    assert found == [
        (logging.WARNING, f"batch_invariant_ops {ACTIVE}: {ADVICE}"),
        (logging.INFO, DETERMINISTIC),
    ]


def test_check_advises_it(monkeypatch: pytest.MonkeyPatch, deterministic: None) -> None:
    def findings(level: Any) -> list[Any]:
        forecast = tritonamp.check(Net(), None, torch.ones(2, 6), level=level)
        assert forecast.policy.batch_invariant is forecast.asked.batch_invariant
        return [f for f in forecast.findings if f.kind == "batch invariance"]

    activate(monkeypatch)
    library, torchs = findings("O1")
    assert not library.problem and not torchs.problem
    assert library.why == f"batch_invariant_ops {ACTIVE}"
    assert library.advice == f"{ADVICE} (not tried: one batch does not show it)"
    assert torchs.why == DETERMINISTIC.partition(": ")[0]
    assert findings(resolve("O1", None, batch_invariant=True)) == []


def test_doctor_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_trial", lambda *args: ("O1", "float16", "works"))
    assert "batch_invariant" not in doctor.report()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    said = " ".join(doctor.report().split())  # lines fit the terminal
    assert f" vLLM's VLLM_BATCH_INVARIANT=1 {ACTIVE}: {ADVICE} " in said

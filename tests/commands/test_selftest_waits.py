"""The selftest's loops in which the host must not wait for the GPU."""

import pytest
import torch

from tritonamp.commands.selftest import waits
from tritonamp.commands.selftest.check import outcome_of
from tritonamp.commands.selftest.training import SmallTraining

NAMES = list(waits.loops())


def outcome(cuda: torch.device, name: str) -> dict[str, object]:
    checks = {check.name: check for check in waits.checks(cuda, "triton")}
    return outcome_of(checks[name], cuda)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_no_loop_waits(cuda: torch.device, name: str) -> None:
    found = outcome(cuda, name)
    assert found["status"] == "ok", found["detail"]


def test_every_level_optimizer_and_option_has_a_loop() -> None:
    assert {loop.level for loop in waits.loops().values()} == {"O0", "O1", "O2", "O3"}
    assert {"O2 Muon", "O2 offload", "O2 AdamW state=8bit", "O1 bfloat16"} <= set(NAMES)
    assert not list(waits.checks(torch.device("cpu"), "eager"))


@pytest.mark.parametrize("name", ["O1 float16", "O2 SGD"])
def test_a_wait_in_a_step_is_found(
    cuda: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = SmallTraining.step

    def waits_for_its_loss(run: SmallTraining, max_norm: float | None = None) -> torch.Tensor:
        loss = step(run, max_norm)
        loss.item()
        return loss

    monkeypatch.setattr(SmallTraining, "step", waits_for_its_loss)
    found = outcome(cuda, name)
    assert found["status"] == "FAILED"
    assert "called a synchronizing CUDA operation" in str(found["detail"])

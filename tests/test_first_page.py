"""What the first page says in words and numbers; its programs run in ``test_readme.py``."""

import contextlib
import io
import logging
import re
import runpy

import pytest
import step_bytes
import test_readme
import torch
from torch import nn

import tritonamp

PAGE = (test_readme.ROOT / "README.md").read_text()
DIAGNOSIS = test_readme.ROOT / "tritonamp" / "diagnosis" / "README.md"


def rows(heading: str) -> list[list[str]]:
    """Return the cells of a section's first table; "" stands for what precedes all sections."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(heading))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_it_is_short_and_links_to_the_questions_at_once() -> None:
    lines = PAGE.splitlines()
    assert len(lines) <= 180
    assert "tritonamp/questions.md" in lines[2]


class Attention(nn.Module):
    """The product of queries and keys leaves float16 for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ x


def large_batches() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("attention", Attention())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), 500 * torch.randn(8, 5, 16)


def test_first_row_torch_says_nothing_while_its_scale_falls(caplog) -> None:
    caplog.set_level(logging.DEBUG)
    model, optimizer, x = large_batches()
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(60):
        with torch.autocast("cpu", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    (said,) = (row[1] for row in rows("") if "NaN" in row[0])
    assert loss.isnan() and not caplog.records
    assert f"{scaler.get_scale():.0e}" in said


def test_first_row_we_name_the_operation_and_keep_the_scale(caplog) -> None:
    model, optimizer, x = large_batches()
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        for _ in range(60):
            amp.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert amp.scaler.get_scale() == 65536
        said = amp.explain(replay=True)
    assert "matmul overflow, forward: attention, op matmul at " in said
    assert "(tried: the forward passes)" in said


def test_second_row_a_half_model_trains() -> None:
    (_, theirs, _) = next(row for row in rows("") if "loaded in float16" in row[0])
    model = nn.Linear(4, 4).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4).half()).float().sum()).backward()
    with pytest.raises(ValueError, match="unscale") as raised:
        scaler.unscale_(optimizer)
    assert theirs == f"`ValueError: {raised.value}`"
    optimizer.zero_grad()
    before = model.weight.detach().clone()
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        for _ in range(5):  # the first steps look for the loss scale
            amp.backward(model(torch.ones(4)).sum())
            optimizer.step()
            optimizer.zero_grad()
        assert (model.weight < before).all()
        assert all(p.dtype is torch.float32 for p in amp.master_params())


def test_third_row_a_mask_is_clamped() -> None:
    (_, theirs, ours) = next(row for row in rows("") if "masked_fill" in row[0])

    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).masked_fill(torch.ones(4, dtype=torch.bool), -1e9)

    model = Masked(4, 4)
    with (
        pytest.raises(RuntimeError) as raised,
        torch.autocast("cpu", torch.float16),
    ):
        model(torch.ones(4))
    assert theirs == f"`RuntimeError: {raised.value}`"
    with tritonamp.enable(model, level="O2"):
        assert model(torch.ones(4)).tolist() == [-65504.0] * 4
    assert "-65504" in ours


def test_the_explanation_is_what_the_program_of_diagnosis_prints(tmp_path) -> None:
    program = next(b.code for b in test_readme.blocks(DIAGNOSIS) if "class Attention" in b.code)
    file = tmp_path / "train.py"
    file.write_text(program)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(file))["amp"].disable()
    shown = re.search(r"^matmul overflow.*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
    assert shown
    told = squeezed(printed.getvalue().replace(f"{tmp_path}/", ""))
    for entry in re.split(r"\n(?=  \w)", shown[0].strip()):
        assert squeezed(entry) in told


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_bytes_are_those_of_the_step() -> None:
    cells = {row[0]: row[1:] for row in rows("What it costs")}
    kept = next(values for name, values in cells.items() if "takes in training" in name)
    moved = next(values for name, values in cells.items() if "a step moves" in name)
    plain, small = (
        step_bytes.Ours("AdamW", "adamw", 2, state, packed)
        for state, packed in (("fp32", False), ("8bit", True))
    )
    assert re.findall(r"[\d.]+(?=\b)", kept[0].replace("8bit", "")) == numbers(
        plain.kept, small.kept
    )
    assert re.findall(r"[\d.]+", moved[0]) == numbers(plain.moved, small.moved)


def numbers(*values: float) -> list[str]:
    return [f"{round(value, 2):g}" for value in values]

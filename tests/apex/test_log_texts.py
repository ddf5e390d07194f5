"""The lines of the log name a handle that exists where scripts have apex's ``amp``."""

import copy
import logging
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as criterion

import tritonamp
from tritonamp.apex import amp


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("factor", "cause"), [(float("nan"), "forward fault"), (1e6, "scale")])
def test_the_call_that_the_log_names(
    level: str,
    factor: float,
    cause: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = torch.randn(8, 8), torch.zeros(8, dtype=torch.long)
    with caplog.at_level(logging.INFO, "tritonamp"):
        for _ in range(4):
            with amp.scale_loss(factor * criterion(model(x), y), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    handle = tritonamp.handle(model)
    texts = [*caplog.messages, handle.explain()]
    assert any(cause in text for text in texts)
    assert not any(re.search(r"(?<!\w)amp\.\w+\(", text) for text in texts)
    (call,) = {m[1] for text in texts if (m := re.search(r" (print\(.*\)), with that batch", text))}
    assert call == "print(tritonamp.handle(model).explain(replay=lambda: criterion(model(x), y)))"
    eval(call, {"tritonamp": tritonamp, "criterion": criterion, "model": model, "x": x, "y": y})
    assert "skipped" in capsys.readouterr().out
    handle.disable()


def test_the_calls_that_a_report_names() -> None:
    """A replay of the forward finds nothing where the loss is at fault, and names a call."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    handle = tritonamp.handle(model)
    with amp.scale_loss(model(torch.randn(8, 8)).sum() * float("inf"), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    _, report = handle.explain(replay=True).splitlines()
    assert "tritonamp.handle(model).explain(replay=" in report
    assert not re.search(r"(?<!\w)amp\.\w+\(", report)
    handle.disable()


class Wide(nn.Module):
    """Its products leave float16 at every step, and so does each module's part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("level", "argument"),
    [
        ("O2", 'opt_level="O5"'),
        ("O3", "cast_model_type=torch.bfloat16"),
    ],
)
def test_the_argument_for_bfloat16_is_taken(level: str, argument: str) -> None:
    """``amp.initialize`` takes it, with the others as they were, and the batch passes."""
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(4, 8)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start = copy.deepcopy(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    handle = tritonamp.handle(model)
    report = handle.explain(replay=lambda: model(x).float().mean())
    handle.disable()
    assert f"rain in bfloat16: {argument} (tried: the batch passes)" in report
    optimizer = torch.optim.SGD(start.parameters(), lr=1e-3)
    given = eval(f"dict({argument})", {"torch": torch})
    model, optimizer = amp.initialize(
        start, optimizer, **{"opt_level": level, "verbosity": 0, **given}
    )
    assert bool(model(x).isfinite().all())
    tritonamp.handle(model).disable()


class Shrinking(nn.Linear):
    """Its product leaves float16, and its result does not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e-3


class Tall(nn.Module):
    """A product leaves float16 in a module, or with more rows a square in no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Shrinking(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(1e3 * x if len(x) == 8 else x)
        return self.last(h) if len(x) == 8 else (self.last(h) + 5e2).square()


def fault_at(level: str, rows: int) -> tuple[nn.Module, Tensor, str]:
    """Return a model with a fault, its batch, and the report. The model is enabled."""
    torch.manual_seed(0)
    model, x = Tall(), torch.randn(rows, 8)
    with torch.no_grad():
        model.first.weight.mul_(300.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(x).float().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    report = tritonamp.handle(model).explain(replay=True)
    assert not re.search(r"fp32_modules=|\blevel=|\bdtype=torch.bfloat16", report)
    return model, x, report


def test_the_call_that_heals_a_module_runs_as_it_is_printed() -> None:
    model, x, report = fault_at("O2", 8)
    call = "tritonamp.handle(model).heal('first')"
    assert f"{call} (tried: the forward passes)" in report
    eval(call, {"tritonamp": tritonamp, "model": model})
    assert bool(model(x).isfinite().all())
    tritonamp.handle(model).disable()


def test_the_level_for_the_whole_model_is_that_of_apex() -> None:
    model, _, report = fault_at("O2", 16)
    assert 'opt_level="O0" (tried: the forward passes)' in report
    tritonamp.handle(model).disable()


@pytest.mark.parametrize("rows", [8, 16])
def test_no_precision_is_advised_where_apexs_own_casts_would_undo_it(rows: int) -> None:
    """O1 casts around functions, whatever a policy says, and a handle has nothing to heal there."""
    model, _, report = fault_at("O1", rows)
    assert "overflow, forward" in report and "to do:" in report
    assert not re.search(r"heal\(|bfloat16|opt_level|FP32 does not help", report)
    tritonamp.handle(model).disable()

"""The lines of the log name a handle that exists where scripts have apex's ``amp``."""

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


class Tall(nn.Module):
    """Its product leaves float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).square() if x.numel() > 64 else self.last(self.first(x))


@pytest.mark.parametrize(
    ("rows", "cure"), [(8, r"tritonamp\.handle\(model\)\.heal\('first'\)"), (16, 'opt_level="O0"')]
)
def test_a_report_names_the_arguments_that_apex_takes(rows: int, cure: str) -> None:
    torch.manual_seed(0)
    model = Tall()
    with torch.no_grad():
        (model.first.bias if rows == 8 else model.last.bias).fill_(7e4 if rows == 8 else 5e2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    handle = tritonamp.handle(model)
    with amp.scale_loss(model(torch.randn(rows, 8)).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    report = handle.explain(replay=True)
    assert re.search(cure, report)
    assert not re.search(r"fp32_modules=|\blevel=|\bdtype=torch.bfloat16", report)
    handle.disable()

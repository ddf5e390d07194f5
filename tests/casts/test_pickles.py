"""A pickle of an tangled model is the plain model's, with the FP32 values that its state has."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_python import FreshPython
from helpers import Net, assert_same, take_step
from torch import Tensor, nn

import tritonamp

LEVELS = ["O0", "O1", "O2", "O3"]


class Tangled(nn.Module):
    """Parts that refer to one another, outside of what modules register, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.head = nn.Linear(6, 16)
        self.head.weight = self.net.first.weight
        self.register_buffer("table", torch.linspace(0, 1, 3))
        self.parts = [self.net.first, self]
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.net(x) + self.table
        return self.seen


def train_twice(model: nn.Module, amp: tritonamp.Amp, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        take_step(amp, optimizer, model(torch.ones(2, 6)).square().mean() * 1e-2)


def buffer_of(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def tangled(level: str, handles: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tangled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_twice(model, handles(model, optimizer, level=level, fp32_modules=()), optimizer)
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_it_is_the_plain_model_with_the_values_of_the_state(handles: Any, level: str) -> None:
    model, _ = tangled(level, handles)
    model.net.forward = model.net.forward  # set on an instance inside
    del model.net.forward
    found = torch.load(buffer_of(model), weights_only=False)
    assert {type(m) for m in found.modules()} == {Tangled, Net, nn.Linear, nn.LayerNorm}
    assert_same(found.state_dict(), model.state_dict())
    assert {t.dtype for t in found.state_dict().values()} == {torch.float32}
    assert found.head.weight is found.net.first.weight
    assert found.parts[0] is found.net.first and found.parts[1] is found
    assert not any("tritonamp" in key for m in found.modules() for key in vars(m))


@pytest.mark.parametrize("level", LEVELS)
def test_it_loads_under_the_safe_globals_of_the_plain_model(handles: Any, level: str) -> None:
    model, _ = tangled(level, handles)
    model.seen = None
    wanted = torch.serialization.get_unsafe_globals_in_checkpoint
    assert wanted(buffer_of(model)) == wanted(buffer_of(Tangled()))
    classes = [Tangled, Net, nn.Linear, nn.LayerNorm]
    with torch.serialization.safe_globals(classes):
        found = torch.load(buffer_of(model), weights_only=True)
    assert_same(found.state_dict(), model.state_dict())


@pytest.mark.long
def test_it_loads_where_there_is_no_tritonamp(
    handles: Any, fresh_python: FreshPython, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles(model, optimizer, level="O2", fp32_modules=["1"])
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "run.pt")
    code = f"""
import sys
sys.modules["tritonamp"] = None
import torch
run = torch.load({str(tmp_path / "run.pt")!r}, weights_only=False)
model, optimizer = run["model"], run["optimizer"]
before = model[0].weight.clone()
(model(torch.arange(8.0).view(2, 4)) * torch.arange(4)).sum().backward()
optimizer.step()
assert model[0].weight.dtype is torch.float32 and not torch.equal(before, model[0].weight)
"""
    done = fresh_python.run(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_model_and_optimizer_in_one_pickle_stay_together(handles: Any, level: str) -> None:
    """The masters are the parameters of the model that is loaded."""
    model, optimizer = tangled(level, handles)
    loaded, stepped = pickle.loads(pickle.dumps((model, optimizer)))
    assert type(stepped) is torch.optim.AdamW
    assert [p for g in stepped.param_groups for p in g["params"]] == list(loaded.parameters())
    for p in loaded.net.parameters():
        assert stepped.state[p]["exp_avg"].dtype is torch.float32


def test_what_is_set_aside_comes_back(handles: Any) -> None:
    """A forward that was set on the instance is the plain model's again; "healed" is not."""
    model = Net()
    model.forward = len
    amp = handles(model, level="O2")
    amp.heal("")
    found = pickle.loads(pickle.dumps(model))
    assert vars(found)["forward"] is len
    assert not any("tritonamp" in key for key in vars(found))
    assert model.__class__ is type(model) is not Net  # but for pickle


def test_who_reads_the_class_of_an_enabled_optimizer_finds_its_own(handles: Any) -> None:
    """Lightning derives a class from it, whose ``zero_grad`` has to be the tangled one."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles(model, optimizer, level="O2")
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        use(optimizer)
        assert optimizer.__class__ is type(optimizer) is not torch.optim.SGD


def test_a_class_that_says_how_it_is_copied_is_asked(handles: Any) -> None:
    class Own(Net):
        def __deepcopy__(self, memo: Any) -> str:
            return "own"

    model = Own()
    handles(model, level="O2")
    assert copy.deepcopy(model) == "own"


def test_another_class_given_to_an_enabled_model_is_enabled(handles: Any) -> None:
    """As parametrizations give one."""

    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = Net()
    amp = handles(model, level="O2")
    output = model(torch.ones(1, 6))
    model.__class__ = Other
    assert isinstance(model, Other)
    twice = model(torch.ones(1, 6))
    assert torch.equal(twice, 2 * output) and twice.dtype is torch.float32
    amp.disable()
    assert type(model) is Other

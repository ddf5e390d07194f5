"""``load(path, model=..., ...)``: everything back in the right order, or a clear refusal."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same, snapshot
from saves import Scheduled
from torch import Tensor, nn

import tritonamp


class WithAverage(Scheduled):
    """A model that trains at O2, with a scheduler, an average of its weights and random inputs."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        self.average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
        scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        super().__init__(model, lr=0.01 * (seed + 1), scaler=scaler)

    def objects(self) -> dict[str, Any]:
        return {"rng": tritonamp.RNGState(), "average": self.average, **super().objects()}

    def tensors(self) -> list[Tensor]:
        return [*self.everything(), *snapshot(self.average)]

    def numbers(self) -> list[Any]:
        return [self.amp.state_dict(), self.scheduler.state_dict(), torch.get_rng_state().tolist()]


@pytest.fixture
def first_and_second() -> Iterator[list[WithAverage]]:
    made = [WithAverage(0), WithAverage(1)]
    yield made
    for run in made:
        run.end()


NAMES = ("rng", "amp", "scheduler", "optimizer", "average", "model")
ORDERS = [NAMES, NAMES[::-1], *itertools.islice(itertools.permutations(NAMES), 100, 720, 150)]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_training_goes_on_bit_for_bit_in_any_order(
    tmp_path: Path, order: tuple[str, ...], first_and_second: list[WithAverage]
) -> None:
    first, second = first_and_second
    second.go_on(2)
    first.go_on(5, bad=3)
    tritonamp.save(tmp_path / "run.pt", **first.objects(), epoch=7)
    first.go_on(3)
    after = first.numbers()
    objects = second.objects()
    rest = tritonamp.load(tmp_path / "run.pt", **{name: objects[name] for name in order})
    assert rest == {"epoch": 7}
    second.go_on(3)
    assert same(first.tensors(), second.tensors()) and second.numbers() == after


class Noting:
    """An object with a state that writes down when it is loaded."""

    def __init__(self, name: str, log: list[str], **attributes: Any) -> None:
        self._name, self._log = name, log
        vars(self).update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["name"] != self._name:
            raise KeyError(f"the state of {state['name']}")
        self._log.append(self._name)


def test_the_order_is_that_of_what_objects_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    kinds = {"wrapper": {"param_groups": []}, "amp": {"master_params": iter}, "other": {}}
    objects: dict[str, Any] = {name: Noting(name, log, **own) for name, own in kinds.items()}
    objects |= {"rng": tritonamp.RNGState(), "model": nn.Linear(1, 1)}
    for kind, name in ((tritonamp.RNGState, "rng"), (nn.Linear, "model")):
        monkeypatch.setattr(kind, "load_state_dict", lambda self, state, n=name: log.append(n))
    tritonamp.save(tmp_path / "x.pt", **objects)
    for names in itertools.permutations(objects):
        log.clear()
        tritonamp.load(tmp_path / "x.pt", **{name: objects[name] for name in names})
        assert log == ["model", "wrapper", "amp", "other", "rng"]


def test_lists_tuples_and_dicts_of_objects(tmp_path: Path) -> None:
    def made(start: float) -> dict[str, Any]:
        models = [nn.Linear(1, 1) for _ in range(4)]
        for i, model in enumerate(models):
            nn.init.constant_(model.weight, start + i)
        return {"pair": models[:2], "named": {"a": models[2]}, "nested": ([models[3]],)}

    tritonamp.save(tmp_path / "x.pt", **made(1.0), ratios=[1, 2])
    objects = made(5.0)
    assert tritonamp.load(tmp_path / "x.pt", **objects) == {"ratios": [1, 2]}
    loaded = [*objects["pair"], objects["named"]["a"], objects["nested"][0][0]]
    assert [model.weight.item() for model in loaded] == [1, 2, 3, 4]


def test_none_returns_the_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    tritonamp.save(tmp_path / "x.pt", model=model, config={"width": 2}, t=torch.ones(1))
    rest = tritonamp.load(tmp_path / "x.pt", model=model, config=None)
    assert rest["config"] == {"width": 2} and rest.keys() == {"config", "t"}


def linear(n: int, m: int) -> nn.Linear:
    return nn.Linear(n, m)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


REFUSED = {
    "not saved": ({"moddel": linear(3, 2)}, r"not in the checkpoint: moddel; it has model, pair"),
    "not named": (
        {"model": linear(3, 2)},
        r"also has the state of pair, optimizer: give the objects.*pair=None",
    ),
    "shapes": (
        {"model": linear(4, 2), "pair": None, "optimizer": None},
        r"model is not what was saved; of other shapes: weight \(saved \(2, 3\), here \(2, 4\)\)",
    ),
    "keys": (
        {"model": nn.Bilinear(3, 3, 2, bias=False), "pair": None, "optimizer": None},
        r"model is not what was saved; not in the module: bias; of other shapes: weight",
    ),
    "lengths": (
        {"model": linear(3, 2), "pair": [linear(3, 2)], "optimizer": None},
        "pair: expected 2 objects as saved, got 1 objects",
    ),
    "a dict for a list": (
        {"model": linear(3, 2), "pair": {0: linear(3, 2), 1: linear(3, 2)}, "optimizer": None},
        "pair: expected 2 objects as saved, got a dict of 0, 1",
    ),
    "nothing for a value": (
        {"model": linear(3, 2), "pair": None, "optimizer": None, "epoch": []},
        "epoch: expected int as saved, got 0 objects",
    ),
    "several": (
        {"model": 3, "pair": [linear(3, 2), linear(5, 2)], "optimizer": None},
        r"model: expected an object with load_state_dict\(\), .* got int; pair\[1\] is not what",
    ),
    "a class": (
        {"model": nn.Linear, "pair": None, "optimizer": None},
        "model: expected an object with load_state_dict.*got type",
    ),
    "a value": (
        {"model": linear(3, 2), "pair": None, "optimizer": None, "epoch": linear(3, 2)},
        "epoch: expected the state of Linear, got int",
    ),
    "groups": (
        {"model": linear(3, 2), "pair": None, "optimizer": sgd(linear(1, 1))},
        r"optimizer is not what was saved: \[2\] parameters in its groups, \[1\] in the checkpoint",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_changes(tmp_path: Path, case: str) -> None:
    objects, text = REFUSED[case]
    saved = linear(3, 2)
    optimizer = torch.optim.SGD([saved.weight])
    pair = [saved, linear(3, 2)]
    tritonamp.save(tmp_path / "x.pt", model=saved, pair=pair, optimizer=optimizer, epoch=3)
    modules = [m for m in (objects.get("model"), *(objects.get("pair") or ())) if m]
    modules = [m for m in modules if isinstance(m, nn.Module)]
    before = [p.clone() for m in modules for p in m.parameters()]
    with pytest.raises(ValueError, match=rf"(?s)load\('.*x\.pt'\): .*{text}"):
        tritonamp.load(tmp_path / "x.pt", **objects)
    after = [p for m in modules for p in m.parameters()]
    assert all(map(torch.equal, before, after))


def test_a_failure_half_way_says_what_was_loaded(tmp_path: Path) -> None:
    log: list[str] = []
    model = nn.Linear(2, 2)
    tritonamp.save(
        tmp_path / "x.pt", b=Noting("b", log), model=model, a=Noting("a", log), c=Noting("c", log)
    )
    objects = {"a": Noting("a", log), "b": Noting("z", log), "c": Noting("c", log), "model": model}
    text = (
        r"load\(.*\): b raised KeyError: 'the state of b'\. Before it was loaded: model, a; b and"
    )
    with pytest.raises(RuntimeError, match=text):
        tritonamp.load(tmp_path / "x.pt", **objects)
    assert log == ["a"]
    with pytest.raises(RuntimeError, match=r"Before it was loaded: nothing"):
        tritonamp.load(tmp_path / "x.pt", b=objects["b"], a=None, c=None, model=None)


@pytest.mark.parametrize("compiled", ["saved", "loaded"])
def test_keys_of_a_compiled_model_are_named(tmp_path: Path, compiled: str) -> None:
    plain, wrapped = torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2))
    first, second = (wrapped, plain) if compiled == "saved" else (plain, wrapped)
    tritonamp.save(tmp_path / "run.pt", model=first)
    with pytest.raises(ValueError, match=r"save and load the model that was compiled"):
        tritonamp.load(tmp_path / "run.pt", model=second)
    tritonamp.save(tmp_path / "run.pt", model=wrapped)
    tritonamp.load(tmp_path / "run.pt", model=torch.compile(plain))

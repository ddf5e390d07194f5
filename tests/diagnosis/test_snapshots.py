"""A forward that is recorded runs again with the same bits, and a replay leaves no trace; bundles
carry both.
"""

import copy
import functools
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import LEVELS
from torch import Tensor, nn
from torch.autograd import forward_ad as fwAD
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import tritonamp
from tritonamp.ambient import AmbientState, Generators
from tritonamp.diagnosis.batches import data_in
from tritonamp.diagnosis.replay.bundles import load_bundle, write_bundle
from tritonamp.diagnosis.replay.faults import NOT_REPRODUCED
from tritonamp.diagnosis.replay.search import find_fault
from tritonamp.kernels import _facts
from tritonamp.step.forwards import Forwards
from tritonamp.step.snapshots import BatchGoneError, Snapshot


class Restless(nn.Module):
    """Draws random numbers, writes to buffers and parameters, replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8)
        )
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4, 8))
        self.gain = nn.Parameter(torch.ones(8))
        self.power = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            self.gain[1:].mul_(0.9)
        y = self.inner(x) * self.gain * random.random() * (1.0 + np.random.rand()) * 1e3
        self.last = y.detach().float()
        return y * y if self.power == 2 else y


@pytest.fixture
def model(device: torch.device) -> Restless:
    return Restless().to(device)


def batch(device: torch.device) -> Tensor:
    return torch.randn(4, 8, device=device)


def recorded(model: nn.Module, *args: Any) -> Snapshot:
    snapshot = Snapshot(model, args, {})
    snapshot.ambient = AmbientState.now(Generators.now(snapshot.gpus)._replace(numpy=None))
    return snapshot


def bits(model: nn.Module, device: torch.device) -> list[Any]:
    """Everything that a replay could change, as comparable values."""
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    generators = [torch.get_rng_state()] + (
        [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    )
    return [
        [(id(t), t._version, t.dtype, t.detach().float().nan_to_num(-7).tolist()) for t in tensors],
        [g.tolist() for g in generators],
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        [module.training for module in model.modules()],
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        (torch.is_autocast_cache_enabled(), torch.is_grad_enabled()),
    ]


def crash(output: Tensor) -> Tensor:
    raise KeyError("in the user's code")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("loss", [torch.mean, torch.Tensor.detach, crash])
def test_no_trace(
    model: Restless, level: str, power: int, loss: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    amp = tritonamp.enable(model, level=level)
    model.power, model.inner[1].training, x = power, False, batch(device)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = bits(model, device)

    def run() -> Tensor:
        model.train()
        torch.set_autocast_enabled("cpu", True)
        output = model(x)
        assert model.steps == 1
        return loss(output)

    if loss is crash:
        with pytest.raises(KeyError, match="in the user's code"):
            find_fault(model, run)
    else:
        find_fault(model, run, scale=16.0)
    assert bits(model, device) == before
    amp.disable()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_runs_again_bit_for_bit(level: str, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)).to(device)
    amp, x = tritonamp.enable(model, level=level), batch(device)
    snapshot = recorded(model, x)
    first = model(x)
    snapshot.follow(first)
    model.eval()
    assert find_fault(model, snapshot.run) is None and not model.training
    assert torch.equal(snapshot.run(), first)
    assert torch.equal(snapshot.outputs[0], first)
    assert snapshot.grad_outputs is None
    (first.sum() * 4).backward()
    assert torch.equal(snapshot.grad_outputs[0], torch.full_like(first, 4))
    del first
    assert snapshot.outputs is None
    amp.disable()


class DropsLayers(nn.Linear):
    """A layer that is left out, or not, by Python's generator, once there is a rate."""

    rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if not self.rate or random.uniform(0, 1) >= self.rate else x


@pytest.mark.parametrize("still", [0, 3, 60])
def test_forwards_that_draw_from_python_run_again(still: int, device: torch.device) -> None:
    """From the first that does, after any number that have not."""
    model, forwards, x = DropsLayers(8, 8).to(device), Forwards(gradients=False), batch(device)
    outputs = []
    for i in range(still + 1 + (10 if still < 8 else 0)):
        model.rate = 0.5 if i >= still else 0.0
        snapshot = forwards.before(model, (x,), {})
        outputs.append(model(x))
        forwards.after(snapshot, outputs[-1])
        moved = random.getstate()
        for _ in range(4):
            assert torch.equal(snapshot.run(), outputs[-1])
        random.setstate(moved)
    assert still or len({id(y) if y is not x else 0 for y in outputs}) > 1


@pytest.mark.parametrize("same", [True, False])
def test_exactness_is_stated(same: bool, device: torch.device) -> None:
    model, x = nn.Linear(8, 8).to(device), batch(device) * 1e6
    amp = tritonamp.enable(model, level="O2")
    snapshot = recorded(model, x)
    output = model(x)
    fault = find_fault(model, snapshot.run, expected=[output if same else torch.zeros_like(output)])
    assert fault is not None
    assert fault.replayed.startswith("bit-identical" if same else "not bit-identical")
    assert f"forward output {fault.replayed}" in str(fault)
    amp.disable()


def test_backward_from_the_gradients_that_arrived(device: torch.device) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device), batch(device)
    amp = tritonamp.enable(model, level="O1")
    snapshot = recorded(model, x)
    output = model(x)
    snapshot.follow(output)
    (output.square().mean() * 2.0**24).backward()
    fault = find_fault(model, snapshot.run, grad_outputs=snapshot.grad_outputs, scale=2.0**24)
    assert fault is not None
    assert (fault.kind, fault.module) == ("scale_too_high", "1")
    fits = [g * (fault.fits / 2.0**24) for g in snapshot.grad_outputs]
    assert find_fault(model, snapshot.run, grad_outputs=fits, scale=fault.fits) is None
    assert snapshot.weakened().grad_outputs is None, "it would hold their memory"
    amp.disable()


def test_a_batch_that_is_gone(model: Restless, device: torch.device) -> None:
    x = batch(device)
    snapshot = recorded(model, x).weakened()
    snapshot.run()
    del x
    with pytest.raises(BatchGoneError, match="keep a reference to it"):
        snapshot.run()


def test_a_batch_that_was_changed(model: Restless, device: torch.device) -> None:
    x = batch(device)
    snapshot = recorded(model, x)
    x.add_(1)
    with pytest.raises(BatchGoneError, match="changed in place"):
        snapshot.run()


@pytest.mark.parametrize("how", ["detached", "view", "graph", "by name"])
def test_what_a_model_made_is_no_data(how: str, device: torch.device) -> None:
    model, forwards, x = nn.Linear(8, 8).to(device), Forwards(gradients=False), batch(device)
    first = forwards.before(model, (x,), {})
    y = model(x)
    forwards.after(first, y)
    made = {"detached": y.detach(), "view": y.detach()[1:], "graph": y * 2, "by name": y.detach()}
    given = ((x,), {"y": made[how]}) if how == "by name" else ((x, [made[how]]), {})
    second = forwards.before(model, *given)
    del y
    assert not any(t.requires_grad for t in tree_leaves(second.arguments()))
    forwards.after(second, x)  # and returning x makes no data of what was data before it
    assert [[path for path, _ in found] for found in data_in([first, second])] == [["0"], ["0"]]


def test_masters_that_the_user_wrote_to(device: torch.device) -> None:
    """They reach the half weights as at any forward, and keep their values."""
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = tritonamp.enable(model, optimizer, level="O2")
    masters = list(amp.master_params())
    with torch.no_grad():
        masters[0].fill_(1 / 3)
    x = batch(device)
    assert find_fault(model, lambda: model(x).mean()) is None
    assert torch.equal(masters[0], torch.full_like(masters[0], 1 / 3))
    assert torch.equal(model.weight, masters[0].half())
    amp.disable()


class Wrapped(Tensor):
    """A subclass, about which C++ does not answer."""


def given_to_forwards() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return arguments of forwards, which C++ can read or cannot, by name."""
    x, weight = torch.randn(3), nn.Parameter(torch.randn(3))
    written, base = torch.zeros(3), torch.zeros(4)
    written.add_(1).mul_(2)
    view = base[:2]
    base.mul_(torch.ones(4, requires_grad=True))  # the view has a graph from now on
    with torch.inference_mode():
        inference = torch.ones(2)
    return {
        "nothing": ((), {}),
        "tensors": ((x, written, x[1:]), {}),
        "keywords": ((written,), {"mask": x, "labels": torch.arange(3)}),
        "parameter": ((weight, x.requires_grad_()), {}),
        "graph": ((x, weight * 2), {}),
        "graph by keyword": ((x,), {"y": weight * 2}),
        "view": ((view,), {}),
        "inference": ((x, inference), {}),
        "subclass": ((x.detach().as_subclass(Wrapped),), {}),
        "sparse": ((torch.eye(2).to_sparse(),), {}),
        "values": ((x, None, 3, "text"), {"flag": True}),
        "nested": (({"x": x, "more": [written, (weight * 2,)]},), {}),
    }


@pytest.mark.parametrize("name", given_to_forwards())
def test_python_and_cpp_record_the_same(
    name: str, cpp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, kwargs = given_to_forwards()[name]
    found = []
    for native in (_facts._InPython, cpp):
        monkeypatch.setattr(_facts, "_native", native)
        forwards = Forwards(gradients=False)
        snapshot = forwards.before(nn.Linear(2, 2), args, kwargs)
        given = [type(value) for value in tree_leaves(snapshot.arguments())]
        graphs = [t for t in tree_leaves(snapshot.arguments()) if getattr(t, "grad_fn", None)]
        assert not graphs
        facts = snapshot._versions, snapshot.made(), snapshot.gpus, snapshot.ambient[1:]
        found.append((given, facts))
        weak = snapshot.weakened()
        assert [type(value) for value in tree_leaves(weak.arguments())] == given
    assert found[0] == found[1]


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "mode": lambda: FlopCounterMode(display=False),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # forward_ad uses it
@pytest.mark.parametrize("name", MODES)
def test_cpp_answers_for_plain_threads_only(name: str, cpp: Any) -> None:
    x = torch.ones(2)
    assert cpp.leaf_versions((x,)) == ([0], False)
    with MODES[name]():
        assert cpp.leaf_versions((x,)) is None
        snapshot = Forwards(gradients=False).before(nn.Linear(2, 2), (x,), {})
        assert (snapshot is None) == (name != "autocast")
    seen: list[Any] = []

    def note(y: Tensor) -> Tensor:
        seen.append((cpp.leaf_versions((y,)), cpp.leaf_versions((x,))))
        return y.sum()

    torch.func.grad(note)(x)
    torch.func.vmap(note)(torch.ones(2, 2))
    with fwAD.dual_level():
        note(fwAD.make_dual(x, x))
    assert seen[:2] == [(None, None)] * 2
    assert cpp.leaf_versions((x,)) == ([0], False)


# Bundles


def bundle(
    folder: Path, model: nn.Module, args: tuple[Any, ...], level: str = "O2"
) -> tuple[Any, Tensor]:
    amp = tritonamp.enable(model, level=level)
    snapshot = recorded(model, *args)
    output = model(*args)
    fault = find_fault(model, snapshot.run)
    write_bundle(folder, fault, snapshot, amp.policy, model.state_dict(), "step 3 skipped", 8.0)
    amp.disable()
    return fault, output


def test_bundle(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)).to(device)

    fault, output = bundle(tmp_path, make(), (batch(device) * 1e6,))
    assert (tmp_path / "report.txt").read_text() == f"step 3 skipped\n{fault}\n"
    assert fault.kind == "cast_overflow"
    model = make()
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    amp = tritonamp.enable(model, level="O2")
    assert torch.equal(load_bundle(tmp_path, model).run().isnan(), output.isnan())
    amp.disable()
    script = runpy.run_path(str(tmp_path / "replay.py"))
    with pytest.raises(NotImplementedError, match="in FP32 and on its device"):
        script["make_model"]()
    completed = (
        (tmp_path / "replay.py")
        .read_text()
        .replace("raise NotImplementedError(", "return MAKE() or (")
    )
    (tmp_path / "completed.py").write_text(completed)
    printed: list[Any] = []
    runpy.run_path(
        str(tmp_path / "completed.py"), {"MAKE": make, "print": printed.append}, "__main__"
    )
    assert (printed[0].kind, printed[0].event.exact) == (fault.kind, fault.event.exact)


def test_a_bundle_from_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs where there is none, and where there are fewer: as far as files can tell them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    x = batch(torch.device("cpu")) * 1e6
    now = Generators.now
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    monkeypatch.setattr(
        Generators,
        "now",
        lambda *args, **kwargs: now()._replace(
            cuda={torch.device("cuda:3"): torch.ones(16).byte()}
        ),
    )
    bundle(tmp_path, model, (x,))
    monkeypatch.undo()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.load(tmp_path / "weights.pt", weights_only=True)
    script = (tmp_path / "replay.py").read_text()
    script = script.replace("raise NotImplementedError(", "return MAKE() or (")
    (tmp_path / "completed.py").write_text(script)
    printed: list[Any] = []
    names = {"MAKE": lambda: copy.deepcopy(model), "print": printed.append}
    runpy.run_path(str(tmp_path / "completed.py"), names, "__main__")
    assert printed[0].kind == "cast_overflow"
    snapshot = load_bundle(tmp_path, model)
    assert torch.equal(snapshot.arguments()[0][0], x)
    assert snapshot.ambient.generators.cuda == {}


def test_the_generator_of_another_gpu(tmp_path: Path, cuda: torch.device) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("the other GPUs are here")
    model = nn.Linear(8, 8).cuda()
    write = functools.partial(
        write_bundle, tmp_path, None, policy=tritonamp.O2, state={}, skip="", scale=1.0
    )
    snapshot = recorded(model, batch(torch.device("cuda")))
    states = snapshot.ambient.generators.cuda
    for gpus in ({2}, {1, 2}, {0, 2}):
        of_gpus = {torch.device("cuda", i): states[torch.device("cuda", 0)] for i in gpus}
        generators = snapshot.ambient.generators._replace(cuda=of_gpus)
        snapshot.ambient = snapshot.ambient._replace(generators=generators)
        write(snapshot=snapshot)
        found = load_bundle(tmp_path, model).ambient.generators.cuda
        assert set(found) == ({torch.device("cuda", 0)} if gpus != {1, 2} else set())


def test_bundle_of_nothing(tmp_path: Path, device: torch.device) -> None:
    fault, output = bundle(tmp_path, nn.Linear(8, 8).to(device), (batch(device),))
    assert fault is None
    report, script = ((tmp_path / name).read_text() for name in ("report.txt", "replay.py"))
    assert report.startswith("step 3 skipped\n") and NOT_REPRODUCED in report
    assert "\nSCALE = 8.0  #" in script  # of the step, although nothing was found
    assert torch.isfinite(output).all()


def test_bundle_holds_plain_values_only(
    tmp_path: Path, model: Restless, device: torch.device
) -> None:
    snapshot = recorded(model, batch(device), object())
    with pytest.raises(ValueError, match=r"expected .* tensors and plain values, got object"):
        write_bundle(tmp_path, None, snapshot, tritonamp.O2, {}, "", 1.0)

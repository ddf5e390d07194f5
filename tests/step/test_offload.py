"""``offload="state"``: masters and optimizer state in host memory, with the bits of those that are
not.
"""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import more
from gpuless.fake_cuda import FakeCuda
from gpuless.real_cuda import AnyCuda
from gpuless.streams import Clocks
from helpers import disabled_after, on_cpu, same_bits, storage_bytes
from runs import FORMS, OPTIMIZERS, Training, batch
from small_models import TiedAndFrozen
from torch import Tensor, nn

import tritonamp
from tritonamp.kernels import _multi_tensor
from tritonamp.step import offload
from tritonamp.step.offload import Offload

KINDS = {
    **OPTIMIZERS,
    "dampened SGD": partial(torch.optim.SGD, momentum=0.9, dampening=0.1),
}
SKIPS = 2, 7
STEPS = 20


class Offloaded(Training):
    """Trained in two groups on four batches, with or without offload."""

    def __init__(
        self,
        device: Any,
        offloads: bool = True,
        kind: str = "AdamW",
        level: str = "O2",
        **fields: Any,
    ) -> None:
        def grouped(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
            return KINDS[kind](groups, lr=lr)

        if offloads:
            fields["offload"] = "state"
        model = lambda: TiedAndFrozen().partly_half("frozen")  # noqa: E731
        super().__init__(model, grouped, level, device, lr=0.02, **fields)
        self.batches = batch(1, 4, 8, 6, device=device)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.taken = 0

    def loss(self, x: Tensor | None = None) -> Tensor:
        return super().loss(self.batches[self.taken % 4])

    def finish(self, max_norm: float | None = None, by_scaler: bool = False) -> None:
        super().finish(max_norm, by_scaler)
        self.taken += 1

    def steps(self, number: int) -> "Offloaded":
        for _ in range(number):
            self.step(bad=self.taken in SKIPS, max_norm=None if self.taken % 2 else 0.5)
            self.schedule.step()
        return self

    def bits(self) -> dict[str, Any]:
        found = {
            "as it is kept": self.optimizer.state_dict(packed=True),
            "masters": dict(self.amp.named_master_params()),
            "in order": list(self.amp.master_params()),
        }
        return {**super().bits(), **on_cpu(found)}


def disabled(run: Offloaded) -> Any:
    return on_cpu([run.model.state_dict(), run.optimizer.state_dict()])


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has four or five parts."""
    monkeypatch.setattr(offload, "PART", 1024)


@pytest.fixture
def runs(cuda: torch.device) -> Iterator[Callable[..., Offloaded]]:
    """Make runs, which are disabled at the end."""
    yield from disabled_after(partial(Offloaded, cuda))


def pair(runs: Callable[..., Offloaded], *args: Any, **fields: Any) -> tuple[Offloaded, Offloaded]:
    return runs(False, *args, **fields), runs(True, *args, **fields)


# the bits


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("AdamW", {}),
        ("AdamW", {"state": "bf16", "backend": "eager"}),
        ("AdamW", {"state": "8bit"}),
        ("SGD momentum", {"backend": "eager"}),
        ("Lion", {"dtype": torch.bfloat16, "backend": "eager"}),
        *more(
            [
                ("AdamW", {"state": "bf16"}),
                ("AdamW", {"state": "8bit", "dtype": torch.bfloat16}),
                ("AdamW", {"level": "O1"}),
                ("AdamW", {"level": "O1", "state": "8bit"}),
                ("AdamW", {"level": "O0"}),
                ("AdamW", {"level": "O3", "backend": "eager"}),
                ("AdamW", {"grad_dtype": torch.float32}),
                ("AdamW", {"fp32_modules": ("last",)}),
                ("amsgrad", {}),
                ("our Adam", {"state": "8bit", "backend": "eager"}),
                ("our Adam", {}),
                ("SGD momentum", {}),
                ("dampened SGD", {"backend": "eager"}),
                ("SGD momentum", {"state": "bf16"}),
                ("SGD", {"level": "O1"}),
                ("SGD", {}),
                ("Lion", {"state": "bf16"}),
                ("Lion", {"state": "8bit"}),
                ("SGD momentum", {"state": "8bit"}),
                ("AdamW", {"masters": "packed"}),
                ("RMSprop momentum", {"masters": "packed", "state": "bf16"}),
                ("RMSprop momentum", {"state": "8bit", "backend": "eager"}),
            ]
        ),
    ],
    ids=str,
)
@pytest.mark.steps
@pytest.mark.long
def test_the_bits_are_the_same(
    runs: Callable[..., Offloaded], kind: str, fields: dict[str, Any]
) -> None:
    """Of twenty steps, two of which are skipped, every other one clipped."""
    plain, offloaded = pair(runs, kind, **fields)
    for _ in range(2):
        for run in (plain, offloaded):
            run.steps(STEPS // 2)
        assert same_bits(plain.bits(), offloaded.bits())
    assert offloaded.amp.stats()["skipped"] == len(SKIPS)
    for run in (plain, offloaded):
        run.amp.disable()
    assert same_bits(*(disabled(run) for run in (plain, offloaded)))
    for state in offloaded.optimizer.state.values():
        assert all(x.is_cuda for k, x in state.items() if k != "step" and isinstance(x, Tensor))


ELSE: dict[str, Callable[[Offloaded], Any]] = {
    "a write to a master": lambda run: write(next(run.amp.master_params())),
    "a write to a half parameter": lambda run: write(run.model.first.weight),
    "another memory": lambda run: setattr(
        run.model.first.weight, "data", run.model.first.weight * 2
    ),
    "a write to both": lambda run: (
        write(next(run.amp.master_params())),
        write(run.model.first.weight),
    ),
    "masters that are read": lambda run: list(run.amp.master_params()),
    "heal": lambda run: run.amp.heal("last"),
    "heal, unheal": lambda run: (run.amp.heal("last"), run.step(), run.amp.unheal("last")),
    "sleep": lambda run: (run.amp.sleep(), run.amp.wake()),
    "sleep of weights": lambda run: (run.amp.sleep(weights=True), run.amp.wake()),
    "channels last": lambda run: channels_last(run),
    "accumulation": lambda run: run.backward(),
    "two losses": lambda run: run.amp.backward(run.loss(), loss_id=1),
    "unscale_": lambda run: (run.backward(), halve(run), run.finish()),
    "a veto": lambda run: (run.backward(), run.amp.veto(True), run.finish(0.5)),
    "unfrozen": lambda run: unfreeze(run),
    "a group that is added": lambda run: add_group(run),
    "a parameter without gradient": lambda run: (
        run.model.norm.requires_grad_(False),
        run.step(),
        run.model.norm.requires_grad_(True),
    ),
    "loaded": lambda run: run.load(run.states()),
    "a model that is loaded": lambda run: run.model.load_state_dict(
        copy.deepcopy(run.model.state_dict())
    ),
    "a file that is loaded": lambda run: load_file(run),
    "a state that is edited": lambda run: flip(run),
    "more steps before": lambda run: run.steps(3),
}


@torch.no_grad()
def write(tensor: Tensor) -> None:
    tensor.add_(0.375)


def load_file(run: Offloaded) -> None:
    state = on_cpu(run.model.state_dict())
    run.step()
    run.model.load_state_dict(state)


def flip(run: Offloaded) -> None:
    state = run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]
    moment = next(x for key, x in state.items() if key in HOST)
    some = moment[:64]  # of one byte: codes, without their exponents
    some.copy_(some.flip(0))


def halve(run: Offloaded) -> None:
    run.amp.unscale_()
    for master in run.amp.master_params():
        assert master.grad is not None
        assert master.grad.dtype is torch.float32
    for group in run.optimizer.param_groups:
        for param in group["params"]:
            param.grad.mul_(0.5)
    nn.utils.clip_grad_norm_(list(run.amp.master_params()), 0.01)


def channels_last(run: Offloaded) -> None:
    weight = run.model.first.weight
    weight.data = weight.data.t().contiguous().t()


def unfreeze(run: Offloaded) -> None:
    run.model.frozen.requires_grad_(True)
    run.optimizer.add_param_group({"params": [run.model.frozen.bias]})


def add_group(run: Offloaded) -> None:
    run.optimizer.add_param_group({"params": list(run.model.frozen.parameters()), "lr": 0.01})
    run.model.frozen.requires_grad_(True)


SIMILAR = [
    "a write to both",
    "masters that are read",
    "sleep of weights",
    "two losses",
    "unfrozen",
    "a model that is loaded",
    "more steps before",
]


@pytest.mark.parametrize("state", ["fp32", *more(["8bit"])])
@pytest.mark.parametrize("what", [*(what for what in ELSE if what not in SIMILAR), *more(SIMILAR)])
def test_whatever_else_a_loop_does(runs: Callable[..., Offloaded], what: str, state: str) -> None:
    plain, offloaded = pair(runs, state=state, backend="eager")
    for run in (plain, offloaded):
        run.step()
        ELSE[what](run)
        run.step()
        run.step(bad=True)
        run.step()
    assert same_bits(plain.bits(), offloaded.bits())


def test_a_model_that_has_moved(cuda: torch.device) -> None:
    run = Offloaded(cuda, backend="eager")
    value = run.amp._parts.fp32_values._lent[run.model.first.weight]
    value.half = run.model.first.weight.cpu()
    with pytest.raises(RuntimeError, match="is on cpu, its value of offload='state' is for one on"):
        value.settle()
    value.half = run.model.first.weight
    run.amp.disable()


def test_moments_in_another_order(runs: Callable[..., Offloaded]) -> None:
    """Of an FP32 parameter, whose moments of one byte are in its order of memory."""
    plain, offloaded = pair(runs, level="O1", state="8bit", backend="eager")
    for run in (plain, offloaded):
        run.step()
        channels_last(run)
        run.step()
    assert same_bits(plain.bits(), offloaded.bits())


# memory and the bus


HOST = "exp_avg", "exp_avg_sq", "square_avg", "momentum_buffer", "grad_avg"


def host_tensors(run: Offloaded) -> list[Tensor]:
    """Masters (or their lower bits) and moments."""
    kept = [x for s in run.optimizer.state.values() for k, x in s.items() if k in HOST]
    lent = run.amp._parts.fp32_values._lent.values()
    return kept + [value.stored_form() for value in lent]


def padded(number: int) -> int:
    return -(-number // 128) * 128


in_halves = sum(padded(n) * 2 for n in (72, 12, 36, 3))


def in_8bit(half: int, wide: int) -> int:
    codes = sum(padded(n) * 2 + padded(n) // 128 * 2 for n in (72, 12, 36, 3, 12, 12))
    return codes + in_halves


@pytest.mark.parametrize(
    ("kind", "form", "expected"),
    [
        ("AdamW", "fp32", lambda half, wide: 12 * half + 8 * wide),
        ("AdamW", "bf16", lambda half, wide: 8 * half + 4 * wide),
        ("AdamW", "8bit", in_8bit),
        ("SGD momentum", "fp32", lambda half, wide: 8 * half + 4 * wide),
        ("SGD", "fp32", lambda half, wide: 4 * half),
        ("RMSprop", "packed bf16", lambda half, wide: 2 * half + 2 * wide + in_halves),
    ],
)
def test_bytes_over_the_bus(
    fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    form: str,
    expected: Callable[[int, int], int],
) -> None:
    """Masters and moments once in each direction, in a step that is skipped, too.

    After the first four steps, in which numbers for warnings are copied to the host.
    """
    moved = {"send": 0, "fetch": 0}
    for name in moved:
        original = getattr(fake_cuda, name)

        def counted(
            into: Tensor, out_of: Tensor, name: str = name, original: Any = original
        ) -> None:
            moved[name] += into.nbytes
            original(into, out_of)

        monkeypatch.setattr(fake_cuda, name, counted)

    def of_a_step(run: Offloaded, bad: bool) -> dict[str, int]:
        run.amp.backward(run.loss() * (math.inf if bad else 1.0))
        moved.update(send=0, fetch=0)
        run.optimizer.step()
        found = dict(moved)
        run.optimizer.zero_grad()
        return found

    nbytes = expected(72 + 12 + 36 + 3, 24)
    runs = [
        Offloaded("cuda", on, kind, **FORMS[form], backend="eager").steps(4) for on in (False, True)
    ]
    assert sum(x.nbytes for x in host_tensors(runs[1])) == nbytes
    for bad in (False, True):
        plain, offloaded = (of_a_step(run, bad) for run in runs)
        assert offloaded == {name: nbytes + plain[name] for name in moved}
    for run in runs:
        run.amp.disable()


@pytest.mark.parametrize("form", FORMS)
def test_memory_of_the_device(cuda: torch.device, form: str) -> None:
    """Between steps: half parameters, gradients, and two buffers of the largest part."""
    run = Offloaded(cuda, **FORMS[form], backend="eager")
    run.steps(2)
    run.backward()
    buffers = run.amp._parts.stepper.offload._buffers
    sizes = [buffer.nbytes for buffer in buffers]
    assert len(sizes) == 2
    assert max(sizes) <= 3 * 512  # the largest parameter has 72 elements
    assert all(x.device.type == "cpu" and x.is_pinned() for x in host_tensors(run))
    parameters = sum(p.nbytes for p in run.model.parameters())
    grads = sum(p.grad.nbytes for p in run.model.parameters() if p.grad is not None)
    on_device = storage_bytes("cuda")
    assert parameters + grads + sum(sizes) < on_device < parameters + grads + sum(sizes) + 3 * SMALL
    run.amp.sleep()
    assert not buffers
    run.amp.wake()
    run.finish(0.5)
    run.amp.disable()


SMALL = 1 << 10
"""Bytes that stay for these few parameters: records, decisions, step counts, batches."""


@pytest.mark.parametrize("part", [1, 300, 1 << 26, *more([1024])])
def test_parts(cuda: torch.device, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Of any size, down to a parameter in each: the same bits, buffers no larger than needed."""
    monkeypatch.setattr(offload, "PART", part)
    plain, offloaded = Offloaded(cuda, False, backend="eager"), Offloaded(cuda, backend="eager")
    for run in (plain, offloaded):
        run.steps(4)
    buffer = offloaded.amp._parts.stepper.offload._buffers[0].nbytes
    assert buffer <= max(part, 3 * 512)  # the largest parameter has 72 elements
    assert same_bits(plain.bits(), offloaded.bits())
    for run in (plain, offloaded):
        run.amp.disable()


# streams


class Order:
    """When parts arrived, stepped and left.

    Attributes:
        clocks: those of its stream, by name of what was done there.
    """

    def __init__(self, gpu: FakeCuda) -> None:
        self._gpu = gpu
        self.clocks: dict[str, Clocks] = {}
        self._counts: dict[str, int] = {}

    def note(self, kind: str) -> None:
        """Note something that the current stream does next, as "kind 0", "kind 1", ..."""
        number = self._counts[kind] = self._counts.get(kind, -1) + 1
        self._gpu.use(kind)
        self.clocks[f"{kind} {number}"] = dict(self._gpu.streams.current[-1].clocks)

    def comes_after(self, name: str, other: str) -> bool:
        """Tell whether one waits for another."""
        return all(self.clocks[name].get(s, 0) >= at for s, at in self.clocks[other].items())


@pytest.fixture
def order(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Order:
    """The order of copies and steps: "arrive", "step" and "leave"."""
    found, current = Order(fake_cuda), fake_cuda.streams.current
    by_part, send, fetch = Offload.parts_on_device, fake_cuda.send, fake_cuda.fetch

    def sent(into: Tensor, out_of: Tensor) -> None:
        if len(current) > 1:  # not the records
            found.note("leave")
        send(into, out_of)

    def fetched(into: Tensor, out_of: Tensor) -> None:
        if len(current) > 1:
            found.note("arrive")
        fetch(into, out_of)

    def stepped(self: Offload, lists: Any) -> Iterator[Any]:
        for part in by_part(self, lists):
            found.note("step")
            yield part

    monkeypatch.setattr(fake_cuda, "send", sent)
    monkeypatch.setattr(fake_cuda, "fetch", fetched)
    monkeypatch.setattr(Offload, "parts_on_device", stepped)
    return found


def test_streams_wait_for_one_another(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the GPU in software raises; also where the next step has other parts."""
    monkeypatch.setattr(offload, "PART", 1)
    run = Offloaded("cuda", backend="eager", kind="SGD")
    for frozen in ([], ["first"], ["last"], []):
        for name, module in run.model.named_children():
            module.requires_grad_(name not in ["frozen", *frozen])
        run.step()
    list(run.amp.master_params())
    run.step()
    assert "leave 8" in order.clocks
    run.amp.disable()


def test_parts_overlap(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part arrives while the one before steps, and leaves while the next one steps."""
    monkeypatch.setattr(offload, "PART", 1)
    run = Offloaded(
        "cuda", level="O3", backend="eager", kind="SGD momentum"
    )  # each part is one moment
    run.step()
    for k in range(4):
        assert order.comes_after(f"step {k}", f"arrive {k}")
        assert order.comes_after(f"leave {k}", f"step {k}")
        assert order.comes_after(f"arrive {k + 2}", f"leave {k}")
        assert not order.comes_after(f"arrive {k + 1}", f"step {k}")
        assert not order.comes_after(f"step {k + 1}", f"leave {k}")
    order.note("backward")
    run.step()
    assert not order.comes_after("arrive 6", "backward 0")
    assert not order.comes_after("arrive 7", "backward 0")
    run.amp.disable()


def test_the_host_does_not_wait(gpu: AnyCuda) -> None:
    run = Offloaded("cuda")
    for _ in range(3):
        run.step()
    with gpu.watch("wait", "pageable") as records:
        run.step()
    assert records == []
    with gpu.watch("wait") as records:
        run.optimizer.state_dict()
    assert records
    run.amp.disable()


def test_host_memory_is_read_after_copies(cuda: torch.device) -> None:
    """``optimizer.state`` holds the values that the last step has written."""
    plain, offloaded = Offloaded("cuda", False, backend="eager"), Offloaded("cuda", backend="eager")
    found = []
    for run in (plain, offloaded):
        run.step()
        run.step()
        state = run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]
        found.append(state["exp_avg"].clone())
    assert torch.equal(found[0].cpu(), found[1])
    for run in (plain, offloaded):
        run.amp.disable()


@pytest.mark.parametrize("state", ["fp32", *more(["8bit"])])
def test_plans_are_found_again(
    runs: Callable[..., Offloaded], monkeypatch: pytest.MonkeyPatch, plans: None, state: str
) -> None:
    """However many parts there are."""
    monkeypatch.setattr(offload, "PART", 1)
    monkeypatch.setattr(_multi_tensor, "_PLANS", 3)
    run = runs(state=state)
    run.steps(2)
    built = []
    original = _multi_tensor.Plan.__init__

    def counted(self: Any, *args: Any) -> None:
        built.append(self)
        original(self, *args)

    monkeypatch.setattr(_multi_tensor.Plan, "__init__", counted)
    run.step()
    run.step()
    assert built == []


# files


@pytest.mark.parametrize("form", ["fp32", "bf16", *more(["8bit", "packed fp32"])])
@pytest.mark.parametrize("saves", [False, True])
def test_resume(runs: Callable[..., Offloaded], tmp_path: Path, form: str, saves: bool) -> None:
    """From either kind of run into the other, with the same bits as one that went on."""
    plain, offloaded = pair(runs, **FORMS[form], backend="eager")
    first = (plain, offloaded)[saves]
    first.steps(4)
    tritonamp.save(tmp_path / "checkpoint", **first.objects())
    resumed = runs(not saves, **FORMS[form], backend="eager")
    tritonamp.load(tmp_path / "checkpoint", **resumed.objects())
    resumed.taken = 4
    states = first.states()
    again = runs(True, **FORMS[form], backend="eager").load(states)
    again.taken = 4
    for run in (first, resumed, again):
        for _ in range(3):
            run.step(bad=run.taken == 5)
    assert same_bits(first.bits(), resumed.bits())
    assert same_bits(first.bits(), again.bits())


@pytest.mark.parametrize("kind", ["AdamW", "our Adam"])
def test_a_state_that_is_loaded_goes_to_host_memory(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Not by way of the device, and in memory of its own."""
    first, second = (Offloaded(cuda, kind=kind, backend="eager") for _ in range(2))
    first.step()
    states = first.optimizer.state_dict()
    before, meanwhile, keep = storage_bytes("cuda"), list[int](), Offload.pin

    def noted(self: Offload, tensor: Tensor) -> Tensor:
        meanwhile.append(storage_bytes("cuda"))
        return keep(self, tensor)

    with monkeypatch.context() as patched:
        patched.setattr(Offload, "pin", noted)
        second.optimizer.load_state_dict(states)
    assert meanwhile
    assert max(meanwhile) <= before + 4 * len(states["state"])  # step counts
    mine, theirs = (
        [x for s in run.optimizer.state.values() for k, x in s.items() if k in HOST]
        for run in (first, second)
    )
    assert all(x.device.type == "cpu" and x.is_pinned() for x in theirs)
    assert not {x.data_ptr() for x in mine} & {x.data_ptr() for x in theirs}
    for run in (first, second):
        run.amp.disable()


def test_masters_of_our_optimizers_files(cuda: torch.device) -> None:
    """``master_param`` of an optimizer that trained half parameters by itself."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(cuda).half()
    optimizer = tritonamp.optim.AdamW(model.parameters(), lr=0.02)
    model(torch.ones(2, 6, device=cuda).half()).float().sum().backward()
    optimizer.step()
    state = on_cpu(optimizer.state_dict())
    for fields in ({}, {"state": "8bit"}, {"masters": "packed"}, {"offload": "state"}):
        other = copy.deepcopy(model)
        theirs = tritonamp.optim.AdamW(other.parameters(), lr=0.02)
        amp = tritonamp.enable(other, theirs, level="O2", **fields)
        theirs.load_state_dict(state)
        for i, master in enumerate(amp.master_params()):
            assert torch.equal(master.cpu(), state["state"][i]["master_param"]), fields
        amp.disable()


def test_copies_are_plain(runs: Callable[..., Offloaded]) -> None:
    plain, offloaded = pair(runs, backend="eager")
    found = []
    for run in (plain, offloaded):
        run.step()
        copied = copy.deepcopy(run.optimizer)
        assert type(copied) is torch.optim.AdamW
        assert all(x.is_cuda for s in copied.state.values() for k, x in s.items() if k != "step")
        found.append(on_cpu(copied.state_dict()))
    assert same_bits(*found)


def test_averages(runs: Callable[..., Offloaded]) -> None:
    plain, offloaded = pair(runs, backend="eager")
    found = []
    for run in (plain, offloaded):
        average = run.amp.ema(0.75)
        for bad in (False, True, False):
            run.step(bad=bad)
            average.update()
        found.append(on_cpu(average.state_dict()))
    assert same_bits(*found)
    assert same_bits(plain.bits(), offloaded.bits())


def test_lost_updates_and_overflows(runs: Callable[..., Offloaded]) -> None:
    plain, offloaded = pair(runs, track_lost_updates=True)
    for run in (plain, offloaded):
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-5
        with torch.no_grad():
            next(iter(run.amp.master_params()))[0] = 65519.0  # half a unit below what is inf
            run.model.first.weight[0] = 65504.0
        run.step()
        for group in run.optimizer.param_groups:
            group["lr"] = 2.0
        run.step()
    keys = "lost_updates", "overflowed_parameters", "steps", "grad_norm"
    stats = [{key: run.amp.stats()[key] for key in keys} for run in (plain, offloaded)]
    assert stats[0] == stats[1]


# what is refused


def test_refused(device: torch.device) -> None:
    model = TiedAndFrozen().to(device)
    params = list(model.parameters())
    refused: list[tuple[torch.optim.Optimizer, str]] = [
        (torch.optim.Adagrad(params), "steps in parts, .* got Adagrad, which runs its own step"),
        (tritonamp.optim.Muon([model.last.weight]), "got Muon, which works on whole matrices"),
    ]
    if device.type == "cpu":
        host = "a CUDA device, got one on cpu, whose state is in host memory already"
        refused.append((torch.optim.AdamW(params), host))
    before = on_cpu(model.state_dict())
    for optimizer, message in refused:
        with pytest.raises(ValueError, match=rf"offload='state': expected .*{message}"):
            tritonamp.enable(model, optimizer, level="O2", offload="state")
        assert type(optimizer).__module__ in (
            "torch.optim.adagrad",
            "tritonamp.optim",
            "torch.optim.adamw",
        )
    assert same_bits(on_cpu(model.state_dict()), before)
    with pytest.raises(ValueError, match="offload: expected None or 'state', got 'params'"):
        tritonamp.enable(model, level="O2", offload="params")


def test_a_model_without_optimizer(device: torch.device) -> None:
    model = TiedAndFrozen().to(device)
    amp = tritonamp.enable(model, level="O2", offload="state")
    with torch.no_grad():
        model(torch.ones(2, 6, device=device))
    amp.disable()


def test_graphs(gpu: AnyCuda) -> None:
    run = Offloaded("cuda", backend="eager")
    run.step()
    run.backward()
    message = r"step\(\) outside of a CUDA graph, got a capture"
    with pytest.raises(RuntimeError, match=message), gpu.capture():
        run.optimizer.step()
    run.finish()
    run.amp.disable()


def test_sparse_gradients(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own step would work on host memory."""
    run = Offloaded(cuda, kind="SGD momentum", backend="eager")
    monkeypatch.setattr(type(run.amp._parts.weights[run.optimizer]), "any_sparse", lambda w: True)
    run.backward()
    with pytest.raises(RuntimeError, match="dense gradients, got sparse ones"):
        run.optimizer.step()
    monkeypatch.undo()
    run.finish()
    run.amp.disable()


def test_the_policy_as_text() -> None:
    policy = tritonamp.Policy(offload="state")
    assert tritonamp.Policy.from_json(policy.to_json()) == policy

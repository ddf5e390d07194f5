"""``Amp.sleep`` and ``wake``: tensors that only training needs leave the device, and come back."""

import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import more
from gpuless.real_cuda import AnyCuda
from helpers import same_bits, storage_bytes
from runs import FORMS, OPTIMIZERS, Training, named
from small_models import TiedAndFrozen
from torch import Tensor, nn

import tritonamp
from tritonamp.step import host_memory, sleep
from tritonamp.step.host_memory import HostMemory

KINDS = {
    **named("AdamW", "SGD momentum", "Muon", "Adagrad"),
    **dict.fromkeys(FORMS, OPTIMIZERS["AdamW"]),
}
MATRIX = 12 * 6
SMALL = 1 << 10
"""Bytes that stay for these few parameters: records, decisions, the batch."""


class Sleeper(Training):
    """Trained by two optimizers, with an average of its weights."""

    parts = (*Training.parts, "ema")

    def __init__(self, device: Any, level: str = "O2", kind: str = "AdamW", **fields: Any) -> None:
        def in_two(params: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
            first, *norm, last = params
            return [KINDS[kind]([first, last], lr=0.05), torch.optim.AdamW(norm, lr=lr)]

        fields |= FORMS.get(kind, {})
        scaler = tritonamp.GradScaler(init_scale=8.0, growth_interval=3) if level != "O3" else None
        model = lambda: TiedAndFrozen(bias=False).partly_half("frozen", "first")  # noqa: E731
        super().__init__(model, in_two, level, device, scaler=scaler, **fields)
        self.ema = self.amp.ema(0.75)

    def finish(self, max_norm: float | None = 0.5, by_scaler: bool = False) -> None:
        super().finish(max_norm, by_scaler)
        self.ema.update()


def sleeps(run: Sleeper, weights: bool) -> None:
    """Sleep, let others write over the memory, wake."""
    run.amp.sleep(weights=weights)
    others = [torch.full((MATRIX,), math.nan, device=run.x.device) for _ in range(8)]
    run.amp.wake()
    del others


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("level", "kind"),
    [
        *[("O2", kind) for kind in ("AdamW", "Muon", "8bit", "packed fp32")],
        ("O1", "SGD momentum"),
        *more([("O2", "Adagrad"), ("O3", "SGD momentum")]),
    ],
)
def test_training_goes_on_with_the_same_bits(
    cuda: torch.device, level: str, kind: str, weights: bool
) -> None:
    """Asleep after clean steps, after a skip, and between a backward and its step."""
    never, slept = (Sleeper(cuda, level, kind) for _ in range(2))
    for run in (never, slept):
        for i, bad in enumerate([False, level != "O3", False, False, False]):
            run.step(max_norm=0.5, bad=bad)
            if run is slept and i < 4:
                sleeps(run, weights)
        run.backward()
        if run is slept:
            sleeps(run, weights)
        run.finish()
        run.backward()
        run.amp.unscale_()
        if run is slept:
            sleeps(run, weights)
        run.finish(None)
    assert same_bits(never.bits(), slept.bits())
    for run in (never, slept):
        run.amp.disable()


def test_gradients_of_micro_batches(cuda: torch.device) -> None:
    """In FP32; of two losses with scales of their own, one of which has unscaled early."""
    never, slept = (Sleeper(cuda, grad_dtype=torch.float32) for _ in range(2))
    for run in (never, slept):
        for loss_id in (0, 0, 1):
            run.amp.backward(run.loss(), loss_id=loss_id)
            if run is slept:
                sleeps(run, False)
        run.finish()
    assert same_bits(never.bits(), slept.bits())
    for run in (never, slept):
        run.amp.disable()


@pytest.mark.parametrize("weights", [False, True])
def test_a_backward_through_what_was_saved_before(cuda: torch.device, weights: bool) -> None:
    """Autograd counts no write: the weights that it has saved are there again."""
    never, slept = (Sleeper(cuda) for _ in range(2))
    for run in (never, slept):
        run.step()
        loss = run.loss()
        if run is slept:
            sleeps(run, weights)
        run.amp.backward(loss)
        run.finish()
    assert same_bits(never.bits(), slept.bits())
    for run in (never, slept):
        run.amp.disable()


def on_device(tensors: Any) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.parametrize("weights", [False, True])
def test_memory_leaves_the_device(cuda: torch.device, weights: bool) -> None:
    run = Sleeper(cuda)
    run.step()
    run.backward()
    params, masters = list(run.model.parameters()), list(run.amp.master_params())[:2]
    moving = [*masters, *run.ema.state_dict().values()]
    moving += [p.grad for p in params if p.grad is not None]
    moving += [x for o in run.optimizers for s in o.state.values() for x in s.values()]
    if weights:
        moving += [*params, *run.model.buffers()]
    expected = on_device(moving)
    del moving
    memories = [w.memory for w in run.amp._parts.weights.values()]
    before = storage_bytes("cuda")
    moved = run.amp.sleep(weights=weights)
    assert expected <= moved <= expected + SMALL
    assert before - storage_bytes("cuda") >= moved
    assert not any(memory.kinds or memory._plans for memory in memories)
    assert not any(m.untyped_storage().nbytes() for m in masters)
    assert all((p.untyped_storage().nbytes() == 0) == weights for p in params)
    run.amp.wake()
    assert before - 2 * SMALL <= storage_bytes("cuda") <= before
    assert next(run.amp.master_params()) is masters[0]
    run.finish()
    run.amp.disable()


@pytest.mark.parametrize("hidden", ["set aside by another loss", "behind shown ones"])
def test_hidden_gradients_leave_the_device(cuda: torch.device, hidden: str) -> None:
    run = Sleeper(cuda)
    run.amp.backward(run.loss(), loss_id=0)
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    run.amp.unscale_()
    if hidden.startswith("set"):
        grads = [master.grad for master in run.amp.master_params()]
        run.amp.backward(run.loss(), loss_id=1)
    run.amp.sleep()
    assert not any(grad.untyped_storage().nbytes() for grad in grads)
    run.amp.wake()
    run.finish()
    run.amp.disable()


def test_views_of_the_users(cuda: torch.device) -> None:
    run = Sleeper(cuda)
    run.step()
    master = next(run.amp.master_params())
    view, version, before = master.detach()[2:4], master._version, master.detach().clone()
    run.amp.sleep()
    run.amp.wake()
    assert torch.equal(master, before)
    assert torch.equal(view, before[2:4])
    assert view.data_ptr() == master[2:4].data_ptr()
    assert master._version == version
    run.amp.disable()


def test_asleep_in_inference_mode(cuda: torch.device) -> None:
    """A sampler may call ``sleep`` there, and the trainer ``wake`` outside."""
    never, slept = Sleeper(cuda), Sleeper(cuda)
    with torch.inference_mode():
        slept.amp.sleep(weights=True)
    slept.amp.wake()
    for run in (never, slept):
        run.step()
    assert same_bits(never.bits(), slept.bits())
    for run in (never, slept):
        run.amp.disable()


def test_what_wrappers_are_made_of() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b, c = torch.ones(2), torch.zeros(2), torch.ones(2)
    assert [id(t) for t in sleep._plain_tensors(TwoTensor(TwoTensor(a, b), c))] == list(
        map(id, (a, b, c))
    )


# while it is asleep


TRAINING: dict[str, Callable[[Sleeper], Any]] = {
    "backward": lambda run: run.amp.backward(run.x.sum()),
    "scale_loss": lambda run: run.amp.scale_loss(run.x.sum()),
    "unscale_": lambda run: run.amp.unscale_(),
    "clip": lambda run: run.amp.clip_grad_norm_(1.0),
    "veto": lambda run: run.amp.veto(True),
    "ema": lambda run: run.amp.ema(0.5),
    "ema.update": lambda run: run.ema.update(),
    "ema.state_dict": lambda run: run.ema.state_dict(),
    "ema.load_state_dict": lambda run: run.ema.load_state_dict({}),
    "ema.copy_to": lambda run: run.ema.copy_to(copy.deepcopy(TiedAndFrozen(bias=False))),
    "masters": lambda run: list(run.amp.master_params()),
    "named masters": lambda run: list(run.amp.named_master_params()),
    "stats": lambda run: run.amp.stats(),
    "heal": lambda run: run.amp.heal("first"),
    "amp.state_dict": lambda run: run.amp.state_dict(),
    "amp.load_state_dict": lambda run: run.amp.load_state_dict({}),
    "disable": lambda run: run.amp.disable(),
    "sleep": lambda run: run.amp.sleep(),
    "step": lambda run: run.optimizer.step(),
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(),
    "optimizer.load_state_dict": lambda run: run.optimizer.load_state_dict({}),
    "add_param_group": lambda run: run.optimizer.add_param_group({"params": []}),
    "copy of the optimizer": lambda run: copy.deepcopy(run.optimizer),
    "scaler.step": lambda run: run.amp.scaler.step(run.optimizer),
    "scaler.unscale_": lambda run: run.amp.scaler.unscale_(run.optimizer),
    "model.state_dict": lambda run: run.model.state_dict(),
    "model.cpu": lambda run: run.model.cpu(),
    "save": lambda run: tritonamp.save(Path("never"), optimizer=run.optimizer),
}
WEIGHTS: dict[str, Callable[[Sleeper], Any]] = {
    "forward": lambda run: run.model(run.x),
    "autocast": lambda run: run.amp.autocast().__enter__(),
    "load": lambda run: run.model.load_state_dict(TiedAndFrozen(bias=False).state_dict()),
    "copy": lambda run: copy.deepcopy(run.model),
    "pickle": lambda run: pickle.dumps(run.model),
}


def is_refused(call: Callable[[Sleeper], Any], run: Sleeper) -> bool:
    try:
        call(run)
    except RuntimeError as error:
        return bool(re.search(r"asleep since amp.sleep\(.*amp\.wake\(\) first", str(error)))
    return False


@pytest.mark.parametrize("weights", [False, True])
def test_nothing_trains_while_it_is_asleep(device: torch.device, weights: bool) -> None:
    never, slept = (Sleeper(device) for _ in range(2))
    for run in (never, slept):
        run.step()
        run.backward()
    moved = slept.amp.sleep(weights=weights)
    assert (moved > 0) == (device.type == "cuda")
    calls = TRAINING | WEIGHTS if weights else TRAINING
    assert [name for name, call in calls.items() if not is_refused(call, slept)] == []
    slept.amp.wake()
    for run in (never, slept):
        run.finish()
    assert same_bits(never.bits(), slept.bits())
    for run in (never, slept):
        run.amp.disable()


def test_the_model_runs_forwards(device: torch.device) -> None:
    run = Sleeper(device, state_dict_dtype=torch.float16)
    run.step()
    run.model.eval()
    with torch.no_grad():
        expected = run.model(run.x)
        run.amp.sleep()
        assert torch.equal(run.model(run.x), expected)
        with run.amp.autocast():
            assert run.model.last(run.x.repeat(1, 2)).dtype is torch.float16
    assert run.model.state_dict()["last.weight"].dtype is torch.float16, "for a sampler"
    run.amp.wake()
    run.amp.disable()


def test_the_end_of_a_with_block(device: torch.device) -> None:
    run = Sleeper(device)
    with run.amp:
        run.amp.sleep(weights=True)
    assert run.model.last.weight.dtype is torch.float32


def test_wrong_calls(device: torch.device) -> None:
    run = Sleeper(device)
    with pytest.raises(RuntimeError, match=r"amp.wake\(\): .* after amp.sleep\(\), got one while"):
        run.amp.wake()
    with pytest.raises(ValueError, match="weights: expected a bool, got 1"):
        run.amp.sleep(weights=1)  # type: ignore[arg-type]
    inside = pytest.raises(RuntimeError, match=r"inside of `with amp.scale_loss\(\.\.\.\)`")
    with run.amp.scale_loss(run.loss()) as scaled, inside:
        run.amp.sleep()
    scaled.backward()
    run.finish()
    run.amp.disable()
    with pytest.raises(RuntimeError, match="disabled"):
        run.amp.sleep()


# what cannot be moved


def test_graphs(gpu: AnyCuda) -> None:
    """A graph has captured addresses; who has captured no step sleeps."""

    def update(run: Sleeper) -> None:
        run.ema.update()

    def scale(run: Sleeper) -> None:
        run.amp.scaler.scale(run.loss())

    def forward(run: Sleeper) -> None:
        run.model(run.x)

    refused = (Sleeper.step, "optimizer.step"), (update, "ema.update"), (scale, "amp.scaler.scale")
    for captured, name in (*refused, (forward, "")):
        run = Sleeper("cuda")
        run.step()
        run.amp.scaler.scale(run.loss()).backward()
        run.finish(None)
        with gpu.capture():
            captured(run)
        if name:
            with pytest.raises(RuntimeError, match=rf"no CUDA graph, got .* captured {name}"):
                run.amp.sleep()
        else:
            assert run.amp.sleep() > 0
            run.amp.wake()
        run.amp.disable()


def test_no_room(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host: all is awake. On the device: all is asleep, and wakes later."""
    never, run = Sleeper(cuda), Sleeper(cuda)
    never.step()
    run.step()
    with monkeypatch.context() as patched:
        patched.setattr(host_memory.torch, "empty", fail)
        with pytest.raises(torch.OutOfMemoryError):
            run.amp.sleep()
    run.amp.sleep()
    before = storage_bytes("cuda")
    of = HostMemory._resize
    with monkeypatch.context() as patched:

        def half_way(self: HostMemory, sizes: list[int]) -> None:
            of(self, [size if i < 3 else 0 for i, size in enumerate(sizes)])
            if any(sizes):
                fail()

        patched.setattr(HostMemory, "_resize", half_way)
        with pytest.raises(torch.OutOfMemoryError):
            run.amp.wake()
    assert storage_bytes("cuda") == before
    run.amp.wake()
    assert same_bits(never.bits(), run.bits())
    for each in (never, run):
        each.amp.disable()


def fail(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("on purpose")


@pytest.mark.parametrize("block", [1 << 26, 16, 24, 64])
def test_host_memory(device: torch.device, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages once, whatever views there are, in blocks that are smaller or larger."""
    monkeypatch.setattr(host_memory, "BLOCK", block)
    whole = torch.randn(5, 7, device=device)
    half = torch.randn(3, device=device).half()
    complex_ = torch.randn(4, dtype=torch.complex64, device=device)
    mask = torch.tensor([True, False, True], device=device)
    tensors = [whole[1:3], whole.mT[2], whole, half, complex_, mask, half.new_empty(0)]
    before = [t.cpu().clone() for t in tensors]
    versions = [t._version for t in tensors]
    memory = HostMemory(tensors)
    assert memory.nbytes == 5 * 7 * 4 + 3 * 2 + 4 * 8 + 3
    assert not any(t.untyped_storage().nbytes() for t in tensors)
    memory.put_back()
    assert all(torch.equal(t.cpu(), b) for t, b in zip(tensors, before, strict=True))
    assert [t._version for t in tensors] == versions


@pytest.mark.parametrize("kind", ["8bit", "packed fp32"])
def test_packed_masters_leave_the_device(cuda: torch.device, kind: str) -> None:
    """With values that were written into lent FP32 tensors, which are given up."""
    run = Sleeper(cuda, kind=kind)
    run.step()
    masters = list(run.amp.master_params())
    with torch.no_grad():
        masters[0].zero_()
    run.backward()
    shapes = [p.numel() for p in (run.model.first.weight, run.model.last.weight)]
    remainders = sum(2 * -(-n // 128) * 128 for n in shapes)
    grads = on_device(p.grad for p in run.model.parameters() if p.grad is not None)
    state = [x for o in run.optimizers for s in o.state.values() for x in s.values()]
    state = [x for x in state if isinstance(x, Tensor)]
    expected = remainders + grads + on_device([*state, *run.ema.state_dict().values()])
    del state
    before = storage_bytes("cuda")
    lent = on_device(masters[:2])
    del masters
    moved = run.amp.sleep()
    assert expected <= moved <= expected + SMALL
    assert before - storage_bytes("cuda") >= moved + lent
    run.amp.wake()
    assert not run.model.first.weight.any()
    run.finish()
    run.amp.disable()

"""No training loop waits for the GPU, whatever is done between backward and step; and a CUDA graph
captures it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from covering import more
from gpuless.fake_cuda import FakeCuda
from gpuless.real_cuda import AnyCuda
from gpuless.steps import OnGpu, by_scaler, clipped, plain, replays_like_eager, unscaled
from helpers import Net
from torch import Tensor

import tritonamp
from tritonamp.apex import amp as apex_amp
from tritonamp.kernels._plan import Plan

LEVELS = ["O1", "O2", *more(["O0", "O3"])]


class Looped(OnGpu):
    """A model in training, in one of the ways below."""

    def __init__(
        self, level: str, loop: "Loop", optimizer: Any = torch.optim.AdamW, **options: Any
    ):
        rate = 0.1 if optimizer is torch.optim.SGD else torch.tensor(0.01, device="cuda")
        by_apex = loop is apex
        super().__init__(None if by_apex else level, optimizer, lr=rate, **options)
        if by_apex:
            apex_amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=1)
        self.y = torch.randint(3, (len(self.x),), device="cuda")
        self._loop = loop

    def loss(self, x: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self.model(self.x).float(), self.y)

    def take(self) -> None:
        self._loop(self)


def muon(params: Iterable[Tensor], lr: Tensor) -> torch.optim.Optimizer:
    params = list(params)
    rest = [{"params": [p for p in params if p.dim() != 2], "lr": lr}]
    matrices = [p for p in params if p.dim() == 2]
    return tritonamp.optim.Muon(matrices, lr=lr, adamw_params=rest)


Loop = Callable[[Any], None]


def vetoed(t: Looped) -> None:
    """Early decisions are made again."""
    t.amp.backward(t.loss())
    t.amp.unscale_()
    for limit in (0, -1):
        t.amp.veto(t.y.sum() < limit)
    t.optimizer.step()


def accumulated(t: Looped) -> None:
    for _ in range(2):
        t.amp.backward(t.loss() / 2)
    t.amp.clip_grad_norm_(0.5)
    t.optimizer.step()


def two_losses(t: Looped) -> None:
    t.amp.backward(t.loss())
    t.amp.backward(t.loss() / 2, loss_id=1)
    t.optimizer.step()


def apex(t: Looped) -> None:
    with apex_amp.scale_loss(t.loss(), t.optimizer) as scaled:
        scaled.backward()
    t.clip()
    t.optimizer.step()


def logged(t: Looped) -> None:
    plain(t)
    t.amp.metrics()


LOOPS = [clipped, unscaled, by_scaler, two_losses, vetoed]
LOOPS += more([plain, accumulated, apex, logged])


pytestmark = pytest.mark.usefixtures("plans")


@pytest.fixture(autouse=True)
def apex_ends() -> Iterator[None]:
    yield
    apex_amp._amp_state.handle._deactivate()


def waits(gpu: AnyCuda, training: Looped) -> list[Any]:
    """Return the waits of two steps, after two others; events lag behind."""
    gpu.event_lag = 3
    for _ in range(2):
        training.step()
    with gpu.watch() as records, mock.patch.object(Plan, "__init__") as built:
        for _ in range(2):
            training.step()
    assert not built.called
    return records


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("level", LEVELS)
def test_no_loop_waits(gpu: AnyCuda, level: str, loop: Loop) -> None:
    assert waits(gpu, Looped(level, loop)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": torch.optim.SGD},
        {"optimizer": muon},
        {"dtype": torch.bfloat16},
        {"grad_dtype": torch.float32},
    ],
    ids=["optimizer", "muon", "dtype", "grad_dtype"],
)
@pytest.mark.parametrize("level", LEVELS)
def test_no_option_brings_a_wait(gpu: AnyCuda, level: str, options: dict[str, Any]) -> None:
    assert waits(gpu, Looped(level, clipped, **options)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": tritonamp.optim.Lion},
        {"optimizer": functools.partial(tritonamp.optim.AdamW, state="bf16")},
        {"optimizer": functools.partial(tritonamp.optim.AdamW, state="8bit")},
        {"optimizer": functools.partial(tritonamp.optim.Lion, state="8bit")},
        {"optimizer": torch.optim.RMSprop, "masters": "packed"},
        {"skip_outliers": 6.0},
        {"offload": "state"},
        {"softmax_dtype": torch.float32},
        {"track_changes": True},
        {"track_changes": True, "optimizer": muon},
    ],
    ids=[
        *("lion", "bf16", "8bit", "lion 8bit", "packed", "skip_outliers", "offload"),
        *("softmax_dtype", "track_changes", "track_changes muon"),
    ],
)
def test_no_option_of_o2_brings_a_wait(gpu: AnyCuda, options: dict[str, Any]) -> None:
    assert waits(gpu, Looped("O2", clipped, **options)) == []


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_step_waits_for_nothing(gpu: AnyCuda, level: str) -> None:
    training = Looped(level, clipped)
    with gpu.watch() as records:
        training.step()
    assert records == []


def test_metrics_come_when_they_have_arrived(fake_cuda: FakeCuda) -> None:
    training = Looped("O2", plain)
    fake_cuda.event_lag = 2
    training.step()
    with fake_cuda.watch() as records:
        found = [training.amp.metrics() for _ in range(3)]
    assert records == []
    norm = training.amp.stats()["grad_norm"]
    assert found == [
        {},
        {},
        {"amp/scale": 65536.0, "amp/skipped": 0.0, "amp/grad_norm": norm},
    ]


def test_a_capture_does_not_ask_whether_numbers_have_arrived(gpu: AnyCuda) -> None:
    training = Looped("O2", plain)
    gpu.event_lag = 2
    training.step()
    with gpu.capture():  # in which CUDA refuses the question
        assert training.amp.metrics() == {}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_captures_every_loop(gpu: AnyCuda, level: str, loop: Loop) -> None:
    replays_like_eager(gpu, Looped(level, loop), Looped(level, loop))


@pytest.mark.parametrize("level", ["O2", *more(["O0", "O1", "O3"])])
def test_a_graph_captures_muon(gpu: AnyCuda, level: str) -> None:
    eager, captured = (Looped(level, clipped, optimizer=muon) for _ in range(2))
    replays_like_eager(gpu, eager, captured)


def test_a_graph_captures_fp32_gradients(gpu: AnyCuda) -> None:
    eager, captured = (Looped("O2", accumulated, grad_dtype=torch.float32) for _ in range(2))
    replays_like_eager(gpu, eager, captured)


@pytest.mark.parametrize("level", ["O2", *more(["O0", "O1", "O3"])])
def test_watched_ranges_bring_no_wait(gpu: AnyCuda, level: str) -> None:
    training = Looped(level, logged)
    training.amp.watch(every=2)
    assert waits(gpu, training) == []


@pytest.mark.parametrize("level", ["O2", *more(["O0", "O1", "O3"])])
def test_a_graph_watches_every_other_replay(gpu: AnyCuda, level: str) -> None:
    eager, captured = Looped(level, plain), Looped(level, plain)
    for training in (eager, captured):
        training.amp.watch(every=2)
        training.step()
    with gpu.capture() as graph:
        captured.step()
    read = []
    for _ in range(4):
        eager.step()
        graph.replay()
        assert eager.amp.ranges() == captured.amp.ranges()
        read.append(captured.amp.ranges()[0].step)
    assert read == [1, 3, 3, 5]


def test_masters_are_made_on_the_gpu(gpu: AnyCuda) -> None:
    with gpu.watch() as records:
        training = Looped("O2", plain)
    assert [r for r in records if "tritonamp" in r.where] == []
    training.amp.disable()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_weights_without_masters_leave_the_gpu_once(gpu: AnyCuda, level: str) -> None:
    """Their FP32 values come back where they are asked for, and are exact."""
    torch.manual_seed(0)
    model = Net().cuda()
    before = [p.detach().clone() for p in model.parameters()]
    with gpu.watch() as records:
        amp = tritonamp.enable(model, level=level)
    halves = [p for p in model.parameters() if p.dtype is torch.float16]
    assert len(records) == len(halves)
    with torch.no_grad():
        halves[0][0] += 1.0  # a row changes, the others keep their FP32 values
    with gpu.watch() as records:
        model(torch.ones(2, 6, device="cuda"))
    assert records == []
    values = list(model.state_dict().values())
    assert values[0].dtype is torch.float32
    assert torch.equal(values[0][0], halves[0][0].float())
    assert torch.equal(values[0][1:], before[0][1:])
    amp.disable()
    assert torch.equal(model.last.weight, before[list(model.state_dict()).index("last.weight")])

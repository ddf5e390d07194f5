"""Pointer tables on a GPU: nothing waits for them, and a CUDA graph reads none but its own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpuless.fake_cuda import FakeCuda
from gpuless.real_cuda import AnyCuda
from torch import Tensor, nn

import tritonamp
from tritonamp.kernels import _device_tables
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._transfer import upload
from tritonamp.kernels.cast import cast

HALF, WIDE = torch.float16, torch.float32
SIZES = (3, 4099)


pytestmark = pytest.mark.usefixtures("plans")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    counts = SimpleNamespace(builds=0)
    build = _device_tables.DeviceTables.__init__

    def counted(self: Any, *args: Any) -> None:
        counts.builds += 1
        build(self, *args)

    monkeypatch.setattr(_device_tables.DeviceTables, "__init__", counted)
    return counts


def tensors(value: float, dtype: torch.dtype) -> list[Tensor]:
    return [torch.full((n,), value, dtype=dtype, device="cuda") for n in SIZES]


def rounded(memory: Memory, params: list[Tensor], copies: list[Tensor], **of: Any) -> None:
    cast(TensorLists(memory=memory, params=params, copies=copies, **of), "triton")


def values(copies: list[Tensor]) -> set[float]:
    return set(torch.cat(copies).tolist())


# on their way there


def test_an_upload_waits_for_nothing(gpu: AnyCuda) -> None:
    target, values = torch.zeros(3, device="cuda"), torch.arange(3.0)
    with gpu.watch() as records:
        upload(values, target)
    values += 1  # ours again
    assert records == []
    assert target.tolist() == [0.0, 1.0, 2.0]


def test_a_captured_upload_is_always_the_same(gpu: AnyCuda) -> None:
    target, values = torch.zeros(3, device="cuda"), torch.arange(3.0)
    with gpu.capture() as graph:
        upload(values, target)
    values += 1
    upload(values, target)
    assert target.tolist() == [1.0, 2.0, 3.0]
    graph.replay()
    assert target.tolist() == [0.0, 1.0, 2.0]


def test_on_the_cpu_cuda_is_left_alone(fake_cuda: FakeCuda) -> None:
    target = torch.zeros(3)
    with fake_cuda.watch("pinning", "query", "wait", "pageable") as records:
        upload(torch.arange(3.0), target)
    assert records == []
    assert target.tolist() == [0.0, 1.0, 2.0]


def test_nothing_waits_where_tables_are_built(gpu: AnyCuda, counts: SimpleNamespace) -> None:
    memory = Memory()
    for k, dtype in enumerate((HALF, torch.bfloat16, HALF)):
        params, copies = tensors(k, WIDE), tensors(-1, dtype)
        with gpu.watch() as records:
            rounded(memory, params, copies)
        assert records == []
        assert values(copies) == {k}
    assert counts.builds == 2


# what comes again


def test_lists_of_different_kinds_in_turn_are_built_once(
    cuda: torch.device, counts: SimpleNamespace
) -> None:
    """Half gradients and true ones, losses that feed other parameters."""
    memory = Memory()
    kinds = [(2, [0, 1], HALF), (2, [0, 1], WIDE), (2, [1], HALF), (2, [0], HALF)]
    for turn in range(3):
        for size, numbers, dtype in kinds:
            params = [p for i, p in enumerate(tensors(turn, WIDE)) if i in numbers]
            copies = [c for i, c in enumerate(tensors(-1, dtype)) if i in numbers]
            rounded(memory, params, copies, numbers=numbers, size=size)
            assert values(copies) == {turn}
    assert counts.builds == len(kinds)


def test_the_tables_of_a_few_kinds_are_kept(cuda: torch.device) -> None:
    memory = Memory()
    for i in range(40):
        rounded(memory, tensors(1, WIDE)[:1], tensors(0, HALF)[:1], numbers=[i], size=40)
    assert len(memory._plans) <= 24


def test_a_gradient_that_lies_otherwise_than_its_parameter(
    gpu: AnyCuda, counts: SimpleNamespace
) -> None:
    model = nn.Linear(5, 7, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp = tritonamp.enable(model, optimizer, level="O0")
    kept = []
    for turn in range(4):
        before = model.weight.detach().clone()
        with amp.scale_loss(torch.ones((), device="cuda")):
            pass
        grad = torch.full((5, 7), turn + 1.0, device="cuda").t()
        kept.append(grad)  # each at another address
        model.weight.grad = grad
        built = counts.builds
        with gpu.watch() as records:
            optimizer.step()
        torch.testing.assert_close(before - model.weight, grad, rtol=0, atol=1e-6)
        if turn > 1:
            assert records == [] and counts.builds == built
    amp.disable()


# what a graph captures


def test_a_graph_reads_tables_of_its_own(gpu: AnyCuda) -> None:
    memory, graphs = Memory(), []
    rounded(Memory(), tensors(0, WIDE), tensors(0, HALF))  # loads the kernel, as no capture may
    for value in (1, 2):
        params, copies = tensors(value, WIDE), tensors(0, HALF)
        for _ in range(2):  # of the second there is nothing new
            with gpu.capture() as graph:
                rounded(memory, params, copies)
            graphs.append((graph, value, params, copies))
            rounded(memory, params, copies)
    rounded(memory, tensors(3, WIDE), tensors(0, HALF))
    rounded(memory, tensors(4, WIDE), tensors(0, HALF), numbers=[0, 1], size=3)
    for graph, value, _, copies in graphs:
        for copy in copies:
            copy.zero_()
        graph.replay()
        assert values(copies) == {value}


class Steps:
    """One parameter of ones that SGD moves against gradients that a test chooses."""

    def __init__(self, lr: float) -> None:
        self.param = nn.Parameter(torch.ones(8, device="cuda"))
        model = nn.Module()
        model.param = self.param
        self.optimizer = torch.optim.SGD([self.param], lr=lr)
        self.amp = tritonamp.enable(model, self.optimizer, level="O0")
        self.grads = {sign: torch.full((8,), sign, device="cuda") for sign in (1.0, -1.0)}

    def step(self, sign: float) -> None:
        self.param.grad = self.grads[sign]
        with self.amp.scale_loss(torch.ones((), device="cuda")):
            pass
        self.optimizer.step()


def test_steps_between_replays(gpu: AnyCuda) -> None:
    """Each update has the sign of its own gradient, whichever step ran before."""
    steps = Steps(0.1)

    def moved(run: Any, *args: float) -> float:
        before = steps.param.detach().clone()
        run(*args)
        return (steps.param - before).sign().unique().item()

    for warm_up in (1.0, -1.0):
        for _ in range(2):
            steps.step(warm_up)
        with gpu.capture() as graph:
            steps.step(-1.0)
        for _ in range(2):
            assert moved(graph.replay) == 1.0
            assert moved(steps.step, 1.0) == -1.0
            assert moved(graph.replay) == 1.0
            assert moved(steps.step, -1.0) == 1.0
    steps.amp.disable()


def test_the_rate_of_a_captured_step_is_its_own(gpu: AnyCuda) -> None:
    """Given as a number; as a tensor it follows the schedule."""
    steps = Steps(1.0)
    steps.step(1.0)
    with gpu.capture() as graph:
        steps.step(1.0)
    steps.optimizer.param_groups[0]["lr"] = 10.0
    steps.step(1.0)
    assert steps.param.tolist() == [-10.0] * 8
    graph.replay()
    assert steps.param.tolist() == [-11.0] * 8
    steps.amp.disable()


def test_memory_that_a_graph_writes_to_stays(cuda: torch.device) -> None:
    memory = Memory()
    first = memory.kept("sums", (4,), WIDE, torch.device("cuda"))
    memory.kept("sums", (8,), WIDE, torch.device("cuda"))
    assert memory.kept("sums", (4,), WIDE, torch.device("cuda")) is first

"""What the GPU in software does as a GPU would, and what it sees."""

import contextlib
import copy
import io
import threading

import pytest
import torch
from gpuless import driver
from gpuless.fake_cuda import FakeCuda
from gpuless.gpu import Observer
from torch import nn

from tritonamp.kernels import softmax


@pytest.mark.skipif(not driver.is_loaded(), reason="what is asked for first")
def test_a_torch_for_cpus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "needs a torch that is built with CUDA" in str(driver.obstacle())


def test_tensors_say_cuda(fake_cuda: FakeCuda) -> None:
    x = torch.arange(6, device="cuda").reshape(2, 3)
    assert x.is_cuda and x.device == torch.device("cuda", 0) and x.get_device() == 0
    assert x.t().is_cuda and x.t().stride() == (1, 3)
    assert x.cpu().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not torch.ones(1).is_cuda
    assert x.t_().shape == (3, 2) and x.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_autograd_and_autocast_are_those_of_cuda(fake_cuda: FakeCuda) -> None:
    linear = nn.Linear(3, 4).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        y = linear(torch.ones(2, 3, device="cuda"))
    assert y.dtype is torch.float16
    y.sum().backward()
    assert linear.weight.grad.is_cuda
    assert torch.equal(linear.weight.grad.cpu(), torch.full((4, 3), 2.0))


def test_views_of_parameters_in_inference_mode(fake_cuda: FakeCuda) -> None:
    weight = nn.Linear(3, 4).cuda().weight
    with torch.inference_mode():
        assert not weight.view(-1).is_inference()
        assert (weight * 2).view(-1).is_inference()


def test_kernels_say_nothing_of_infinities(fake_cuda: FakeCuda) -> None:
    x = torch.tensor([[float("inf"), 1.0]], device="cuda")
    y = softmax.softmax(x, 1, torch.float16, False, "triton")
    assert y.isnan().tolist() == [[True, True]]


def test_devices_do_not_mix(fake_cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(2, device="cuda") + torch.ones(2)
    assert (torch.ones(2, device="cuda") + torch.tensor(1.0)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.ones(3).copy_(x),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.as_tensor([1.0], device="cuda"),
        lambda x: torch.ones(3).cuda(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.equal(x, x),
    ],
)
def test_waits_are_seen(fake_cuda: FakeCuda, wait) -> None:
    x = torch.ones(3, device="cuda")
    with fake_cuda.watch() as records:
        wait(x)
    assert [record.kind for record in records] == ["wait"]
    assert records[0].where.startswith("tests/gpuless/test_fake_cuda.py:")
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        wait(x)
    torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="capturing"), fake_cuda.capture():
        wait(x)


def test_work_on_the_gpu_does_not_wait(fake_cuda: FakeCuda) -> None:
    x, pinned = torch.ones(3, device="cuda"), torch.ones(3, pin_memory=True)
    with fake_cuda.watch() as records:
        torch.where(x > 0, x, 2.0).softmax(0).add_(x).view(3, 1)
        x.copy_(pinned, non_blocking=True)
        x[torch.zeros(1, dtype=torch.long, device="cuda")] = 3.0
        x[x > 2] = 0.0
        x.to("cpu", non_blocking=True)
    assert records == []
    with fake_cuda.watch() as records:
        x.copy_(torch.ones(3), non_blocking=True)
    assert [record.kind for record in records] == ["pageable"]


def test_copies_to_the_host_arrive_late(fake_cuda: FakeCuda) -> None:
    x, there = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    fake_cuda.event_lag = 2
    there.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    x.zero_()
    assert [event.query(), event.query()] == [False, False]
    assert not torch.equal(there, torch.ones(3))
    assert event.query()
    assert torch.equal(there, torch.ones(3))


def test_pinned_memory_is_left_alone_until_its_copy_is_through(fake_cuda: FakeCuda) -> None:
    x, here = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    x.copy_(here, non_blocking=True)
    here.fill_(1)
    with pytest.raises(AssertionError, match="written while it was on its way"):
        torch.cuda.synchronize()


def test_random_numbers_are_the_gpus(fake_cuda: FakeCuda) -> None:
    torch.manual_seed(1)
    here, state = torch.rand(3), torch.cuda.get_rng_state()
    there = torch.rand(3, device="cuda")
    assert torch.equal(there.cpu(), here)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), there)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), here)


def test_copies_and_files_keep_the_device(fake_cuda: FakeCuda) -> None:
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    file = io.BytesIO()
    torch.save({"x": parameter}, file)
    file.seek(0)
    for other in (copy.deepcopy(parameter), torch.load(file)["x"]):
        assert isinstance(other, nn.Parameter) and other.is_cuda and other.requires_grad
        assert torch.equal(other, parameter) and other.data_ptr() != parameter.data_ptr()
    file.seek(0)
    assert not torch.load(file, map_location="cpu")["x"].is_cuda
    file = io.BytesIO()
    torch.save({"x": torch.ones(3)}, file)
    file.seek(0)
    assert torch.load(file, map_location="cuda")["x"].is_cuda


def test_tensors_are_made_on_other_devices(fake_cuda: FakeCuda) -> None:
    x = torch.ones(3, device="cuda")
    for device in ("cpu", "meta"):
        assert x.to(device).device.type == torch.zeros_like(x, device=device).device.type == device
    assert torch.empty_like(x.to("meta"), device="cuda").is_cuda


def test_threads_have_the_gpu(fake_cuda: FakeCuda) -> None:
    def work() -> None:
        x = torch.ones(3, device="cuda", requires_grad=True)
        (x * 2).sum().backward()
        found.append(x.grad)

    found: list[torch.Tensor] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_of_half_is_rounded_once(fake_cuda: FakeCuda, function) -> None:
    x, grad = torch.randn(2, 5, 7).half().cuda()
    x.requires_grad_()
    y = function(x, 1)
    wide = x.detach().float().requires_grad_()
    assert torch.equal(y, function(wide, 1).half())
    y.backward(grad)
    backward = getattr(torch.ops.aten, f"_{function.__name__}_backward_data")
    expected = backward(grad.float(), y.float(), 1, torch.float32)
    assert torch.equal(x.grad, expected.half())


def test_without_the_fixture_there_is_no_gpu() -> None:
    assert not torch.cuda.is_available()
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_histograms_of_integers(fake_cuda: FakeCuda, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 2, 5, 6, 7, 9], dtype=dtype, device="cuda")
    found = torch.histc(x, bins=4, min=1, max=7)  # parts of a width of 1.5; 7 is in the last one
    assert found.is_cuda and found.dtype is dtype
    assert found.tolist() == [3, 0, 1, 2]
    assert torch.histc(x, bins=3).tolist() == [4, 1, 3]  # from the least to the largest
    assert torch.histc(x[:1] + 4, bins=2).tolist() == [0, 1]


class Tagged(torch.Tensor):
    """Has a method, and an answer of its own to one function."""

    def twice(self) -> torch.Tensor:
        return self + self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.sigmoid:
            return "mine"
        return super().__torch_function__(func, types, args, kwargs)


def test_tensors_of_other_subclasses(fake_cuda: FakeCuda) -> None:
    x = torch.arange(4.0, device="cuda").requires_grad_()
    tagged = x.as_subclass(Tagged)
    assert isinstance(tagged, Tagged) and tagged.is_cuda
    assert torch.sigmoid(tagged) == "mine"
    y = tagged.view(2, 2).twice()  # results have the subclass, too
    assert isinstance(y, Tagged) and y.is_cuda
    plain = y.as_subclass(torch.Tensor)
    assert type(plain) is type(x)
    plain.sum().backward()
    assert x.grad.tolist() == [2.0] * 4
    with torch.no_grad():
        tagged.mul_(3)  # the same memory
        tagged.copy_(tagged + 1)
    assert x.tolist() == [1.0, 4.0, 7.0, 10.0]
    assert tagged.cpu().tolist() == x.tolist()


class Names(Observer):
    """Notes what it is shown."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def computed(self, func, args, kwargs, result) -> None:
        self.found.append(func._schema.name)

    def launched(self, kernel, tensors) -> None:
        assert all(x.is_cuda for x in tensors)
        self.found.append(kernel)

    @contextlib.contextmanager
    def attention(self, args, kwargs):
        self.found = ["attention"]
        yield
        self.found = [*self.found[:1], "end"]


def test_an_observer_sees_what_a_gpu_would_run(fake_cuda: FakeCuda, compiled: bool) -> None:
    x = torch.ones(2, 4, 4, device="cuda").requires_grad_()
    names = fake_cuda.observer = Names()
    nn.functional.silu(x).backward(x)
    assert "aten::silu" in names.found
    assert "aten::silu_backward" in names.found  # not the operations that torch has for others
    softmax.softmax(x.detach(), -1, torch.float16, False, "triton")
    assert compiled or names.found[-1] == "softmax_kernel"
    nn.functional.scaled_dot_product_attention(x, x, x)
    assert names.found == ["attention", "end"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_is_that_of_the_cpu(fake_cuda: FakeCuda, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 3, 8, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = nn.functional.scaled_dot_product_attention(*x.double(), is_causal=True)
    found = nn.functional.scaled_dot_product_attention(*x.cuda(), is_causal=True)
    atol = torch.finfo(dtype).eps * x.abs().max().item()  # a mean of values, in FP32
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=atol)

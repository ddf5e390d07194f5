"""What is said of devices that are not here: the questions to torch are answered by the tests."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tritonamp
from tritonamp.commands import doctor
from tritonamp.kernels import device as hardware

GPU, MPS = torch.device("cuda", 0), torch.device("mps", 0)
WITHOUT = [
    "NVIDIA GeForce GTX 1660 Ti",
    "NVIDIA GeForce GTX 1650 with Max-Q Design",
    "GeForce GTX 1630",
    "NVIDIA GeForce MX450",
    "Quadro T2000",
    "NVIDIA T1000 8GB",
]
WITH = [
    ("NVIDIA GeForce RTX 2080 Ti", (7, 5)),
    ("Tesla T4", (7, 5)),
    ("Quadro RTX 4000", (7, 5)),
    ("NVIDIA GeForce MX570", (8, 6)),
    ("NVIDIA T1000", (9, 0)),  # a name alone says nothing
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    hardware._warn_once.cache_clear()
    monkeypatch.setattr(hardware, "capability", lambda device: (7, 5))
    yield monkeypatch
    hardware._warn_once.cache_clear()


@pytest.mark.parametrize("name", WITHOUT)
def test_gpus_without_tensor_cores_are_named(
    name: str, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setattr(torch.cuda, "get_device_name", lambda device: name)
    for _ in range(2):
        hardware.warn_of_known_fault(GPU)
    (warning,) = caplog.messages
    assert warning.startswith(f"{name} has no Tensor Cores")
    assert "use level='O0' for a model that has convolutions" in warning
    assert "Tensor Cores" not in hardware.choose_backend("auto", GPU).reason
    with pytest.raises(tritonamp.UnsupportedDeviceError, match=r"8\.0, cuda:0 has 7\.5"):
        hardware.check_dtype(torch.bfloat16, GPU)


@pytest.mark.parametrize(("name", "capability"), WITH)
def test_other_gpus_have_no_known_fault(
    name: str,
    capability: tuple[int, int],
    gpu: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu.setattr(hardware, "capability", lambda device: capability)
    gpu.setattr(torch.cuda, "get_device_name", lambda device: name)
    hardware.warn_of_known_fault(GPU)
    assert caplog.messages == []


def test_enable_warns_where_it_computes_in_half(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setattr(torch.cuda, "get_device_name", lambda device: WITHOUT[0])
    for level, warnings in (("O0", 0), ("O1", 1), ("O2", 1)):  # once in a process
        tritonamp.enable(nn.Linear(2, 2), level=level, backend="eager").disable()
        assert len(caplog.messages) == warnings


def test_the_doctor_says_what_is_known(gpu: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory = WITHOUT[0], 6 << 30

    gpu.setattr(torch.cuda, "get_device_name", lambda device: WITHOUT[0])
    gpu.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    first, second = doctor._describe(GPU).splitlines()
    assert first == f"{WITHOUT[0]}, compute capability 7.5, 6 GiB"
    assert second == hardware.known_fault(GPU)


def test_other_accelerators_ask_for_reports() -> None:
    asks = "tritonamp has never been run on mps, where eager torch takes the place of kernels"
    for backend in ("auto", "eager"):
        chosen = hardware.choose_backend(backend, MPS)
        assert chosen.name == "eager" and asks in chosen.reason
    for known in ("cpu", "meta"):
        assert "never" not in hardware.choose_backend("auto", torch.device(known)).reason


def test_triton_is_refused_on_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "INTERPRETED", False)
    with pytest.raises(tritonamp.UnsupportedDeviceError, match="has never been run on mps"):
        hardware.choose_backend("triton", MPS)


@pytest.mark.parametrize(
    ("name", "has_fp64", "expected"),
    [
        ("cpu", None, torch.float64),
        ("cuda:3", None, torch.float64),
        ("mps:3", None, torch.float32),
        ("xpu:3", True, torch.float64),
        ("xpu:4", False, torch.float32),
        ("hpu:3", None, torch.float32),
    ],
)
def test_the_widest_dtype(
    name: str, has_fp64: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(has_fp64=has_fp64)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(hardware, "_wide_dtypes", {})
    assert hardware.wide_dtype(torch.device(name)) is expected


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_devices_without_autocast_are_refused_before_anything_changes(level: str) -> None:
    model = nn.Linear(2, 2)
    mode = FakeTensorMode()
    for name, p in list(model.named_parameters()):
        # torch makes tensors there, and plain fakes, where it has a driver alone
        fake = FakeTensor(mode, torch.empty_like(p, device="meta"), torch.device("mtia", 0))
        setattr(model, name, nn.Parameter(fake))
    with pytest.raises(
        tritonamp.UnsupportedDeviceError,
        match=r"expected a device for which torch has autocast, .* got mtia:0: use level='O3'",
    ):
        tritonamp.enable(model, torch.optim.SGD(model.parameters()), level=level)
    assert type(model) is nn.Linear


def test_the_doctor_finds_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert dict(doctor._versions())["GPUs"] == "none that torch can use"
    assert doctor._devices() == [torch.device("cpu")]
    found = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert dict(doctor._versions())["GPUs"] == "none of CUDA or ROCm, but mps"
    assert doctor._devices() == [MPS]
    assert doctor._describe(MPS) == "an accelerator that torch calls mps"
    assert "never been run on mps" in doctor._backend(MPS)

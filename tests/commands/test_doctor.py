import json
import platform

import pytest
import torch

import tritonamp
from tritonamp.__main__ import main
from tritonamp.commands import doctor
from tritonamp.kernels import _native
from tritonamp.kernels import device as hardware
from tritonamp.kernels._implementations import operations
from tritonamp.kernels._optimizers import FUSED, OPTIMIZERS


def test_json_holds_what_the_report_shows(report, capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["tritonamp"] == tritonamp.__version__
    shown = "\n".join(report)
    assert all(text in shown for text in [*found["versions"], *found["notes"]])
    for device, entry in zip(doctor._devices(), found["devices"], strict=True):
        assert entry["device"] == str(device)
        assert entry["backend"] == doctor._backend(device)
        assert {level["step"].partition(",")[0] for level in entry["levels"]} == {"works"}
        assert [level["level"] for level in entry["levels"]] == [t[0] for t in doctor.TRIALS]


@pytest.fixture
def report(capsys):
    """The lines that ``python -m tritonamp doctor`` prints."""
    assert main(["doctor"]) == 0
    return capsys.readouterr().out.splitlines()


def _rows(report, first_word):
    return [line for line in report if line.split()[:1] == [first_word]]


@pytest.mark.parametrize(
    ("what", "version"),
    [
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("triton", hardware.triton_version() or "cannot be imported"),
        ("CUDA", torch.version.cuda or "none"),
    ],
)
def test_versions(report, what, version):
    (row,) = _rows(report, what)
    assert row.split(maxsplit=1)[1].startswith(version)


def test_every_device_has_a_backend_and_a_reason(report):
    for device in doctor._devices():
        assert " ".join(report).count(doctor._backend(device)) == 1


def test_devices_that_are_alike_are_described_once(monkeypatch):
    monkeypatch.setattr(doctor, "_devices", lambda: [torch.device("cpu")] * 2)
    lines = doctor.report().splitlines()
    (line,) = [line for line in lines if line.startswith("cpu")]
    assert line == f"cpu, cpu: {doctor._describe(torch.device('cpu'))}"
    assert len(_rows(lines, "O0")) == 1


def test_every_fused_optimizer_has_a_row(report):
    for name in FUSED:
        (row,) = _rows(report, name)
        assert ", ".join(OPTIMIZERS[name].states) in row


def test_cpp_for_steps(monkeypatch):
    monkeypatch.setattr(hardware, "runs_triton", lambda device: False)
    assert "C++ for steps" not in dict(doctor._versions())
    monkeypatch.setattr(hardware, "runs_triton", lambda device: True)
    monkeypatch.setattr(_native, "build", lambda: _native.Attempt(None, "no compiler"))
    assert doctor._cpp_for_steps() == ("none, so that each step takes the host longer: no compiler")
    monkeypatch.setattr(_native, "build", lambda: _native.Attempt(object()))
    assert doctor._cpp_for_steps() == dict(doctor._versions())["C++ for steps"] == "built"


@pytest.mark.smoke
def test_cpu_is_eager_because_it_is_no_gpu():
    expected = "operations run as eager torch, no kernels: cpu is not an NVIDIA GPU"
    assert doctor._backend(torch.device("cpu")) == f"{len(operations())} {expected}"


def test_operations_run_kernels_where_triton_runs(monkeypatch):
    backend = hardware.Backend("triton", "it can", "auto")
    monkeypatch.setattr(hardware, "choose_backend", lambda requested, device: backend)
    assert doctor._backend(torch.device("cuda")).endswith("run as Triton kernels: it can")


@pytest.mark.parametrize(("level", "dtype"), doctor.TRIALS)
def test_every_level_works_on_cpu(level, dtype):
    works = doctor._trial(level, dtype, torch.device("cpu"))[2]
    scaled = dtype is torch.float16 and level in ("O1", "O2")
    assert works == f"works, loss scale {65536 if scaled else 1}"


def test_a_level_that_does_not_work_gives_the_reason(monkeypatch):
    def check_dtype(dtype, device):
        raise tritonamp.UnsupportedDeviceError("dtype=torch.bfloat16 needs compute capability 8.0")

    monkeypatch.setattr(
        tritonamp, "enable", lambda *args, dtype, **kwargs: check_dtype(dtype, None)
    )
    trial = doctor._trial("O1", torch.bfloat16, torch.device("cpu"))
    assert trial == ("O1", "bfloat16", "no: dtype=torch.bfloat16 needs compute capability 8.0")


def test_no_command_prints_the_commands(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "demo" in printed
    assert "doctor" in printed

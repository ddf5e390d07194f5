"""AMD's GPUs: what is said of them, and what a launch does there. torch's answers are stand-ins,
kernels are built and never run.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fresh_python import FreshPython
from torch import Tensor, nn

import tritonamp
from tritonamp.commands import doctor
from tritonamp.kernels import _launch
from tritonamp.kernels import device as hardware

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda", 0)
NVIDIAS_ALONE = {"get_device_capability", "inline_asm_elementwise", "libdevice", "num_ctas"}
BUILDS = """
import sys
sys.path.insert(0, "bench")
import builds, gates, machine_code
CALLS = {"adamw": "float32 float16 float16$", "softmax": "^softmax float16 n=1024$"}
for op, only in CALLS.items():
    for build in builds.all_builds([op], ["gfx942", "gfx1100"], only):
        if build.moves_tensors:
            row = machine_code.measure(build)
            print(build.target, build.kernel, build.options["num_warps"], gates.faults(row))
"""


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has torch say that it was built for ROCm and finds a GPU of an architecture."""

    def find(name: str) -> None:
        properties = SimpleNamespace(
            gcnArchName=f"{name}:sramecc+:xnack-", name="AMD Instinct", total_memory=192 << 30
        )
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", "7.2.1")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    monkeypatch.setattr(hardware, "_answers", {})
    return find


@pytest.mark.parametrize("name", hardware.AMD_WAVES)
def test_architectures_that_kernels_are_built_for(name: str, rocm: Callable[[str], None]) -> None:
    rocm(name)
    assert hardware.amd_architecture(GPU) == name
    assert hardware.amd_architecture(torch.device("cpu")) is hardware.capability(GPU) is None
    chosen = hardware.choose_backend("auto", GPU)
    assert chosen.name == "triton" and hardware.runs_triton(GPU)
    assert f"AMD GPU of {name} (kernels: built ahead of time, never run)" in chosen.reason
    hardware.check_dtype(torch.bfloat16, GPU)
    assert hardware.known_fault(GPU) is None


def test_other_architectures_are_eager(
    rocm: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm("gfx906")
    monkeypatch.setattr(hardware, "INTERPRETED", False)
    chosen = hardware.choose_backend("auto", GPU)
    reason = (
        "cuda:0 is an AMD GPU of gfx906, kernels are built for gfx90a, gfx942, gfx1100, gfx1201"
    )
    assert (chosen.name, chosen.reason) == ("eager", reason)
    with pytest.raises(tritonamp.UnsupportedDeviceError, match=f"cannot run: {reason}"):
        hardware.choose_backend("triton", GPU)
    monkeypatch.setattr(hardware, "triton_version", lambda: None)
    rocm("gfx942")
    assert hardware.why_not_triton(GPU) == "Triton cannot be imported"


def test_the_doctor(rocm: Callable[[str], None]) -> None:
    rocm("gfx942")
    assert doctor._describe(GPU) == (
        "AMD Instinct, gfx942, waves of 64, kernels built ahead of time, never run, 192 GiB"
    )
    assert dict(doctor._versions())["CUDA"] == "none: torch was built for ROCm 7.2.1"
    backend = doctor._backend(GPU)
    assert "operations run as Triton kernels: " in backend and "never run" in backend
    rocm("gfx906")
    assert doctor._describe(GPU) == "AMD Instinct, gfx906, 192 GiB"


@pytest.mark.parametrize(
    ("amd", "num_warps", "waves"),
    [("gfx942", 8, 4), ("gfx942", 1, 1), ("gfx1100", 8, 8), ("gfx906", 8, 8)],
)
def test_a_launch_has_as_many_threads(amd: str, num_warps: int, waves: int) -> None:
    """And no limit of registers, which AMD's compiler refuses as an unknown option."""
    options = {"num_warps": waves, "enable_fp_fusion": True}
    assert _launch.compile_options(num_warps, 64, amd) == options
    assert _launch.compile_options(num_warps, 64) == options | {
        "num_warps": num_warps,
        "maxnreg": 64,
    }


def test_kernels_are_compiled_with_these_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "amd_architecture", lambda device: "gfx942")
    monkeypatch.setattr(_launch, "_compiled", {})
    kernel = mock.MagicMock()
    _launch.Launch(kernel, (1, 1, 1), (), (), 8, 64)._find((torch.zeros(4),))
    assert kernel.warmup.call_args.kwargs == {
        "grid": (1, 1, 1),
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def _losses(device: torch.device) -> list[Tensor]:
    """Train with a clip; one batch has an inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        for step in range(4):
            x = torch.ones(4, 8)
            x[0, 0] = float("inf") if step == 2 else step
            loss = model(x.to(device)).square().mean()
            amp.backward(loss)
            amp.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        stats = amp.stats()
    assert stats["skipped"] == 1
    assert stats["backend"] == ("eager" if device.type == "cpu" else "triton")
    return losses


@pytest.fixture
def software_amd(
    fake_cuda: Any, rocm: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> torch.device:
    """The GPU in software, of which torch says that it is AMD's; CUDA's questions fail."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("a question that is NVIDIA's alone")

    rocm("gfx942")
    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "AMD Instinct")
    return GPU


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
def test_the_host_asks_nothing_of_cuda(software_amd: torch.device) -> None:
    assert hardware.capability(software_amd) is None
    torch.testing.assert_close(
        _losses(software_amd), _losses(torch.device("cpu")), rtol=0, atol=0, equal_nan=True
    )


def test_kernels_hold_nothing_that_is_nvidias_alone() -> None:
    for path in (ROOT / "kernels").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
        asked = {"get_device_capability"} if path.name == "device.py" else set()
        assert names & NVIDIAS_ALONE == asked, path.name


@pytest.mark.static
def test_some_kernels_build(fresh_python: FreshPython) -> None:
    """All of them, with their gates: ``python bench/static.py --arch gfx942 gfx1100``."""
    pytest.importorskip("triton")
    done = fresh_python.run(BUILDS, ROOT, {"TRITON_INTERPRET": "0"})
    assert done.stdout.splitlines() == [
        f"{target} {kernel} {waves} []"
        for kernel, warps in (("update_kernel", 8), ("softmax_kernel", 1))
        for target, waves in (("gfx942", -(-warps // 2)), ("gfx1100", warps))
    ], done.stderr

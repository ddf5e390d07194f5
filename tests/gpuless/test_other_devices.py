"""Accelerators that are neither CUDA's nor ROCm's, in software. None has ever been at hand."""

from pathlib import Path

import pytest
from fresh_python import FreshPython

TESTS = Path(__file__).parents[1]
BEGIN = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]"

TRAINING = """
import logging
import torch
from gpuless.other_device import in_software
from runs import Training

logging.basicConfig(level=logging.INFO)

def trained(device, level):
    with Training(device=device, level=level, backend="auto") as run:
        run.lower_scale()
        run.amp.watch(every=1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        for bad in (False, True, False):
            run.step(bad=bad, max_norm=0.1)
            run.amp.step_schedulers(scheduler)
        stats = run.amp.stats()
        assert (stats["steps"], stats["skipped"], scheduler.last_epoch) == (2, 1, 2), stats
        assert "never been run on odd" in stats["backend_reason"] or device == "cpu"
        with run.amp.autocast():
            x = torch.ones(2, 2, device=device)
            dtypes = (x @ x).dtype, x.half().exp().dtype, x.half().softmax(-1).dtype
        y = run.model(run.x)
        return [p.detach().cpu() for p in run.amp.master_params()], dtypes, y.dtype

for level in ("O1", "O2"):
    expected = trained("cpu", level)
    with in_software() as device:
        found = trained(device, level)
    assert found[1:] == expected[1:]
    # half products have the same bits; only the record and bias corrections lack float64
    torch.testing.assert_close(found[0], expected[0], rtol=8 * 2.0**-23, atol=1e-8)
"""

OPS = """
import torch
import tritonamp
from gpuless.other_device import in_software

class Product(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6, 2, device=device), requires_grad=False)

    def forward(self, x):
        y = x @ self.weight
        assert y.dtype is torch.float16
        assert torch.nn.functional.layer_norm(y, (2,)).dtype is torch.float16
        assert y.masked_fill(y > 0, -1e9).min().item() == -65504
        return y.exp()

with in_software("DEVICE") as device, torch.no_grad():
    model = Product(device)
    for level in ("O1", "O2"):
        amp = tritonamp.enable(model, level=level)
        assert "never been run on DEVICE" in amp.stats()["backend_reason"]
        x = torch.full((3, 6), 0.5, device=device)
        assert model(x).dtype is torch.float32
        half = tritonamp.half_function(lambda x: x)
        wide = tritonamp.float_function(lambda x: x @ x.t())
        with amp.autocast():
            assert half(x).dtype is torch.float16
            assert wide(x.half()).dtype is torch.float32
        amp.disable()
        assert (x @ model.weight).dtype is torch.float32
"""


def run(fresh_python: FreshPython, program: str, folder: Path) -> str:
    done = fresh_python.run(f"{BEGIN}\n{program}", folder, {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_training(fresh_python: FreshPython, tmp_path: Path) -> None:
    """A skip, clipping, a scheduler and ``watch``."""
    log = run(fresh_python, TRAINING, tmp_path)
    assert "backend eager for odd:0: tritonamp has never been run on odd" in log


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_ops_are_cast(fresh_python: FreshPython, tmp_path: Path, device: str) -> None:
    """By rules at torch's own autocast key for the device."""
    run(fresh_python, OPS.replace("DEVICE", device), tmp_path)

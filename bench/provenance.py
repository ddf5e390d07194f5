"""Where a measurement comes from: device, versions, commit."""

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import tritonamp
from tritonamp.kernels.device import triton_version

ROOT = Path(__file__).resolve().parents[1]


def machine(device: torch.device) -> dict[str, Any]:
    """Return what every row carries."""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"cpu {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton_version(),
        "tritonamp": tritonamp.__version__,
        "commit": commit(),
    }


def commit() -> str:
    """Return the checked out commit; "unknown" outside a checkout.

    "-dirty" follows where files that Git knows differ from it.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def slug(text: str) -> str:
    """For file names."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")

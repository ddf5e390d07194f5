"""Device, versions and commit for the files in results/, and functions that write them."""

import contextlib
import json
import platform
import re
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from commits import commit

import tritonamp
from tritonamp.kernels.device import triton_version


def machine(device: torch.device) -> dict[str, Any]:
    """Return the fields of every row: device, versions and commit."""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"cpu {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton_version(),
        "tritonamp": tritonamp.__version__,
        "commit": commit(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def run_name() -> str:
    """Return the name of a run: this machine's GPU and the date."""
    return f"{slug(torch.cuda.get_device_name())}-{time.strftime('%Y-%m-%d')}"


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write JSON with a line for each item of a list, so that a diff of two files can be read."""
    head = {key: value for key, value in record.items() if not isinstance(value, list)}
    parts = [json.dumps(head, indent=1)[:-2]]
    for key, value in record.items():
        if isinstance(value, list):
            parts.append(f' "{key}": [\n' + ",\n".join(map(json.dumps, value)) + "\n ]")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(",\n".join(parts) + "\n}\n")


def reason_of(error: Exception) -> str:
    """Return an error as one line, the reason for a row that was not measured."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def slug(text: str) -> str:
    """Return text for a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")

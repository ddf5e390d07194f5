"""``python -m tritonamp doctor``: what this machine has, what will run on it, and why."""

import platform

import torch
from torch import nn

import tritonamp
from tritonamp.commands.table import table
from tritonamp.kernels import device as hardware
from tritonamp.kernels._implementations import operations

TRIALS = [("O0", torch.float16)] + [
    (level, dtype) for dtype in (torch.float16, torch.bfloat16) for level in ("O1", "O2", "O3")
]


def report() -> str:
    parts = [table(("what", "found"), _versions())]
    for device in _devices():
        parts.append(f"{device}: {_describe(device)}")
        parts.append(
            table(
                ("operation", "backend", "reason"),
                [_operation(name, device) for name in operations()],
            )
        )
        parts.append(
            table(
                ("level", "dtype", "one training step"),
                [_trial(*trial, device) for trial in TRIALS],
            )
        )
    return "\n\n".join(parts)


def _versions() -> list[tuple[str, str]]:
    gpus = torch.cuda.device_count()
    return [
        ("python", _python()),
        ("tritonamp", tritonamp.__version__),
        ("torch", torch.__version__),
        ("triton", hardware.triton_version() or "cannot be imported"),
        ("CUDA", _cuda()),
        ("GPUs", str(gpus) if gpus else "none that torch can use"),
    ]


def _python() -> str:
    implementation, system = platform.python_implementation(), platform.system()
    return f"{platform.python_version()} ({implementation}, {system})"


def _cuda() -> str:
    if torch.version.cuda is not None:
        return f"{torch.version.cuda} (what torch was built for)"
    return (
        f"none: torch was built for ROCm {torch.version.hip}"
        if torch.version.hip
        else "none: a CPU build of torch"
    )


def _devices() -> list[torch.device]:
    """Return the GPUs, or the CPU where there is none."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [
        torch.device("cpu")
    ]


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        processor = platform.processor() or platform.machine()
        return (
            f"{processor}, {torch.get_num_threads()} threads; half matmuls are "
            "computed in FP32 and rounded: for trying things out, not for speed"
        )
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    capability = hardware.capability(device)
    shown = (
        "no compute capability"
        if capability is None
        else "compute capability {}.{}".format(*capability)
    )
    return f"{properties.name}, {shown}, {memory}"


def _operation(name: str, device: torch.device) -> tuple[str, str, str]:
    backend = hardware.choose_backend("auto", device)
    return name, backend.name, backend.reason


def _trial(level: str, dtype: torch.dtype, device: torch.device) -> tuple[str, str, str]:
    shown_dtype = "float32" if level == "O0" else str(dtype).removeprefix("torch.")
    try:
        return level, shown_dtype, _train_one_step(level, dtype, device)
    except Exception as error:  # whatever goes wrong is the answer that was asked for
        return level, shown_dtype, f"no: {error}"


def _train_one_step(level: str, dtype: torch.dtype, device: torch.device) -> str:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters())
    amp = tritonamp.enable(model, optimizer, level=level, dtype=dtype)
    try:
        amp.backward(model(torch.ones(4, 8, device=device)).square().mean())
        optimizer.step()
        stats = amp.stats()
    finally:
        amp.disable()
    if stats["skipped"]:
        return f"no: the step was skipped, {stats['last_skip_reason']}"
    return f"works, loss scale {stats['scale']:g}"

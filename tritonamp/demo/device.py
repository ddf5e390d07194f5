"""Which device the demo runs on."""

import torch


def chosen_device(name: str | None) -> torch.device:
    """Return the device of that name; None: the GPU where there is one.

    Exits with a message for one that is not there.
    """
    gpus = torch.cuda.device_count()
    there = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{index}" for index in range(gpus))]
    if name is not None and name not in there:
        raise SystemExit(f"--device: expected on this machine {', '.join(there)}, got {name}")
    device = torch.device(name or ("cuda" if gpus else "cpu"))
    if device.type == "cpu":
        # models this small gain little from more, and on a busy machine lose a lot
        torch.set_num_threads(1)
    return device


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return "cpu, one thread"

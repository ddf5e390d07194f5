"""The device of the demo."""

import torch


def chosen_device(name: str | None) -> torch.device:
    """Return the device ``name``; for None a GPU if there is one, else the CPU.

    Exit with a message if the machine has no such device.
    """
    gpus = torch.cuda.device_count()
    there = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{index}" for index in range(gpus))]
    if name is not None and name not in there:
        raise SystemExit(f"--device: expected on this machine {', '.join(there)}, got {name}")
    device = torch.device(name or ("cuda" if gpus else "cpu"))
    if device.type == "cpu":
        # small models gain little from more threads, and lose a lot on a busy machine
        torch.set_num_threads(1)
    return device


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return "cpu, one thread"

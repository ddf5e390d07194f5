"""How much memory a training step takes: the allocator's peak, or on a CPU a count of tensors."""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

MEANING = {
    "cuda": "the most that the CUDA allocator had handed out",
    "cpu": (
        "parameters, buffers, optimizer state, gradients and saved activations of one step, counted"
    ),
}


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()  # a model of before may be in a reference cycle
        torch.cuda.reset_peak_memory_stats(device)


def peak(
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[], None],
) -> int:
    """Return the most bytes since ``forget_peak``; on a CPU, what one ``backward()`` holds.

    Nobody keeps a peak on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = [*model.parameters(), *stepped]
    state = [value for values in optimizer.state.values() for value in values.values()]
    kept = _storages(
        [*parameters, *model.buffers(), *(value for value in state if isinstance(value, Tensor))]
    )
    saved = _saved_by(backward)
    gradients = _storages(parameter.grad for parameter in parameters if parameter.grad is not None)
    return sum((kept | saved).values()) + sum(gradients.values())


def _saved_by(backward: Callable[[], None]) -> dict[int, int]:
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        saved.update(_storages([tensor]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        backward()
    return saved


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address to bytes, so that views of one memory count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}

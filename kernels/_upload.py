"""Small tables on their way to a device."""

import torch
from torch import Tensor


class Upload:
    """Copies small CPU tensors to a device without waiting and without allocation.

    A piece of pinned memory is used again when the copy out of it is through. What a CUDA graph
    captures copies from the same piece at every replay: that piece is never used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[tuple[Tensor, torch.cuda.Event]] = []
        self._spare: Tensor | None = None  # pinning during a capture would break it
        self._captured: list[Tensor] = []

    def send(self, values: Tensor, target: Tensor) -> None:
        """Copy ``values`` to ``target``, both of the same shape and dtype at every call."""
        if target is values:
            return
        if target.device.type != "cuda":
            target.copy_(values)
        elif torch.cuda.is_current_stream_capturing():
            piece = _pinned(values) if self._spare is None else self._spare
            self._spare = None
            self._captured.append(piece)
            target.copy_(piece.copy_(values), non_blocking=True)
        else:
            self._send(values, target)

    def _send(self, values: Tensor, target: Tensor) -> None:
        if self._spare is None:
            self._spare = _pinned(values)
        free = next((piece for piece in self._pieces if piece[1].query()), None)
        if free is None:
            free = _pinned(values), torch.cuda.Event()
            self._pieces.append(free)
        piece, through = free
        with torch.cuda.device(self._device):
            target.copy_(piece.copy_(values), non_blocking=True)
            through.record()


def _pinned(values: Tensor) -> Tensor:
    return torch.empty_like(values, pin_memory=True)

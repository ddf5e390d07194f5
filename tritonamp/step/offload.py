"""Masters and optimizer state in host memory, and their way through the device in each step."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._memory_order import memory_strides
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._optimizers import IN_PARTS, in_words
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels.device import is_capturing
from tritonamp.step.fused_rule import FusedRule

PART = 1 << 26
"""Largest number of bytes in one part of a step; a larger tensor is a part of its own."""
# Bytes. A tensor begins at a multiple of this in a buffer, as torch's allocator places it, so that
# kernels may load whole vectors.
_ALIGNED = 256


def check_offload(optimizer: Optimizer, rule: FusedRule | None, device: torch.device) -> None:
    """Raise ValueError unless the masters and the state of ``optimizer`` can be offloaded.

    Args:
        optimizer: optimizer whose groups are checked.
        rule: fused rule of the optimizer; None: the optimizer runs its own step.
        device: device of the model.
    """
    kind = type(optimizer).__name__
    if rule is None or not rule.offloads:
        why = "which runs its own step" if rule is None else "which works on whole matrices at once"
        raise ValueError(
            "offload='state': expected an optimizer that steps in parts, "
            f"{in_words(IN_PARTS, 'or')} (torch's, or of tritonamp.optim), got a {kind}, {why}"
        )
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(is_sharded, params)):
        raise ValueError(
            "offload='state': expected parameters in one piece, got sharded ones (FSDP2, DTensor): "
            "leave offload out, and divide the state among more ranks"
        )
    if device.type != "cuda":
        raise ValueError(
            f"offload='state': expected a model on a CUDA device, got one on {device}, whose state "
            "is in host memory already: leave offload out, or move the model first"
        )
    others = [str(p.device) for p in params if p.device != device]
    if others:
        raise ValueError(
            f"offload='state': expected all parameters on one device, got {device} and {others[0]}"
        )


class _Part(NamedTuple):
    """Parameters whose tensors go through a buffer together.

    Attributes:
        places: indices of the parameters in the lists of the step.
        begins: host tensor to its first byte in the buffer.
        nbytes: number of bytes that the tensors take in the buffer.
    """

    places: range
    begins: dict[Tensor, int]
    nbytes: int


class _Staged(NamedTuple):
    """A part on its way through a buffer.

    Attributes:
        copies: host tensors and their copies on the device, both flat, in the order of memory.
        views: host tensor to its copy, with the same shape and strides.
        arrived: event that is recorded after the copies to the device.
    """

    copies: list[tuple[Tensor, Tensor]]
    views: dict[Tensor, Tensor]
    arrived: torch.cuda.Event


class Offload:
    """Pinned host memory of masters and optimizer state, which a step takes through the device.

    ::

        buffer 0   arrive 0 | step 0 | leave 0   arrive 2 | step 2 | leave 2 ...
        buffer 1              arrive 1 | step 1 | leave 1   arrive 3 | step 3 ...

    One stream brings parts in, another stream takes them out, and the current stream steps. The
    host does not wait, so host memory may be read after ``wait`` only. A step that is skipped moves
    the same bytes, because only the device knows of the skip.

    Args:
        device: device of all parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arriving = torch.cuda.Stream(device)
        self._leaving = torch.cuda.Stream(device)
        self._buffers: list[Tensor] = []

    # host memory

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in pinned memory."""
        # without gaps, in the order of the tensor's memory, so that its bytes travel as one flat
        # copy
        pinned = torch.empty_strided(
            tensor.shape, memory_strides(tensor), dtype=tensor.dtype, device="cpu", pin_memory=True
        )
        return pinned.copy_(tensor.detach())

    def is_pinned(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in pinned memory."""
        return tensor.device.type == "cpu" and tensor.is_pinned()

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device of a tensor in host memory; the host does not wait."""
        # the step before may still be on its way out to this memory
        torch.cuda.current_stream(self._device).wait_stream(self._leaving)
        return tensor.to(self._device, non_blocking=True)

    def wait(self) -> None:
        """Wait for the device. Afterwards host memory can be read and written."""
        torch.cuda.synchronize(self._device)

    def give_up_buffers(self) -> None:
        """Free the memory on the device, until the next step."""
        self.wait()
        self._buffers.clear()

    def return_state(self, optimizer: Optimizer) -> None:
        """Move the state of an optimizer to the device of its parameters, at ``disable``."""
        self.wait()
        for param, state in optimizer.state.items():
            state |= on_device(state, param)

    # a step

    def parts_on_device(self, lists: TensorLists) -> Iterator[TensorLists]:
        """Yield the parts of a step's lists, on the device; writes to them reach host memory.

        Args:
            lists: lists of parameters on the device, and of state in host memory or on the device.
        """
        parts = list(_parts(lists, self.is_pinned))
        # Each part has plans of its own. Without room for all, every step would build them again.
        lists.memory.make_room(len(parts))
        self._make_buffers(max(part.nbytes for part in parts))
        current = torch.cuda.current_stream(self._device)
        # The step before may still write to the host memory that is about to be read. The current
        # stream is not waited for: the first parts arrive while the backward still runs.
        self._arriving.wait_stream(self._leaving)
        staged = [self._start_arrival(part, k) for k, part in enumerate(parts[:2])]
        for k, part in enumerate(parts):
            copies, views, arrived = staged.pop(0)
            current.wait_event(arrived)
            try:
                yield lists.part(part.places, views)
            finally:
                # Also after an exception: the next step waits for ``_leaving`` before it fills this
                # buffer, which launched kernels may still read.
                self._leaving.wait_event(_recorded(current))
            with torch.cuda.stream(self._leaving):
                for host, copy in copies:
                    host.copy_(copy, non_blocking=True)
            # into the same buffer, once this part has left it
            if k + 2 < len(parts):
                self._arriving.wait_event(_recorded(self._leaving))
                staged.append(self._start_arrival(parts[k + 2], k))

    def _start_arrival(self, part: _Part, k: int) -> _Staged:
        """Start to fill a buffer: even parts take the first one, odd parts the second."""
        copies, views, buffer = [], {}, self._buffers[k % 2]
        for host, begin in part.begins.items():
            copy = buffer[begin : begin + host.nbytes].view(host.dtype)
            copies.append((host.as_strided((host.numel(),), (1,)), copy))
            views[host] = copy.as_strided(host.shape, host.stride())
        with torch.cuda.stream(self._arriving):
            for flat, copy in copies:
                copy.copy_(flat, non_blocking=True)
        return _Staged(copies, views, _recorded(self._arriving))

    def _make_buffers(self, nbytes: int) -> None:
        if self._buffers and self._buffers[0].numel() >= nbytes:
            return
        current = torch.cuda.current_stream(self._device)
        # Smaller buffers are freed to the current stream, which may use their memory at once. So no
        # other stream may still read them.
        current.wait_stream(self._leaving)
        # cleared first, because the device may have no room for both sizes at once
        self._buffers.clear()
        self._buffers += [
            torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        ]
        # the current stream may still use the memory that it has given to the new buffers
        self._arriving.wait_stream(current)

    def refuse_capture(self) -> None:
        """Raise RuntimeError if a CUDA graph is being captured."""
        if is_capturing(self._device):
            raise RuntimeError(
                "offload='state': expected optimizer.step() outside of a CUDA graph, got a "
                "capture: its replays would read host memory that other steps write. Capture "
                "forward and backward, and step outside, or leave offload out"
            )


def on_device(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return a parameter's state on its device: tensors by key, step counts excluded."""
    return {
        key: value.to(param.device)
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step"
    }


def _parts(lists: TensorLists, is_host: Callable[[Tensor], bool]) -> Iterator[_Part]:
    """Yield parts of at most ``PART`` bytes, or of one parameter."""
    begin, begins, nbytes = 0, dict[Tensor, int](), 0
    for i in range(len(lists)):
        # a list may repeat a parameter where it has no such state: each tensor is moved once
        hosts = [t for t in dict.fromkeys(lists.at(i)) if is_host(t)]
        sizes = [-(-t.nbytes // _ALIGNED) * _ALIGNED for t in hosts]
        if begins and nbytes + sum(sizes) > PART:
            yield _Part(range(begin, i), begins, nbytes)
            begin, begins, nbytes = i, {}, 0
        for host, size in zip(hosts, sizes, strict=True):
            begins[host], nbytes = nbytes, nbytes + size
    yield _Part(range(begin, len(lists)), begins, nbytes)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event

"""An FP32 value kept as a half tensor and the 16 bits that it lacks."""

import weakref

import torch
from torch import Tensor

from tritonamp.kernels._device_tables import memory_strides
from tritonamp.kernels._small_state import (
    cut,
    in_memory_of,
    in_order_of_memory,
    join,
    padded,
)
from tritonamp.kernels.cast import fp32_value
from tritonamp.policy import HALF_DTYPES


class PackedValue:
    """The FP32 value of a half tensor, in two bytes beside the tensor's own.

    ``get`` makes an FP32 tensor. What is written into it counts at the next ``settle``, which comes
    before each forward, step and save; after a step it is out of date, and a write to it raises.
    Somebody else may write to the half tensor, too: the 16 bits stay, at most half a unit in the
    last place of what was written (a whole one below a power of two).

    Args:
        half: float16 or bfloat16; its rounding of ties may change by one unit (bfloat16).
        value: its FP32 value; None: that of ``half`` and ``remainder``.
        remainder: the 16 bits, int16 of shape (padded(n),), taken over; None: zeros.

    Attributes:
        half: the half tensor; FP32 while its module is healed, and then its own value.
    """

    def __init__(
        self, half: Tensor, value: Tensor | None = None, remainder: Tensor | None = None
    ) -> None:
        self.half = half
        if remainder is None:
            size = padded(half.numel())
            remainder = torch.zeros(size, dtype=torch.int16, device=half.device)
        self._remainder = remainder
        self._strides = memory_strides(half)
        self._layout = half.dtype, half.device, half.stride()  # for which the 16 bits are known
        self._view: Tensor | None = None
        self._versions = 0, 0  # of half tensor and view when they agreed
        self._stale: tuple[weakref.ref[Tensor], int] | None = None
        if value is not None:
            self._set(value)

    def remainder(self) -> Tensor:
        """Return the 16 bits, int16 of shape (padded(n),), in the order of the tensor's memory.

        Returns:
            the tensor itself while it is FP32.
        """
        half = self.half
        if (half.dtype, half.device, half.stride()) == self._layout:
            return self._remainder
        if half.dtype not in HALF_DTYPES:
            return half
        if half.device != self._remainder.device:
            raise RuntimeError(
                f"a parameter of the model is on {half.device}, the lower bits of its FP32 "
                f"value on {self._remainder.device}: move the model to its device before "
                "tritonamp.enable"
            )
        n, strides = half.numel(), memory_strides(half)
        if strides != self._strides:  # channels_last, since
            before = self._remainder[:n].as_strided(half.shape, self._strides)
            self._remainder[:n] = in_order_of_memory(before, like=half).clone()
            self._strides = strides
        self._layout = half.dtype, half.device, half.stride()
        return self._remainder

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return the FP32 value in a tensor that nobody writes to, and that nothing here keeps."""
        self.settle()
        half = self.half.detach()
        if half.dtype not in HALF_DTYPES:
            return half
        value = join(in_order_of_memory(half), self.remainder()[: half.numel()])
        return in_memory_of(half, value)

    @torch.no_grad()
    def get(self) -> Tensor:
        """Return the FP32 value to read and write; until the next step always the same tensor."""
        value = self.read()
        if self.half.dtype not in HALF_DTYPES:
            return value
        if self._view is None:
            self._view = value
        else:  # a CUDA graph that ran again is no write that torch counts
            self._view.copy_(value)
        self._agree()
        return self._view

    @property
    def is_known_to_others(self) -> bool:
        """Whether somebody may hold an FP32 tensor of it."""
        return self._view is not None or self._stale is not None

    def load(self, value: Tensor) -> None:
        """Take a value that counts at the next ``settle``, wherever it rounds to the half tensor's.

        Args:
            value: of the half tensor's shape, on any device.
        """
        self._view = value.detach().to(self.half.device, torch.float32, copy=True)
        self._versions = -1, -1

    @torch.no_grad()
    def settle(self) -> None:
        """Take over what somebody has written into the FP32 tensor.

        Raises:
            RuntimeError: it was written to after a step.
        """
        self._check_stale()
        view, (half_version, view_version) = self._view, self._versions
        if view is None:
            return
        moved = self.half._version != half_version
        if view._version != view_version:
            if moved:
                view.copy_(fp32_value(self.half.detach(), view))
            self._set(view)
            self._agree()
        elif moved:
            self.release()

    def release(self) -> None:
        """Give up the FP32 tensor: a step, or somebody else, has written to the half tensor."""
        if self._view is not None:
            self._stale = weakref.ref(self._view), self._view._version
            self._view = None

    def _agree(self) -> None:
        assert self._view is not None
        self._versions = self.half._version, self._view._version

    def _check_stale(self) -> None:
        if self._stale is None:
            return
        view = self._stale[0]()
        if view is not None and view._version != self._stale[1]:
            self._stale = None
            raise RuntimeError(
                "an FP32 value of state='8bit' was written to after a step (or amp.sleep()): "
                "expected a tensor from amp.master_params() or amp.named_master_params() after "
                "that, got an earlier one, whose values nobody reads any more: ask for it again, "
                "then write"
            )
        if view is None:
            self._stale = None

    def _set(self, value: Tensor) -> None:
        half = self.half.detach()
        if half.dtype not in HALF_DTYPES:
            half.copy_(value)
            return
        remainder = self.remainder()
        wide = in_order_of_memory(value.to(half.device, torch.float32), like=half)
        upper, lower = cut(wide, half.dtype)
        half.copy_(in_memory_of(half, upper))
        remainder[: half.numel()] = lower

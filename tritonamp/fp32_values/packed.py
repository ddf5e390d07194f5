"""An FP32 value kept as a half tensor and the 16 bits that it lacks."""

import torch
from torch import Tensor

from tritonamp.fp32_values.lent import Home, LentValue
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.kernels._memory_order import (
    in_memory_of,
    in_order_of_memory,
    memory_strides,
    padded,
)
from tritonamp.kernels._packed_masters import join_master, split_master
from tritonamp.policy import HALF_DTYPES


class PackedValue(LentValue):
    """The FP32 value of a half tensor, in 16 bits per element in addition to the tensor.

    If the half tensor is written to, the 16 bits stay. They are at most half a unit in the last
    place of the written value, or a whole unit below a power of two.

    Args:
        half: a float16 or bfloat16 tensor; its rounding of ties may change by one unit (bfloat16).
        value: FP32 value of ``half``; None: the value that ``half`` and ``remainder`` make.
        remainder: the 16 bits, int16 of shape (padded(n),), taken over; None: zeros.
        strides: ``memory_strides`` of ``half`` when ``remainder`` was made; None: the present ones.
        home: host memory that holds the 16 bits; None: they are on the device of ``half``.
    """

    made_by = "masters='packed' or state='8bit'"

    def __init__(
        self,
        half: Tensor,
        value: Tensor | None = None,
        remainder: Tensor | None = None,
        strides: tuple[int, ...] | None = None,
        home: Home | None = None,
    ) -> None:
        super().__init__(half)
        if remainder is None:
            size = padded(half.numel())
            remainder = torch.zeros(size, dtype=torch.int16, device=half.device)
        self._home = home
        self._remainder = remainder if home is None else home.pin(remainder)
        self._strides = strides or memory_strides(half)
        # dtype, device and strides for which the 16 bits are known to lie in order
        self._layout = half.dtype, half.device, half.stride() if strides is None else strides
        if value is not None:
            self._set(value)

    def stored_form(self) -> Tensor:
        """Return the 16 bits, int16 of shape (padded(n),), in the order of the tensor's memory.

        Returns:
            the 16 bits, or the half tensor itself while it is FP32.
        """
        half = self.half
        if (half.dtype, half.device, half.stride()) == self._layout:
            return self._remainder
        if half.dtype not in HALF_DTYPES:
            return half
        if half.device != self._layout[1]:
            raise self._wrong_device(self._layout[1])
        n, strides = half.numel(), memory_strides(half)
        if strides != self._strides:  # channels_last, since
            self._wait()
            before = self._remainder[:n].as_strided(half.shape, self._strides)
            self._remainder[:n] = in_order_of_memory(before, like=half).clone()
            self._strides = strides
        self._layout = half.dtype, half.device, half.stride()
        return self._remainder

    @torch.no_grad()
    def read(self) -> Tensor:
        self.settle()
        half = self.half.detach()
        if half.dtype not in HALF_DTYPES:
            return half
        lower = self.stored_form()
        lower = lower if self._home is None else self._home.fetch(lower)
        return in_memory_of(half, join_master(in_order_of_memory(half), lower[: half.numel()]))

    @leaves_inference_mode
    def load(self, value: Tensor) -> None:
        self.view = value.detach().to(self.half.device, torch.float32, copy=True)
        self._versions = -1, -1  # of no tensor: ``settle`` takes both for written to

    def _set(self, value: Tensor) -> None:
        half = self.half.detach()
        if half.dtype not in HALF_DTYPES:
            half.copy_(value)
            return
        remainder = self.stored_form()
        wide = in_order_of_memory(value.to(half.device, torch.float32), like=half)
        upper, lower = split_master(wide, half.dtype)
        half.copy_(in_memory_of(half, upper))
        self._wait()
        remainder[: half.numel()] = lower

    def _wait(self) -> None:
        if self._home is not None:
            self._home.wait()

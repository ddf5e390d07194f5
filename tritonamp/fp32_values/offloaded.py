"""An FP32 value in host memory."""

import torch
from torch import Tensor

from tritonamp.fp32_values.lent import Home, LentValue
from tritonamp.kernels.cast import fp32_value
from tritonamp.policy import HALF_DTYPES


class OffloadedValue(LentValue):
    """The FP32 value of a half tensor, in host memory between steps.

    A half tensor that was written to, or that has other memory, overrides the value where the two
    no longer agree, as for a master on the device.

    Args:
        half: a float16 or bfloat16 tensor on the device.
        value: FP32 value of ``half``, on any device.
        home: host memory for the value.
    """

    made_by = "offload='state'"

    def __init__(self, half: Tensor, value: Tensor, home: Home) -> None:
        super().__init__(half)
        self._home = home
        self._device = half.device
        self._master = home.pin(value.detach())
        self._agreed_with = self._half_state()

    def beside(self) -> Tensor:
        """Return the FP32 value in host memory, or the half tensor itself while it is FP32."""
        if self.half.device != self._device:  # moved since
            raise self._wrong_device(self._device)
        return self._master if self.half.dtype in HALF_DTYPES else self.half

    @torch.no_grad()
    def read(self) -> Tensor:
        self.settle()
        if self.half.dtype not in HALF_DTYPES:
            return self.half.detach()
        return self._home.fetch(self._master)

    @torch.no_grad()
    def load(self, value: Tensor) -> None:
        self._release()
        self._keep(value)
        self._agreed_with = 0, 0  # the half tensor is about to be written

    @property
    def needs_settling(self) -> bool:
        return True  # the half tensor may be written to at any time

    @torch.no_grad()
    def settle(self) -> None:
        """Take over writes to the lent tensor and to the half tensor."""
        super().settle()
        if self._agreed_with != self._half_state() and self.half.dtype in HALF_DTYPES:
            self._keep(fp32_value(self.half.detach(), self._home.fetch(self.beside())))
            self._agreed_with = self._half_state()

    def note_step(self) -> None:
        super().note_step()
        self._agreed_with = self._half_state()

    def _set(self, value: Tensor) -> None:
        half = self.half.detach()
        half.copy_(value)
        if half.dtype in HALF_DTYPES:
            self._keep(value)
            self._agreed_with = self._half_state()

    def _keep(self, value: Tensor) -> None:
        self._home.wait()  # a step may still be on its way into this memory
        self._master.copy_(value)

    def _half_state(self) -> tuple[int, int]:
        """Return address and version of the half tensor; a write, or other memory, changes them."""
        return self.half.data_ptr(), self.half._version

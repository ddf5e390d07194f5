"""An FP32 value that is not stored as an FP32 tensor on the device, and is lent as one."""

import weakref
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.kernels.cast import fp32_value
from tritonamp.policy import HALF_DTYPES


class Home(Protocol):
    """Host memory that steps stream to the device and back: ``step.offload.Offload``."""

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in this memory."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device; the host does not wait."""

    def wait(self) -> None:
        """Wait for all reads and writes of the device in this memory."""


class LentValue(ABC):
    """The FP32 value of a half tensor, stored in a form of its own.

    ``get`` makes an FP32 tensor. A write to that tensor counts at the next ``settle``, which comes
    before each forward, step and save. After a step the tensor is out of date, and a write to it
    raises an error.

    Args:
        half: a float16 or bfloat16 tensor.

    Attributes:
        half: the half tensor. While its module is healed it is FP32, and its own value.
        view: FP32 tensor that was lent; None: none was lent since the last step.
        made_by: policy field that asks for this form, for messages.
    """

    made_by: str

    def __init__(self, half: Tensor) -> None:
        self.half = half
        self.view: Tensor | None = None
        self._versions = 0, 0  # of half tensor and view when they agreed
        # the view of before a step, with its version then: a write to it would be lost
        self._stale: tuple[weakref.ref[Tensor], int] | None = None

    @abstractmethod
    def stored_form(self) -> Tensor:
        """Return the stored form of the value, or the half tensor itself while it is FP32."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return the FP32 value in a tensor that is not kept, and must not be written to."""

    @abstractmethod
    def load(self, value: Tensor) -> None:
        """Take over a value that counts at the next ``settle``, where it rounds to the half tensor.

        Args:
            value: a tensor of the half tensor's shape, on any device.
        """

    @abstractmethod
    def _set(self, value: Tensor) -> None:
        """Store an FP32 value, and round it into the half tensor."""

    @torch.no_grad()
    @leaves_inference_mode
    def get(self) -> Tensor:
        """Return the FP32 value to read and write, in the same tensor until the next step."""
        value = self.read()
        if self.half.dtype not in HALF_DTYPES:
            return value
        if self.view is None:
            self.view = value
        else:  # a CUDA graph that ran again is no write that torch counts
            self.view.copy_(value)
        self._agree()
        return self.view

    @property
    def needs_settling(self) -> bool:
        """Whether the user may hold an FP32 tensor of this value."""
        return self.view is not None or self._stale is not None

    @torch.no_grad()
    def settle(self) -> None:
        """Take over writes to the FP32 tensor.

        Raises:
            RuntimeError: the tensor was written to after a step.
        """
        self._check_stale()
        view, (half_version, view_version) = self.view, self._versions
        if view is None:
            return
        half_was_written = self.half._version != half_version
        if view._version != view_version:
            if half_was_written:  # it overrides the view where they disagree
                view.copy_(fp32_value(self.half.detach(), view))
            self._set(view)
            self._agree()
        elif half_was_written:
            self._release()

    def note_step(self) -> None:
        """Give up the FP32 tensor, because a step has written to half tensor and stored form."""
        self._release()

    def _release(self) -> None:
        if self.view is not None:
            self._stale = weakref.ref(self.view), self.view._version
            self.view = None

    def _agree(self) -> None:
        assert self.view is not None
        self._versions = self.half._version, self.view._version

    def _check_stale(self) -> None:
        if self._stale is None:
            return
        view = self._stale[0]()
        if view is not None and view._version != self._stale[1]:
            self._stale = None
            raise RuntimeError(
                f"an FP32 value of {self.made_by} was written to after a step (or amp.sleep()): "
                "expected a tensor from amp.master_params() or amp.named_master_params() after "
                "that, got an earlier one, whose values are no longer read: ask for it again, "
                "then write"
            )
        if view is None:
            self._stale = None

    def _wrong_device(self, where: torch.device) -> RuntimeError:
        return RuntimeError(
            f"a parameter of the model is on {self.half.device}, its value of {self.made_by} is "
            f"for one on {where}: move the model to its device before tritonamp.enable"
        )

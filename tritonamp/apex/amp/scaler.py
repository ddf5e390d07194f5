"""apex's interface of a loss scaler."""

import torch

import tritonamp

MIN_LOSS_SCALE = 2.0**-24  # apex had no floor, and a scale of 0 in the end
INIT_LOSS_SCALE = 2.0**16


class LossScaler:
    """``_amp_state.loss_scalers[i]``, which reads and sets a ``tritonamp.GradScaler``.

    Reading waits for the device.

    Args:
        loss_scale: "dynamic", or a fixed number.
        min_loss_scale: lower bound of a dynamic loss scale; None is 2^-24.
        max_loss_scale: upper bound of a dynamic loss scale.
        device: device of the losses.
    """

    def __init__(
        self,
        loss_scale: str | float,
        min_loss_scale: float | None,
        max_loss_scale: float,
        device: torch.device,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._device = device
        if not self.dynamic:
            self._make(float(loss_scale), float(loss_scale), float(loss_scale))
            return
        low = min_loss_scale or min(MIN_LOSS_SCALE, max_loss_scale)
        high = max(low, max_loss_scale)
        self._make(max(low, min(high, INIT_LOSS_SCALE)), low, high)

    def _make(self, scale: float, low: float, high: float) -> None:
        self.scaler = tritonamp.GradScaler(
            self._device.type, scale, min_scale=low, max_scale=high, backoff_on_fault=self.dynamic
        )
        self.scaler.scale_tensor(self._device)

    def loss_scale(self) -> float:
        """Return the scale that the next loss will get."""
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:
        return float(self.scaler.get_scale())

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        if self.dynamic:
            self.scaler.update(float(value))
        else:
            self._make(float(value), float(value), float(value))

    @property
    def _unskipped(self) -> int:
        """Number of steps without a skip since the scale last changed."""
        return int(self.scaler.state_dict()["_growth_tracker"])

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        scale = self._loss_scale
        self.scaler.load_state_dict({**self.scaler.state_dict(), "_growth_tracker": int(value)})
        if self.dynamic:
            self._loss_scale = scale  # even one beyond the bounds

    @property
    def _min_loss_scale(self) -> float:
        return self.scaler.rule.min_scale

    @property
    def _max_loss_scale(self) -> float:
        return self.scaler.rule.max_scale

    @property
    def _scale_seq_len(self) -> int:
        return self.scaler.rule.growth_interval

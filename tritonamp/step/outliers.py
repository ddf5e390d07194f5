"""Windows of losses and norms by which outliers are found: one per scaler, on the device."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._transfer import upload
from tritonamp.kernels.device import refuse_capture
from tritonamp.kernels.outliers import WINDOW, Limit, new_window
from tritonamp.scaler import GradScaler


class OutlierWindows:
    """Losses and gradient norms of the last steps, by scaler, so that losses with ids stay apart.

    Args:
        sigmas: number of standard deviations above the others from which a step is an outlier;
            None: no step is one.
    """

    def __init__(self, sigmas: float | None) -> None:
        self._sigmas = sigmas
        # Weak: an ``Amp`` drops scalers when it loads a state, and their windows go with them. A
        # loaded window is in main memory until the next loss, since only a decision knows the
        # device.
        self._windows: weakref.WeakKeyDictionary[GradScaler, Tensor] = weakref.WeakKeyDictionary()

    def limit(self, scaler: GradScaler, device: torch.device) -> Limit | None:
        """Return the limit for losses that ``scaler`` scales; None: the policy has no limit.

        Args:
            scaler: scaler of the losses.
            device: device of the decision.
        """
        if self._sigmas is None:
            return None
        window = self._windows.get(scaler)
        if window is None or window.device != device:
            # each replay would empty a window that was made inside of the graph
            refuse_capture(device, "the window of outliers")
            loaded, window = window, new_window(device)
            if loaded is not None:
                upload(loaded, window)
            self._windows[scaler] = window
        return Limit(window, float(self._sigmas))

    def state(self, scalers: Mapping[int, GradScaler]) -> dict[str, list[float]]:
        """Return the windows as plain values, by loss_id. Reads the device."""
        return {str(i): self._windows[s].tolist() for i, s in scalers.items() if s in self._windows}

    def load_state(self, state: Mapping[str, Any], scalers: Mapping[int, GradScaler]) -> None:
        """Continue from a result of ``state``; windows that the state lacks are emptied."""
        if self._sigmas is None:
            return
        for i, scaler in scalers.items():
            values = torch.tensor(state.get(str(i)) or [0.0] * WINDOW, dtype=torch.float32)
            if scaler in self._windows:
                # in place, because a CUDA graph may write there
                upload(values, self._windows[scaler])
            elif str(i) in state:
                self._windows[scaler] = values

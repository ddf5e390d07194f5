"""Half weights that differ from their rounded FP32 masters: one was written through ``.data``.

torch does not count writes through ``.data``, so the other side does not follow. A value written
into a half weight is lost at the next step, which rounds the master into it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.diagnosis.looks import Looks
from tritonamp.kernels.device import wide_dtype

logger = logging.getLogger("tritonamp")


class UnseenWrites:
    """Looks for half weights that differ from their masters before a few steps, and warns once.

    Args:
        names: function that returns the name of each parameter.

    Attributes:
        looks: numbers on their way to the host.
    """

    def __init__(self, names: Callable[[], Mapping[Tensor, str]]) -> None:
        self._names = names
        self.looks = Looks(self._read)

    def look(self, params: Sequence[Tensor], unlike: Sequence[Tensor]) -> None:
        """Start reading how many elements differ. A later step reads the numbers and may warn.

        Args:
            params: half parameters.
            unlike: for each parameter, the number of elements that are not the rounded master, 0-d
                on the device.
        """
        if unlike and not self.looks.has_ended:
            device = unlike[0].device
            counts = [count.to(device, wide_dtype(device)) for count in unlike]
            self.looks.start(torch.stack(counts), params)

    def _read(self, values: Sequence[float], params: Any) -> None:
        found = {p: int(count) for p, count in zip(params, values, strict=True) if count}
        if not found:
            return
        self.looks.has_ended = True
        names = self._names()
        param, count = next(iter(found.items()))
        others = f" and in {len(found) - 1} more" if len(found) > 1 else ""
        logger.warning(
            "in parameter %s%s, %d of %d half values are not those of the FP32 master that the "
            "optimizer steps on: one of the two was written through .data, which torch does not "
            "count, so that the other does not follow, and the next step overwrites the half "
            "values. Inside of `with torch.no_grad():`, write to amp.master_params() or "
            "amp.named_master_params() (half parameters follow), or cut values off in the model's "
            "own parameters without .data, as in param.clamp_(-1, 1): small changes, as of "
            "param.mul_(0.9999), are rounded away there%s",
            repr(names[param]) if param in names else f"of shape {tuple(param.shape)}",
            others,
            count,
            param.numel(),
            ". A bit that flips in memory also changes a single value" if count == 1 else "",
        )

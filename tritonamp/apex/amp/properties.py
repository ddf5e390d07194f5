"""The properties of apex's levels."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

import tritonamp
from tritonamp.policy import HALF_DTYPES


@dataclass
class Properties:
    """The properties of a level.

    Attributes:
        cast_model_type: dtype of parameters and inputs; None or False casts neither.
        patch_torch_functions: whether to cast around torch's functions, in the whole process.
        keep_batchnorm_fp32: whether norm layers of half models keep FP32 parameters.
        master_weights: whether the optimizer steps on FP32 copies of half parameters.
        loss_scale: "dynamic" or a number.
        patch_torch_functions_type: half dtype of the casts around torch's functions.
    """

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | bool | None = None
    patch_torch_functions: bool | None = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: str | float = 1.0
    patch_torch_functions_type: torch.dtype | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The properties as a dict."""
        return dataclasses.asdict(self)

    def policy(self, keep_outputs: bool) -> tritonamp.Policy:
        """Return the Policy with the same meaning.

        Its op policy is off, because apex's lists cast functions.

        Args:
            keep_outputs: whether outputs of a half model stay half.
        """
        half = self.cast_model_type if self.cast_model_type in HALF_DTYPES else None
        return tritonamp.Policy(
            dtype=half or self.patch_torch_functions_type or torch.float16,
            cast_model=half is not None,
            keep_norms_fp32=half is not None and bool(self.keep_batchnorm_fp32),
            master_weights=bool(self.master_weights),
            loss_scale=self.loss_scale,
            cast_inputs=half is not None,
            cast_outputs=None if keep_outputs or not self.cast_model_type else torch.float32,
            half_parameters=True,
        )

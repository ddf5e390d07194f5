"""The properties of apex's levels, and which of them a user may override."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

import tritonamp
from tritonamp.apex.amp._amp_state import warn_or_err

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass
class Properties:
    """What a level stands for.

    Attributes:
        cast_model_type: dtype of the parameters and the inputs; None or False leaves both alone.
        patch_torch_functions: casts around torch's functions, in the whole process.
        keep_batchnorm_fp32: norm layers keep FP32 parameters where ``cast_model_type`` is half.
        master_weights: the optimizer steps on FP32 copies of half parameters.
        loss_scale: "dynamic" or a number.
        patch_torch_functions_type: the half dtype of those casts.
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
        """All of them."""
        return dataclasses.asdict(self)

    def policy(self, keep_outputs: bool) -> tritonamp.Policy:
        """Return the Policy of the same meaning.

        Functions are cast by apex's lists, so its op policy is off.

        Args:
            keep_outputs: half outputs stay half though the model is cast.
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


opt_levels = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic", torch.float16),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
    "O4": Properties(True, "O4", None, True, None, None, 1.0, torch.bfloat16),
    "O5": Properties(True, "O5", torch.bfloat16, False, True, True, 1.0),
}


def resolve(opt_level: str, **overrides: Any) -> Properties:
    """Return the level's properties with those overridden that are not None.

    Raises:
        RuntimeError: an unknown level, or overrides that contradict it.
        AssertionError: keep_batchnorm_fp32 is neither a bool nor "True" or "False".
        ValueError: loss_scale is neither "dynamic" nor a number.
    """
    if opt_level not in opt_levels:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}: expected one of "
            f"{', '.join(opt_levels)}; they begin with the letter O, not the digit zero"
        )
    given = {name: value for name, value in overrides.items() if value is not None}
    if "keep_batchnorm_fp32" in given:
        given["keep_batchnorm_fp32"] = _to_bool(given["keep_batchnorm_fp32"])
    if given.get("loss_scale", "dynamic") != "dynamic":
        given["loss_scale"] = float(given["loss_scale"])
    if opt_levels[opt_level].patch_torch_functions:
        _check_patching_level(opt_level, given)
    elif given.get("patch_torch_functions") or "patch_torch_functions_type" in given:
        warn_or_err(
            f"opt_level={opt_level!r} casts the model, got patch_torch_functions="
            f"{given.get('patch_torch_functions')}: casts around functions come with "
            "opt_level='O1' or 'O4'"
        )
    return dataclasses.replace(opt_levels[opt_level], **given)


def _check_patching_level(opt_level: str, given: dict[str, Any]) -> None:
    """O1 and O4 leave the model's weights alone."""
    cast_model_type = given.get("cast_model_type")
    if cast_model_type not in (None, False, torch.float32):
        warn_or_err(
            f"opt_level={opt_level!r} casts around functions and keeps FP32 weights, got "
            f"cast_model_type={cast_model_type}: use opt_level='O2' or 'O3' for half weights"
        )
    for name in ("keep_batchnorm_fp32", "master_weights"):
        if name in given:
            warn_or_err(
                f"opt_level={opt_level!r} keeps all weights FP32, got {name}={given[name]}: leave "
                f"{name} out, or use opt_level='O2'"
            )
    level_type = opt_levels[opt_level].patch_torch_functions_type
    if given.get("patch_torch_functions_type", level_type) is not level_type:
        warn_or_err(
            f"opt_level={opt_level!r} means {level_type}, got patch_torch_functions_type="
            f"{given['patch_torch_functions_type']}: O1 is float16, O4 is bfloat16"
        )


def _to_bool(value: Any) -> bool:
    named = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
    if not isinstance(named, bool):
        raise AssertionError(
            f"keep_batchnorm_fp32: expected True, False, 'True', 'False' or None, got {value!r}"
        )
    return named

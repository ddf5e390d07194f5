"""apex's levels, and which of their properties a user may override."""

import dataclasses
from typing import Any

import torch

from tritonamp.apex.amp._amp_state import warn_or_err
from tritonamp.apex.amp.properties import Properties

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

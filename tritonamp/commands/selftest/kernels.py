"""Checks of every kernel against its eager twin, on the samples of its operation."""

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.commands.selftest.check import Check, Found, WrongError
from tritonamp.kernels import device as hardware
from tritonamp.kernels._implementations import Implementations, operations

MAX_ULPS = {torch.float16: 2.0, torch.bfloat16: 2.0, torch.float32: 64.0}
"""Half results are FP32 results rounded once, so that twins differ by a neighbour; FP32 ones differ
by the order in which long lines are added up. An element that was left out shows as thousands.
"""


def checks(device: torch.device, backend: str) -> Iterator[Check]:
    for operation in operations().values():
        for sample in operation.samples:
            name = " ".join(filter(None, (operation.name, sample.variant)))
            run = functools.partial(_compare, operation, sample, device, backend)
            yield Check(name, run)


def half_dtypes(device: torch.device) -> list[torch.dtype]:
    """Return float16, and bfloat16 if the device supports it."""
    try:
        hardware.check_dtype(torch.bfloat16, device)
    except hardware.UnsupportedDeviceError:
        return [torch.float16]
    return [torch.float16, torch.bfloat16]


def _compare(operation: Implementations, sample: Any, device: torch.device, backend: str) -> Found:
    """Run all calls of the sample, even after a failed one."""
    worst, count, failed = 0.0, 0, []
    for call in sample.calls(device, half_dtypes(device)):
        count += 1
        try:
            expected = [result.cpu() for result in call.run(operation.torch_function)]
            if backend != "triton":
                continue
            error, wrong = differs(_by_kernel(operation, call), expected)
        except Exception as problem:
            failed.append(f"{call.what}: {type(problem).__name__}: {problem}")
            continue
        worst = max(worst, error)
        if wrong:
            failed.append(f"{call.what}: {wrong}")
    if failed:
        raise WrongError(f"{len(failed)} of {count} calls: {failed[0]}")
    if backend != "triton":
        return Found(f"{count} calls", {"calls": count})
    return Found(f"{count} calls, at most {worst:.2g} ulps", {"calls": count, "max_ulps": worst})


def _by_kernel(operation: Implementations, call: Any) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # NumPy's about inf and NaN, in the interpreter
        return [result.cpu() for result in call.run(operation.triton_function)]


def differs(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, str]:
    """Return the largest error in ulps, and a sentence if it is too large, else ""."""
    worst, wrong = 0.0, ""
    for got, want in zip(actual, expected, strict=True):
        error, due = ulps(got, want), MAX_ULPS.get(want.dtype, 0.0)
        if error > due and not wrong:
            wrong = f"{error:.3g} ulps of {want.dtype} off its eager twin, {due:g} are due"
        worst = max(worst, error)
    return worst, wrong


def ulps(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error, in distances between neighbours of the dtype.

    The distance is the one at the expected value, or at the mean magnitude of its tensor if that is
    larger, because a sum that cancels is only as precise as its terms. The error is inf for another
    shape or dtype, for a value that is finite on one side only, and for a wrong integer.
    """
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else math.inf
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return math.inf
    got, want = actual[finite].double(), expected[finite].double()
    if not want.numel():
        return 0.0
    info = torch.finfo(expected.dtype)
    size = want.abs().clamp(min=max(float(want.abs().mean()), info.tiny))
    unit = torch.ldexp(torch.full_like(size, info.eps), torch.frexp(size).exponent - 1)
    return float(((got - want).abs() / unit).max())

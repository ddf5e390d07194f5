"""Inputs in the other half format, such as those of a bfloat16 pipeline for a float16 forward."""

import dataclasses
from collections.abc import Iterator

from torch import nn

from tritonamp.casts.inputs import input_tensors, signature_of
from tritonamp.forecast.findings import Finding
from tritonamp.forecast.running import Batch
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES, Policy


def with_halves_cast(model: nn.Module, batch: Batch, policy: Policy) -> Policy:
    """Return ``policy`` with a cast of the arguments that hold tensors in the other half format.

    torch refuses ops on both half formats, such as ``torch.cat``, under autocast.
    """
    if policy.cast_inputs is True or not (policy.cast_model or policy.op_policy):
        return policy
    other = [dtype for dtype in HALF_DTYPES if dtype is not policy.dtype]
    given = input_tensors(*batch, signature_of(model.forward))
    names = [argument for argument, tensor in given if tensor.dtype in other]
    already = () if isinstance(policy.cast_inputs, bool) else policy.cast_inputs
    wanted = (*dict.fromkeys((*already, *names)),)
    return dataclasses.replace(policy, cast_inputs=wanted) if names else policy


def other_halves(policy: Policy, asked: Policy) -> Iterator[Finding]:
    """Yield advice about inputs in the other half format.

    Args:
        policy: result of ``with_halves_cast``.
        asked: the requested policy.
    """
    if policy == asked or isinstance(policy.cast_inputs, bool):
        return
    already = () if isinstance(asked.cast_inputs, bool) else asked.cast_inputs
    names = [str(name) for name in policy.cast_inputs if name not in already]
    (other,) = (dtype for dtype in HALF_DTYPES if dtype is not policy.dtype)
    why = f"{short(other)} inputs of a forward in {short(policy.dtype)}, which cannot be joined"
    advice = f"forecast.policy, cast_inputs={policy.cast_inputs} (tried: the batch runs)"
    yield Finding("other half", ", ".join(names), why, advice, problem=False, untried="")

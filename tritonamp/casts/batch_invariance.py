"""Requests in this process for rows with the same bits in every batch, by libraries and by torch.

Libraries are not imported to find out, because importing one may change torch.
"""

import functools
import logging
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tritonamp.policy import Policy

logger = logging.getLogger("tritonamp")

_VLLM_MODULE = "vllm.model_executor.layers.batch_invariant"
_MODULES = {
    "batch_invariant_ops": "batch_invariant_ops",
    "sglang.srt.batch_invariant_ops": "SGLang's batch-invariant mode",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels": (
        "Megatron-Core's batch-invariant mode"
    ),
    _VLLM_MODULE: "vLLM's batch-invariant mode",
}
"""Modules of batch-invariant kernels, all descended from the first, and their names in texts."""

_VLLM_VARIABLE = "VLLM_BATCH_INVARIANT"
"""Environment variable, which is also set where vLLM runs in a child process."""


class Note(NamedTuple):
    """A request that an enabled model without ``batch_invariant`` meets.

    Attributes:
        why: source of the request, and dependence of the model's rows on their batch.
        advice: argument for ``enable``.
        is_warning: whether the model does not fulfil the request.
    """

    why: str
    advice: str
    is_warning: bool

    def __str__(self) -> str:
        return f"{self.why}: {self.advice}"


def notes(policy: Policy | None = None) -> Iterator[Note]:
    """Yield a note for each request that a model without ``batch_invariant`` meets.

    Args:
        policy: policy of the model. None: that of any model with an op policy.
    """
    if policy is not None and (policy.batch_invariant or not policy.op_policy):
        return
    for library in _libraries():
        yield Note(
            f"{library} is active, but tritonamp's kernels choose tiles by the number of rows, so "
            "the bits of a row depend on its batch",
            "give batch_invariant=True to tritonamp.enable",
            is_warning=True,
        )
    if torch.are_deterministic_algorithms_enabled():
        yield Note(
            "torch.use_deterministic_algorithms(True) is on, and the same batch gives the same "
            "bits",
            "for the same bits of a row in every batch give batch_invariant=True to "
            "tritonamp.enable",
            is_warning=False,
        )


def log_notes(policy: Policy) -> None:
    """Log each note about a policy once in this process."""
    for note in notes(policy):
        _log_once(logging.WARNING if note.is_warning else logging.INFO, str(note))


@functools.cache
def _log_once(level: int, text: str) -> None:
    logger.log(level, text)


def _libraries() -> list[str]:
    """Return the names of the batch-invariant libraries that are active in this process."""
    found = [name for module, name in _MODULES.items() if _is_active(module)]
    if _is_set(_VLLM_VARIABLE):
        found = [name for name in found if name != _MODULES[_VLLM_MODULE]]
        found.append(f"vLLM's {_VLLM_VARIABLE}=1")
    return found


def _is_active(module: str) -> bool:
    """Return whether the mode of a library is on; False for a module that is not imported."""
    # not by getattr, by which some modules import others
    names = vars(sys.modules[module]) if sys.modules.get(module) is not None else {}
    ask = names.get("is_batch_invariant_mode_enabled")
    # private: the flag behind that function, all that vLLM has
    return bool(ask() if callable(ask) else names.get("_batch_invariant_MODE"))


def _is_set(variable: str) -> bool:
    """Return whether an environment variable is a number other than 0, as vLLM reads it."""
    try:
        return int(os.environ.get(variable, "0")) != 0
    except ValueError:
        return False

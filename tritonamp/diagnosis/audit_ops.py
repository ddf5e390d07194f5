"""Autograd nodes whose backward may give other bits each time, by torch's own list."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tritonamp.diagnosis.replay.nondeterministic_ops import DEVICES

# nodes whose backward has another name in torch's dispatcher, or whose op is in the list of
# ``torch.use_deterministic_algorithms`` (torch 2.14) and not its backward
_ON_GPU = {
    "Cumsum", "Embedding", "GridSampler2D", "GridSampler3D", "CudnnGridSampler", "CudnnCtcLoss",
    "MiopenCtcLoss", "CudnnAttention", "ScaledDotProductCudnnAttention", "ScatterReduce", "Take",
    "UpsampleLanczos2DAa",
}  # fmt: skip
_CONVOLUTIONS = {"Convolution", "CudnnConvolution", "CudnnConvolutionTranspose"}
_ON_CPU = {"Index", "UnsafeIndex"}
# the ops inside are not known
COMPILED = "CompiledFunctionBackward"
_WARNING = "does not have a deterministic implementation"
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[0-9]D)(?=[A-Z])")


def name_of(node: Any) -> str:
    """Return the name of a node's class, as in ``tensor.grad_fn``."""
    return type(node).__name__


def unordered(found: Iterable[Any]) -> list[Any]:
    """Return the nodes whose backward torch calls nondeterministic on their device."""
    return [node for node in found if _is_unordered(node)]


def _is_unordered(node: Any) -> bool:
    name, on_gpu = name_of(node), _is_on_gpu(node)
    if name == COMPILED:
        return on_gpu
    op, is_backward, _ = name.partition("Backward")
    if not is_backward or torch.are_deterministic_algorithms_enabled():
        return False
    if not on_gpu:
        # a thread alone adds up in one order
        return op in _ON_CPU and torch.get_num_threads() > 1
    if op in _CONVOLUTIONS:
        return not torch.backends.cudnn.deterministic
    return op in _ON_GPU or "cuda" in DEVICES.get(f"{_WORDS.sub('_', op).lower()}_backward", ())


def _is_on_gpu(node: Any) -> bool:
    # private (torch 2.11 to 2.15): nothing public tells where a node has run
    results = getattr(node, "_input_metadata", ())
    return any(torch.device(result.device).type != "cpu" for result in results)


def behind(found: Iterable[Any]) -> set[Any]:
    """Return the given nodes, and all nodes that get gradients from a given one."""
    reached, todo = set[Any](), list(found)
    while todo:
        node = todo.pop()
        if node is not None and node not in reached:
            reached.add(node)
            todo += [following for following, _ in node.next_functions]
    return reached


def warned_ops(backward: Callable[[], object]) -> list[str]:
    """Return the ops that torch warns of as nondeterministic while ``backward`` runs."""
    with _deterministic(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward()
    # cuBLAS has a warning of another kind for every product
    texts = [str(warning.message) for warning in caught]
    return sorted({text.split()[0] for text in texts if _WARNING in text})


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)

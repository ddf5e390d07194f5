"""What a model keeps outside of parameters and buffers, which no rerun of a batch puts back."""

import itertools
import random
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_OWN = frozenset(vars(nn.Module()))  # parameters, buffers, hooks and the mode of training
_PLAIN = int, float, complex, str, bytes, type(None)
_MOST = 64  # values of one collection


def python_state(models: Iterable[nn.Module]) -> list[Any]:
    """Return a value that is another one if attributes of modules have changed.

    It holds numbers and texts as they are, tensors by identity and version, and generators by their
    state, also inside of collections. Other objects count by identity.
    """
    modules = dict.fromkeys(module for model in models for module in model.modules())
    return [_mark(v) for m in modules for n, v in vars(m).items() if n not in _OWN]


def _mark(value: Any, depth: int = 0) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value)  # NaN is not equal to itself
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if type(value) is itertools.count:
        return repr(value)
    if depth < 3 and isinstance(value, (list, tuple, deque, dict)):
        items = value.items() if isinstance(value, dict) else value
        return len(value), [_mark(v, depth + 1) for v in itertools.islice(items, _MOST)]
    return id(value)

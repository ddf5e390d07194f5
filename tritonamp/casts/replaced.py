"""Other tensors for modules inside a block: FP32 ones for half ones."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tritonamp.kernels._shards import is_sharded
from tritonamp.policy import HALF_DTYPES


@contextlib.contextmanager
def replaced(modules: Iterable[nn.Module], others: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers of modules by ``others`` inside the block."""
    modules = list(dict.fromkeys(modules))
    held: list[tuple[dict[str, Any], str, Any]] = [
        (tensors, name, tensor)
        for module in modules
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor in others
    ]
    rnns = [m for m in modules if isinstance(m, nn.RNNBase)] if held else []
    try:
        for tensors, name, tensor in held:
            tensors[name] = others[tensor]
        for rnn in rnns:
            _refresh(rnn)
        yield
    finally:
        for tensors, name, tensor in held:
            tensors[name] = tensor
        for rnn in rnns:
            _refresh(rnn)


def _refresh(rnn: nn.RNNBase) -> None:
    """Make an RNN update the list that it keeps of its weights."""
    # private (torch 2.11 to 2.15): the list that ``__setattr__`` fills, with parameters only
    rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]


def wide_weights(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Make a module compute with FP32 copies of its half parameters, where FSDP2 gathered them.

    These parameters were gathered together with those of a module around it. Modules that are
    sharded by themselves are gathered in FP32. Gradients arrive at the half parameters.
    """
    halves = [p for p in module.parameters() if p.dtype in HALF_DTYPES and not is_sharded(p)]
    return replaced(module.modules(), {half: half.float() for half in halves})

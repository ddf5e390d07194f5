"""FP32 weights for a module that computes in FP32, where FSDP2 gathered half ones."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from tritonamp.kernels._shards import is_sharded
from tritonamp.policy import HALF_DTYPES


@contextlib.contextmanager
def wide_weights(module: nn.Module) -> Iterator[None]:
    """Make a module compute with FP32 copies of its half parameters inside the block.

    These parameters were gathered together with those of a module around it. Modules that are
    sharded by themselves are gathered in FP32. Gradients arrive at the half parameters.
    """
    halves = [
        (holder, name, param)
        for holder in module.modules()
        for name, param in holder._parameters.items()
        if param is not None and param.dtype in HALF_DTYPES and not is_sharded(param)
    ]
    wide: dict[Tensor, Tensor] = {param: param.float() for _, _, param in halves}
    rnns = [m for m in module.modules() if isinstance(m, nn.RNNBase)] if halves else []
    try:
        for holder, name, param in halves:
            holder._parameters[name] = wide[param]  # type: ignore[assignment]
        for rnn in rnns:
            _refresh(rnn)
        yield
    finally:
        for holder, name, param in halves:
            holder._parameters[name] = param
        for rnn in rnns:
            _refresh(rnn)


def _refresh(rnn: nn.RNNBase) -> None:
    """Make an RNN update the list that it keeps of its weights."""
    # private (torch 2.11 to 2.15): the list that ``__setattr__`` fills, with parameters only
    rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]

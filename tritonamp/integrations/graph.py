"""Which optimizers a loss feeds, where the library does not say."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return what the optimizer steps on: once it is enabled, the masters."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def fed_by(loss: Tensor, params: Mapping[Optimizer, Sequence[Tensor]]) -> list[Optimizer]:
    """Return the optimizers whose ``params`` (the model's own) the graph of ``loss`` ends in.

    All of them where it does not say, as under FSDP2. One optimizer costs nothing, several a walk
    over the graph on the host.
    """
    if len(params) == 1:
        return list(params)
    leaves, seen, todo = set[object](), set[object](), [loss.grad_fn]
    while todo:
        function = todo.pop()
        if function is not None and function not in seen:
            seen.add(function)
            leaves.add(getattr(function, "variable", None))
            todo += [following for following, _ in function.next_functions]
    # reentrant: hides its part
    if any(type(function).__name__ == "CheckpointFunctionBackward" for function in seen):
        return list(params)
    return [o for o, own in params.items() if not leaves.isdisjoint(own)] or list(params)

"""The matrix products and convolutions of a forward: their FLOPs and results, by module."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from tritonamp.watched.ops import OpCall


class Share(NamedTuple):
    """The products of some modules, as a part of those of a forward.

    Attributes:
        flops: FLOPs of these products.
        of_all: FLOPs of all products of the forward.
        elements: number of elements of these products' results.
        convolved: FLOPs of the convolutions among these products.
    """

    flops: int = 0
    of_all: int = 0
    elements: int = 0
    convolved: int = 0


class Products:
    """Counts the products of a forward as they run."""

    def __init__(self) -> None:
        self._flops: Counter[str] = Counter()  # by full name of the module
        self._elements: Counter[str] = Counter()
        self._convolved: Counter[str] = Counter()

    def add(self, call: OpCall, result: Any, module: str | None) -> None:
        """Count an op, if it is a product.

        Args:
            call: the op.
            result: result of the op.
            module: full name of the innermost module that runs; None: outside the model.
        """
        flops = _flops_of(call, result) if isinstance(result, Tensor) else 0
        if not flops:
            return
        name = module or ""
        self._flops[name] += flops
        self._elements[name] += result.numel()
        if "conv" in call.schema.name:
            self._convolved[name] += flops

    def inside(self, names: Iterable[str]) -> Share:
        """Return the share of the modules of these names, with the modules inside them."""
        found = {*names}
        inside = [
            name
            for name in self._flops
            if any(f"{name}.".startswith(f"{outer}.") or not outer for outer in found)
        ]
        return Share(
            sum(self._flops[name] for name in inside),
            self._flops.total(),
            sum(self._elements[name] for name in inside),
            sum(self._convolved[name] for name in inside),
        )


def _flops_of(call: OpCall, result: Tensor) -> int:
    """Return the FLOPs of an op as torch counts them; 0 for an op that is no product."""
    # here, because only few runs count
    from torch.utils.flop_counter import flop_registry

    # torch counts the ops inside of these, which inference mode hides
    if call.schema.name in ("linear", "matmul"):
        return 2 * result.numel() * int(call.args[0].shape[-1])
    if call.schema.name in ("conv1d", "conv2d", "conv3d"):
        return 2 * result.numel() * math.prod(call.args[1].shape[1:])
    count = flop_registry.get(call.func.overloadpacket)
    if count is None or not math.prod(result.shape):
        return 0
    return int(count(*call.args, **call.kwargs, out_val=result))

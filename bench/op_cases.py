"""Cases of operations: calls of peers, forward and backward."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from case import Case
from timing import Work
from torch import Tensor

from tritonamp.names import short

HALF, BF16 = torch.float16, torch.bfloat16
ELEMENTS = 1 << 27
TOY_LENGTH = 64
LOSS_SCALE = 2.0**16
# the others take FP32 weights beside half activations, as under O1 and O2
HALF_WEIGHTS = "eager", "apex", "FlagGems"
DIRECTIONS = "forward", "backward"

Shape = tuple[int, ...]
Inputs = list[Tensor | None]
Forward = Callable[..., Any]


class Op(NamedTuple):
    """An operation, and who computes it.

    Attributes:
        name: beginning of the names of its cases.
        forwards: by peer, a function of the tensors of ``inputs`` with one result or a tuple;
            "compile" has the argument of torch.compile.
        inputs: maker of the tensors, from shape, dtype and device; None among them omits an
            argument.
        bytes: least number of bytes per element, forward and backward.
        kernels: the kernels' operations, forward and backward.
        gems: peer whose call FlagGems replaces; None if FlagGems lacks these operations.
    """

    name: str
    forwards: dict[str, Forward]
    inputs: Callable[[Shape, torch.dtype, Any], Inputs]
    bytes: tuple[float, float] | None
    kernels: tuple[tuple[str, ...], tuple[str, ...]]
    gems: str | None = "eager"

    @property
    def peers(self) -> tuple[str, ...]:
        return (*self.forwards, "FlagGems") if self.gems else tuple(self.forwards)

    def forward_of(self, peer: str, device: torch.device) -> Forward:
        """Return the function that a peer runs on a device."""
        if peer == "compile":
            return compiled(self.forwards[peer], device)
        return self.forwards[self.gems if peer == "FlagGems" else peer]

    def inputs_of(self, peer: str, shape: Shape, dtype: torch.dtype, device: Any) -> Inputs:
        """Return the tensors in the dtypes that a peer takes."""
        made = self.inputs(shape, dtype, device)
        if peer not in HALF_WEIGHTS:
            return made
        return [x.to(dtype) if x is not None and x.is_floating_point() else x for x in made]


def simple_op(
    name: str, forwards: dict[str, Forward], inputs: Any, bytes: Any, **others: Any
) -> Op:
    """Return an operation whose kernels are ``name`` and its backward."""
    return Op(name, forwards, inputs, bytes, ((name,), (f"{name}_backward",)), **others)


def compiled(function: Forward, device: torch.device) -> Forward:
    torch._dynamo.reset()  # a shape of its own for each case, not a dynamic one
    # on a CPU inductor would wait for a C++ compiler
    backend = "inductor" if device.type == "cuda" else "eager"
    return torch.compile(function, dynamic=False, backend=backend)


def leaves(inputs: Inputs) -> Inputs:
    """Make the floating inputs require gradients, in place."""
    return [x if x is None else x.requires_grad_(x.is_floating_point()) for x in inputs]


def wanted(inputs: Inputs) -> list[Tensor]:
    return [x for x in inputs if x is not None and x.requires_grad]


def results_of(forward: Forward, inputs: Inputs) -> list[Tensor]:
    """Return the results of a forward; a loss in FP32, because half cannot hold a scaled loss."""
    found = forward(*inputs)
    results = found if isinstance(found, tuple | list) else [found]
    return [y.float() if y.dim() == 0 else y for y in results]


def work(
    op: Op, peer: str, direction: str, shape: Shape, dtype: torch.dtype, device: torch.device
) -> Work:
    """Return the work of a forward without autograd, of a backward, or of both in one call."""
    forward, inputs = op.forward_of(peer, device), op.inputs_of(peer, shape, dtype, device)
    if direction == "forward":
        return Work([functools.partial(forward, *inputs)])
    inputs = leaves(inputs)
    if direction == "both":

        def call_both() -> Any:
            results = results_of(forward, inputs)
            return torch.autograd.grad(results, wanted(inputs), _gradients(results))

        return Work([call_both])
    # without it a compiled backward runs only once
    with torch._functorch.config.patch(donated_buffer=False):
        results = results_of(forward, inputs)
        above = _gradients(results)

        def call() -> list[Tensor]:
            found = torch.autograd.grad(results, wanted(inputs), above, retain_graph=True)
            return [grad.contiguous() for grad in found]  # what comes next would have to read it

        call()
    return Work([call])


def _gradients(results: list[Tensor]) -> list[Tensor]:
    """Return gradients of results: the loss scale for a loss, random numbers for others."""
    return [
        torch.full_like(y, LOSS_SCALE) if y.dim() == 0 else torch.randn_like(y) for y in results
    ]


def under_flag_gems(make: Callable[[torch.device], Work], device: torch.device) -> Work:
    """Make work with FlagGems instead of torch's operations, in the whole process until its end."""
    import flag_gems

    with contextlib.ExitStack() as stack:
        stack.enter_context(flag_gems.use_gems())
        return Work(make(device).calls, stack.pop_all().close)


def makers(
    op: Op, direction: str, shape: Shape, dtype: torch.dtype
) -> dict[str, Callable[[torch.device], Work]]:
    """Return by peer a function that makes its work on a device."""
    made = {peer: functools.partial(work, op, peer, direction, shape, dtype) for peer in op.peers}
    if op.gems:
        made["FlagGems"] = functools.partial(under_flag_gems, made["FlagGems"])
    return made


def both_directions(
    op: Op,
    dtype: torch.dtype,
    shape: Shape,
    toy: Shape | None,
    *,
    path_bytes: dict[str, tuple[float, float]],
    tier: int,
    form: str = "",
) -> list[Case]:
    """Return the cases of a forward and of a backward.

    Args:
        op: the operation.
        dtype: dtype of activations.
        shape: shape of the input, which the names contain.
        toy: smaller shape for a run on the CPU.
        path_bytes: bytes per element of other peers as in ``Case``, forward and backward.
        tier: tier of the cases.
        form: memory format, at the end of the names.
    """
    used = toy or shape
    return [
        Case(
            group=f"{op.name} {direction}",
            name=f"{op.name} {direction} {short(dtype)} {by(shape)}{form}",
            dtype=short(dtype),
            shape=by(used) + form,
            elements=math.prod(used),
            bytes=op.bytes[i],
            peers=makers(op, direction, used, dtype),
            path_bytes={peer: counts[i] for peer, counts in path_bytes.items()}
            | {"tritonamp": op.bytes[i]},
            tier=tier,
            operations=op.kernels[i],
        )
        for i, direction in enumerate(DIRECTIONS)
    ]


def by(shape: Shape) -> str:
    return "x".join(map(str, shape))

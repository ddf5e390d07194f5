"""Hooks that read the outputs of modules, and their gradients."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.kernels._dynamo import never_alone
from tritonamp.kernels.ranges import ranges, ranges_traced
from tritonamp.nested import leaves, map_leaves


def readable(value: Any, device: torch.device) -> Tensor | None:
    """Return the tensor to read from a leaf, of a sharded one this rank's part; None: no tensor."""
    if not isinstance(value, Tensor):
        return None
    value = getattr(value, "_local_tensor", value)
    numbers = value.is_floating_point() and value.layout is torch.strided
    return value if numbers and value.device == device else None


class Running:
    """The hooks of the modules whose forwards run, the innermost last.

    Only forwards of one thread at a time are noted, the first that enters. Under DataParallel the
    calls of other threads are not read. A forward that has raised is forgotten when its module, or
    one outside of it, is entered again, and when a backward computes a segment again, or ends.
    Forward hooks with ``always_call`` would know of exceptions, but each block that torch.compile
    compiles would get a graph of its own.
    """

    def __init__(self) -> None:
        self._hooks: list[RangeHook] = []
        self._thread = 0
        self._node = -1  # of the backward in which the modules run; -1: in no backward

    def enter(self, hook: "RangeHook") -> None:
        """Note that the forward of a hook's module begins."""
        if torch.compiler.is_compiling():
            self._hooks.append(hook)
            return
        # private (torch 2.11 to 2.15), as in ``PlacedOps``
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if number != self._node:
            self._hooks.clear()
            self._node = number
        if self._takes_thread():
            self._forget(hook)
            self._hooks.append(hook)

    def leave(self, hook: "RangeHook") -> None:
        """Note that the forward of a hook's module has returned."""
        if torch.compiler.is_compiling():
            self._hooks.pop()
        elif self._takes_thread():
            self._forget(hook)

    def innermost(self) -> "RangeHook | None":
        """Return the hook of the innermost module; None: no forward runs."""
        # traced code reads the list, too: torch.compile may run the hooks of a block eagerly
        is_there = torch.compiler.is_compiling() or self._takes_thread()
        return self._hooks[-1] if is_there and self._hooks else None

    def clear(self) -> None:
        """Forget all forwards."""
        self._hooks.clear()

    def _takes_thread(self) -> bool:
        """Return whether forwards of the present thread are noted."""
        thread = threading.get_ident()
        if not self._hooks:
            self._thread = thread
        return thread == self._thread

    def _forget(self, hook: "RangeHook") -> None:
        """Forget a forward, and those inside of it."""
        if hook in self._hooks:
            del self._hooks[self._hooks.index(hook) :]


class RangeHook:
    """A forward hook that reads its module's output, and the gradient of the output.

    Copies and pickles of the module are not watched. Their hook does nothing.

    Args:
        forward, backward: rows of the output and of its gradient, as for ``ranges``.
        on: 0-d int32, 1 in steps that are read.
        backend: "auto", "triton" or "eager".
        logits: float32 of shape (2, heads), for the largest attention scores and their bounds.
        running: the modules whose forwards run.

    Attributes:
        logits: the argument.
        scores, bounds: number of heads whose scores, or bounds, were read, and their format; None:
            none were. They are attributes of the hook, because several modules may share a graph of
            torch.compile, which sets the attributes of the module that runs.
    """

    def __init__(
        self,
        forward: Tensor,
        backward: Tensor,
        on: Tensor,
        backend: str,
        logits: Tensor,
        running: Running,
    ) -> None:
        self._forward, self._backward, self._on = forward, backward, on
        self._backend = backend
        self._running = running
        self.logits = logits
        self.scores: tuple[int, torch.dtype] | None = None
        self.bounds: tuple[int, torch.dtype] | None = None
        self.is_silent = False

    def enter(self) -> None:
        """Note that the module's forward begins."""
        if not self.is_silent:
            self._running.enter(self)

    @never_alone
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.is_silent:
            self._running.leave(self)
        if self.is_silent or not torch.is_grad_enabled():  # without gradients no step will follow
            return None
        if torch.compiler.is_compiling():
            return map_leaves(self._traced, output)
        for value in leaves(output):
            found = readable(value, self._on.device)
            if found is not None:
                ranges(found.detach(), self._forward, self._on, self._backend)
                if value.requires_grad:
                    value.register_hook(self._read_gradient)
        return None

    def _read_gradient(self, grad: Tensor) -> None:
        found = readable(grad, self._on.device)
        if found is not None:
            ranges(found, self._backward, self._on, self._backend)

    def _traced(self, value: Any) -> Any:
        found = readable(value, self._on.device)
        if found is None or found is not value:
            return value
        ranges_traced(found.detach(), self._forward, self._on, self._backend)
        return _Gradient.apply(value, self._backward, self._on, self._backend)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functools.partial, (_no_hook,)


class EnterHook:
    """A forward pre-hook that notes for a ``RangeHook`` that its module's forward begins."""

    def __init__(self, hook: RangeHook) -> None:
        self._hook = hook

    @never_alone
    def __call__(self, module: nn.Module, args: Any) -> None:
        self._hook.enter()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functools.partial, (_no_enter,)


@contextlib.contextmanager
def silenced(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Read nothing inside the block, because a batch runs again there."""
    hooks = [h for m in modules for h in m._forward_hooks.values() if isinstance(h, RangeHook)]
    for hook in hooks:
        hook.is_silent = True
    try:
        yield
    finally:
        for hook in hooks:
            hook.is_silent = False


class _Gradient(torch.autograd.Function):
    """Reads the gradient in a compiled graph, where torch allows no hook on a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, on: Tensor, backend: str) -> Tensor:
        ctx.args = row, on, backend
        return x.clone()  # a view must not be written to, which may follow; Inductor drops a copy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ranges_traced(grads[0], *ctx.args)
        return grads[0], None, None, None


def _no_enter(module: nn.Module, args: Any) -> None:
    """Leave arguments unchanged."""


def _no_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Leave an output unchanged."""

"""Injected faults, for tests of a training loop's reaction to them.

tritonamp itself does not import this module: ``import tritonamp.testing``.
"""

import contextlib
import functools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritonamp.kernels import _implementations

CAUSES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data",),
    "loss": ("forward fault",),
    "overflow": ("forward fault",),
    "gradient": ("scale overflow", "backward fault", "scale exhausted"),
    "scale": ("scale overflow", "backward fault", "scale exhausted"),
    "missing gradient": (),
    "error in forward": (),
    "error in backward": (),
    "error in step": (),
    "out of memory": (),
}
"""Kind of a fault to the causes that ``amp.history`` may name for the step; (): no cause, because
the step is taken or the loop gets an exception.
"""

KINDS = tuple(CAUSES)
_IN_STEP = ("error in step", "out of memory")
_TOO_LARGE = 2.0 * 65504  # for float16, not for FP32


class InjectedError(RuntimeError):
    """The error that a ``FaultInjector`` raises on purpose."""


@dataclass(frozen=True)
class Fault:
    """A fault in one step.

    Attributes:
        kind: one of ``KINDS``.

            - "batch": one number of the model's first floating input becomes ``value``;
            - "loss": the tensor that is given to ``FaultInjector.loss`` becomes ``value``;
            - "overflow": one number of the output of module ``place`` becomes ``value``;
            - "gradient": one number of the gradient of parameter ``place`` becomes ``value``; the
              loss is finite;
            - "scale": in the backward, at the output of module ``place``, one number becomes too
              large for float16;
            - "missing gradient": the gradient of parameter ``place`` becomes None;
            - "error in forward", "error in backward": module ``place`` raises ``InjectedError``;
            - "error in step", "out of memory": ``optimizer.step`` raises ``InjectedError``, or
              ``torch.OutOfMemoryError``.
        place: name of a module or parameter.
        value: inf or NaN.
        step: number of the step in ``amp.history``; if the step raised, the number of the next
            attempt.
    """

    kind: str
    place: str = ""
    value: float = math.nan
    step: int = 0

    @property
    def raises(self) -> bool:
        """Whether the loop gets an exception instead of a step or a skip."""
        return self.kind.startswith("error") or self.kind == "out of memory"

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes that ``amp.history`` may name for the step; (): no cause."""
        return CAUSES[self.kind]


class FaultInjector:
    """Injects faults into some steps of a training loop, and lists them.

    ::

        injector = tritonamp.testing.FaultInjector(model, optimizer, rate=0.1, seed=0)
        for x, y in loader:
            try:
                with injector.step():  # from the forward to the optimizer's step
                    loss = criterion(model(x), y)
                    amp.backward(injector.loss(loss))
                    optimizer.step()
            except (tritonamp.testing.InjectedError, torch.OutOfMemoryError):
                pass
            optimizer.zero_grad()
        skipped = {record.step for record in amp.history if record.cause}
        # the scale may skip, too
        assert {fault.step for fault in injector.injected if fault.causes} <= skipped

    Hooks inject the faults, and exist inside ``step`` only. The same seed gives the same faults.
    torch's random numbers are not used.

    Args:
        model: a model, enabled or not.
        optimizer: the optimizer; only the ``KINDS`` that raise in its step need it.
        rate: probability of a fault in a step.
        seed: seed for kinds, places and steps of the faults.
        kinds: kinds to choose from; None: all (without ``optimizer``, those that need none).

    Attributes:
        injected: faults that happened, in order. A fault that could not happen (its module was not
            run, the batch holds integers) is not listed.

    Raises:
        ValueError: a rate outside 0 to 1, or an unknown kind.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        rate: float = 0.0,
        seed: int = 0,
        kinds: Sequence[str] | None = None,
    ) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"rate: expected 0 to 1, got {rate}")
        if kinds is None:
            kinds = [kind for kind in KINDS if optimizer is not None or kind not in _IN_STEP]
        self.injected: list[Fault] = []
        self._model = model
        self._optimizer = optimizer
        self._rate = rate
        self._random = random.Random(seed)
        self._kinds = tuple(kinds)
        self._steps = 0
        self._due: Fault | None = None
        self._happened = False
        for kind in kinds:
            self._check_fault(Fault(kind))

    @contextlib.contextmanager
    def step(self, fault: Fault | None = None) -> Iterator[Fault | None]:
        """Have ``fault``, or a fault that is drawn, happen in the block.

        The block reaches from the forward to the optimizer's step.

        Args:
            fault: the fault; None: draw one, or none.

        Yields:
            the fault; None: this step has none.

        Raises:
            ValueError: ``fault`` is of an unknown kind, or at a place that the model does not have.
            RuntimeError: ``fault`` did not happen, because its place was not reached.
        """
        if fault is not None:
            self._check_fault(fault)
        due = self._draw_fault() if fault is None else fault
        self._due = None if due is None else replace(due, step=self._steps + 1)
        self._happened = False
        handles = [] if self._due is None else self._register_hooks(self._due)
        try:
            yield self._due
            self._steps += 1
        finally:
            for handle in handles:
                handle.remove()
            if self._due is not None and self._happened:
                self.injected.append(self._due)
            self._due = None
        if fault is not None and not self._happened:
            raise RuntimeError(f"{fault} did not happen: nothing came by there in this step")

    def loss(self, loss: Tensor) -> Tensor:
        """Return ``loss``; if a fault "loss" is due, inf or NaN with the same graph."""
        if self._due is None or self._due.kind != "loss":
            return loss
        self._happened = True
        return loss + torch.full_like(loss, self._due.value)

    def _check_fault(self, fault: Fault) -> None:
        if fault.kind not in CAUSES:
            raise ValueError(
                f"kind: expected one of {', '.join(map(repr, KINDS))}, got {fault.kind!r}"
            )
        if fault.kind in _IN_STEP and self._optimizer is None:
            raise ValueError(f"{fault.kind!r} needs the optimizer: FaultInjector(model, optimizer)")
        names = self._places_for(fault.kind)
        if fault.place and fault.place not in names:
            raise ValueError(
                f"place: expected for {fault.kind!r} one of {names}, got {fault.place!r}"
            )

    def _places_for(self, kind: str) -> list[str]:
        if kind in ("gradient", "missing gradient"):
            return [name for name, param in self._model.named_parameters() if param.requires_grad]
        if kind in ("overflow", "scale", "error in forward", "error in backward"):
            return [name for name, _ in self._model.named_modules()]
        return []

    def _draw_fault(self) -> Fault | None:
        if self._random.random() >= self._rate:
            return None
        kind = self._random.choice(self._kinds)
        place = self._random.choice(self._places_for(kind) or [""])
        value = self._random.choice([math.inf, math.nan])
        return Fault(kind, place, math.inf if kind == "overflow" else value)

    def _register_hooks(self, fault: Fault) -> list[Any]:
        """Register the hooks that let the fault happen, and return their handles."""
        model, optimizer = self._model, self._optimizer

        raise_fault = functools.partial(self._raise_fault, fault)

        def spoil_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._spoil_tree(fault, (args, kwargs))

        if fault.kind == "loss":
            return []
        if fault.kind == "batch":
            return [model.register_forward_pre_hook(spoil_inputs, with_kwargs=True)]
        if fault.kind in _IN_STEP:
            assert optimizer is not None
            return [optimizer.register_step_pre_hook(raise_fault)]
        if fault.kind in ("gradient", "missing gradient"):
            param = model.get_parameter(fault.place)
            spoil_gradient = functools.partial(self._spoil_gradient, fault)
            return [param.register_post_accumulate_grad_hook(spoil_gradient)]
        module = model.get_submodule(fault.place)
        if fault.kind == "error in forward":
            return [module.register_forward_pre_hook(raise_fault)]
        change = self._spoil_tree if fault.kind == "overflow" else self._hook_gradient
        return [module.register_forward_hook(lambda module, args, output: change(fault, output))]

    def _raise_fault(self, fault: Fault, *_: Any) -> NoReturn:
        self._happened = True
        if fault.kind == "out of memory":
            raise torch.OutOfMemoryError("injected: out of memory")
        raise InjectedError(f"injected: {fault.kind} {fault.place}".rstrip())

    def _spoil_tree(self, fault: Fault, tree: Any) -> Any:
        """Return ``tree`` with one number of its first floating tensor replaced."""
        leaves, spec = tree_flatten(tree)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                leaves[i] = leaf + self._zeros_but_one(leaf, fault.value).to(leaf.dtype)
                return tree_unflatten(leaves, spec)
        return tree

    def _spoil_gradient(self, fault: Fault, param: Tensor) -> None:
        assert param.grad is not None
        if fault.kind == "missing gradient":
            self._happened = True
            param.grad = None
        elif param.grad.numel():
            param.grad += self._zeros_but_one(param.grad, fault.value).to(param.grad.dtype)

    def _hook_gradient(self, fault: Fault, output: Any) -> None:
        """Have the fault happen at the first tensor of ``output`` that gets a gradient."""

        def spoil(grad: Tensor) -> Tensor:
            if self._due is not fault:  # a backward after the block
                return grad
            if fault.kind == "error in backward":
                self._raise_fault(fault)
            return (grad.float() + self._zeros_but_one(grad, _TOO_LARGE)).to(grad.dtype)

        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel():
                leaf.register_hook(spoil)  # goes with this step's graph
                return

    def _zeros_but_one(self, tensor: Tensor, value: float) -> Tensor:
        """Return FP32 zeros of the shape of ``tensor``, with one number replaced by ``value``."""
        self._happened = True
        spoiled = torch.zeros(tensor.numel(), device=tensor.device)
        spoiled[self._random.randrange(tensor.numel())] = value
        return spoiled.view(tensor.shape)


def compile_failure() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no Triton kernel can be compiled, nor run if compiled earlier.

    Under ``backend="auto"`` each operation warns once, and runs in eager torch for the rest of the
    block; ``amp.stats()["kernel_failures"]`` lists the operations. ``backend="triton"`` raises.
    Nothing changes where kernels do not run (no NVIDIA GPU).
    """
    return _implementations.compile_failure()

"""Hooks that let faults happen in steps of a training loop."""

import contextlib
import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritonamp.testing.bits import IN_BACKWARD, OF_MODEL, flip_bit, flip_stored, state_of
from tritonamp.testing.faults import CAUSES, IN_STEP, KINDS, Fault

_TOO_LARGE = 2.0 * 65504  # for float16, not for FP32


class InjectedError(RuntimeError):
    """The error that a ``FaultInjector`` raises on purpose."""


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
        kinds: kinds to choose from; None: all but "bitflip", whose outcome is not certain (without
            ``optimizer``, those that need none).

    Attributes:
        injected: faults that happened, in order, a "bitflip" with its ``bit`` and ``element``. A
            fault that could not happen (its module was not run, the batch holds integers, the
            optimizer has no such state yet) is not listed.

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
            certain = [kind for kind in KINDS if not Fault(kind).may_pass]
            kinds = [kind for kind in certain if optimizer is not None or kind not in IN_STEP]
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
            ValueError: ``fault`` is of an unknown kind, at a place that the model does not have, or
                of a bit or element that the tensor does not have.
            RuntimeError: ``fault`` did not happen, because its place was not reached.
        """
        if fault is not None:
            self._check_fault(fault)
        due = self._draw_fault() if fault is None else fault
        self._due = None if due is None else replace(due, step=self._steps + 1)
        self._happened = False
        handles = [] if self._due is None else self._register_hooks(self._due)
        try:
            if self._due is not None and self._due.kind == "bitflip":
                flip = functools.partial(self._flip, self._due)
                flip_stored(self._model, self._optimizer, self._due, flip)
            yield self._due
            self._steps += 1
        finally:
            for handle in handles:
                handle.remove()
            if self._due is not None and self._happened:
                self.injected.append(self._due)
            self._due = None
        if fault is not None and not self._happened:
            raise RuntimeError(
                f"{fault} did not happen: nothing came by there in this step{self._other(fault)}"
            )

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
        if fault.kind in IN_STEP and self._optimizer is None:
            raise ValueError(f"{fault.kind!r} needs the optimizer: FaultInjector(model, optimizer)")
        if fault.kind == "bitflip" and fault.target not in OF_MODEL and self._optimizer is None:
            raise ValueError(
                f"a bit of {fault.target!r} needs the optimizer: FaultInjector(model, optimizer)"
            )
        names = self._places_for(fault.kind, fault.target)
        if fault.place and fault.place not in names:
            of = f" of target {fault.target!r}" if fault.kind == "bitflip" else ""
            what = f"{fault.kind!r}{of}"
            raise ValueError(f"place: expected for {what} one of {names}, got {fault.place!r}")

    def _other(self, fault: Fault) -> str:
        """Return the targets that a bitflip can have, in words; "" for other kinds."""
        if fault.kind != "bitflip" or not fault.place or fault.target == "backward":
            return ""
        targets = [*OF_MODEL, *state_of(self._model, self._optimizer, fault.place)]
        return f"; its target can be {', '.join(map(repr, targets))}"

    def _places_for(self, kind: str, target: str = "gradient") -> list[str]:
        of_module = "overflow", "scale", "error in forward", "error in backward"
        if kind in of_module or (kind, target) == ("bitflip", "backward"):
            return [name for name, _ in self._model.named_modules()]
        if kind in ("gradient", "missing gradient", "bitflip"):
            return [name for name, param in self._model.named_parameters() if param.requires_grad]
        return []

    def _draw_fault(self) -> Fault | None:
        if self._random.random() >= self._rate:
            return None
        kind = self._random.choice(self._kinds)
        if kind == "bitflip":
            return self._draw_flip()
        place = self._random.choice(self._places_for(kind) or [""])
        value = self._random.choice([math.inf, math.nan])
        return Fault(kind, place, math.inf if kind == "overflow" else value)

    def _draw_flip(self) -> Fault:
        place = self._random.choice(self._places_for("bitflip") or [""])
        state = state_of(self._model, self._optimizer, place)
        target = self._random.choice([*OF_MODEL, *state])
        if target == "backward":
            place = self._random.choice(self._places_for("bitflip", target))
        return Fault("bitflip", place, target=target)

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
        if fault.kind in IN_STEP:
            assert optimizer is not None
            return [optimizer.register_step_pre_hook(raise_fault)]
        if fault.kind == "bitflip" and fault.target not in IN_BACKWARD:
            return []
        if fault.kind in ("gradient", "missing gradient") or (
            fault.kind == "bitflip" and fault.target == "gradient"
        ):
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
        if fault.kind == "bitflip":
            self._flip(fault, param.grad)
        elif fault.kind == "missing gradient":
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
            if fault.kind == "bitflip":
                self._flip(fault, grad := grad.clone())
                return grad
            return (grad.float() + self._zeros_but_one(grad, _TOO_LARGE)).to(grad.dtype)

        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel():
                leaf.register_hook(spoil)  # goes with this step's graph
                return

    def _flip(self, fault: Fault, tensor: Tensor) -> None:
        """Flip a bit of ``tensor``, once, and note which."""
        if self._due is not fault or not tensor.numel():
            return
        bits = 8 * tensor.dtype.itemsize
        bit = self._random.randrange(bits) if fault.bit is None else fault.bit
        drawn = self._random.randrange(tensor.numel())
        element = drawn if fault.element is None else fault.element
        flip_bit(tensor, element, bit)
        self._due, self._happened = replace(fault, bit=bit, element=element), True

    def _zeros_but_one(self, tensor: Tensor, value: float) -> Tensor:
        """Return FP32 zeros of the shape of ``tensor``, with one number replaced by ``value``."""
        self._happened = True
        spoiled = torch.zeros(tensor.numel(), device=tensor.device)
        spoiled[self._random.randrange(tensor.numel())] = value
        return spoiled.view(tensor.shape)

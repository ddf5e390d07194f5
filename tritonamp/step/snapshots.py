"""Record the state of a forward, in addition to the weights, so that it can run again."""

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.ambient import AmbientState
from tritonamp.nested import leaves, map_leaves
from tritonamp.watched.bits import bit_sum

# while a storage lives, all its views have one Python object for it (torch 2.11 to 2.15)
Storage = weakref.ref[torch.UntypedStorage]
Outputs = Iterable[tuple[int, Storage]]
"""Storages of outputs of models, while they live, each after its number."""


class BatchGoneError(RuntimeError):
    """The batch of a snapshot no longer exists, or has changed."""


# private (torch 2.11 to 2.15): the number that this thread's next node gets
sequence_number = torch._C._autograd._get_sequence_nr


class _Arrived(dict[int, Tensor]):
    """Gradients that arrived at outputs, by number of the output.

    Attributes:
        more: whether gradients arrived again, or with a graph.
    """

    more = False

    def note(self, i: int, grad: Tensor) -> None:
        """Note the gradient of an output."""
        self.more = self.more or i in self or torch.is_grad_enabled()
        self[i] = grad


class Snapshot:
    """One forward of a model that is about to run: its arguments, and all else it depends on.

    ::

        snapshot = Snapshot(model, args, kwargs)   # before the forward
        snapshot.ambient = AmbientState.now(Generators.now(snapshot.gpus))
        output = model(*args, **kwargs)
        snapshot.follow(output)
        ...
        find_fault(model, snapshot.run, expected=snapshot.outputs,
                   grad_outputs=snapshot.grad_outputs, scale=scale)

    Arguments are kept without the graphs that they come from.
    """

    ambient: AmbientState  # generators, grad mode and autocast of the forward; the owner sets it
    gpus: Sequence[torch.device] = ()  # GPUs that the arguments are on
    is_exact = True  # whether ``ambient`` has the CPU's generators as they were at the forward
    decisions = 0  # number of decisions before it
    sums: Sequence[Tensor | None] = ()  # checksums of the output's tensors, where they have memory
    span = (0, 0)  # sequence numbers of the forward's first autograd node, and after its last one
    has_loss = False  # whether a loss was noted before its backward
    is_bypassed = False  # whether such a loss gives gradients to leaves in other ways, too

    _computed: Sequence[int] = ()  # which leaves of the arguments were part of a graph
    _outputs: Sequence[weakref.ref[Tensor]] = ()
    _grads = _Arrived()  # ``follow`` gives each its own

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "__call__",  # of the model, called instead of its forward
        earlier: tuple[Outputs, int] = ((), 0),  # outputs, and the number of those before it
        versions: list[int] | None = None,  # of tensors without graphs, if all arguments are
    ) -> None:
        self.model = model
        self.method = method
        self.training = model.training
        self._earlier = earlier
        self._versions: list[int] = [] if versions is None else versions
        if versions is None:
            args, kwargs = map_leaves(self._noted, args), kwargs and map_leaves(self._noted, kwargs)
        self._given = args, kwargs

    def weakened(self) -> "Snapshot":
        """Return the same forward, with weak references to the tensors of its batch."""
        weak = Snapshot.__new__(Snapshot)
        given = map_leaves(_weak, self._given)
        vars(weak).update(vars(self), _given=given, _outputs=(), _grads=_Arrived())
        return weak

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``args`` and ``kwargs``.

        Raises:
            BatchGoneError: a tensor in them no longer exists, or was written to since.
        """
        given = map_leaves(_alive, self._given)
        versions = zip(map(_version, leaves(given)), self._versions, strict=True)
        changed = [i for i, (now, then) in enumerate(versions) if now != then]
        if changed:
            raise BatchGoneError(
                f"the batch was changed in place after the forward (tensor {changed[0]} of its "
                "arguments), so the forward cannot be run again: write to a copy of it"
            )
        return given

    def _noted(self, value: Any) -> Any:
        """Record facts of a leaf of the arguments, and return the leaf without its graph."""
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                self._computed = [*self._computed, len(self._versions)]
                value = value.detach()
            if value.is_cuda:
                self.gpus = [*self.gpus, value.device]
        self._versions.append(_version(value))
        return value

    def made(self) -> set[int]:
        """Return the leaves of the ``arguments`` that are results of models, as indices.

        They were part of a graph, or are outputs of a forward, detached or not. They do not count
        as data.
        """
        outputs, until = self._earlier
        storages = {storage() for number, storage in outputs if number < until}
        returned = [
            i
            for i, value in enumerate(leaves(self.arguments()))
            if isinstance(value, Tensor)
            and value.layout is torch.strided
            and value.untyped_storage() in storages
        ]
        return {*self._computed, *returned}

    def run(self) -> Any:
        """Run the forward again on its ``arguments``, under the state of its first run.

        The state is generators, grad mode, autocast and training flag. A loss that runs afterwards
        draws the random numbers that follow. The training flags stay, until ``find_fault`` restores
        them.
        """
        args, kwargs = self.arguments()
        before = AmbientState.now()
        if self.model.training is not self.training:
            self.model.train(self.training)
        self.ambient.restore()
        try:
            return getattr(self.model, self.method)(*args, **kwargs)
        finally:
            before.restore()

    def begin(self) -> None:
        """Note that the forward begins."""
        self.span = sequence_number(), 0

    def follow(self, output: Any) -> None:
        """Remember the output while it lives, its bits, and the gradients that arrive at it."""
        tensors = [t for t in leaves(output) if isinstance(t, Tensor)]
        self._outputs = [weakref.ref(t) for t in tensors]
        # now, because it may be written to, and is often gone before the step
        self.sums = [bit_sum(t) for t in tensors]
        self.span = self.span[0], sequence_number()
        self._grads = grads = _Arrived()
        for i, t in enumerate(tensors):
            if t.requires_grad:
                t.register_hook(functools.partial(grads.note, i))

    @property
    def outputs(self) -> list[Tensor] | None:
        """The tensors of the output that ``follow`` was given; None: some no longer exist."""
        alive = [t for t in (ref() for ref in self._outputs) if t is not None]
        return alive if alive and len(alive) == len(self._outputs) else None

    @property
    def grad_outputs(self) -> list[Tensor | None] | None:
        """The gradient that arrived at each output, with the loss scale in it.

        None: no backward has come yet.
        """
        return [self._grads.get(i) for i in range(len(self._outputs))] if self._grads else None

    @property
    def ran_one_backward(self) -> bool:
        """Whether parameters got the gradients of ``grad_outputs``, and no others.

        False after several backwards, where a graph of the gradients was made, as for a penalty of
        gradients, and where the loss is not known, or reads parameters itself.
        """
        is_one = bool(self._grads) and not self._grads.more
        return is_one and self.has_loss and not self.is_bypassed


def _weak(value: Any) -> Any:
    return weakref.ref(value) if isinstance(value, Tensor) else value


def _version(value: Any) -> int:
    # private, but as old as autograd; tensors of inference mode have none
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _alive(value: Any) -> Any:
    if not isinstance(value, weakref.ref):
        return value
    value = value()
    if value is None:
        raise BatchGoneError(
            "the batch of this forward is gone, so it cannot be run again: keep a reference to it "
            "until after optimizer.step()"
        )
    return value

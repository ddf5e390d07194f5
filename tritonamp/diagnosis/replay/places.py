"""Where an op runs: module and source line; an op of a backward where its forward's op ran."""

import dataclasses
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.diagnosis.replay.calls import is_watched
from tritonamp.diagnosis.replay.verdicts import Place
from tritonamp.frames import Role, outwards, role_of
from tritonamp.names import prefixes


class Names:
    """What modules, parameters and buffers are called.

    Args:
        models: several get their number in front.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self.roots = models
        self.modules: dict[nn.Module, str] = {}
        self._weights: dict[int, dict[str, Tensor]] = {}  # by storage, which several may share
        for front, model in zip(prefixes(models), models, strict=True):
            for name, module in model.named_modules():
                self.modules.setdefault(module, (front + name).rstrip("."))
            for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
                self._weights.setdefault(storage(tensor), {})[front + name] = tensor

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of all parameters and buffers."""
        for own in self._weights.values():
            yield from own.items()

    def weight(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return name and tensor of the parameter or buffer that ``tensor`` is or looks into."""
        for name, weight in self._weights.get(storage(tensor), {}).items():
            if 0 <= tensor.data_ptr() - weight.data_ptr() < weight.nbytes:
                return name, weight
        return None


def storage(tensor: Tensor) -> int:
    """Return the same number for all views of one memory."""
    # private (torch 2.11 to 2.15): the identity of the storage that views share
    return tensor.untyped_storage()._cdata


class Rule(NamedTuple):
    """A rule of the op table in progress.

    Attributes:
        func: the op that it stands for.
        args: what that was given.
        kwargs: what that was given by name.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class PlaceTracker:
    """Follows the modules and the autograd nodes of a run, from ``begin`` to ``end``.

    Attributes:
        inputs: storage of a tensor that a model was called with to its name.
    """

    def __init__(self, names: Names) -> None:
        self.inputs: dict[int, str] = {}
        self._names = names
        self._modules: list[nn.Module] = []
        self._nodes: dict[int, Place] = {}  # by sequence number
        self._makers: dict[int, Place] = {}  # by storage

    def begin(self) -> None:
        """Follow forwards of all modules, until ``end``."""
        hooks = nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._entered),
            hooks.register_module_forward_hook(self._left, always_call=True),
        ]

    def end(self) -> None:
        """Take off the hooks that ``begin`` registered."""
        for hook in self._hooks:
            hook.remove()

    def _entered(self, module: nn.Module, args: Any) -> None:
        if module in self._names.modules:
            self._modules.append(module)
        if module in self._names.roots:
            self.inputs |= {storage(t): f"input {i}" for i, t in enumerate(args) if is_watched(t)}

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules and self._modules[-1] is module:
            self._modules.pop()

    def made(self, results: list[Tensor], place: Place) -> None:
        """Note that ``results`` come from an op at ``place``."""
        self._makers.update((storage(t), place) for t in results)

    def current(
        self, op: str, inputs: list[Tensor], in_backward: bool
    ) -> tuple[Place, Rule | None]:
        """Return where the op that is being dispatched belongs, and the rule above it.

        Args:
            op: its name, if no rule of the op table stands above it.
            inputs: the floating tensors that it reads.
            in_backward: it may be part of an autograd node, and then belongs where the node was
                made.
        """
        frame, at_edge, file, line = _walk(sys._getframe(1))
        rule = None
        if frame is not None:
            found = frame.f_locals
            rule = Rule(found["stock"].target, found["args"], found["kwargs"])
        place = self._place(op if rule is None else rule.func.overloadpacket.__name__, file, line)
        is_cast = at_edge and op == "to_copy" and rule is None
        if is_cast and inputs and self._modules and self._modules[-1] in self._names.roots:
            # an output that is cast belongs to its maker
            place = self._makers.get(storage(inputs[0]), place)
        # private (torch 2.11 to 2.15): nothing public gives the node of a backward that is running,
        # or the number that ties it to the op of the forward
        node: Any = torch._C._current_autograd_node() if in_backward else None
        origin = None if node is None else self._origin(node)
        # in a backward gradients are recorded where a checkpointed segment is computed again
        if node is None or torch.is_grad_enabled():
            if origin is not None and place.module is None:
                place = dataclasses.replace(place, module=origin.module, kind=origin.kind)
            number = torch._C._autograd._get_sequence_nr() - 1
            self._nodes.setdefault(number, place)  # the node was made just before its op runs
            return place, rule
        if origin is None:
            return place, rule
        return (origin if file is None else dataclasses.replace(origin, file=file, line=line)), rule

    def _place(self, op: str, file: str | None, line: int) -> Place:
        if not self._modules:
            return Place(None, "", op, file, line)
        module = self._modules[-1]
        return Place(self._names.modules[module], type(module).__name__, op, file, line)

    def _origin(self, node: Any) -> Place | None:
        number = node._sequence_nr()
        # writes to views make two or three nodes for one op
        return next(
            (self._nodes[n] for n in range(number, number - 4, -1) if n in self._nodes), None
        )

    def of_traceback(self, traceback: Any) -> Place:
        """Return where an exception was raised: innermost line of the user's, innermost module."""
        file, line = None, 0
        while traceback is not None:
            frame = traceback.tb_frame
            module = frame.f_locals.get("self")
            if (
                isinstance(module, nn.Module)
                and module in self._names.modules
                and module not in self._modules[-1:]
            ):
                self._modules.append(module)
            if role_of(frame.f_code) is Role.USER:
                file, line = frame.f_code.co_filename, traceback.tb_lineno
            traceback = traceback.tb_next
        return self._place("", file, line)


def _walk(innermost: FrameType | None) -> tuple[FrameType | None, bool, str | None, int]:
    """Walk from an op outwards to the first code of the user's.

    Returns:
        the frame of a rule if the op is in one, whether the wrapper of an enabled model comes
        before any code of the user's, file and line of that code.
    """
    rule, at_edge = None, False
    for frame, role in outwards(innermost):
        if role is Role.USER:
            return rule, at_edge, frame.f_code.co_filename, frame.f_lineno
        if role is Role.REPLAY:
            break
        if role is Role.RULE:
            rule = frame
        at_edge = at_edge or role is Role.EDGE
    return rule, at_edge, None, 0

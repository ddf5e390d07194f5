"""Backwards without a trace: what one changes, other than ``.grad`` of leaves, is put back."""

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions

from tritonamp.ambient import Generators, preserve
from tritonamp.diagnosis.audit_ops import COMPILED, name_of
from tritonamp.nested import leaves


class Traces:
    """What backwards of one graph may change, if they run more often than in training.

    ::

        generators           those of Python, numpy and torch; each backward begins with their state
                             at the time of this object
        functions in Python  attributes and saved tensors of a ``torch.autograd.Function``, which
                             some scale in place
        retain_grad()        ``.grad`` of activations
        checkpointing        buffers that a second forward writes to

    Args:
        found: nodes of the graph.
        models: models whose buffers are put back.
        devices: devices whose generators are put back.
    """

    def __init__(
        self, found: Sequence[Any], models: Iterable[nn.Module], devices: set[torch.device]
    ) -> None:
        self._devices = devices
        self._generators = Generators.now(devices)
        self._functions = [node for node in found if _is_of_a_user(node)]
        self._retaining = _retaining(set(found))
        self._buffers = _buffers(models) if any(map(_has_hooks, found)) else []

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put everything back at the end of a block in which one backward runs."""
        grads = [(t, t.grad) for t in self._retaining]
        written = [*self._buffers, *(grad for _, grad in grads if grad is not None)]
        values = [(t, t.detach().clone()) for t in written]
        with preserve(self._devices), preserve_versions(tuple(written)):
            self._generators.restore()
            try:
                with contextlib.ExitStack() as stack:
                    for node in self._functions:
                        stack.enter_context(_State(node))
                    yield
            finally:
                _write_back(values)
                for tensor, grad in grads:
                    tensor.grad = grad


class _State(contextlib.AbstractContextManager[None]):
    """Puts the state of a node back after its backward, of which it copies tensors before."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._kept: tuple[dict[str, Any], list[Any], list[tuple[Tensor, Tensor]]] | None = None
        self._versions = contextlib.ExitStack()
        self._handles = [node.register_prehook(self._keep), node.register_hook(self._put_back)]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._put_back((), ())  # the backward may have raised

    def _keep(self, _: Any) -> None:
        own = dict(self._node.__dict__)
        lists = [(x, x.copy()) for x in own.values() if type(x) in (list, dict, set)]
        tensors = [t for t in [*_saved(self._node), *leaves(own)] if _is_written(t)]
        self._versions.enter_context(preserve_versions(tuple(tensors)))
        self._kept = own, lists, [(t, t.detach().clone()) for t in tensors]

    def _put_back(self, grads: Any, _: Any) -> Any:
        if self._kept is None:
            return None
        (own, lists, values), self._kept = self._kept, None
        # a gradient may be one of these tensors
        made = tuple(g.clone() if isinstance(g, Tensor) else g for g in grads) if values else None
        self._node.__dict__.clear()
        self._node.__dict__.update(own)
        for x, content in lists:
            x.clear()
            x.extend(content) if isinstance(x, list) else x.update(content)
        _write_back(values)
        self._versions.close()
        return made


def _is_of_a_user(node: Any) -> bool:
    """Return whether the backward of a node is Python code of another library, or of the user."""
    own = isinstance(node, BackwardCFunction) and name_of(node) != COMPILED
    return own and type(node)._forward_cls.__module__.split(".")[0] not in ("torch", "tritonamp")


def _saved(node: Any) -> list[Any]:
    """Return the tensors that a function has saved; none where hooks make them again."""
    # ``saved_tensors`` would run the hooks, as those of checkpoints, which may run only once
    return [] if _has_hooks(node) else [saved.data for saved in node._raw_saved_tensors]


def _has_hooks(node: Any) -> bool:
    """Return whether hooks of saved tensors have seen those of a node."""
    raw = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    each = [saved for one in raw for saved in (one if isinstance(one, tuple | list) else [one])]
    return any(saved.unpack_hook is not None for saved in each)


def _is_written(value: Any) -> bool:
    """Return whether a backward may write to a value: parameters, and views, are let alone."""
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    return not (value.is_leaf and value.requires_grad) and 0 not in value.stride()


def _retaining(found: set[Any]) -> list[Tensor]:
    """Return the activations among the results of some nodes that retain their gradient."""
    # a node does not tell its results, so that all objects of the process are looked at
    types = _subclasses(Tensor)
    tensors = [t for t in gc.get_objects() if type(t) in types]
    return [t for t in tensors if not t.is_leaf and t.retains_grad and t.grad_fn in found]


def _subclasses(cls: type) -> set[type]:
    """Return a class with all classes derived from it."""
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))


def _buffers(models: Iterable[nn.Module]) -> list[Tensor]:
    return list(dict.fromkeys(b for model in models for b in model.buffers() if _is_written(b)))


@torch.no_grad()
def _write_back(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in values:
        tensor.detach().copy_(value)

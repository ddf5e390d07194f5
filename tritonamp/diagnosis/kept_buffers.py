"""Copies of finite buffers, to restore those that a skipped forward has made inf or NaN."""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions

from tritonamp.ambient import is_traced
from tritonamp.kernels._dynamo import never_alone
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.kernels.device import is_capturing
from tritonamp.watched.forwards import Spectator
from tritonamp.watched.ops import has_memory

RUNNING = ("running_mean", "running_var")  # torch counts no writes of batch_norm there
_CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Kept(NamedTuple):
    """The kept values of one module.

    Attributes:
        buffers: by name, each buffer and a copy, made when all of them were finite.
        seen: id and version of each buffer, when they were last read.
    """

    buffers: Mapping[str, tuple[Tensor, Tensor]]
    seen: Sequence[tuple[int, int]]


class KeptBuffers(Spectator):
    """Keeps values of the buffers that training forwards write, while these values are finite.

    A forward that computes inf or NaN writes them into running statistics, where they would stay
    for ever, although its step is skipped. ``restore`` writes back the values from before that
    forward.

    The first forward of each module after a decision copies the buffers that may have changed, and
    reads on the host which are finite. It does nothing in forwards that torch.compile or a CUDA
    graph runs.

    Args:
        names: function that returns the full name of each parameter and buffer.
    """

    def __init__(self, names: Callable[[], Mapping[Tensor, str]]) -> None:
        self._names = names
        self._kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
        self._ran: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules, since a decision

    def decided(self) -> None:
        """Note a decision: the next forwards belong to another step."""
        self._ran.clear()

    @never_alone
    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], method: str) -> Any:
        """Copy the buffers that may have changed, before a forward in training writes them."""
        if torch.is_grad_enabled() and not is_traced():
            self._keep(model)
        return None

    @leaves_inference_mode
    @torch.no_grad()
    def _keep(self, model: nn.Module) -> None:
        changed = []
        for module in model.modules():
            own = _plain(module)
            seen = [(id(t), t._version) for t in own.values() if t.is_floating_point()]
            if not seen:
                continue
            known, is_first = self._kept.get(module), module not in self._ran
            self._ran.add(module)
            is_uncounted = is_first and _has_running(own)
            if known is None or known.seen != seen or is_uncounted:
                before = known.buffers if known else {}
                changed.append((module, own, seen, before, is_first))
        if not changed or is_capturing(next(iter(changed[0][1].values())).device):
            return
        bad = _nonfinite(t for _, own, *_ in changed for t in own.values())
        copies: list[tuple[Tensor, Tensor]] = []
        for module, own, seen, before, is_first in changed:
            # other bad buffers are no fault: masks, those that have never been finite, and, before
            # the first forward of a step, those that the user's program has written
            tracked = {
                name: t
                for name, t in own.items()
                if t not in bad
                or name in RUNNING
                or (name in before and not is_first and not _is_mask(name, t))
            }
            if bad.isdisjoint(tracked.values()):
                before = {n: (t, _memory_for(t, before.get(n))) for n, t in tracked.items()}
                copies += before.values()
            self._kept[module] = _Kept(before, seen)
        _copy((copy, t) for t, copy in copies)

    @leaves_inference_mode
    @torch.no_grad()
    def restore(self) -> list[str]:
        """Restore all buffers of each module in which one has become inf or NaN.

        A -inf in buffers other than running statistics does not count: masks hold it.

        Returns:
            full names of the buffers that were inf or NaN.
        """
        known = [(m, _still_there(m, kept)) for m, kept in self._kept.items()]
        bad = _nonfinite(t for _, kept in known for t, _ in kept.values())
        spoilt: list[Tensor] = []
        writes: list[tuple[Tensor, Tensor]] = []
        for _, kept in known:
            found = [t for name, (t, _) in kept.items() if t in bad and not _is_mask(name, t)]
            spoilt += found
            writes += kept.values() if found else ()
        # a graph that has saved the buffers for a later backward must keep working
        with preserve_versions(tuple(t for t, _ in writes)):
            _copy(writes)
        names = self._names() if spoilt else {}
        return [names.get(t, "a buffer") for t in spoilt]


def _plain(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module, by name, that are plain tensors with memory."""
    return {
        name: t
        for name, t in module._buffers.items()
        if t is not None
        and has_memory(t)
        and t.layout is torch.strided
        and t.device.type != "meta"
        and t.numel() > 0
        and not t.is_inference()
    }


def _has_running(buffers: Mapping[str, Tensor]) -> bool:
    return any(name in buffers for name in RUNNING)


def _still_there(module: nn.Module, kept: _Kept) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the present buffers of the module that can take a kept value, each with the value.

    A forward may have replaced the tensors that were copied.
    """
    own = _plain(module)
    return {
        name: (own[name], copy)
        for name, (_, copy) in kept.buffers.items()
        if name in own and _is_like(own[name], copy)
    }


def _is_like(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)


def _memory_for(buffer: Tensor, kept: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return memory for a copy of a buffer: that of its last copy, if there is one."""
    if kept is not None and kept[0] is buffer and _is_like(buffer, kept[1]):
        return kept[1]
    return torch.empty_like(buffer)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, in few launches."""
    for same in _by_kind(pairs):
        torch._foreach_copy_([t for t, _ in same], [source for _, source in same])


def _nonfinite(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Return the floating tensors that hold inf or NaN. Reads the device once for each dtype."""
    found = set()
    for same in _by_kind((t, t) for t in tensors if t.dtype in _CHECKED):
        kind = [t for t, _ in same]
        # private (torch 2.11 to 2.15): autocast refuses to stack the other half format
        with torch._C._DisableAutocast():
            largest = torch.stack(torch._foreach_norm(kind, math.inf))
        flags = torch.isfinite(largest).tolist()
        found |= {t for t, is_finite in zip(kind, flags, strict=True) if not is_finite}
    return found


def _by_kind(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[list[tuple[Tensor, Tensor]]]:
    kinds: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for pair in pairs:
        kinds[pair[0].dtype, pair[0].device].append(pair)
    return kinds.values()


def _is_mask(name: str, buffer: Tensor) -> bool:
    """Return whether a buffer that is not finite may be a mask: -inf, but no inf and no NaN."""
    return name not in RUNNING and not bool((buffer.isnan() | (buffer == math.inf)).any())

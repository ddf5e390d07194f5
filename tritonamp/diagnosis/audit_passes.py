"""Backwards of one graph, run several times, and the bits of the gradients that they make."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.diagnosis.audit_ops import behind, name_of, unordered, warned_ops
from tritonamp.diagnosis.audit_traces import Traces
from tritonamp.diagnosis.replay.faults import listed
from tritonamp.kernels.grad_stats import checksums
from tritonamp.watched.graph import nodes

Sums = dict[str, int]
"""Checksums of gradients by name of the parameter."""
_SHOWN = 3  # parameters in a text
_REENTRANT = "CheckpointFunctionBackward"


class Finding(NamedTuple):
    """The result of an audited backward.

    Attributes:
        kind: "clean", "unclear" or "suspected".
        reason: why there is no verdict, or which bits differ.
        topic: the part of ``reason`` that is the same for each such audit.
    """

    kind: str
    reason: str = ""
    topic: str = ""


CLEAN = Finding("clean")


class Passes:
    """The passes over the graph of one scaled loss.

    Args:
        scaled: scaled loss.
        names: names of the parameters.
        device: device on which checksums are collected.
        backend: "auto", "triton" or "eager".
        models: enabled models, whose buffers do not change.
        several: whether other ranks may take part in a backward, as under FSDP2 or with a batch
            norm over ranks. All ranks run as many passes then.
    """

    def __init__(
        self,
        scaled: Tensor,
        names: Mapping[Tensor, str],
        device: torch.device,
        backend: str,
        models: Sequence[nn.Module],
        several: bool,
    ) -> None:
        self._several = several
        self._scaled, self._device, self._backend = scaled, device, backend
        self._nodes = list(nodes(scaled))
        leaves = {node.variable: node for node in self._nodes if hasattr(node, "variable")}
        # parameters under FSDP2 are gathered into others, which have no names
        self._named = {leaf: names.get(leaf, f"leaf {i}") for i, leaf in enumerate(leaves)}
        self._leaf_nodes = {self._named[leaf]: node for leaf, node in leaves.items()}
        # of the passes before the real one: names and checksums
        self._ahead: list[tuple[list[str], Tensor]] = []
        self._real: list[tuple[str, Tensor]] = []
        self._traces = Traces(self._nodes, models, {device, *(leaf.device for leaf in leaves)})
        self._loss = self._sums_of([scaled.detach()])

    def why_not(self) -> str:
        """Return why this graph cannot be audited; "" if it can."""
        if any(name_of(node) == _REENTRANT for node in self._nodes):
            return (
                "the graph is checkpointed with use_reentrant=True, which torch can only run by "
                "backward(): use use_reentrant=False"
            )
        return ""

    def run_ahead(self, keeps_graph: bool) -> None:
        """Run the backward once or twice, before the real one.

        Args:
            keeps_graph: whether the real one leaves the graph for a third pass, if one is needed.

        Raises:
            RuntimeError: the graph cannot run several times.
        """
        times = 1 if keeps_graph and not self._several else 2
        self._ahead = [self._extra_pass() for _ in range(times)]

    def _extra_pass(self) -> tuple[list[str], Tensor]:
        """Run a backward into new tensors; return names and checksums."""
        leaves = list(self._named)
        with _hooks_set_aside(leaves), self._traces.put_back():
            grads = torch.autograd.grad(self._scaled, leaves, retain_graph=True, allow_unused=True)
        found = [(self._named[p], g) for p, g in zip(leaves, grads, strict=True) if g is not None]
        return [name for name, _ in found], self._sums_of([g for _, g in found])

    def _sums_of(self, grads: Sequence[Tensor]) -> Tensor:
        """Return checksums, int64 of shape (n,), of gradients that may be sparse."""
        if any(grad.layout != torch.strided for grad in grads):
            parts = [self._sums_of(_parts(grad)).sum(0, keepdim=True) for grad in grads]
            return torch.cat(parts)
        with torch.no_grad():
            return checksums(grads, self._device, self._backend)

    @contextlib.contextmanager
    def real(self) -> Iterator[None]:
        """Take checksums of the gradients that a backward inside of the block makes.

        They are taken before gradients are accumulated, reduced over ranks, or seen by hooks.
        """
        handles = []
        for leaf, name in self._named.items():
            handles.append(leaf.register_hook(lambda grad, name=name: self._note(name, grad)))
            hooks: Any = leaf._backward_hooks
            # built again, because autograd does not see an order that ``move_to_end`` changes
            later = {key: hook for key, hook in hooks.items() if key != handles[-1].id}
            for key in later:
                del hooks[key]
            hooks.update(later)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, grad: Tensor) -> None:
        self._real.append((name, self._sums_of([grad.detach()])))

    def finding(self) -> Finding:
        """Compare the passes. Waits for the device."""
        if not self._real:
            return Finding("unclear", _NOTHING)
        # one read of the device
        names, sums = self._ahead[0]
        loss = torch.cat([self._loss, self._sums_of([self._scaled.detach()])])
        every = torch.cat([loss, sums, *(s for _, s in self._real)]).tolist()
        before, after, *rest = every
        first = dict(zip(names, rest[: len(names)], strict=True))
        real = dict(zip([name for name, _ in self._real], rest[len(names) :], strict=True))
        if before != after:
            return Finding("suspected", "the loss itself has changed between two backwards")
        if len(real) < len(self._real):
            return Finding("unclear", _SEVERAL)
        differing = [name for name in real if first.get(name, real[name]) != real[name]]
        return self._judged(first, real, differing) if differing else CLEAN

    def _judged(self, first: Sums, real: Sums, differing: Sequence[str]) -> Finding:
        """Return the finding on gradients that differ between two passes."""
        suspects = unordered(self._nodes)
        reached = behind(suspects)
        ops = sorted({name_of(node) for node in suspects})
        told = _of_parameters(differing, first, real)
        # a nondeterministic op explains the parameters behind it, and no others
        sure = [name for name in differing if self._leaf_nodes[name] not in reached]
        third, warned = self._third_pass() if sure else ({}, [])
        if not sure or warned:
            return _unclear(_UNORDERED, told, listed([*ops, *warned]))
        if not third:
            return _unclear(_FREED, told)
        if any(third.get(name) not in (first[name], real[name]) for name in sure):
            return _unclear(_ALL_DIFFER, told)
        return Finding("suspected", _of_parameters(sure, first, real))

    def _third_pass(self) -> tuple[Sums, list[str]]:
        """Return checksums of a third pass, {} if it is impossible, and ops that torch warns of."""
        third = self._ahead[1] if len(self._ahead) > 1 else None
        warned: list[str] = []
        if not self._several:  # ranks that have found nothing would not take part
            # the graph may be freed, or memory may be out
            with contextlib.suppress(RuntimeError):
                third = third or self._extra_pass()
                warned = warned_ops(self._extra_pass)
        return ({}, warned) if third is None else (_by_name(*third), warned)


def _by_name(names: Sequence[str], sums: Tensor) -> Sums:
    return dict(zip(names, sums.tolist(), strict=True))


def _unclear(template: str, told: str, ops: str = "") -> Finding:
    return Finding("unclear", template.format(told=told, ops=ops), template + ops)


_UNORDERED = (
    "two backwards of one graph differ in {told}; torch calls ops of it nondeterministic: {ops}. "
    "torch.use_deterministic_algorithms(True) may replace them"
)
_FREED = "two backwards of one graph differ in {told}; a third was not possible"
_ALL_DIFFER = "three backwards of one graph have three results, in {told}"
_NOTHING = "no backward of this loss ran inside of amp.scale_loss"
_SEVERAL = "several backwards ran inside of one amp.scale_loss"


def _of_parameters(differing: Sequence[str], first: Sums, real: Sums) -> str:
    """Return the first parameters whose gradients differ, and by how many bits."""
    shown = [
        f"{name} (at least {_flips(real[name] - first[name])} bit(s))"
        for name in differing[:_SHOWN]
    ]
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return f"{listed(shown)}{more} of {len(real)} gradients"


def _flips(difference: int) -> int:
    """Return the least number of flipped bits that changes a checksum by ``difference``."""
    # the number of digits of the form in which no two neighbours are other than 0
    size = min(difference % 2**64, -difference % 2**64)
    return (size ^ (3 * size)).bit_count()


def _parts(grad: Tensor) -> list[Tensor]:
    if grad.layout == torch.strided:
        return [grad]
    coalesced = grad.coalesce() if grad.layout == torch.sparse_coo else grad.to_dense()
    return [coalesced.indices(), coalesced.values()] if coalesced.is_sparse else [coalesced]


@contextlib.contextmanager
def _hooks_set_aside(leaves: Sequence[Any]) -> Iterator[None]:
    """Have no hook of these tensors run inside of the block."""
    # emptied, not replaced, because autograd holds the very dictionaries
    kept = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)

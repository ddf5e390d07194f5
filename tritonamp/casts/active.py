"""The policy that a thread's ops follow. Enabled forwards set it, and the op table reads it."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch._guards import TracingContext

from tritonamp.ambient import device_types
from tritonamp.functional.inputs import in_force
from tritonamp.kernels._by_length import BATCH_INVARIANT
from tritonamp.kernels._dynamo import constant_to_dynamo
from tritonamp.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])

NO_RULES = 0  # the number for ``enter`` that stands for no rules
MARKS = 128  # changes of policy that a backward can look back on


class ActivePolicy(NamedTuple):
    """Policy, backend and device type that the ops of an enabled forward follow.

    Attributes:
        policy: policy of the model.
        backend: backend of the model.
        device_type: device type of the model's parameters.
        fp32_results: whether products have FP32 results, inside of ``policy.fp32_results``.
    """

    policy: Policy
    backend: str
    device_type: str
    fp32_results: bool = False


class _Thread(threading.local):
    """The enabled forwards that a thread is inside, each with the trace that it is part of."""

    def __init__(self) -> None:
        # innermost last
        self.stack: list[tuple[ActivePolicy | None, TracingContext | None]] = []
        self.in_rule = False  # inside a rule's stock op, where no rule applies
        # whether autograd used threads of its own before the outermost forward; None: outside
        self.threads_before: bool | None = None
        # policy of the segment that torch.utils.checkpoint recomputed last, and the backward's node
        self.recomputed: tuple[tuple[int, int] | None, ActivePolicy | None] = (None, None)

    def live(self) -> list[tuple[ActivePolicy | None, TracingContext | None]]:
        """Return the stack, without entries that abandoned traces left on it."""
        if self.stack and self.stack[-1][1] is not None:
            trace = TracingContext.try_get()
            while self.stack and self.stack[-1][1] not in (None, trace):
                self.stack.pop()
            if not self.stack:
                self.release_backwards()
        return self.stack

    def note_threads(self) -> None:
        """Note the flag that ``release_backwards`` restores when the outermost forward ends."""
        # private (torch 2.11 to 2.15): the flag of torch.autograd.set_multithreading_enabled
        self.threads_before = torch._C._is_multithreading_enabled()

    def release_backwards(self) -> None:
        """Let autograd use threads of its own again, if it did."""
        if self.threads_before is not None:
            torch._C._set_multithreading_enabled(self.threads_before)
            self.threads_before = None


class _Process:
    """Bookkeeping that all threads share. It enables nothing by itself.

    Attributes:
        policies: policies by the numbers that ``enter`` takes. The first entry stands for NO_RULES.
        marks: pairs of an autograd node's sequence number and the policy that forwards follow from
            that node on. Sequence numbers count the nodes of one thread, so two threads that train
            under different policies must not use checkpointing at the same time.
        latest: policy of the last mark.
        inlined: functions that torch.compile traces as part of their caller.
        entered: number of enabled forwards that have begun.
    """

    def __init__(self) -> None:
        self.policies: list[ActivePolicy | None] = [None]
        self.marks: deque[tuple[int, ActivePolicy]] = deque(maxlen=MARKS)
        self.latest: ActivePolicy | None = None
        self.inlined: list[Callable[..., Any]] = []
        self.entered = 0

    def add_mark(self, active: ActivePolicy | None) -> None:
        """Note that forwards follow this policy from here on."""
        if active is not None and active is not self.latest:
            # private: numbers of autograd's nodes, which torch's own profiler pairs by
            self.marks.append((torch._C._autograd._get_sequence_nr(), active))
            self.latest = active

    def policy_of_node(self, node: Any) -> ActivePolicy | None:
        """Return the policy of the forward that created a node of autograd.

        For a node that a backward's thread created, the result is the latest policy.
        """
        marks = list(self.marks)  # another thread may add to it
        if not marks:
            return None
        number = -1 if node is None else node._sequence_nr()
        made = [mark for mark in marks if mark[0] <= number]
        return max(reversed(made), key=lambda mark: mark[0], default=marks[-1])[1]


thread = _Thread()
process = _Process()


def number_of(policy: Policy, backend: str, device_type: str, fp32_results: bool = False) -> int:
    """Return the number for ``enter`` of an ``ActivePolicy`` with these attributes.

    A graph can carry a number, but no Policy.
    """
    if policy.batch_invariant:
        backend = BATCH_INVARIANT[backend]
    active = ActivePolicy(policy, backend, device_type, fp32_results)
    if active not in process.policies:
        process.policies.append(active)
    return process.policies.index(active)


def inlined_by_dynamo(function: F) -> F:
    """Make torch.compile trace ``function`` as part of its caller, and never compile it alone.

    After a graph break in the user's forward, torch.compile would otherwise compile such functions
    in parts, and the parts after ``enter`` would run without the policy.
    """
    process.inlined.append(function)
    return function


inlined_by_dynamo(_Thread.note_threads)
inlined_by_dynamo(_Thread.release_backwards)


@inlined_by_dynamo
def enter(number: int) -> None:
    """Make ops of this thread that run under autocast follow a policy, until ``leave``.

    The caller turns autocast on, because the rules are registered at autocast's keys. To
    torch.compile ``enter`` and ``leave`` are leaf calls. It runs both while it traces, so the graph
    holds the choices of the rules.

    Args:
        number: number of the policy by ``number_of``, or NO_RULES.
    """
    push_policy(process.policies[number], TracingContext.try_get())


@inlined_by_dynamo
def leave() -> None:
    """End the innermost ``enter``."""
    pop_policies(max(len(thread.live()) - 1, 0))


@inlined_by_dynamo
def push_policy(active: ActivePolicy | None, trace: TracingContext | None = None) -> None:
    """Do what ``enter`` does, for a policy itself.

    Args:
        active: policy to follow; None: no rules apply.
        trace: torch.compile's trace that the forward is part of; None: the forward runs eagerly.
    """
    process.entered += 1
    if active is not process.latest:
        process.add_mark(active)
    stack = thread.stack and thread.live()
    if not stack:
        thread.note_threads()
    if active is not None and active.device_type != "cpu":
        # autograd would run the backward of a GPU in a thread of its own, which has no policy
        torch._C._set_multithreading_enabled(False)
    stack.append((active, trace))


@inlined_by_dynamo
def pop_policies(depth: int) -> None:
    """End all enabled forwards of this thread except the outermost ``depth``."""
    stack = thread.stack
    del stack[depth:]
    if stack:
        process.add_mark(stack[-1][0])
    else:
        thread.release_backwards()


def active() -> ActivePolicy | None:
    """Return the policy that ops of this thread follow now, or None outside enabled forwards."""
    stack = thread.stack
    if stack and stack[-1][1] is None:  # of no trace, so that nothing is left of one above it
        return stack[-1][0]
    stack = thread.live()
    if stack:
        return stack[-1][0]
    # private (torch 2.11 to 2.15): whether this thread is in a backward, and at which node; nothing
    # public says so
    if torch._C._current_graph_task_id() != -1 and not torch.is_autocast_cache_enabled():
        # a backward that runs forward ops under autocast is recomputing a checkpointed segment:
        # torch.utils.checkpoint restores autocast but cannot know of ``enter``. A cache that is off
        # tells ours from torch's own, see ``checkpointed``
        node, policy = thread.recomputed
        if policy is not None and node == _running_node():
            return policy
        return process.policy_of_node(torch._C._current_autograd_node())
    return None


def _running_node() -> tuple[int, int]:
    """Return the numbers of the backward that this thread is in, and of its node; -1: none."""
    node = torch._C._current_autograd_node()
    return torch._C._current_graph_task_id(), -1 if node is None else node._sequence_nr()


def _backend_in_force() -> str | None:
    found = active()
    return None if found is None else found.backend


in_force.ask = _backend_in_force


@constant_to_dynamo
def is_inside() -> bool:
    """Return whether this thread is in an enabled forward, or recomputes a part of one."""
    return bool(thread.live()) or active() is not None


class _OfSegment(dict[str, Any]):
    """Arguments of the ``torch.autocast`` in which a checkpointed segment is recomputed.

    The node that needs the segment may lie in a module that is only a part of it, so its policy may
    be another one. ``f(**arguments)`` calls ``keys``, because the class has its own ``__iter__``.
    """

    def __init__(self, arguments: dict[str, Any], policy: ActivePolicy) -> None:
        super().__init__(arguments)
        self._policy = policy

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def keys(self) -> Any:
        """Return the names, and note that ops follow the policy of the segment from here on."""
        if torch._C._current_graph_task_id() != -1:
            thread.recomputed = _running_node(), self._policy
        return super().keys()


def checkpointed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``stock`` with marks in its result: the policy, and that autocast's cache is off.

    torch.utils.checkpoint calls ``stock`` where a segment begins, and restores the returned state
    where it recomputes the segment. The cache is off in enabled forwards only. With the cache off,
    the recomputation casts a weight again for each use. Nothing else depends on the cache.

    Args:
        stock: torch's own function, which returns the arguments of ``torch.autocast`` for the
            device and for the CPU.
    """

    def noted(device_type: str = "cuda") -> Any:
        of_device, of_cpu = stock(device_type)
        found = active()
        of_cpu["cache_enabled"] = found is None  # set last; one flag for all
        return of_device, of_cpu if found is None else _OfSegment(of_cpu, found)

    return noted


@constant_to_dynamo
def under_op_policy() -> bool:
    """Return whether functions that the user registered are cast now."""
    found = active()
    return found is not None and found.policy.op_policy


def half_dtype() -> torch.dtype | None:
    """Return the half dtype of the op policy in force, or None where there is none."""
    for device_type in reversed(device_types):
        if torch.is_autocast_enabled(device_type) and under_op_policy():
            return torch.get_autocast_dtype(device_type)
    return None


@constant_to_dynamo
def tell_dynamo() -> None:
    """Make torch.compile put ``enter`` and ``leave`` into its graphs.

    Tracing calls this function. Dynamo is imported by then, so ``enable`` need not import it.
    """
    for function in (enter, leave):
        torch.compiler.allow_in_graph(function)

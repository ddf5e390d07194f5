"""Which policy the ops of a thread follow: set by enabled forwards, asked by the op table."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch._guards import TracingContext

from tritonamp.kernels._dynamo import constant_to_dynamo
from tritonamp.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])

NO_RULES = 0  # a number for ``enter``
MARKS = 128  # changes between kinds of enabled forwards that a backward can look back on


class ActivePolicy(NamedTuple):
    """What the ops of an enabled forward follow, and the type of the device that they run on."""

    policy: Policy
    backend: str
    device_type: str


class _Thread(threading.local):
    """The enabled forwards that this thread is in, and the trace that each is part of."""

    def __init__(self) -> None:
        # innermost last
        self.stack: list[tuple[ActivePolicy | None, TracingContext | None]] = []
        self.in_rule = False  # inside a rule's stock op, where no rule applies
        self.keeps_backwards = False  # whether this object has turned autograd's threads off

    def live(self) -> list[tuple[ActivePolicy | None, TracingContext | None]]:
        """Return the stack, without what traces that were given up half-way have left on it."""
        if self.stack and self.stack[-1][1] is not None:
            trace = TracingContext.try_get()
            while self.stack and self.stack[-1][1] not in (None, trace):
                self.stack.pop()
            if not self.stack:
                self.release_backwards()
        return self.stack

    def keep_backwards(self) -> None:
        """Run backwards in the thread that calls them.

        On a GPU autograd uses a thread of the device, which has no policy.
        """
        # private (torch 2.11 to 2.15): what torch.autograd.set_multithreading_enabled sets
        if torch._C._is_multithreading_enabled():
            self.keeps_backwards = True
            torch._C._set_multithreading_enabled(False)

    def release_backwards(self) -> None:
        """Undo ``keep_backwards``."""
        if self.keeps_backwards:
            torch._C._set_multithreading_enabled(True)
            self.keeps_backwards = False


class _Process:
    """What all threads of the process know: it only grows, and decides nothing by itself.

    Attributes:
        policies: by the numbers that ``enter`` takes; the first stands for NO_RULES.
        marks: sequence number of a node of autograd, and the policy that forwards follow from that
            node on. Numbers count the nodes of one thread: two threads that train under different
            policies must not checkpoint at once.
        latest: the policy of the last mark.
        inlined: functions that torch.compile traces as a part of their caller.
        entered: how often ``enter`` was called.
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
        """Return the policy of the forward that has made a node of autograd.

        For a node that a backward's thread has made it is the latest.
        """
        marks = list(self.marks)  # another thread may add to it
        if not marks:
            return None
        number = -1 if node is None else node._sequence_nr()
        made = [mark for mark in marks if mark[0] <= number]
        return max(reversed(made), key=lambda mark: mark[0], default=marks[-1])[1]


thread = _Thread()
process = _Process()


def number_of(policy: Policy, backend: str, device_type: str) -> int:
    """Return a small number for ``enter``: a traced graph can carry a number, not a Policy."""
    active = ActivePolicy(policy, backend, device_type)
    if active not in process.policies:
        process.policies.append(active)
    return process.policies.index(active)


def inlined_by_dynamo(function: F) -> F:
    """Have torch.compile trace ``function`` as a part of its caller, or else run it as it is.

    Were it compiled in parts, around a graph break in the user's forward, the parts after ``enter``
    would lack it.
    """
    process.inlined.append(function)
    return function


inlined_by_dynamo(_Thread.keep_backwards)
inlined_by_dynamo(_Thread.release_backwards)


@inlined_by_dynamo
def enter(number: int) -> None:
    """Have ops of this thread that run under autocast follow a policy, until ``leave``.

    The rules are at autocast's keys: turning autocast on is left to the caller. Both are leaf calls
    to torch.compile, which runs them while it traces: the graph holds what the rules chose.

    ``number`` is the policy's, by ``number_of``; or NO_RULES.
    """
    push_policy(process.policies[number], TracingContext.try_get())


@inlined_by_dynamo
def leave() -> None:
    """End the innermost ``enter``."""
    pop_policies(max(len(thread.live()) - 1, 0))


@inlined_by_dynamo
def push_policy(active: ActivePolicy | None, trace: TracingContext | None = None) -> None:
    """Do what ``enter`` does, for a policy itself, or None: no rules.

    ``trace`` is the one that the forward is part of; None: it runs.
    """
    process.entered += 1
    if active is not process.latest:
        process.add_mark(active)
    stack = thread.stack and thread.live()
    if active is not None and active.device_type != "cpu":
        thread.keep_backwards()
    stack.append((active, trace))


@inlined_by_dynamo
def pop_policies(depth: int) -> None:
    """End all enabled forwards of this thread but the outermost ``depth``."""
    stack = thread.stack
    del stack[depth:]
    if stack:
        process.add_mark(stack[-1][0])
    else:
        thread.release_backwards()


def active() -> ActivePolicy | None:
    """Return what ops of this thread follow now, or None outside enabled forwards."""
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
        return process.policy_of_node(torch._C._current_autograd_node())
    return None


@constant_to_dynamo
def is_inside() -> bool:
    """Tell whether this thread is in an enabled forward, or recomputes a part of one."""
    return bool(thread.live()) or active() is not None


def checkpointed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``stock`` with a mark in its answer: autocast's cache is off in enabled forwards only.

    torch.utils.checkpoint asks it where a segment begins, and sets autocast to the answer where the
    segment is recomputed. There the cache would spare the casts of weights that the segment uses
    more than once; nothing else depends on it.

    ``stock`` is torch's own function: it returns ``torch.autocast``'s arguments for the device and
    for the CPU.
    """

    def noted(device_type: str = "cuda") -> Any:
        of_device, of_cpu = stock(device_type)
        of_cpu["cache_enabled"] = active() is None  # it is set last, and there is one for all
        return of_device, of_cpu

    return noted


@constant_to_dynamo
def under_op_policy() -> bool:
    """Tell whether functions of the user's own are cast now."""
    found = active()
    return found is not None and found.policy.op_policy


def half_dtype() -> torch.dtype | None:
    """Return the half dtype of the op policy that applies here, or None outside of any."""
    for device_type in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device_type) and under_op_policy():
            return torch.get_autocast_dtype(device_type)
    return None


@constant_to_dynamo
def tell_dynamo() -> None:
    """Have torch.compile put ``enter`` and ``leave`` into its graphs.

    Called where it traces them: dynamo is imported then, and ``enable`` need not import it.
    """
    for function in (enter, leave):
        torch.compiler.allow_in_graph(function)

"""Which ops follow the op table, and its registration at torch's autocast keys.

Outside an enabled forward every entry hands over to the kernel that torch had there before.
"""

import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._guards import TracingContext

from tritonamp.casts.op_table import Forward, Rule, op_table
from tritonamp.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])

MARKS = 128  # changes between kinds of enabled forwards that a backward can look back on


class _Kind(NamedTuple):
    """Enabled forwards of one policy and backend, and the setting of autocast's cache in them."""

    forward: Forward
    cache: bool


class _Active(threading.local):
    """The enabled forwards that this thread is in, innermost last, and the trace that each is part
    of.

    Attributes:
        in_rule: this thread is inside a rule's stock op; no rule applies there.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[_Kind, TracingContext | None]] = []
        self.in_rule = False

    def live(self) -> list[tuple[_Kind, TracingContext | None]]:
        """The stack, without what traces that were given up half-way have left on it."""
        if self.stack and self.stack[-1][1] is not None:
            trace = TracingContext.try_get()
            while self.stack and self.stack[-1][1] not in (None, trace):
                self.stack.pop()
        return self.stack


class _Registration:
    """The one piece of module state: the forwards that ``enter`` knows, and the libraries while
    they are registered.

    Attributes:
        marks: what kind of forward autograd's nodes come from, beginning with the node of that
            sequence number. They count the nodes of one thread: two that train under different
            policies must not checkpoint at once.
    """

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.marks: deque[tuple[int, _Kind]] = deque(maxlen=MARKS)
        self.libraries: list[torch.library.Library] = []
        self.undivided: list[Callable[..., Any]] = []
        self.owners = 0

    def mark(self, kind: _Kind) -> None:
        """From here on forwards are of this kind."""
        if not self.marks or self.marks[-1][1] != kind:
            self.marks.append((torch._C._autograd._get_sequence_nr(), kind))

    def origin(self, node: Any) -> _Kind | None:
        """The kind of forward that a node of autograd was made in; the latest, of one from a
        backward's thread.
        """
        marks = list(self.marks)  # another thread may add to it
        if not marks:
            return None
        number = -1 if node is None else node._sequence_nr()
        made = [mark for mark in marks if mark[0] <= number]
        return max(reversed(made), key=lambda mark: mark[0], default=marks[-1])[1]


_active = _Active()
_registration = _Registration()


def forward_id(policy: Policy, backend: str) -> int:
    """A small number for ``enter``: a traced graph can carry a number, not a Policy."""
    forward = Forward(policy, backend)
    if forward not in _registration.forwards:
        _registration.forwards.append(forward)
    return _registration.forwards.index(forward)


def undivided(function: F) -> F:
    """Has torch.compile trace ``function`` as a part of its caller, or else run it as it is.

    Were it compiled in parts, around a graph break in the user's forward, the parts after ``enter``
    would lack it.
    """
    _registration.undivided.append(function)
    return function


@undivided
def enter(number: int, cache: bool = True) -> None:
    """From here to ``leave``, ops of this thread that run under autocast follow the forward of that
    number.

    ``cache`` is the setting of autocast's cache in that forward.

    Both are leaf calls to torch.compile, which runs them while it traces: the graph holds what the
    rules chose.
    """
    kind = _Kind(_registration.forwards[number], cache)
    _registration.mark(kind)
    _active.live().append((kind, TracingContext.try_get()))


@undivided
def leave() -> None:
    """Ends the innermost ``enter``."""
    stack = _active.live()
    if stack:
        stack.pop()
    if stack:
        _registration.mark(stack[-1][0])


class Surroundings(NamedTuple):
    """What a forward changes in its thread while it runs: the stack of ``enter``, and torch's
    autocast.
    """

    depth: int
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool
    nesting: int

    @classmethod
    @undivided
    def now(cls, device_type: str) -> "Surroundings":
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        enabled, dtype = (
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        )
        return cls(
            len(_active.stack),
            device_type,
            enabled,
            dtype,
            torch.is_autocast_cache_enabled(),
            nesting,
        )

    @undivided
    def restore(self) -> None:
        """After a Ctrl-C, which may have come while they were being changed."""
        del _active.stack[self.depth :]
        torch.set_autocast_enabled(self.device_type, self.enabled)
        torch.set_autocast_dtype(self.device_type, self.dtype)
        torch.set_autocast_cache_enabled(self.cache)
        for _ in range(Surroundings.now(self.device_type).nesting - self.nesting):
            torch.autocast_decrement_nesting()
        if self.nesting == 0:
            torch.clear_autocast_cache()


def active() -> Forward | None:
    """What ops of this thread follow now, or None outside enabled forwards."""
    stack = _active.live()
    if stack:
        return stack[-1][0].forward
    if torch._C._current_graph_task_id() != -1:
        # a backward that runs forward ops under autocast is recomputing a checkpointed segment:
        # torch.utils.checkpoint restores autocast but cannot know of ``enter``. The cache setting
        # tells torch's own from ours
        kind = _registration.origin(torch._C._current_autograd_node())
        if kind is not None and torch.is_autocast_cache_enabled() == kind.cache:
            return kind.forward
    return None


def active_policy() -> Policy | None:
    """The policy that ops of this thread follow now, or None outside enabled forwards."""
    forward = active()
    return None if forward is None else forward.policy


def under_op_policy() -> bool:
    """Whether functions of the user's own are cast now. To torch.compile a constant, read while it
    traces.
    """
    policy = active_policy()
    return policy is not None and policy.op_policy


def is_registered() -> bool:
    """Whether torch's dispatch tables hold the op table now."""
    return len(_registration.libraries) > 0


def acquire(functions: dict[str, Rule]) -> None:
    """Registers the op table for one more enabled model.

    Args:
        functions: rules for single ops ("softmax.int"), the same on every device type.
    """
    _registration.owners += 1
    ensure(functions)


def ensure(functions: dict[str, Rule]) -> None:
    """Registers the op table if it is not: a copy of an enabled model may outlive it."""
    if _registration.libraries:
        return
    for function in (enter, leave):
        torch.compiler.allow_in_graph(function)
        torch.fx.node.has_side_effect(function)
    torch._dynamo.assume_constant_result(under_op_policy)
    for function in _registration.undivided:
        torch._dynamo.eval_frame.skip_code(function.__code__)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            library = torch.library.Library("aten", "IMPL")
            for op, rule in op_table(device_type, functions).items():
                library.impl(op, _implementation(op, rule, key), key, with_keyset=True)
            _registration.libraries.append(library)


def release() -> None:
    """Takes back one ``acquire``; the last one puts torch's dispatch tables back as they were."""
    _registration.owners -= 1
    if _registration.owners == 0:
        for library in _registration.libraries:
            library._destroy()
        _registration.libraries.clear()


class _Op:
    """One op at one autocast key, without our rules."""

    def __init__(self, op: str, key_name: str) -> None:
        packet, _, overload = op.partition(".")
        self.target = getattr(getattr(torch.ops.aten, packet), overload or "default")
        key = getattr(DispatchKey, key_name)
        self.autocast, self.after = DispatchKeySet(key), torch._C._dispatch_keyset_full_after(key)
        self.kernel = None
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key_name):
            self.kernel = torch.library.get_kernel(self.target, key_name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.target, *args, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` where no rule and no autocast applies."""
        before, _active.in_rule = _active.in_rule, True
        try:
            with torch._C._ExcludeDispatchKeyGuard(self.autocast):
                return function(*args, **kwargs)
        finally:
            _active.in_rule = before

    def torchs(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """What torch would have done at this key."""
        if (
            self.kernel is not None and not _active.in_rule
        ):  # torch.func comes back here from below, the guard undone
            return self.kernel.call_boxed(keyset, *args, **kwargs)
        return self.target.redispatch(keyset & self.after, *args, **kwargs)


def _implementation(op: str, rule: Rule, key_name: str) -> Callable[..., Any]:
    stock = _Op(op, key_name)

    def implementation(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        forward = None if _active.in_rule else active()
        if forward is None:
            return stock.torchs(keyset, *args, **kwargs)
        return rule(stock, forward, *args, **kwargs)

    # torch.compile gets the graph of what rules call; the rules themselves are not worth compiling
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(implementation.__code__, skip)
    return implementation

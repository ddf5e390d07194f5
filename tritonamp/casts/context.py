"""The context that modules of an enabled model share, and its forwards under the policy."""

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tritonamp.casts import active, dispatch
from tritonamp.casts.compiled_backward import begins, compilations, leave_autocast
from tritonamp.casts.tree import Cast, from_half, to_half
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels import _facts
from tritonamp.kernels._dynamo import constant_to_dynamo
from tritonamp.policy import Policy
from tritonamp.watched.forwards import Spectator

RunForward = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Entry(NamedTuple):
    """The state that a forward puts its thread into: a policy, and torch's autocast."""

    number: int  # of the policy, by ``active.number_of``; NO_RULES: autocast does not change
    policy: active.ActivePolicy | None  # of that number
    device_type: str
    dtype: torch.dtype
    cache: bool  # whether autocast caches casts of weights
    context: "weakref.ref[EnabledContext]"  # of the model
    in_native: tuple[Any, ...] = ()  # what ``run_under`` of _block.h takes


def _entry_of(context: "EnabledContext") -> Entry:
    """Return the entry for the forwards of a context's model."""
    policy, device_type, owner = context.policy, context.device_type, weakref.ref(context)
    if not dispatch.has_autocast(device_type):
        return Entry(active.NO_RULES, None, "cpu", policy.dtype, False, owner)
    dispatch.serve(device_type)
    # on CPU the op table also keeps half matmuls and convolutions from torch's slow kernels
    half_on_cpu = policy.cast_model and device_type == "cpu"
    number = active.NO_RULES
    if policy.op_policy or half_on_cpu:
        number = active.number_of(policy, context.backend, device_type)
    # autocast's cache is of use where weights are FP32; where it is off, a checkpointed segment
    # can be told from one of torch's own autocast, also where others than torch recompute it
    cache = device_type == "cuda" and not policy.cast_model
    followed = active.process.policies[number]
    in_native = (followed, None), torch.device(device_type), policy.dtype, cache
    return Entry(number, followed, device_type, policy.dtype, cache, owner, in_native)


class EnabledContext:
    """Facts for the modules of an enabled model: its policy, its backend, and its FP32 values.

    A copy of a model keeps the policy, but its ``fp32_values`` are empty, because the tensors of a
    copy hold the FP32 values themselves.

    Attributes:
        handle: ``Amp`` of the model; None in copies, and while the ``Amp`` is built.
        policy: policy of the model.
        backend: "auto", "triton" or "eager".
        fp32_values: FP32 values of the model's half tensors.
        spectators: objects that hear of each forward, in this order; none in copies.
        gathered: whether FSDP2 gathers the parameters.
        holdings: ``Holdings`` of the model in ``sharing``; None in copies.
        casts: whether the policy computes anything in half.
        device_type: device type of the parameters.
        autocast: whether forwards run under torch's autocast, at whose keys the op table is
            registered.
        run_forward: function that runs a function with its ``args`` and ``kwargs`` under the op
            policy.
        input_cast: cast for the arguments that the policy selects.
        output_cast: cast for outputs; None: outputs stay as they came.
    """

    def __init__(
        self,
        policy: Policy,
        backend: str,
        device_type: str,
        fp32_values: Fp32Values,
        spectators: Sequence[Spectator] = (),
        gathered: bool = False,
    ) -> None:
        self.handle: Any = None
        self.policy = policy
        self.backend = backend
        self.fp32_values = fp32_values
        self.spectators = spectators
        self.gathered = gathered
        self.holdings: Any = None
        self.move(device_type)

    @contextlib.contextmanager
    def under(self, policy: Policy) -> Iterator[None]:
        """Run forwards under another policy inside the block. Tensors keep their dtypes."""
        before = dict(vars(self))
        self.policy = policy
        self.move(self.device_type)
        try:
            yield
        finally:
            vars(self).update(before)
            dispatch.need_products(self, self._has_fp32_results)

    def move(self, device_type: str) -> None:
        """Adapt to parameters that are on a device of this type now."""
        self.device_type = device_type
        self.casts = self.policy.cast_model or self.policy.op_policy
        entry = self._entry = _entry_of(self)
        self.autocast = entry.number != active.NO_RULES
        # no method wraps it, because at each forward every Python call counts
        self.run_forward: RunForward = (
            functools.partial(run_under, entry) if self.casts else _run_plainly
        )
        self.input_cast = to_half(self.policy.dtype)
        self.output_cast = _output_cast(self.policy)
        self._number_with_fp32_results = active.NO_RULES
        if self.policy.fp32_results and self.autocast:
            self._number_with_fp32_results = active.number_of(
                self.policy, self.backend, device_type, fp32_results=True
            )
        dispatch.need_products(self, self._has_fp32_results)

    @property
    def _has_fp32_results(self) -> bool:
        """Whether modules of ``Policy.fp32_results`` run by rules of their own."""
        return self._number_with_fp32_results != active.NO_RULES

    @active.inlined_by_dynamo
    def run_with_fp32_results(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return ``function(*args, **kwargs)``, run with FP32 results of products.

        Outside of enabled forwards, and where nothing is cast, it runs as usual.
        """
        number = self._number_with_fp32_results
        is_cast = torch.is_autocast_enabled(self.device_type) and active.is_inside()
        if number == active.NO_RULES or not is_cast:
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            active.tell_dynamo()
            active.enter(number)
            try:
                return function(*args, **kwargs)
            finally:
                active.leave()
        depth = len(active.thread.live())
        active.push_policy(active.process.policies[number])
        try:
            return function(*args, **kwargs)
        finally:
            active.pop_policies(depth)

    @property
    def is_copy(self) -> bool:
        """Whether the context is a copy's, which belongs to no ``Amp``."""
        return self.handle is None

    def __deepcopy__(self, memo: dict[int, Any]) -> "EnabledContext":
        policy = self.policy
        has_wide = next(iter(self.fp32_values), None) is not None
        if has_wide and not policy.op_policy:  # O3: half inputs meet FP32 weights in the copy
            policy = dataclasses.replace(policy, op_policy=True)
        return EnabledContext(policy, self.backend, self.device_type, Fp32Values())

    @contextlib.contextmanager
    @active.inlined_by_dynamo
    def entered(self) -> Iterator[None]:
        """Apply the op policy to a ``with`` block."""
        if not self.autocast:
            yield
        elif torch.compiler.is_compiling():
            with self._traced():
                yield
        else:
            with restored(self.device_type):
                _enter(self._entry)
                yield

    @active.inlined_by_dynamo
    def run_compiled(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what ``run_forward`` does, in a form that torch.compile can trace."""
        if not self.casts:
            return function(*args, **kwargs)
        with self._traced():
            return function(*args, **kwargs)

    @contextlib.contextmanager
    @active.inlined_by_dynamo
    def _traced(self) -> Iterator[None]:
        """Enter and leave the policy and autocast, in a form that torch.compile can trace."""
        active.tell_dynamo()
        leave_autocast()
        self._have_rules()
        entry = self._entry
        active.enter(entry.number)
        try:
            if not self.autocast:
                yield
            else:
                with torch.autocast(
                    entry.device_type, dtype=entry.dtype, cache_enabled=entry.cache
                ):
                    yield
        finally:
            active.leave()

    @constant_to_dynamo
    def _have_rules(self) -> None:
        """Register the op table for a copy that outlived its original."""
        if not dispatch.is_registered():
            dispatch.borrow(self)


def _output_cast(policy: Policy) -> Cast | None:
    """Return the cast for outputs; None: outputs keep their dtype."""
    target = policy.cast_outputs
    cast = None if target is None else from_half(target)
    unread = (cast or Cast((policy.dtype,), policy.dtype))._replace(is_unread=True)
    return unread if policy.fuse_loss else cast


@active.inlined_by_dynamo
def run_under(
    entry: Entry, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return ``function(*args, **kwargs)``, run under a policy and its autocast.

    This does what ``EnabledContext.entered`` does, without the cost of a generator. Any exception
    leaves this thread as it was before, even a Ctrl-C during the changes themselves. Where C++ can
    do all of it, no Ctrl-C comes in between.
    """
    stack, in_native = active.thread.stack, _facts._native.run_under
    if in_native is not None and _changes_autocast_only(entry.policy, stack):
        active.process.entered += 1
        return in_native(stack, entry.in_native, function, args, kwargs)
    before = _begin(entry.device_type)
    try:
        _enter(entry)
        result = function(*args, **kwargs)
        _restore(*before)
    except BaseException:
        _restore(*before)
        raise
    return result


@active.inlined_by_dynamo
def _changes_autocast_only(policy: active.ActivePolicy | None, stack: Sequence[Any]) -> bool:
    """Return whether ``_enter`` and ``_restore`` would only change the stack and autocast.

    They would also mark another policy, register the op table, or observe compilations.
    """
    if policy is None or policy is not active.process.latest or not dispatch.registration.libraries:
        return False
    if stack and stack[-1] != (policy, None):
        return False
    return "torch._dynamo" not in sys.modules or begins in compilations.observers


@active.inlined_by_dynamo
def _run_plainly(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return function(*args, **kwargs)


@contextlib.contextmanager
def restored(device_type: str) -> Iterator[None]:
    """Restore this thread's policy and autocast at the end of the block.

    A Ctrl-C while autocast is entered or left cannot prevent this.
    """
    before = _begin(device_type)
    try:
        yield
        _restore(*before)
    except BaseException:
        _restore(*before)
        raise


@active.inlined_by_dynamo
def _begin(device_type: str) -> tuple[int, str, bool, torch.dtype, bool, int]:
    """Return the arguments of ``_restore``, and count one more autocast block."""
    return (
        len(active.thread.stack and active.thread.live()),
        device_type,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        torch.autocast_increment_nesting() - 1,
    )


@active.inlined_by_dynamo
def _enter(entry: Entry) -> None:
    """Make this thread follow a policy, and turn on its autocast."""
    _, followed, device_type, dtype, cache, context, _ = entry
    active.push_policy(followed)
    if followed is None:
        return
    if not dispatch.registration.libraries and (owner := context()) is not None:
        owner._have_rules()
    # torch.compile may have been imported since, or reset
    if begins not in compilations.observers and "torch._dynamo" in sys.modules:
        compilations.observe()
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache)


@active.inlined_by_dynamo
def _restore(
    depth: int, device_type: str, enabled: bool, dtype: torch.dtype, cache: bool, nesting: int
) -> None:
    """Restore the thread state that ``_enter`` changes, even if only a part was changed.

    ``depth`` and ``nesting`` are the numbers of enabled forwards, and of autocast blocks, that the
    thread was in. The other arguments are the state of its autocast.
    """
    active.pop_policies(depth)
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache)
    while (now := torch.autocast_decrement_nesting()) > nesting:
        pass  # blocks inside were not left
    if now < nesting:
        torch.autocast_increment_nesting()
    if nesting == 0:
        torch.clear_autocast_cache()

"""The context that modules of an enabled model share, and their forwards under its policy."""

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from tritonamp.casts import active, dispatch
from tritonamp.casts.compiled_backward import begins, compilations, leave_autocast
from tritonamp.casts.tree import from_half, to_half
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._dynamo import constant_to_dynamo
from tritonamp.policy import Policy

RunForward = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class ForwardObserver(Protocol):
    """Whom each forward of an enabled model is reported to.

    What ``before`` returns is handed to ``after`` or ``failed``.
    """

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], method: str) -> Any:
        """Note that a forward begins; return None where its end is of no interest."""

    def after(self, noted: Any, output: Any) -> None:
        """Note that it has returned ``output``."""

    def failed(self, noted: Any) -> None:
        """Note that it has raised."""


class RanksInForward(Protocol):
    """The ranks that a model is trained on, which become known in its forwards."""

    @property
    def gathered(self) -> bool:
        """Whether FSDP2 gathers the parameters."""

    def on_forward(self) -> bool:
        """Take note of the DDP or stage that this forward runs in; return whether it has data."""


class Entry(NamedTuple):
    """What a thread is put into for a forward: a policy, and torch's autocast."""

    number: int  # of the policy, by ``active.number_of``; NO_RULES: autocast is left as it is
    followed: active.ActivePolicy | None  # this policy; None: no rules
    device_type: str
    dtype: torch.dtype
    cache: bool  # whether autocast caches casts of weights
    context: "weakref.ref[EnabledContext]"  # of the model


def _entry_of(context: "EnabledContext") -> Entry:
    """Return what forwards of a context's model enter."""
    policy, device_type, owner = context.policy, context.device_type, weakref.ref(context)
    if not torch.amp.is_autocast_available(device_type):
        return Entry(active.NO_RULES, None, "cpu", policy.dtype, False, owner)
    # on CPU the op table also keeps half matmuls and convolutions from torch's slow kernels
    half_on_cpu = policy.cast_model and device_type == "cpu"
    number = active.NO_RULES
    if policy.op_policy or half_on_cpu:
        number = active.number_of(policy, context.backend, device_type)
    # autocast's cache is of use where weights are FP32; where it is off, a checkpointed segment
    # can be told from one of torch's own autocast, also where others than torch recompute it
    cache = device_type == "cuda" and not policy.cast_model
    followed = active.process.policies[number]
    return Entry(number, followed, device_type, policy.dtype, cache, owner)


class EnabledContext:
    """What an enabled module knows: its policy and backend, and the FP32 values of half tensors.

    Copies keep the policy. Their tensors hold the FP32 values themselves.

    Attributes:
        handle: the ``Amp``; None in copies, and while it is built.
        policy: what runs in which precision.
        backend: "auto", "triton" or "eager".
        fp32_values: of the model's half tensors.
        observer: whom forwards are reported to; None in copies.
        ranks: the ranks that decide together; None in copies, which decide alone.
        holdings: what ``sharing`` notes of an enabled model; None in copies.
        casts: whether anything is computed in half.
        device_type: where the parameters are.
        autocast: whether forwards run under torch's autocast, at whose keys the op table is.
        run_forward: takes a function, its ``args`` and ``kwargs``, and runs it under the op policy.
        input_cast: what becomes of arguments that are cast.
        output_cast: what becomes of outputs; None: nothing.
    """

    def __init__(
        self,
        policy: Policy,
        backend: str,
        device_type: str,
        fp32_values: Fp32Values,
        observer: ForwardObserver | None = None,
        ranks: RanksInForward | None = None,
    ) -> None:
        self.handle: Any = None
        self.policy = policy
        self.backend = backend
        self.fp32_values = fp32_values
        self.observer = observer
        self.ranks = ranks
        self.holdings: Any = None
        self.move(device_type)

    @contextlib.contextmanager
    def under(self, policy: Policy) -> Iterator[None]:
        """Have forwards run under another policy inside the block; dtypes of tensors stay."""
        before = dict(vars(self))
        self.policy = policy
        self.move(self.device_type)
        try:
            yield
        finally:
            vars(self).update(before)

    def move(self, device_type: str) -> None:
        """Note that the parameters are on a device of this type now."""
        self.device_type = device_type
        self.casts = self.policy.cast_model or self.policy.op_policy
        entry = self._entry = _entry_of(self)
        self.autocast = entry.number != active.NO_RULES
        # without a method of its own between: each call of a function counts
        self.run_forward: RunForward = (
            functools.partial(run_under, entry) if self.casts else _run_plainly
        )
        self.input_cast = to_half(self.policy.dtype)
        cast_outputs = self.policy.cast_outputs
        self.output_cast = None if cast_outputs is None else from_half(cast_outputs)

    @property
    def is_copy(self) -> bool:
        """Whether it is that of a copy, which belongs to no ``Amp``."""
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
        """Put the op policy around a ``with`` block."""
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
        """Do what ``run_forward`` does so that torch.compile traces it, and the function."""
        if not self.casts:
            return function(*args, **kwargs)
        with self._traced():
            return function(*args, **kwargs)

    @contextlib.contextmanager
    @active.inlined_by_dynamo
    def _traced(self) -> Iterator[None]:
        """Do what ``_enter`` and ``_restore`` do by what torch.compile has graph nodes for."""
        active.tell_dynamo()
        leave_autocast()
        self._have_rules()
        entry = self._entry
        active.enter(entry.number)
        try:
            if entry.followed is None:
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


@active.inlined_by_dynamo
def run_under(
    entry: Entry, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return ``function(*args, **kwargs)``, run under a policy and its autocast.

    As in ``EnabledContext.entered``, without a generator. Whatever is raised, this thread is left
    as it was: also by a Ctrl-C that comes while it is being changed.
    """
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
def _run_plainly(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return function(*args, **kwargs)


@contextlib.contextmanager
def restored(device_type: str) -> Iterator[None]:
    """Leave this thread as it is, also where a Ctrl-C comes while autocast is entered or left."""
    before = _begin(device_type)
    try:
        yield
        _restore(*before)
    except BaseException:
        _restore(*before)
        raise


@active.inlined_by_dynamo
def _begin(device_type: str) -> tuple[int, str, bool, torch.dtype, bool, int]:
    """Return what ``_restore`` puts back, and count one more autocast block."""
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
    """Have this thread follow a policy, and turn on its autocast."""
    _, followed, device_type, dtype, cache, context = entry
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
    """Put back what ``_enter`` changes in a thread, from wherever it is.

    ``depth`` and ``nesting`` count the enabled forwards, and the autocast blocks, that the thread
    was in.
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

"""What the modules of an enabled model know, and how their forwards run under its policy."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from tritonamp.casts import active, dispatch
from tritonamp.casts.rounded_inputs import InputLook
from tritonamp.casts.scripted import scripted
from tritonamp.casts.tree import from_half, to_half
from tritonamp.fp32_values import Fp32Values
from tritonamp.policy import Policy

Run = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


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

    def on_forward(self) -> None:
        """Take note of the DistributedDataParallel that this forward runs in."""


class EnabledContext:
    """What an enabled module knows: its policy and backend, and the FP32 values of half tensors.

    Copies keep the policy and leave the values, which belong to the original's optimizers.

    Attributes:
        policy: what runs in which precision.
        backend: "auto", "triton" or "eager".
        fp32_values: of the model's half tensors.
        observer: whom forwards are reported to; None in copies.
        ranks: the ranks that decide together; None in copies, which decide alone.
        look: at what inputs lose by their cast; None in copies, whose inputs are the original's.
        casts: whether anything is computed in half.
        device_type: where the parameters are.
        autocast: whether forwards run under torch's autocast, at whose keys the op table is.
        cache: the setting of autocast's cache in forwards.
        run: takes a function, its ``args`` and ``kwargs``, and runs it under the op policy.
        input_cast: what becomes of arguments that are cast.
        output_cast: what becomes of outputs; None: nothing.
    """

    def __init__(
        self,
        policy: Policy,
        backend: str,
        device_type: str,
        fp32_values: Fp32Values,
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.fp32_values = fp32_values
        self.observer: ForwardObserver | None = None
        self.ranks: RanksInForward | None = None
        self.look: InputLook | None = None
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
        self._number = active.number_of(self.policy, self.backend, device_type)
        # on CPU the op table also keeps half matmuls and convolutions from torch's slow kernels
        half_on_cpu = self.policy.cast_model and device_type == "cpu"
        available = torch.amp.is_autocast_available(device_type)
        self.autocast = available and (self.policy.op_policy or half_on_cpu)
        # autocast's cache is of use where weights are FP32; where it is off, a checkpointed segment
        # can be told from one of torch's own autocast, also where others than torch recompute it
        self.cache = device_type == "cuda" and not self.policy.cast_model
        # without a method of its own between: each call of a function counts
        self.run: Run = (
            functools.partial(run_under, self._number, self.cache)
            if self.autocast
            else functools.partial(_run_without_rules, self.casts)
        )
        self.input_cast = to_half(self.policy.dtype)
        cast_outputs = self.policy.cast_outputs
        self.output_cast = None if cast_outputs is None else from_half(cast_outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EnabledContext":
        return EnabledContext(self.policy, self.backend, self.device_type, Fp32Values())

    @active.inlined_by_dynamo
    def run_compiled(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what ``run`` does in a way that torch.compile traces, into the function, too."""
        if not self.autocast:
            return _run_without_rules(self.casts, function, args, kwargs)
        if not dispatch.is_registered():
            dispatch.ensure()
        active.enter(self._number)
        try:
            with torch.autocast(
                self.device_type, dtype=self.policy.dtype, cache_enabled=self.cache
            ):
                result = function(*args, **kwargs)
        finally:
            active.leave()
        return result

    @contextlib.contextmanager
    @active.inlined_by_dynamo
    def context(self) -> Iterator[None]:
        """Put the op policy around a ``with`` block."""
        if not self.autocast:
            yield
            return
        if torch.compiler.is_compiling():
            active.tell_dynamo()
        active.enter(self._number)
        try:
            with torch.autocast(
                self.device_type, dtype=self.policy.dtype, cache_enabled=self.cache
            ):
                yield
        finally:
            active.leave()


@active.inlined_by_dynamo
def _run_without_rules(
    casts: bool, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not casts:
        return function(*args, **kwargs)
    active.enter(active.NO_RULES)
    try:
        return function(*args, **kwargs)
    finally:
        active.leave()


@active.inlined_by_dynamo
def run_under(
    number: int,
    cache: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return ``function(*args, **kwargs)``, run under a policy and its autocast.

    Does what ``active.enter`` and ``leave`` and ``torch.autocast`` do, at less than half the price.
    Whatever is raised, this thread is left as it was: also by a Ctrl-C that comes while it is being
    changed.

    Args:
        number: of the policy, by ``number_of``.
        cache: whether autocast caches casts of weights.
        function: what is run.
        args: of it, by position.
        kwargs: of it, by name.
    """
    known = active.known
    followed = known.policies[number]
    device_type = followed.device_type
    if not dispatch.registration.libraries:  # a copy that outlived its original
        dispatch.ensure()
    stack = active.thread.stack and active.thread.live()
    before = _begin(stack, device_type)
    try:
        known.entered += 1
        if known.latest is not followed:
            known.mark(followed)
        if not stack and device_type == "cpu":
            scripted.off()
        stack.append((followed, None))
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, followed.policy.dtype)
        torch.set_autocast_cache_enabled(cache)
        result = function(*args, **kwargs)
        _restore(stack, device_type, *before)
    except BaseException:
        _restore(stack, device_type, *before)
        raise
    return result


@contextlib.contextmanager
def restored(device_type: str) -> Iterator[None]:
    """Leave this thread as it is, also where a Ctrl-C comes while autocast is entered or left."""
    before = _begin(active.thread.stack, device_type)
    try:
        yield
    finally:
        _restore(active.thread.stack, device_type, *before)


@active.inlined_by_dynamo
def _begin(stack: list[Any], device_type: str) -> tuple[int, bool, torch.dtype, bool, int]:
    """Return what ``_restore`` puts back, and count one more autocast block."""
    return (
        len(stack),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        torch.autocast_increment_nesting() - 1,
    )


@active.inlined_by_dynamo
def _restore(
    stack: list[Any],
    device_type: str,
    depth: int,
    enabled: bool,
    dtype: torch.dtype,
    cache: bool,
    nesting: int,
) -> None:
    """Put back what ``run_under`` changes in a thread, from wherever it is.

    Args:
        stack: of the thread.
        device_type: that autocast is set for.
        depth: of the stack.
        enabled: whether autocast was on.
        dtype: of autocast.
        cache: whether autocast cached casts of weights.
        nesting: how many autocast blocks the thread was in.
    """
    del stack[depth:]
    if stack:
        active.known.mark(stack[-1][0])
    else:
        scripted.on()
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache)
    while (now := torch.autocast_decrement_nesting()) > nesting:
        pass  # blocks inside were not left
    if now < nesting:
        torch.autocast_increment_nesting()
    if nesting == 0:
        torch.clear_autocast_cache()

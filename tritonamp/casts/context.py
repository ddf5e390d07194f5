"""What the modules of an enabled model know, and how their forwards run under its policy."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from tritonamp.casts import active, dispatch
from tritonamp.casts.rounded_inputs import InputLook
from tritonamp.fp32_values import Fp32Values
from tritonamp.policy import Policy


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

    def __deepcopy__(self, memo: dict[int, Any]) -> "EnabledContext":
        return EnabledContext(self.policy, self.backend, self.device_type, Fp32Values())

    @active.inlined_by_dynamo
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, run under the op policy.

        Not by ``context``: torch.compile would not trace into the forward.
        """
        if not self.casts:
            return function(*args, **kwargs)
        if not self.autocast:
            return self._run_without_rules(function, *args, **kwargs)
        if not dispatch.is_registered():  # a copy that outlived its original
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

    @active.inlined_by_dynamo
    def _run_without_rules(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        active.enter(active.NO_RULES)
        try:
            return function(*args, **kwargs)
        finally:
            active.leave()

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

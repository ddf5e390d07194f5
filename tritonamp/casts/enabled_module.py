"""The classes that ``enable`` gives to a model, and to modules inside it that stay FP32."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tritonamp.casts import active, dispatch
from tritonamp.casts.inputs import Signature, cast_arguments
from tritonamp.casts.rounded_inputs import InputLook
from tritonamp.casts.saved import SavedDtypes, named_tensors, pretrained_members
from tritonamp.casts.tree import cast_tree, from_half, to_half
from tritonamp.class_swap import Swapped
from tritonamp.fp32_values import Fp32Values
from tritonamp.frames import Role, plays
from tritonamp.policy import HALF_DTYPES, Policy


class ForwardObserver(Protocol):
    """Whom each forward of an enabled model is reported to.

    What ``before`` returns is handed to ``after`` or ``failed``.
    """

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    Copies and pickles keep the policy and leave the values, which belong to the original's
    optimizers.

    Attributes:
        policy: what runs in which precision.
        backend: "auto", "triton" or "eager".
        fp32_values: of the model's half tensors.
        observer: whom forwards are reported to; None in copies.
        ranks: the ranks that decide together; None in copies, which decide alone.
        look: at what inputs lose by their cast; None in copies, whose inputs are the original's.
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
        self._number = active.number_of(policy, backend)
        self.move(device_type)

    @contextlib.contextmanager
    def under(self, policy: Policy) -> Iterator[None]:
        """Have forwards run under another policy inside the block; dtypes of tensors stay."""
        before = dict(vars(self))
        self.policy = policy
        self._number = active.number_of(policy, self.backend)
        self.move(self.device_type)
        try:
            yield
        finally:
            vars(self).update(before)

    def move(self, device_type: str) -> None:
        """Note that the parameters are on a device of this type now."""
        self.device_type = device_type
        # on CPU the op table also keeps half matmuls and convolutions from torch's slow kernels
        half_on_cpu = self.policy.cast_model and device_type == "cpu"
        available = torch.amp.is_autocast_available(device_type)
        self.autocast = available and (self.policy.op_policy or half_on_cpu)
        # autocast's cache is of use where weights are FP32; where it is off, a checkpointed segment
        # can be told from one of torch's own autocast, also where others than torch recompute it
        self.cache = device_type == "cuda" and not self.policy.cast_model

    def value_of(self, tensor: Tensor) -> Tensor:
        """Return the FP32 value behind a half tensor that has one, else the tensor."""
        known = tensor.dtype in HALF_DTYPES and tensor in self.fp32_values
        return self.fp32_values.get(tensor) if known else tensor

    def __reduce__(self) -> Any:
        return EnabledContext, (self.policy, self.backend, self.device_type, Fp32Values())

    def __deepcopy__(self, memo: dict[int, Any]) -> "EnabledContext":
        make, of_copy = self.__reduce__()
        return make(*of_copy)

    @active.inlined_by_dynamo
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, run under the op policy.

        Not by ``context``: torch.compile would not trace into the forward.
        """
        if not self.autocast:
            return function(*args, **kwargs)
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


class _WithForward(Swapped):
    """A module whose forward is run by ``_run``; one that was set on the instance counts, too."""

    _belongings: ClassVar[tuple[str, ...]] = ("_tritonamp",)
    _set_aside = ("forward", "_tritonamp_forward")
    _tritonamp: EnabledContext
    _tritonamp_forward: Any = None
    _run: Callable[..., Any]

    @classmethod
    def _members(cls, base: type) -> dict[str, Any]:
        run = cls._run
        base_forward = base.forward  # type: ignore[attr-defined]

        @functools.wraps(base_forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = self._tritonamp_forward
            if own is not None:
                return run(self, own, (), args, kwargs)
            return run(self, base_forward, (self,), args, kwargs)

        return {"forward": forward}


@plays(Role.EDGE)
def enabled_forward(
    module: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any
) -> Any:
    """Run an enabled model's forward.

    Args:
        module: the model.
        forward: of the class it had before, or the one that was set on the instance.
        bound: arguments that come before the caller's.
        args: the caller's.
        kwargs: the caller's.
    """
    context = module._tritonamp
    policy = context.policy
    compiling = torch.compiler.is_compiling()
    if compiling:
        active.tell_dynamo()
    if not compiling:
        context.fp32_values.push()
    if context.ranks is not None:
        context.ranks.on_forward()
    observer = None if compiling else context.observer
    noted = None if observer is None else observer.before(module, args, kwargs)
    before = None
    if context.autocast and not compiling:
        before = active.ThreadState.now(context.device_type)
    try:
        if module._tritonamp_fp32:
            output = _fp32_forward(module, forward, bound, args, kwargs)
        else:
            look = None if compiling else context.look
            output = _cast_forward(module, forward, bound, args, kwargs, look)
    except BaseException:
        if observer is not None and noted is not None:
            observer.failed(noted)
        if before is not None:
            before.restore()
        raise
    if policy.cast_outputs is not None:
        output = cast_tree(output, from_half(policy.cast_outputs))
    if observer is not None and noted is not None:
        observer.after(noted, output)
    return output


def _cast_forward(
    module: Any,
    forward: Callable[..., Any],
    bound: Any,
    args: Any,
    kwargs: Any,
    look: InputLook | None,
) -> Any:
    """Run the forward on cast inputs, and look at what these lose; else as ``enabled_forward``."""
    context, signature = module._tritonamp, module._tritonamp_inputs
    wanted, cast = context.policy.cast_inputs, to_half(context.policy.dtype)
    around = None if look is None else look.around(module, signature, args, kwargs)
    with around or contextlib.nullcontext() as readers:
        args, kwargs = cast_arguments(args, kwargs, wanted, signature, cast)
        output = context.run(forward, *bound, *args, **kwargs)
        if readers is not None:
            readers.returned(output)
    return output


def _fp32_forward(
    module: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any
) -> Any:
    """Run the forward of a module that stays FP32; arguments as for ``enabled_forward``."""
    context = module._tritonamp
    args, kwargs = cast_tree((args, kwargs), from_half(torch.float32))
    with torch.autocast(context.device_type, enabled=False):
        output = forward(*bound, *args, **kwargs)
    if context.policy.op_policy:
        return output
    # nothing else would reconcile FP32 activations with the half layers that follow
    return cast_tree(output, to_half(context.policy.dtype))


class EnabledModule(_WithForward):
    """A model whose forward runs under its policy and whose ``state_dict`` holds FP32 values."""

    _belongings: ClassVar[tuple[str, ...]] = (
        "_tritonamp",
        "_tritonamp_saved",
        "_tritonamp_inputs",
    )
    _tritonamp_fp32 = False  # healed as a whole
    _tritonamp_saved = SavedDtypes()  # in pickles of earlier versions there is none
    _tritonamp_inputs = Signature()  # nor this
    _run = staticmethod(enabled_forward)

    @classmethod
    def _members(cls, base: type) -> dict[str, Any]:
        return super()._members(base) | pretrained_members(base)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return what the plain model's would be.

        What trains, or came in FP32, is FP32 (or of ``policy.state_dict_dtype``), the rest is as it
        is stored.
        """
        if args:  # positional as torch still allows
            defaults: tuple[Any, ...] = (destination, prefix, keep_vars)
            destination, prefix, keep_vars = args + defaults[len(args) :]
        result = super().state_dict(  # type: ignore[misc]
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        context = self._tritonamp
        if context.policy.state_dict_dtype in HALF_DTYPES:
            return result
        made: dict[Tensor, Tensor] = {}  # what is tied stays tied
        for name, tensor in named_tensors(self):
            dtype = self._tritonamp_saved.in_state(name, tensor, context.fp32_values)
            if prefix + name not in result or dtype is tensor.dtype:
                continue
            if tensor not in made:
                made[tensor] = context.value_of(tensor).to(tensor.device, dtype)
            result[prefix + name] = made[tensor] if keep_vars else made[tensor].detach()
        return result

    # private, but what subclasses in torch itself override (RNNBase): ``to``, ``cuda`` and the like
    # all end here, from torch 2.11 to 2.15
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Follow ``to``, ``cuda``, ``cpu`` of the module, or of modules around it."""
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for param in self.parameters():  # type: ignore[attr-defined]
            self._tritonamp.move(param.device.type)
            break
        return result

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        """Take FP32 values unrounded.

        torch calls it for the root before its children, with the whole state.
        """
        if local_metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace the parameters that the enabled "
                "optimizer steps on: load without assign, or before tritonamp.enable"
            )
        values = self._tritonamp.fp32_values
        for name, tensor in named_tensors(self):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and tensor in values:
                values.load(tensor, value)
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, *args
        )


class Fp32Module(_WithForward):
    """A module inside an enabled model that computes in FP32: half inputs are cast up."""

    _run = staticmethod(_fp32_forward)

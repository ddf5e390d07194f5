"""The generated subclasses that ``enable`` installs on a model and an optimizer, and takes off
again.

The object stays the object; only its class changes, to a subclass of its own class with the same
name. Nothing is bound to one instance, so copies, pickles, replicas and other threads behave like
the original.
"""

import contextlib
import copyreg
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp import functional
from tritonamp.casts import dispatch
from tritonamp.casts.model import cast_tree, from_half, to_half
from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.scaler import is_watched
from tritonamp.step.interrupts import Uninterrupted
from tritonamp.step.masters import PreciseValues


class Precision:
    """What an enabled module knows: its policy and backend, and the FP32 values behind its half
    tensors.

    Copies and pickles keep the policy and leave the values, which belong to the original's
    optimizers.
    """

    def __init__(
        self, policy: Policy, backend: str, device_type: str, precise: PreciseValues
    ) -> None:
        self.policy, self.backend, self.precise = policy, backend, precise
        self.forwards: Any = None  # hears of forwards; copies have nobody to tell
        self.ranks: Any = None  # sees the DDP that a forward runs in
        self.number = dispatch.forward_id(policy, backend)
        self.move(device_type)

    def move(self, device_type: str) -> None:
        """The parameters are on a device of this type now."""
        self.device_type = device_type
        # on CPU the op table also keeps half matmuls and convolutions from torch's slow half
        # kernels
        half_on_cpu = self.policy.cast_model and device_type == "cpu"
        self.autocast = torch.amp.is_autocast_available(device_type) and (
            self.policy.op_policy or half_on_cpu
        )
        # autocast's cache is of use where weights are FP32; where it is off, the recomputation of a
        # checkpointed segment can be told from one of torch's own autocast
        self.cache = device_type == "cuda" and not self.policy.cast_model

    def __reduce__(self) -> Any:
        return Precision, (self.policy, self.backend, self.device_type, PreciseValues())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Precision":
        return Precision(self.policy, self.backend, self.device_type, PreciseValues())

    @dispatch.undivided
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` under the op policy. No ``with`` of our own: torch.compile
        must see through.
        """
        if not self.autocast:
            return function(*args, **kwargs)
        if not dispatch.is_registered():  # a copy that outlived its original
            dispatch.ensure(functional.RULES)
        dispatch.enter(self.number, self.cache)
        try:
            with torch.autocast(
                self.device_type, dtype=self.policy.dtype, cache_enabled=self.cache
            ):
                result = function(*args, **kwargs)
        finally:
            dispatch.leave()
        return result

    @contextlib.contextmanager
    @dispatch.undivided
    def context(self) -> Iterator[None]:
        """The op policy as a context manager."""
        if not self.autocast:
            yield
            return
        dispatch.enter(self.number, self.cache)
        try:
            with torch.autocast(
                self.device_type, dtype=self.policy.dtype, cache_enabled=self.cache
            ):
                yield
        finally:
            dispatch.leave()


class _Enabled:
    """Marks generated classes; copies and pickles go by the class they were generated from."""

    _tritonamp_forward: Any = None
    _set_aside = (
        "forward",
        "_tritonamp_forward",
    )  # an attribute of the instance that hides ours, and where it waits

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        new_object = copyreg.__newobj__  # type: ignore[attr-defined]
        if isinstance(reduced, tuple) and reduced[0] is new_object and reduced[1][0] is type(self):
            arguments: tuple[Any, ...] = (
                _kind(type(self)),
                base_class(type(self)),
                *reduced[1][1:],
            )
            rebuilt: tuple[Any, ...] = reduced[2:]
            return (_new, arguments, *rebuilt)
        return reduced


class EnabledModule(_Enabled):
    """A model whose forward runs under its policy and whose ``state_dict`` holds FP32 values."""

    _tritonamp: Precision
    _tritonamp_fp32 = False  # healed as a whole

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        if args:  # positional as torch still allows
            defaults: tuple[Any, ...] = (destination, prefix, keep_vars)
            destination, prefix, keep_vars = args + defaults[len(args) :]
        result = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)  # type: ignore[misc]
        policy, precise = self._tritonamp.policy, self._tritonamp.precise
        if (
            not (policy.cast_model or policy.master_weights)
            or policy.state_dict_dtype in HALF_DTYPES
        ):
            return result
        for name, tensor in _named_tensors(self):
            if prefix + name in result and tensor.dtype in HALF_DTYPES:
                value = (
                    precise.get(tensor).to(tensor.device) if tensor in precise else tensor.float()
                )
                result[prefix + name] = value if keep_vars else value.detach()
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Called by ``to``, ``cuda``, ``cpu`` of the module and of modules around it."""
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for param in self.parameters():  # type: ignore[attr-defined]
            self._tritonamp.move(param.device.type)
            break
        return result

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        """Called for the root before its children, with the whole state: here FP32 values arrive
        unrounded.
        """
        if local_metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace the parameters that the enabled optimizer steps on: "
                "load without assign, or before tritonamp.enable"
            )
        precise = self._tritonamp.precise
        for name, tensor in _named_tensors(self):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and tensor in precise:
                precise.load(tensor, value)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[misc]


class Fp32Module(_Enabled):
    """A module inside an enabled model that computes in FP32: half inputs are cast up, autocast is
    off.
    """

    _tritonamp: Precision


def _forward(module: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any) -> Any:
    """An enabled model's forward; ``bound`` holds the arguments that come before the caller's."""
    precision = module._tritonamp
    policy = precision.policy
    if (policy.cast_model or policy.master_weights) and not torch.compiler.is_compiling():
        precision.precise.push()
    if precision.ranks is not None:
        precision.ranks.look()
    forwards, compiling = precision.forwards, torch.compiler.is_compiling()
    snapshot = None if forwards is None or compiling else forwards.before(module, args, kwargs)
    around = (
        None
        if compiling or not precision.autocast
        else dispatch.Surroundings.now(precision.device_type)
    )
    try:
        if module._tritonamp_fp32:
            output = _fp32_forward(module, forward, bound, args, kwargs)
        else:
            if policy.cast_inputs:
                args, kwargs = cast_tree((args, kwargs), to_half(policy.dtype))
            output = precision.run(forward, *bound, *args, **kwargs)
    except BaseException:
        if snapshot is not None:
            forwards.failed(snapshot)
        if around is not None:
            around.restore()
        raise
    output = (
        output if policy.cast_outputs is None else cast_tree(output, from_half(policy.cast_outputs))
    )
    if snapshot is not None:
        forwards.after(snapshot, output)
    return output


def _fp32_forward(
    module: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any
) -> Any:
    """The forward of a module that stays FP32."""
    precision = module._tritonamp
    args, kwargs = cast_tree((args, kwargs), from_half(torch.float32))
    with torch.autocast(precision.device_type, enabled=False):
        output = forward(*bound, *args, **kwargs)
    # without an op policy nothing would reconcile FP32 activations with the half layers that follow
    return (
        output if precision.policy.op_policy else cast_tree(output, to_half(precision.policy.dtype))
    )


class EnabledOptimizer(_Enabled):
    """An optimizer that steps on unscaled gradients and FP32 masters, or skips. A copy of it is a
    plain optimizer.
    """

    _stepper: Any  # of the Amp that enabled it
    _stepped = (
        False  # by a GradScaler, which is about to call ``step`` where somebody wants to see that
    )
    _step_supports_amp_scaling = True  # so that torch's GradScaler shows itself, see ``step``
    _set_aside = ("step", "_tritonamp_step")

    def step(self, closure: Any = None) -> None:
        """One step or one skip: unscale, check, clip, update, half copies.

        Raises:
            RuntimeError: a closure was passed, or there was no ``amp.backward(loss)``.
        """
        if self._stepped:
            return
        if closure is not None:
            raise RuntimeError(
                "optimizer.step(closure): a skipped step cannot run the closure again. Compute the loss first, "
                "call amp.backward(loss), then optimizer.step() without arguments"
            )
        if "found_inf" in vars(
            self
        ):  # what torch's GradScaler tells optimizers that skip on the device
            self._stepper.check_scaler(None)
        self._opt_called = True  # what an LR scheduler looks for
        with Uninterrupted(), self._stepper.around_step(self):
            self._stepper.step(self)

    step.hooked = True  # type: ignore[attr-defined]  # the hooks fire in the base class's step
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # nor does a scheduler need to wrap it

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._stepper.zeroed(_original(self), set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._stepper.check_group(_original(self), param_group)
        super().add_param_group(param_group)  # type: ignore[misc]
        self._stepper.adopt(_original(self), self.param_groups[-1])  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stepper.load_state(self, super().load_state_dict, state_dict)  # type: ignore[misc]

    def _amp_unscale_(self, scaler: Any) -> None:
        """Called by ``GradScaler.unscale_``."""
        self._stepper.check_scaler(scaler)
        self._stepper.unscale_(self)

    def _amp_step(self, scaler: Any) -> None:
        """Called by ``GradScaler.step``."""
        self._stepper.check_scaler(scaler)
        self._opt_called = True
        with Uninterrupted():
            found_inf = self._stepper.step(self, by_scaler=True)
        if is_watched(self) and (found_inf is None or not bool(found_inf)):
            self._stepped = True
            try:
                self.step()  # for whoever watches
            finally:
                self._stepped = False


class EnabledWrapper(_Enabled):
    """A DDP around an enabled model: what it makes equal on all ranks at the end of ``join``
    includes the rest.
    """

    _tritonamp_ranks: Any
    _set_aside = ("_sync_final_model", "_tritonamp_sync")

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)  # type: ignore[misc]
        self._tritonamp_ranks.catch_up(self)


@functools.cache
def _generated(kind: type, base: type) -> type:
    """The subclass of ``base`` for one kind: same name, module and signatures."""
    namespace: dict[str, Any] = {
        name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    if issubclass(kind, (EnabledModule, Fp32Module)):
        run = _forward if kind is EnabledModule else _fp32_forward
        base_forward = base.forward  # type: ignore[attr-defined]

        @functools.wraps(base_forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = self._tritonamp_forward  # a forward that was set on the instance
            if own is not None:
                return run(self, own, (), args, kwargs)
            return run(self, base_forward, (self,), args, kwargs)

        namespace["forward"] = forward
    return type(base.__name__, (kind, base), namespace)


def _new(kind: type, base: type, *args: Any) -> Any:
    """Rebuilds a copied or unpickled object: modules stay enabled, optimizers become plain ones."""
    cls = base if kind is EnabledOptimizer else _generated(kind, base)
    return cls.__new__(cls, *args)


def _kind(cls: type) -> type:
    return cls.__bases__[0]


def base_class(cls: type) -> type:
    """The class that a generated one was made from."""
    return cls.__bases__[1]


def is_installed(instance: object) -> bool:
    """Whether ``enable`` has installed a generated class on it."""
    return isinstance(instance, _Enabled)


def install(instance: Any, kind: type, **attributes: Any) -> None:
    """Gives ``instance`` the generated subclass of its class, and ``attributes``.

    A ``forward`` that was set on a module instance keeps its place behind the generated one; a
    ``step`` that an LR scheduler wrapped on an optimizer instance is set aside: the generated one
    does what the wrapper does.

    Raises:
        ValueError: Python cannot change the class of such an object.
    """
    cls: Any = type(instance)
    try:
        instance.__class__ = _generated(kind, cls)
    except TypeError as error:
        raise ValueError(f"cannot enable an object of class {cls.__name__}: {error}") from error
    own = vars(instance)
    name, aside = kind._set_aside  # type: ignore[attr-defined]
    if name in own:
        own[aside] = own.pop(name)
    own.update(attributes)


def uninstall(instance: Any, *attributes: str) -> None:
    """Puts the object's own class back, and removes ``attributes``."""
    name, aside = instance._set_aside
    instance.__class__ = base_class(type(instance))
    own = vars(instance)
    for attribute in attributes:
        own.pop(attribute, None)
    if aside in own:
        own[name] = own.pop(aside)


def _original(optimizer: Any) -> Any:
    """Of a wrapper whose class imitates that of the optimizer inside it, as Lightning's does, that
    optimizer.
    """
    return optimizer if "_stepper" in vars(optimizer) else optimizer.optimizer


def _named_tensors(module: Any) -> list[tuple[str, Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def base_step(optimizer: Optimizer) -> Any:
    """The step of the class that an enabled optimizer was made from, with its hooks."""
    return base_class(type(optimizer)).step(optimizer)  # type: ignore[attr-defined]

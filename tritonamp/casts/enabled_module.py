"""The classes that ``enable`` gives to a model, and to modules inside it."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.casts import active
from tritonamp.casts.context import EnabledContext, restored
from tritonamp.casts.inputs import Signature, cast_arguments, signature_of, wanted_names
from tritonamp.casts.methods import entered_methods
from tritonamp.casts.model import refuse_cast
from tritonamp.casts.model_losses import without_logits
from tritonamp.casts.norm_results import Followers, like_given, unknown_followers
from tritonamp.casts.pickled import with_values
from tritonamp.casts.replaced import wide_weights
from tritonamp.casts.saved import SavedDtypes, changed_values, named_tensors, pretrained_members
from tritonamp.casts.tree import cast_tree, from_half, to_half
from tritonamp.casts.uncast import remember, uncast
from tritonamp.class_swap import Swapped
from tritonamp.policy import HALF_DTYPES
from tritonamp.watched.frames import Role, plays

_NO_CHANGE = contextlib.nullcontext()


class _WithForward(Swapped):
    """A module whose forward ``_run`` runs, also a forward that was set on the instance."""

    _belongings: ClassVar[tuple[str, ...]] = ("_tritonamp_context",)
    _set_aside = ("forward", "_tritonamp_forward")
    _tritonamp_forward: Any = None
    _tritonamp_context: EnabledContext
    _run: Callable[..., Any]

    @property
    def _tritonamp(self) -> EnabledContext:
        """The context of the module.

        Raises:
            RuntimeError: the weights of the model are asleep.
        """
        context = self._tritonamp_context
        asleep = context.fp32_values.asleep
        if asleep.weights:  # asked here, because at each forward every call counts
            asleep.check_weights()
        return context

    def __prepare_scriptable__(self) -> Any:
        """Raise RuntimeError: ``torch.jit.script`` calls it, and cannot compile our forward."""
        raise RuntimeError(
            f"torch.jit.script: expected a plain module, got an enabled {type(self).__name__}: "
            "call amp.disable() before"
        )

    @classmethod
    def _members(cls, base: type) -> dict[str, Any]:
        run = cls._run

        @functools.wraps(base.forward)  # type: ignore[attr-defined]
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = self._tritonamp_forward
            if own is not None:
                return run(self, own, (), args, kwargs)
            return run(self, base.forward, (self,), args, kwargs)  # type: ignore[attr-defined]

        return {"forward": forward}


class Method(NamedTuple):
    """A method that runs as an enabled model's forward does."""

    name: str
    signature: Signature


def _entered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs as ``forward`` does, unless an enabled forward calls it."""
    entered = Method(name, signature_of(functools.partial(function, None)))

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active.is_inside() or not self._tritonamp.casts:
            return function(self, *args, **kwargs)
        return enabled_forward(self, function, (self,), args, kwargs, entered)

    return method


@plays(Role.EDGE)
def enabled_forward(
    module: Any,
    forward: Callable[..., Any],
    bound: Any,
    args: Any,
    kwargs: Any,
    method: Method | None = None,
) -> Any:
    """Run an enabled model's forward, or another method as if it were the forward.

    Args:
        module: enabled model.
        forward: forward of the model's original class, or the one that was set on the instance.
        bound: arguments that come before ``args``.
        args: positional arguments of the caller.
        kwargs: keyword arguments of the caller.
        method: method that the caller called; None: the forward.
    """
    if torch.compiler.is_compiling():
        return _traced_forward(module, forward, bound, args, kwargs, method)
    context = module._tritonamp
    context.fp32_values.push()
    noted = []
    try:
        for spectator in context.spectators:
            name = "__call__" if method is None else method.name
            if (note := spectator.before(module, args, kwargs, name)) is not None:
                noted.append((spectator, note))
        if module._tritonamp_fp32:  # healed as a whole
            with restored(context.device_type):
                output = _fp32_forward(module, forward, bound, args, kwargs)
        else:
            if context.policy.cast_inputs:
                args, kwargs = _cast_inputs(module, args, kwargs, method)
            with _without_logits(module, kwargs):
                output = context.run_forward(forward, (*bound, *args), kwargs)
    except BaseException:
        for spectator, note in noted:
            spectator.failed(note)
        raise
    output = _cast_outputs(context, output, method)
    for spectator, note in noted:
        spectator.after(note, output)
    return output


def _without_logits(module: Any, kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a loss from ``labels`` need not compute all logits."""
    context = module._tritonamp_context
    is_asked = context.policy.fuse_loss and kwargs.get("labels") is not None
    # FSDP2 gathers the weight for the layer's own forward
    return without_logits(module) if is_asked and not context.gathered else _NO_CHANGE


def _traced_forward(
    module: Any,
    forward: Callable[..., Any],
    bound: Any,
    args: Any,
    kwargs: Any,
    method: Method | None,
) -> Any:
    """Do what ``enabled_forward`` does while torch.compile traces."""
    context = module._tritonamp
    for spectator in context.spectators:
        spectator.traced()
    if module._tritonamp_fp32:
        output = _fp32_forward(module, forward, bound, args, kwargs)
    else:
        args, kwargs = _cast_inputs(module, args, kwargs, method)
        output = context.run_compiled(forward, (*bound, *args), kwargs)
    return _cast_outputs(context, output, method)


def _cast_inputs(module: Any, args: Any, kwargs: Any, method: Method | None) -> tuple[Any, Any]:
    """Return the arguments of a forward or method, cast as the policy says."""
    context, signature = module._tritonamp, module._tritonamp_inputs
    wanted = context.policy.cast_inputs
    if method is not None:
        if not isinstance(wanted, bool):  # positions are the forward's
            wanted = wanted_names(wanted, signature)
        signature = method.signature
    new_args, new_kwargs = cast_arguments(args, kwargs, wanted, signature, context.input_cast)
    if not torch.compiler.is_compiling():
        remember((*args, *kwargs.values()), (*new_args, *new_kwargs.values()))
    return new_args, new_kwargs


def _cast_outputs(context: EnabledContext, output: Any, method: Method | None) -> Any:
    """Return the output of a forward or method, cast as the policy says."""
    cast = context.output_cast
    if cast is None:
        return output
    if method is not None:  # its purpose may be to return parameters
        cast = cast._replace(passes=(nn.Parameter,))
    return cast_tree(output, cast)


def _fp32_forward(
    module: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any
) -> Any:
    """Run the forward of a module that stays FP32. Arguments are those of ``enabled_forward``."""
    args, kwargs = tuple(map(uncast, args)), {n: uncast(value) for n, value in kwargs.items()}
    output = _in_fp32(module, forward, *bound, *args, **kwargs)
    policy = module._tritonamp.policy
    if policy.op_policy:
        return output
    # without an op table, the half layers that follow would refuse FP32 activations
    return cast_tree(output, to_half(policy.dtype))


def _in_fp32(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``forward(*args, **kwargs)``, computed in FP32."""
    context = module._tritonamp
    args, kwargs = cast_tree((args, kwargs), from_half(torch.float32))
    with (
        torch.autocast(context.device_type, enabled=False),
        wide_weights(module) if context.gathered else contextlib.nullcontext(),
    ):
        return forward(*args, **kwargs)


class EnabledModule(_WithForward):
    """A model whose forward runs under its policy and whose ``state_dict`` holds FP32 values.

    Its other methods that reach parameters run under the policy, too.
    """

    _belongings: ClassVar[tuple[str, ...]] = (
        "_tritonamp_context",
        "_tritonamp_saved",
        "_tritonamp_inputs",
        "_tritonamp_fp32",
    )
    _tritonamp_saved: SavedDtypes
    _tritonamp_inputs: Signature
    _tritonamp_fp32: bool  # healed as a whole
    _run = staticmethod(enabled_forward)

    @classmethod
    def _variant(cls, instance: Any, base: type) -> tuple[str, ...]:
        return entered_methods(instance, base)

    @classmethod
    def _members(cls, base: type, *methods: str) -> dict[str, Any]:
        """Return the members of a subclass of ``base`` whose ``methods`` run as its forward."""
        entered = {name: _entered(name, getattr(base, name)) for name in methods}
        return super()._members(base) | entered | pretrained_members(base)

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the state of the plain model.

        Trainable parameters, and tensors that came in FP32, are FP32, unless
        ``policy.state_dict_dtype`` is half. All other tensors have their stored dtype.

        Raises:
            RuntimeError: torch's exporter of traced models to ONNX asks, which looks for the very
                parameters in the state.
        """
        result = super().state_dict(  # type: ignore[misc]
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        context = self._tritonamp
        if context.policy.state_dict_dtype in HALF_DTYPES:
            return result
        values = context.fp32_values
        is_for_onnx = keep_vars and torch.onnx.is_in_onnx_export()
        for name, _, value in changed_values(self, self._tritonamp_saved, values):
            if is_for_onnx:
                raise RuntimeError(
                    "torch.onnx.export(dynamo=False): expected a plain module, got an enabled "
                    f"{type(self).__name__}: call amp.disable() before"
                )
            if prefix + name in result:
                result[prefix + name] = value if keep_vars else value.detach()
        return result

    # private, but what subclasses in torch itself override (RNNBase): ``to``, ``cuda`` and the like
    # all end here, from torch 2.11 to 2.15
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a conversion, such as ``to``, ``cuda`` or ``cpu``, to the model's tensors.

        Raises:
            RuntimeError: ``fn`` would change dtypes, as ``half``, ``float`` and ``double`` do.
        """
        context = self._tritonamp
        context.fp32_values.asleep.check_training()  # gradients would come along
        if not context.is_copy:
            refuse_cast(self, fn)
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for param in self.parameters():  # type: ignore[attr-defined]
            context.move(param.device.type)
            break
        return result

    def _copied(self, memo: dict[int, Any] | None) -> Any:
        self._tritonamp.fp32_values.asleep.check_weights()
        return super()._copied(memo)

    def _plain_state(self, state: Any) -> Any:
        context = self._tritonamp
        plain = super()._plain_state(state)
        if context.policy.state_dict_dtype in HALF_DTYPES:
            return plain
        changed = changed_values(self, self._tritonamp_saved, context.fp32_values)
        values = {tensor: value for _, tensor, value in changed}
        return with_values(self, plain, values) if values else plain  # type: ignore[arg-type]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        """Load FP32 values without rounding.

        torch calls this for the root before its children, with the whole state.
        """
        assigns = local_metadata.get("assign_to_params_buffers", False)
        if assigns and not self._tritonamp.is_copy:
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
    """A module inside an enabled model that computes in FP32. Its half inputs are cast to FP32."""

    _run = staticmethod(_fp32_forward)


class Fp32ResultsModule(_WithForward):
    """A module inside an enabled model whose products of half operands have FP32 results."""

    @staticmethod
    def _run(module: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any) -> Any:
        """Run the forward. Arguments are those of ``enabled_forward``."""
        return module._tritonamp.run_with_fp32_results(forward, (*bound, *args), kwargs)


class NormModule(_WithForward):
    """A norm layer that is not torch's. Its FP32 weights do not make a half result FP32."""

    _belongings: ClassVar[tuple[str, ...]] = (
        "_tritonamp_context",
        "_tritonamp_followers",
        "_tritonamp_number",
    )
    _tritonamp_followers: Followers
    _tritonamp_number: int

    def _run(self: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any) -> Any:
        """Run the forward. Arguments are those of ``enabled_forward``."""
        if self._tritonamp_context.policy.op_policy:
            output = forward(*bound, *args, **kwargs)
        else:
            output = _in_fp32(self, forward, *bound, *args, **kwargs)
        return like_given(self, output, args, kwargs)

    def _copied(self, memo: dict[int, Any] | None) -> Any:
        """Return a copy that records no followers yet, because its policy may differ."""
        copied = super()._copied(memo)
        copied._tritonamp_followers, copied._tritonamp_number = unknown_followers(copied)
        return copied

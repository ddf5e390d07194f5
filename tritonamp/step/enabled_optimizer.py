"""The class that ``enable`` gives to an optimizer."""

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tritonamp.class_swap import Swapped
from tritonamp.kernels._dynamo import between_graphs
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.policy import HALF_DTYPES
from tritonamp.scaler import is_watched
from tritonamp.step.interrupts import Uninterrupted
from tritonamp.step.optimizer_copies import plain_state, replace_params
from tritonamp.step.rules import keeps_fp32_state, rule_of
from tritonamp.step.small_state import fp32_state_dict
from tritonamp.step.state_loading import load_state, widen_state
from tritonamp.step.stepper import Stepper


class EnabledOptimizer(Swapped):
    """An optimizer that steps on unscaled gradients and FP32 masters, or skips.

    An LR scheduler that was built before ``enable`` has wrapped ``step`` on the instance. That
    wrapper is set aside, because this ``step`` sets the same marks. A copy is a plain optimizer.
    """

    _belongings = ("_stepper",)
    _set_aside = ("step", "_tritonamp_step")
    _kept_by_copies = False
    _stepper: Stepper  # belongs to the Amp that enabled it
    _stepped = False  # True: a GradScaler has stepped, and calls ``step`` for its observers only
    # Private (torch 2.11 to 2.15). torch's GradScaler sets ``found_inf`` on optimizers with this
    # flag, by which ``step`` recognises a scaler that is not the one of the ``Amp``.
    _step_supports_amp_scaling = True

    @property
    def state(self) -> Any:
        """The optimizer's state; under ``offload`` reading it waits for the step before."""
        optimizer = _unwrapped(self)
        own = vars(optimizer)
        if own["_stepper"].offload is not None:
            own["_stepper"].offload.wait()
        if "state" in own:
            return own["state"]
        # An optimizer around another one has no state of its own. Its class has a property, which
        # ``super`` finds, or a ``__getattr__``, which Python calls after this AttributeError.
        return super(EnabledOptimizer, optimizer).state  # type: ignore[misc]

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state

    @between_graphs
    def step(self, closure: Any = None) -> None:
        """Step or skip: unscale, check, clip, update, half copies. A no-op without gradients.

        ``torch.distributed.checkpoint.state_dict`` calls ``step`` with gradients and learning rates
        of 0 to make state, into which it loads. Such a call runs the optimizer's own step, without
        a decision.

        Raises:
            RuntimeError: a closure was passed, or the gradients do not come from
                ``amp.backward(loss)``.
        """
        if self._stepped:
            return
        if closure is not None:
            raise RuntimeError(
                "optimizer.step(closure): a skipped step cannot run the closure again. Compute the "
                "loss first, call amp.backward(loss), then optimizer.step() without arguments"
            )
        stepper = _awake(self)
        own = vars(self)
        # ``self.state`` would wait for the device. The walk over the stack below is left out once
        # there is state, after the first step.
        has_state = own.get("state") or vars(_unwrapped(self)).get("state")
        if not has_state and _is_made_for_loading():
            with _unmoved_halves(self):
                super().step()  # type: ignore[misc]
            return
        # torch's GradScaler has set the attribute. It is refused, since its scale is not the one of
        # the decisions.
        if "found_inf" in own:
            stepper.check_scaler(None)
        # private (torch 2.11 to 2.15): without this mark an LR scheduler warns that it was called
        # before the optimizer
        self._opt_called = True
        optimizer: Any = self
        # Ctrl-C waits for the whole block. A checkpoint between the half copies and the notes of a
        # step would be neither the old state nor the new one.
        with Uninterrupted():
            if stepper.around_step is None:
                stepper.step(optimizer)
            else:
                with stepper.around_step(optimizer):
                    stepper.step(optimizer)

    # Both are private (torch 2.11 to 2.15). ``hooked``: Optimizer does not wrap hooks around this
    # ``step``, which runs them itself; they would run twice. ``_wrapped_by_lr_sched``: a scheduler
    # does not wrap a counter around it on the instance, since ``_opt_called`` is set above.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @between_graphs
    @leaves_inference_mode
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of masters and half parameters."""
        stepper = _awake(self)
        # ``param_groups`` hold the masters, so torch clears these. The half parameters, with the
        # decisions that wait for them, follow below.
        super().zero_grad(set_to_none)  # type: ignore[misc]
        stepper.pending.zeroed(_unwrapped(self), set_to_none)

    @leaves_inference_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model; the new group then holds their masters."""
        stepper, optimizer = _awake(self), _unwrapped(self)
        weights, rule = stepper.weights[optimizer], rule_of(optimizer)
        weights.masters.check_group(param_group)
        if rule is not None:
            group = {**optimizer.defaults, **param_group}
            rule.check_format(stepper.state_of(optimizer), group)
        super().add_param_group(param_group)  # type: ignore[misc]
        weights.adopt(self.param_groups[-1])  # type: ignore[attr-defined]

    def _plain_state(self, state: Any) -> Any:
        stepper, optimizer = _awake(self), _unwrapped(self)
        values = dict(stepper.weights[optimizer].fp32_values(lends=False))
        return plain_state(optimizer, super()._plain_state(state), values, stepper.offload)

    def _copied(self, memo: dict[int, Any] | None) -> Any:
        """Return a plain optimizer over the parameters of the model's copy, if there is one."""
        copied = super()._copied(memo)
        if memo is None:
            return copied
        weights = _awake(self).weights[_unwrapped(self)]
        # ``memo`` knows the parameters of a model that is copied in the same call, in any order.
        # Without one they are copied here, and the optimizer steps on parameters of its own, as in
        # torch.
        params = [copy.deepcopy(param, memo) for param, _, _ in weights.masters.with_groups()]
        replace_params(copied, params)
        widen_state(copied, [p for p in params if p.dtype is torch.float32])
        return copied

    def state_dict(self, *, packed: bool = False) -> dict[str, Any]:
        """Return the state, with moments in FP32.

        Args:
            packed: keep the format that ``Policy.state`` names, which every format loads, too.
        """
        _awake(self)
        optimizer = _unwrapped(self)
        # an optimizer of ``tritonamp.optim`` would give FP32 otherwise
        how = {"packed": True} if keeps_fp32_state(optimizer) else {}
        own: dict[str, Any] = super().state_dict(**how)  # type: ignore[misc]
        return own if packed else fp32_state_dict(own, optimizer, rule_of(optimizer))

    @leaves_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this optimizer has saved, enabled or not; FP32 state stays FP32."""
        stepper, optimizer = _awake(self), _unwrapped(self)
        keep = None if stepper.offload is None else stepper.offload.pin
        load = super().load_state_dict  # type: ignore[misc]
        rule, state = rule_of(optimizer), stepper.state_of(optimizer)
        load_state(optimizer, load, state_dict, rule, keep, state)
        # last: it moves "master_param" out of the state that was loaded
        stepper.weights[optimizer].masters.load_master_params()

    def _amp_unscale_(self, scaler: Any) -> None:
        """Unscale the gradients; ``GradScaler.unscale_`` calls this."""
        stepper = _awake(self)
        stepper.check_scaler(scaler)
        stepper.early.unscale_(self, by_scaler=True)  # type: ignore[arg-type]

    def _amp_step(self, scaler: Any) -> None:
        """Step or skip; ``GradScaler.step`` calls this, and ``update`` follows."""
        stepper = _awake(self)
        stepper.check_scaler(scaler)
        self._opt_called = True
        with Uninterrupted():
            found_inf = stepper.step(self, by_scaler=True)  # type: ignore[arg-type]
        # Accelerate puts a ``step`` on the instance, and takes a call of it for a step that was
        # taken. So it is called after a step, for the watcher only, and not after a skip.
        if is_watched(self) and (found_inf is None or not bool(found_inf)):
            self._stepped = True
            try:
                self.step()
            finally:
                self._stepped = False


def _is_made_for_loading() -> bool:
    """Tell whether torch calls ``step`` to make state, not to train.

    torch has no public sign of this. The answer is read from the stack, by the private name of the
    caller (torch 2.11 to 2.15). Wrappers around the optimizer may stand between.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    # a module that is not imported has no frames, and the walk over the stack is saved
    if module is None:
        return False
    maker, frame = module._init_optim_state.__code__, sys._getframe(1)
    while frame is not None and frame.f_code is not maker:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


@contextlib.contextmanager
def _unmoved_halves(optimizer: Any) -> Iterator[None]:
    """Keep the values of half parameters over a step that only makes state.

    The update of zeros is NaN if eps rounds to 0 in half, also with a learning rate of 0.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = {p: p.detach().clone() for p in params if p.dtype in HALF_DTYPES}
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in before.items():
                p.copy_(value)


def _awake(optimizer: Any) -> Stepper:
    """Return an enabled optimizer's stepper; raise RuntimeError while its tensors are asleep."""
    stepper: Stepper = optimizer._stepper
    if stepper.asleep.training:
        stepper.asleep.check_training()
    return stepper


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside Lightning's LightningOptimizer, or ``optimizer`` itself.

    The wrapper's class derives from the optimizer's class, so it may arrive here as ``self``.
    """
    return optimizer if "_stepper" in vars(optimizer) else optimizer.optimizer

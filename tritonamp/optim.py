"""Optimizers with FP32 arithmetic, for parameters of any floating dtype."""

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonamp.class_swap import is_installed
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._dynamo import between_graphs
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.kernels._memory_order import memory_strides
from tritonamp.kernels._multi_tensor import Memory
from tritonamp.kernels.device import widened
from tritonamp.policy import HALF_DTYPES, MASTERS, STATES, packs_masters
from tritonamp.step.fused import FusedStep
from tritonamp.step.fused_rule import FusedRule, scalar
from tritonamp.step.gradients import Gradients
from tritonamp.step.muon import MUON, MUON_AND_ADAMW, is_adamws
from tritonamp.step.packed_masters import (
    HALF_DTYPE,
    ORDER,
    REMAINDER,
    check_masters,
    has_codes,
)
from tritonamp.step.rule_table import ADAM, LION
from tritonamp.step.rule_table import SGD as SGD_RULE
from tritonamp.step.rules import check_differentiable
from tritonamp.step.shown_gradients import ShownGradients
from tritonamp.step.small_state import check_state, fp32_state_dict, in_fp32
from tritonamp.step.state_loading import load_state

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon"]


class _SupportsAmpScaling:
    """The flag by which ``torch.amp.GradScaler`` leaves unscaling and skipping to the step.

    It is True after ``fused=True``, as in torch's own optimizers, and with half parameters, because
    torch's scaler cannot unscale their gradients. Otherwise torch's scaler unscales, and reads on
    the host whether to skip. Lightning reads the flag before it clips, and clips as usual if it is
    False.
    """

    def __get__(self, optimizer: "_Fused | None", owner: type) -> bool:
        groups = [] if optimizer is None else optimizer.param_groups
        halves = (p.dtype in HALF_DTYPES for group in groups for p in group["params"])
        return any(group.get("fused") for group in groups) or any(halves)


class _Fused:
    """The additions to torch's optimizers: FP32 masters of half parameters, skips on the device.

    ``tritonamp.GradScaler`` recognises them by ``step.by_fused_rule`` and by ``_widen_gradients``.

    Attributes:
        fused_rule: rule by which the optimizer steps.
    """

    fused_rule: FusedRule
    _state_format = STATES[0]
    _masters: str | None = None
    _step_supports_amp_scaling = _SupportsAmpScaling()  # private to torch (2.11 to 2.15)
    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def __init__(
        self,
        *args: Any,
        state: str = STATES[0],
        masters: str | None = None,
        **hyperparameters: Any,
    ) -> None:
        """Build the optimizer.

        Args:
            *args: the optimizer's own positional arguments.
            state: format of the optimizer's state, "fp32", "bf16" or "8bit", as in
                ``tritonamp.Policy``.
            masters: form of the FP32 masters of half parameters, None, "packed" or "fp32", as in
                ``tritonamp.Policy``.
            **hyperparameters: the optimizer's own keyword arguments.

        Raises:
            ValueError: an unknown format or form, or one that the optimizer cannot keep.
        """
        super().__init__(*args, **hyperparameters)
        for name, value, allowed in ("state", state, STATES), ("masters", masters, MASTERS):
            if value not in allowed:
                raise ValueError(
                    f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}"
                )
        check_differentiable(self, state, masters)  # type: ignore[arg-type]
        check_state(state, self, self.fused_rule)  # type: ignore[arg-type]
        check_masters(masters, state, self, self.fused_rule)  # type: ignore[arg-type]
        self._state_format, self._masters = state, masters

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {**state, "_state_format": self._state_format, "_masters": self._masters}

    @property
    def _packs(self) -> bool:
        """Whether a half parameter's FP32 master is the parameter and 16 more bits."""
        return packs_masters(self._masters, self._state_format)

    @between_graphs
    @torch.no_grad()
    @leaves_inference_mode
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once.

        Reads the attributes ``grad_scale`` (the loss scale) and ``found_inf`` if a scaler has set
        them.

        Args:
            closure: function that evaluates the model again and returns the loss.

        Raises:
            RuntimeError: sparse gradients, which this kind of optimizer does not take.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        all_params = [p for group in self.param_groups for p in group["params"]]
        if self.defaults.get("differentiable"):
            with torch.enable_grad():
                # torch's step without its decorators, which would turn gradients off again
                inspect.unwrap(super().step.__func__)(self)  # type: ignore[misc]
            return loss
        value_of = self._pack_master if self._packs else self._fp32_master
        stepped_on = [
            value_of(p) if p.grad is not None and p.dtype in HALF_DTYPES else p for p in all_params
        ]
        grads = [None if p.grad is None else self._as_dense(p.grad) for p in all_params]
        fused, memory = self._fused_step
        gradients = Gradients.of(memory, stepped_on, grads, all_params, known_as=all_params)
        fused.step(gradients, *self._grad_scale_and_found_inf())
        halves = [p for p, master in zip(all_params, stepped_on, strict=True) if p is not master]
        self._fp32_values.mark_rounded(self._fp32_values.indices(halves))
        self._fp32_values.note_step()
        self._narrow_gradients()
        return loss

    step.by_fused_rule = True  # type: ignore[attr-defined]  # for step.rules and GradScaler

    @between_graphs
    @leaves_inference_mode
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as in torch; the next backward gives half parameters half gradients.

        Args:
            set_to_none: False: gradients become zeros.
        """
        self._narrow_gradients()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def _widen_gradients(self) -> None:
        """Make half gradients FP32 until the step; ``GradScaler.unscale_`` calls this."""
        if not self.defaults.get("differentiable"):  # whose step is torch's, in half
            self._shown_gradients.widen(p for group in self.param_groups for p in group["params"])

    def _narrow_gradients(self) -> None:
        """Make widened gradients half again; ``GradScaler`` calls this if there is no step."""
        self._shown_gradients.round_back()

    def _as_dense(self, grad: Tensor) -> Tensor:
        if grad.is_sparse:
            self.fused_rule.refuse_sparse()
            return grad.to_dense()
        return grad

    def _grad_scale_and_found_inf(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the factor on the gradients and the flag to skip, from attributes of a scaler."""
        scale = scalar(getattr(self, "grad_scale", None))
        found_inf = scalar(getattr(self, "found_inf", None))
        if scale is None:
            return None, found_inf
        grad_scale = widened(scale).reciprocal().float()
        # torch's scaler may let a scale sink so far that this is inf
        overflow = (~torch.isfinite(grad_scale)).float()
        return grad_scale, overflow if found_inf is None else torch.maximum(found_inf, overflow)

    # The next three are made at first use, not in __init__: torch's ``__getstate__`` leaves them
    # out, so copies and unpickled optimizers have none.

    @property
    def _fp32_values(self) -> Fp32Values:
        return self.__dict__.setdefault("_own_fp32_values", Fp32Values())

    @property
    def _shown_gradients(self) -> ShownGradients:
        return self.__dict__.setdefault("_own_shown_gradients", ShownGradients())

    @property
    def _fused_step(self) -> tuple[FusedStep, Memory]:
        made = self.__dict__.get("_own_fused")
        if made is None:
            how = "auto", self._state_format, self._packs, self._fp32_values.stored_form
            fused = FusedStep(self, self.fused_rule, *how)  # type: ignore[arg-type]
            made = self.__dict__["_own_fused"] = fused, Memory()
        return made

    def _fp32_master(self, param: Tensor) -> Tensor:
        """Return the FP32 master of a half parameter; the state has it as ``master_param``."""
        state = self.state[param]
        if REMAINDER in state:  # loaded from an optimizer with packed masters
            state = self.state[param] = in_fp32(state, self.fused_rule, param)
        # it is half if torch's ``load_state_dict`` has cast it to the parameter's dtype
        state["master_param"] = state.get("master_param", param.detach()).float()
        return self._fp32_values.adopt(param, state["master_param"])

    def _pack_master(self, param: Tensor) -> Tensor:
        """Keep the lower bits of a half parameter's FP32 value in the state; return ``param``."""
        state = self.state[param]
        known = state.get(REMAINDER), state.get(ORDER)
        state[REMAINDER] = self._fp32_values.lend_packed(param, *known)
        state[HALF_DTYPE] = param.dtype
        # codes keep the order in which they were made until the step makes them again
        if not has_codes(state):
            state[ORDER] = memory_strides(param)
        if "master_param" in state:
            self._fp32_values.load(param, state.pop("master_param"))
            self._fp32_values.settle_lent()
        return param

    def state_dict(self, *, packed: bool = False) -> dict[str, Any]:
        """Return the state as torch does, with moments and masters in FP32.

        Args:
            packed: keep the format that the optimizer was built with, which every format loads,
                too.
        """
        state_dict: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        if packed:
            return state_dict
        return fp32_state_dict(state_dict, self, self.fused_rule)  # type: ignore[arg-type]

    @leaves_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, but keep FP32 state of half parameters in FP32.

        Adam and AdamW also take a state of apex's FusedAdam.

        Raises:
            ValueError: ``state_dict`` is no state of such an optimizer over such parameters;
                nothing was changed then.
        """
        load: Any = super().load_state_dict  # type: ignore[misc]
        if is_installed(self):  # ``EnabledOptimizer`` calls this, and keeps the state in FP32
            load(state_dict)
        else:
            load_state(self, load, state_dict, self.fused_rule)  # type: ignore[arg-type]


class Adam(_Fused, torch.optim.Adam):
    """``torch.optim.Adam`` for parameters of any floating dtype, same arguments and state.

    Half parameters get FP32 moments and an FP32 master (``master_param`` in the state); the
    parameter is the rounded master. ``tritonamp.GradScaler`` leaves unscaling and skipping to the
    step, without a host read. torch's scaler does the same with half parameters and after
    ``fused=True``, else it reads on the host. ``foreach``, ``capturable`` and otherwise ``fused``
    make no difference.
    """

    fused_rule: FusedRule = ADAM


class AdamW(_Fused, torch.optim.AdamW):
    """``torch.optim.AdamW`` for parameters of any floating dtype, same arguments and state.

    Half parameters get FP32 moments and an FP32 master (``master_param`` in the state); the
    parameter is the rounded master. ``tritonamp.GradScaler`` leaves unscaling and skipping to the
    step, without a host read. torch's scaler does the same with half parameters and after
    ``fused=True``, else it reads on the host. ``foreach``, ``capturable`` and otherwise ``fused``
    make no difference.
    """

    fused_rule: FusedRule = ADAM


class SGD(_Fused, torch.optim.SGD):
    """``torch.optim.SGD`` for parameters of any floating dtype, same arguments and state.

    Half parameters get an FP32 momentum buffer and an FP32 master (``master_param`` in the state);
    the parameter is the rounded master. ``tritonamp.GradScaler`` leaves unscaling and skipping to
    the step, without a host read. torch's scaler does the same with half parameters and after
    ``fused=True``, else it reads on the host. ``foreach`` and otherwise ``fused`` make no
    difference. Sparse gradients are made dense. Dampening costs one host read per step, because
    torch does not dampen the first step, and that step may have been skipped.
    """

    fused_rule: FusedRule = SGD_RULE


class Lion(_Fused, torch.optim.Optimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023).

    ::

        update  = sign(beta1 * exp_avg + (1 - beta1) * grad)
        param   = param * (1 - lr * weight_decay) - lr * update
        exp_avg = beta2 * exp_avg + (1 - beta2) * grad

    Parameters may have any floating dtype. Half parameters get an FP32 ``exp_avg`` and an FP32
    master (``master_param`` in the state); the parameter is the rounded master.
    ``tritonamp.GradScaler`` leaves unscaling and skipping to the step, without a host read. torch's
    scaler does the same with half parameters, else it reads on the host.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate; a tenth to a third of AdamW's is usual.
        betas: decay rates of the update and of ``exp_avg``.
        weight_decay: decoupled weight decay; three to ten times AdamW's is usual.
        maximize: step along the gradient instead of against it.
        state: format of ``exp_avg``, "fp32", "bf16" or "8bit".
        masters: form of the FP32 masters of half parameters, as in ``tritonamp.Policy``.

    Raises:
        ValueError: a hyperparameter is out of its range.
    """

    fused_rule: FusedRule = LION

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state: str = STATES[0],
        masters: str | None = None,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"lr: expected 0 or more, got {lr}")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {betas}")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay: expected 0 or more, got {weight_decay}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state=state, masters=masters)


class Muon(_Fused, torch.optim.Muon):
    """``torch.optim.Muon`` for matrices of any floating dtype, same arguments and state.

    Half parameters get an FP32 momentum buffer and an FP32 master (``master_param`` in the state);
    the parameter is the rounded master. Matrices of equal shape are orthogonalised together, in
    bfloat16 as in torch, but normalised in FP32 first. ``tritonamp.GradScaler`` leaves unscaling
    and skipping to the step, without a host read. torch's scaler does the same with half
    parameters, else it reads on the host.

    Args:
        params: parameters of two dimensions, or groups of such parameters.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn:
            arguments of ``torch.optim.Muon``.
        adamw_params: parameters, or groups with AdamW's hyperparameters, on which AdamW steps in
            the same step: embeddings, heads, norms and biases. Their groups come last, and have
            "betas".

    Raises:
        ValueError: a hyperparameter is out of its range, or a parameter is no matrix; the message
            has the parameter's name if there are names.
    """

    @property
    def fused_rule(self) -> FusedRule:  # type: ignore[override]
        """The rule for the present groups."""
        return MUON_AND_ADAMW if any(map(is_adamws, self.param_groups)) else MUON

    def __init__(
        self, params: Any, *args: Any, adamw_params: Any = None, **hyperparameters: Any
    ) -> None:
        super().__init__(params, *args, **hyperparameters)
        if adamw_params is not None:
            adamw = AdamW(adamw_params)  # completes the groups, and checks them
            for group in adamw.param_groups:
                self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices, or, in a group that has "betas", parameters for AdamW.

        Raises:
            ValueError: a parameter is complex or no matrix; or the first group for AdamW comes
                after a step, whose state has no place for it.
        """
        if is_adamws(param_group) and self.fused_rule is MUON and self.state:
            raise ValueError(
                'Muon: got a group with "betas", for AdamW, after a step without such groups: give '
                "these parameters as adamw_params= when the optimizer is built, or to an AdamW"
            )
        super().add_param_group(param_group)
        if is_adamws(param_group):
            return
        params = self.param_groups[-1]["params"]
        names = self.param_groups[-1].get("param_names") or map(str, range(len(params)))
        for name, param in zip(names, params, strict=True):
            if param.dim() != 2 or param.is_complex():
                del self.param_groups[-1]
                raise ValueError(
                    f"Muon: expected real parameters of two dimensions, got parameter {name} of "
                    f"shape {tuple(param.shape)}, {param.dtype}; give it in adamw_params=, or to "
                    "an AdamW"
                )

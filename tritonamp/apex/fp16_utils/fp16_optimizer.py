"""FP16_Optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.apex import amp_C
from tritonamp.apex.fp16_utils.fp16util import clip_grad_norm, master_params_to_model_params
from tritonamp.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from tritonamp.apex.multi_tensor_apply import multi_tensor_applier
from tritonamp.policy import HALF_DTYPES
from tritonamp.step.state_loading import widen_state


class FP16_Optimizer:
    """FP32 masters and a loss scale around the optimizer of a half model.

    ``backward(loss)`` replaces ``loss.backward()``. A step whose gradients overflowed is skipped,
    even with a static scale. The scale changes in ``step``, so that all backwards before it use the
    same scale.

    Args:
        init_optimizer: the optimizer; FP32 masters replace the half parameters in its groups.
        static_loss_scale: the loss scale, unless ``dynamic_loss_scale`` is True.
        dynamic_loss_args: arguments of ``DynamicLossScaler``; default ``init_scale=2**16,
            scale_window=2000``.
        verbose: whether to print skipped steps.

    Attributes:
        overflow: whether the gradients of the last backward are not finite.

    Raises:
        TypeError: a parameter that is not FP32, FP16 or BF16.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            self._adopt(group)
        widen_state(init_optimizer, _flat(self.fp32_from_fp16_groups))
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler = LossScaler(static_loss_scale)
        if dynamic_loss_scale:
            settings = {"init_scale": 2.0**16, "scale_window": 2000, **(dynamic_loss_args or {})}
            self.loss_scaler = DynamicLossScaler(**settings)
        self.overflow = False
        self.first_closure_call_this_step = True
        self._unscaled = False  # FP32 parameters hold true gradients now

    def _adopt(self, group: dict[str, Any]) -> None:
        halves, masters, wide = [], [], []
        for i, param in enumerate(group["params"]):
            if not param.requires_grad:
                continue
            if param.dtype is torch.float32:
                wide.append(param)
            elif param.dtype in HALF_DTYPES:
                master = param.detach().float().requires_grad_()
                group["params"][i] = master
                if param in self.optimizer.state:
                    self.optimizer.state[master] = self.optimizer.state.pop(param)
                halves.append(param)
                masters.append(master)
            else:
                raise TypeError(
                    "FP16_Optimizer: expected parameters of float32, float16 or bfloat16, got one "
                    f"of {param.dtype}"
                )
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(wide)

    def __getstate__(self) -> Any:
        raise RuntimeError("FP16_Optimizer: save state_dict(), not the object")

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of masters and parameters: zeros, or None."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        for param in _flat(self.fp16_groups):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad = torch.zeros_like(param.grad)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Add the scaled gradients of ``loss`` to the parameters'.

        Args:
            loss: the unscaled loss.
            update_master_grads: whether to update the masters' gradients. With False call
                ``update_master_grads`` after the last of several losses.
            retain_graph: as in ``torch.Tensor.backward``.
        """
        if self._unscaled:
            self._scale(_flat(self.fp32_from_fp32_groups), self.loss_scale)
            self._unscaled = False
        self.loss_scaler.backward(loss, retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Give the masters unscaled FP32 gradients, and set ``overflow``. Waits for the device."""
        for param, master in zip(
            _flat(self.fp16_groups), _flat(self.fp32_from_fp16_groups), strict=True
        ):
            master.grad = None if param.grad is None else param.grad.float()
        wide = _flat(self.fp32_from_fp32_groups)
        self.overflow = self._scale(_flat(self.fp32_from_fp16_groups) + wide, 1.0 / self.loss_scale)
        self._unscaled = True

    def _scale(self, params: list[Tensor], factor: float) -> bool:
        """Multiplies their gradients; whether one was not finite."""
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            return False
        flag = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
        multi_tensor_applier(amp_C.multi_tensor_scale, flag, [grads, grads], factor)
        return bool(flag)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the masters and round them into the half parameters, or skip.

        Does nothing without gradients.

        Args:
            closure: function that calls ``zero_grad`` and ``backward`` of this object and returns
                the loss. It is called again with a lower scale if its gradients overflow.
        """
        params = (param for group in self.param_groups for param in group["params"])
        if closure is None and all(param.grad is None for param in params):
            return None
        if closure is None and self.overflow:
            self._skip()
            return None
        result = (
            self.optimizer.step()
            if closure is None
            else self.optimizer.step(lambda: self._evaluate(closure))
        )
        self.first_closure_call_this_step = True
        self._master_params_to_model_params()
        self.loss_scaler.update_scale(False)
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if not self.first_closure_call_this_step:  # the optimizer has moved the masters since
            self._master_params_to_model_params()
        self.first_closure_call_this_step = False
        loss = closure()
        while self.overflow and self.dynamic_loss_scale and self.loss_scale > 1:
            self._skip()
            loss = closure()
        if self.overflow:  # a lower scale is no way out: leave the optimizer nothing to step on
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = None
        return loss

    def _skip(self) -> None:
        self.loss_scaler.update_scale(True)
        if self.verbose:
            moves = "reducing loss scale to" if self.dynamic_loss_scale else "loss scale stays"
            print(f"Gradient overflow.  Skipping step, {moves} {self.loss_scale}")

    def _master_params_to_model_params(self) -> None:
        master_params_to_model_params(_flat(self.fp16_groups), _flat(self.fp32_from_fp16_groups))

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients, and return their norm before; -1 after an overflow."""
        if self.overflow:
            return -1
        return clip_grad_norm(
            [p for group in self.param_groups for p in group["params"]], max_norm, norm_type
        )

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the masters' gradients by group; None after an overflow."""
        if self.overflow:
            return None
        return [
            [None if p.grad is None else p.grad.detach() for p in group["params"]]
            for group in self.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the masters and the loss scale as plain values."""
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [
                [master.detach() for master in group] for group in self.fp32_from_fp16_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an FP16_Optimizer over the same model, which loads its own state."""
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.loss_scaler = DynamicLossScaler() if self.dynamic_loss_scale else LossScaler()
        vars(self.loss_scaler).update(state_dict["loss_scaler"])
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        with torch.no_grad():
            saved = _flat(state_dict["fp32_from_fp16"])
            for master, value in zip(_flat(self.fp32_from_fp16_groups), saved, strict=True):
                master.copy_(value)

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for group in groups for tensor in group]

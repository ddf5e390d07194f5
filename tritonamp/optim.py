"""Adam and AdamW with FP32 arithmetic whatever the parameters are stored in."""

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels.adamw import AdamLists, AdamRule, adamw
from tritonamp.policy import HALF_DTYPES
from tritonamp.step.state_loading import load_state

__all__ = ["Adam", "AdamW"]


class AdamSteps:
    """The steps of an Adam or AdamW optimizer, its hyperparameters and state read from and left in
    torch's format.

    Args:
        optimizer: a torch.optim.Adam or AdamW.
        backend: "auto", "triton" or "eager".
        track_lost: count the half values that a step did not change.
    """

    def __init__(self, optimizer: Optimizer, backend: str, track_lost: bool = False) -> None:
        self._optimizer, self._backend = optimizer, backend
        self._lists = AdamLists(track_lost)
        self._seen: tuple[Any, ...] = ()  # what the state was brought into shape for
        self._seen_moments: list[list[int]] = []
        self._order: list[int] = []  # where the parameters' states are among all of the optimizer's
        self._amsgrad: list[bool] = []  # of each parameter; empty: none

    def take(
        self,
        tensors: TensorLists,
        params: Sequence[Tensor],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """One step.

        Args:
            tensors: "params", which are updated, "grads", and "copies", which receive the rounded
                parameters.
            params: for each place of the lists, what ``param_groups`` and ``state`` know the
                parameter as.
            grad_scale: 0-d factor on the gradients, or None.
            found_inf: 0-d, any value other than 0 skips on the device; None: always step.
        """
        if not len(tensors):
            return
        lists, groups = self._lists, self._optimizer.param_groups
        lists.tensors = tensors
        moments = self._moments(params)
        for name, moment in zip(_MOMENTS, moments[:3], strict=True):
            tensors.set(name, moment, lasting=True)
        lists.steps.number(tensors.numbers, tensors.size)
        lists.steps.set("steps", moments[-1], lasting=True)
        lists.rules = [
            AdamRule(
                _scalar(group["lr"]),
                _scalar(group["betas"][0]),
                _scalar(group["betas"][1]),
                group["eps"],
                group["weight_decay"],
                group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)),
                group["amsgrad"],
                group["maximize"],
            )
            for group in groups
        ]
        adamw(lists, grad_scale, found_inf, self._backend)
        tensors.release(*_MOMENTS)  # whoever replaces or removes state gets its memory back
        lists.steps.release("steps")

    def _moments(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        """Both moments, maxima (the second moments again where there are none) and step counts,
        from the state.
        """
        groups, states = self._optimizer.param_groups, list(self._optimizer.state.values())
        everything, amsgrad = (
            [list(map(id, group["params"])) for group in groups],
            [g["amsgrad"] for g in groups],
        )
        seen = everything, list(map(id, params)), list(map(id, states)), amsgrad
        if seen == self._seen:
            try:
                moments = _read([states[k] for k in self._order], self._amsgrad)
                if _ids(moments) == self._seen_moments:
                    return moments
            except KeyError:
                pass
        # something is new, or somebody else has been at it: bring the state into shape
        group_of = {p: g for g, group in enumerate(groups) for p in group["params"]}
        mine = [_state(self._optimizer.state[p], p, amsgrad[group_of[p]]) for p in params]
        numbers = zip(self._lists.tensors.numbers, params, strict=True)
        self._lists.groups = [0] * self._lists.tensors.size
        for number, param in numbers:
            self._lists.groups[number] = group_of[param]
        place = {id(state): k for k, state in enumerate(self._optimizer.state.values())}
        self._order = [place[id(state)] for state in mine]
        self._seen = *seen[:2], list(map(id, self._optimizer.state.values())), amsgrad
        self._amsgrad = [amsgrad[group_of[p]] for p in params] if any(amsgrad) else []
        moments = _read(mine, self._amsgrad)
        self._seen_moments = _ids(moments)
        return moments


_MOMENTS = "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"
_ITEM = {name: operator.itemgetter(name) for name in ("exp_avg", "exp_avg_sq", "step")}


def _ids(moments: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    exp_avgs, exp_avg_sqs, maxima, steps = moments
    return [
        list(map(id, m))
        for m in (exp_avgs, exp_avg_sqs, steps, *([maxima] if maxima is not exp_avg_sqs else []))
    ]


def _read(states: Sequence[Mapping[str, Tensor]], amsgrad: Sequence[bool]) -> list[list[Tensor]]:
    exp_avgs, exp_avg_sqs, steps = (list(map(_ITEM[name], states)) for name in _ITEM)
    maxima = exp_avg_sqs
    if amsgrad:
        maxima = [
            s["max_exp_avg_sq" if a else "exp_avg_sq"] for s, a in zip(states, amsgrad, strict=True)
        ]
    return [exp_avgs, exp_avg_sqs, maxima, steps]


def refuse_sparse() -> None:
    """Raises what torch's Adam raises."""
    raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")


def _state(state: dict[str, Any], param: Tensor, amsgrad: bool) -> dict[str, Any]:
    """The state of one parameter in torch's format, made or brought to FP32 moments and a step
    count on the device.
    """
    dtype = torch.promote_types(param.dtype, torch.float32)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    elif not (isinstance(state["step"], Tensor) and state["step"].dtype is torch.float32) or (
        state["step"].device != param.device
    ):
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(param.device)
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        elif state[name].dtype != dtype:
            state[name] = state[name].to(dtype)
    return state


def _scalar(value: Any) -> Any:
    """``value``; a tensor of one element without its dimensions."""
    return value.reshape(()) if isinstance(value, Tensor) else value


class _Fp32State:
    """What Adam and AdamW here add to torch's: FP32 masters of half parameters, and skips on the
    device.
    """

    _step_supports_amp_scaling = True
    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Reads the attributes ``grad_scale`` (the loss scale) and ``found_inf`` where a
        scaler set them.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            RuntimeError: sparse gradients.
        """
        if self.defaults["differentiable"]:
            with torch.enable_grad():
                return inspect.unwrap(torch.optim.Adam.step)(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        all_params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in all_params]
        if any(g is not None and g.is_sparse for g in grads):
            refuse_sparse()
        numbers = [i for i, g in enumerate(grads) if g is not None]
        params = [all_params[i] for i in numbers]
        targets = [self._master(p) if p.dtype in HALF_DTYPES else p for p in params]
        steps, tensors = self._steps
        tensors.number(numbers, len(all_params))
        tensors.set("params", targets, lasting=True)
        tensors.set("grads", [grads[i] for i in numbers])
        tensors.set("copies", params, lasting=True)
        scale, found_inf = (
            _scalar(getattr(self, "grad_scale", None)),
            _scalar(getattr(self, "found_inf", None)),
        )
        grad_scale = None
        if scale is not None:
            grad_scale = scale.double().reciprocal().float()
            overflow = (
                ~torch.isfinite(grad_scale)
            ).float()  # of a scale that torch's scaler let sink too far
            found_inf = overflow if found_inf is None else torch.maximum(found_inf, overflow)
        steps.take(tensors, params, grad_scale, found_inf)
        tensors.release("grads")
        halves = [p for p, target in zip(params, targets, strict=True) if p is not target]
        self._fp32_values.mark_rounded(self._fp32_values.indices(halves))
        return loss

    @property
    def _fp32_values(self) -> Fp32Values:
        # copies and pickles come without it
        return self.__dict__.setdefault("_own_fp32_values", Fp32Values())

    @property
    def _steps(self) -> tuple[AdamSteps, TensorLists]:
        return self.__dict__.setdefault("_adam_steps", (AdamSteps(self, "auto"), TensorLists()))  # type: ignore[arg-type]

    def _master(self, param: Tensor) -> Tensor:
        """The FP32 master of a half parameter; it lives in the state, under ``master_param``."""
        state = self.state[param]
        master = state.get(
            "master_param", param.detach()
        )  # half itself if it has been through a torch optimizer
        state["master_param"] = master.float()
        return self._fp32_values.adopt(param, state["master_param"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but FP32 state of half parameters stays FP32; takes a state of apex's
        FusedAdam, too.

        Raises:
            ValueError: it is no state of an Adam or AdamW over such parameters; nothing was changed
                then.
        """
        load_state(self, super().load_state_dict, state_dict)  # type: ignore[arg-type,misc]


class Adam(_Fp32State, torch.optim.Adam):
    """``torch.optim.Adam`` for parameters of any floating dtype: same arguments, same
    ``state_dict`` format.

    Half parameters get FP32 moments and an FP32 master (``master_param`` in the state); the
    parameter is the rounded master. With a GradScaler the step unscales, and skips where
    ``found_inf`` is not 0, without a host read. The implementation choices ``foreach``, ``fused``
    and ``capturable`` are accepted and make no difference.
    """


class AdamW(_Fp32State, torch.optim.AdamW):
    """``torch.optim.AdamW`` for parameters of any floating dtype: same arguments, same
    ``state_dict`` format.

    Half parameters get FP32 moments and an FP32 master (``master_param`` in the state); the
    parameter is the rounded master. With a GradScaler the step unscales, and skips where
    ``found_inf`` is not 0, without a host read. The implementation choices ``foreach``, ``fused``
    and ``capturable`` are accepted and make no difference.
    """

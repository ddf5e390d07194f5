"""Optimizer state in fewer bytes: from FP32 to each of ``policy.STATES``, and back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._memory_order import memory_strides
from tritonamp.kernels._optimizers import in_words, keeping
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._state_formats import FORMATS, STATE_DTYPES, format_of, is_in_blocks
from tritonamp.kernels.device import refuse_capture
from tritonamp.policy import HALF_DTYPES, STATES
from tritonamp.step.fused_rule import FusedRule
from tritonamp.step.offload import Offload
from tritonamp.step.packed_masters import HALF_DTYPE, ORDER, REMAINDER, joined


def check_state(state: str, optimizer: Optimizer, rule: FusedRule | None) -> None:
    """Raise ValueError unless ``optimizer`` can keep its state in the format ``state``.

    Args:
        state: one of ``STATES``.
        optimizer: optimizer whose groups are checked.
        rule: fused rule of the optimizer; None: the optimizer runs its own step.
    """
    kind = type(optimizer).__name__
    states = ("fp32",) if rule is None else rule.states
    if state not in states:
        raise ValueError(
            f"state={state!r}: expected an optimizer whose step can keep such state, "
            f"{in_words(keeping(state), 'or')}, got {kind}, which can keep "
            f"{', '.join(map(repr, states))}: leave state out, or give it to other optimizers "
            f"alone, tritonamp.optim.AdamW(..., state={state!r})"
        )
    if rule is not None:
        for group in optimizer.param_groups:
            rule.check_format(state, group)
    if FORMATS[state].in_blocks and any(
        is_sharded(p) for group in optimizer.param_groups for p in group["params"]
    ):
        raise ValueError(
            f"state={state!r}: expected parameters in one piece, got sharded ones (FSDP2, "
            "DTensor), whose codes have no shape to shard: use state='bf16'"
        )


class StateShape:
    """The keys, dtypes and devices of one optimizer's state, for parameters of any dtype.

    Args:
        rule: fused rule of the optimizer.
        state: format of the moments, among ``policy.STATES``.
        offload: host memory of the state; None: the state is on the parameters' devices.
    """

    def __init__(self, rule: FusedRule, state: str, offload: Offload | None) -> None:
        self._rule = rule
        self._state = state
        self._offload = offload

    def bring(
        self,
        params: Mapping[int, Tensor],
        groups: Sequence[dict[str, Any]],
        group_of: Sequence[int],
        states: Mapping[Tensor, dict[str, Any]],
    ) -> set[int]:
        """Make missing state, and convert state that has another form.

        Args:
            params: parameters by number, as the groups hold them.
            groups: groups of the optimizer.
            group_of: number of the group, by number of the parameter.
            states: a defaultdict with the state of each parameter, which is changed in place.

        Returns:
            numbers of the parameters whose moments were made.

        Raises:
            ValueError: a group has state that this format may not round. No state was made then.
        """
        for group in groups:
            self._rule.check_format(self._state, group)
        counts, made = self._rule.counts_in(self._state, groups), set()
        for i, param in params.items():
            keys = self._rule.keys_of(groups[group_of[i]])
            # SGD without momentum has no state, and torch leaves no entry for such parameters
            # either.
            if not (keys or counts):
                continue
            state = states[param]
            # before the state is made: a parameter without moments takes its first step
            if any(state.get(key) is None for key in keys):
                made.add(i)
            self._bring_one(param, state, keys, counts)
        return made

    def _bring_one(
        self, param: Tensor, state: dict[str, Any], keys: Sequence[str], counts: bool
    ) -> None:
        self._unpack(param, state)
        shaped = self._step_count(param, state) if counts else {}
        shaped |= self._moments(param, state, keys)
        if shaped:
            # state that is made inside of a CUDA graph would be zeroed again by each replay
            refuse_capture(param.device, "the optimizer's state")
            state.update(shaped)
        if self._offload is not None:
            moment_keys = self._rule.state_keys.values()
            moments = {key: state[key] for key in moment_keys if state.get(key) is not None}
            unpinned = {k: v for k, v in moments.items() if not self._offload.is_pinned(v)}
            state |= {k: self._offload.pin(v) for k, v in unpinned.items()}

    def _step_count(self, param: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        step = state.get("step", 0.0)
        if not isinstance(step, Tensor):
            return {"step": torch.full((), step, dtype=torch.float32, device=param.device)}
        # torch keeps step counts in main memory, where a kernel cannot count
        if step.dtype is not torch.float32 or step.device != param.device:
            return {"step": step.to(param.device, torch.float32)}
        return {}

    def _moments(
        self, param: Tensor, state: Mapping[str, Any], keys: Sequence[str]
    ) -> dict[str, Any]:
        dtype = moment_dtype(self._state, param)
        shaped: dict[str, Any] = {}
        for key in keys:
            # states of torch's SGD may hold None here
            moment = state.get(key)
            if moment is not None and moment.is_sparse:
                # torch's own step on a sparse gradient has made it, and kernels take dense tensors
                moment = shaped[key] = moment.to_dense()
            if moment is not None and moment.dtype == dtype:
                continue
            if is_in_blocks(dtype):
                shaped[key] = coded(moment, param, self._rule.value_kinds[key], self._state)
                shaped[ORDER] = memory_strides(param)
            elif moment is None:
                shaped[key] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
            else:
                shaped[key] = moment.to(dtype)
        return shaped

    def _unpack(self, param: Tensor, state: dict[str, Any]) -> None:
        """Turn codes into FP32 moments if another format is wanted, or another order of memory."""
        codes = {
            key: state[key]
            for key in self._rule.state_keys.values()
            if isinstance(state.get(key), Tensor) and is_in_blocks(state[key].dtype)
        }
        # Codes lie in the parameter's order of memory. ``model.to(memory_format=...)`` has changed
        # that order since, so the codes are made again from FP32.
        strides = memory_strides(param)
        wanted = moment_dtype(self._state, param)
        stays = all(moment.dtype is wanted for moment in codes.values())
        if not codes or (stays and state.setdefault(ORDER, strides) == strides):
            return
        refuse_capture(param.device, "the optimizer's state")
        if self._offload is not None:
            self._offload.wait()
        state |= in_fp32({**codes, ORDER: state.pop(ORDER, strides)}, self._rule, param)
        # the order of the remainders, which the step has brought into the present one
        if REMAINDER in state:
            state[ORDER] = strides


def moment_dtype(state: str, param: Tensor) -> torch.dtype:
    """Return the dtype of a moment of ``param`` in the format ``state``.

    State of parameters that are neither half nor FP32 (float64, complex) has their own dtype, as in
    torch.
    """
    if param.dtype not in (*HALF_DTYPES, torch.float32):
        return param.dtype
    return FORMATS[state].dtype


def coded(moment: Tensor | None, param: Tensor, kind: int, state: str) -> Tensor:
    """Return an FP32 moment in codes.

    Codes hold some values exactly; other values lose their last bits.

    Args:
        moment: moment of ``param``; None: zeros.
        param: parameter whose order of memory the codes have.
        kind: kind of the moment's values, SIGNED or UNSIGNED.
        state: name of a format in blocks.
    """
    values = torch.zeros_like(param, dtype=torch.float32) if moment is None else moment.float()
    return FORMATS[state].write(values, param, kind, None)


def decoded(codes: Tensor, param: Tensor, kind: int, strides: tuple[int, ...]) -> Tensor:
    """Return a moment from the codes that ``coded`` makes, FP32 with the parameter's shape.

    Args:
        codes: codes of the moment.
        param: the parameter.
        kind: kind of the moment's values.
        strides: ``memory_strides`` of ``param`` when the codes were made.
    """
    like = torch.empty_strided(param.shape, strides, device="meta")
    return format_of(codes.dtype, True).read(codes, like, kind, torch.float32)


def in_fp32(state: Mapping[str, Any], rule: FusedRule, param: Tensor) -> dict[str, Any]:
    """Return one parameter's state with moments in FP32, by the keys of torch's optimizers."""
    wide = dict(state)
    strides = wide.pop(ORDER, None) or memory_strides(param)
    if REMAINDER in wide:
        remainder, dtype = wide.pop(REMAINDER), wide.pop(HALF_DTYPE, param.dtype)
        wide["master_param"] = joined(param, remainder, strides, dtype)
    for key in rule.state_keys.values():
        moment = wide.get(key)
        if isinstance(moment, Tensor) and is_in_blocks(moment.dtype):
            wide[key] = decoded(moment, param, rule.value_kinds[key], strides)
        elif isinstance(moment, Tensor) and moment.dtype in STATE_DTYPES:
            wide[key] = moment.float()
    return wide


def fp32_state_dict(
    state_dict: dict[str, Any], optimizer: Optimizer, rule: FusedRule | None
) -> dict[str, Any]:
    """Return a result of ``optimizer.state_dict()`` with FP32 moments, which every format loads."""
    # an optimizer around another one may have a format of its own
    if rule is None or not {"state", "param_groups"} <= state_dict.keys():
        return state_dict
    state = dict(state_dict["state"])
    for number, param in numbered_params(optimizer, state_dict):
        if number in state:
            state[number] = in_fp32(state[number], rule, param)
    return {**state_dict, "state": state}


def numbered_params(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter of an optimizer with its number in a state dict of the same groups."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return zip(numbers, params, strict=True)


def state_format(optimizer: Optimizer, wanted: str) -> str:
    """Return the format of an optimizer's state.

    Args:
        optimizer: the optimizer; one of ``tritonamp.optim`` may have been built with a format.
        wanted: format of the policy.

    Raises:
        ValueError: both name a format, and the two differ.
    """
    own: str = getattr(optimizer, "_state_format", STATES[0])
    if STATES[0] not in (own, wanted) and own != wanted:
        raise ValueError(
            f"state={wanted!r}: expected one format for each optimizer, got "
            f"{type(optimizer).__name__}, which was built with state={own!r}: give it in one place"
        )
    return own if wanted == STATES[0] else wanted

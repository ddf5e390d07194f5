"""Copies of an enabled optimizer: plain optimizers with state and masters in FP32."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.step.offload import Offload, on_device
from tritonamp.step.rules import rule_of
from tritonamp.step.small_state import in_fp32


def plain_state(
    optimizer: Optimizer,
    plain: dict[str, Any],
    values: Mapping[Tensor, Tensor],
    offload: Offload | None,
) -> dict[str, Any]:
    """Return the attributes of a copy of an enabled optimizer, with state and masters in FP32.

    Args:
        optimizer: the enabled optimizer.
        plain: attributes of the optimizer without those that ``enable`` has added.
        values: FP32 value of each parameter of the model.
        offload: host memory of masters and state; None: they are on the device.
    """
    rule = rule_of(optimizer)
    if rule is None or "state" not in plain:
        return plain
    # A half parameter that is stepped on itself (packed, in host memory) stands in the groups. A
    # plain optimizer needs an FP32 tensor there.
    masters = {p: p if v is p else nn.Parameter(v.detach()) for p, v in values.items()}
    groups = [
        {**group, "params": [masters.get(p, p) for p in group["params"]]}
        for group in plain["param_groups"]
    ]
    state = {}
    for param, own in plain["state"].items():
        wide = in_fp32(own, rule, param)
        # torch's own step expects state on the device of the parameters
        moved = {} if offload is None else on_device(wide, param)
        state[masters.get(param, param)] = wide | moved
    return {**plain, "state": defaultdict(dict, state), "param_groups": groups}


def replace_params(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Let a plain optimizer step on other parameters of the same values, in the same order."""
    remaining = iter(params)
    for group in optimizer.param_groups:
        for i, before in enumerate(group["params"]):
            param = group["params"][i] = next(remaining)
            if before in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(before)

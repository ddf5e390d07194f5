"""What the steps of an Adam optimizer work on, and its hyperparameters on their way to the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._upload import Upload


class AdamRule(NamedTuple):
    """Hyperparameters of one group, named as in ``torch.optim.AdamW``.

    ``decoupled_weight_decay`` is True for AdamW, False for Adam's L2 term.
    """

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    amsgrad: bool
    maximize: bool


class AdamLists:
    """What the steps of one optimizer work on.

    Attributes:
        tensors: "params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs" (the second moments
            again where a group has no amsgrad) and "copies" (the parameter again where there is
            none).
        steps: "steps", the step counts, 0-d float32.
        rules: hyperparameters by group. ``groups``: by number, which group a tensor belongs to.
        track_lost: whether to count, in memory kept as "lost" (int64, by number), the elements
            whose half value stayed the same although the update was not zero, and all those whose
            update was not zero; 0 for parameters that have no half value.
    """

    def __init__(self, track_lost: bool = False) -> None:
        self.track_lost = track_lost
        self.tensors, self.steps = TensorLists(), TensorLists()
        self.rules: list[AdamRule] = []
        self.groups: list[int] = []
        self.prepared: list[Any] = []  # the launches whose kernels are known to compile
        self._sent: dict[torch.device, _Sent] = {}

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Hyperparameters by group, float64 of shape (groups, 7), and the tensors' groups, int32,
        on the device.
        """
        sent = self._sent.get(device)
        if sent is None or sent.groups != self.groups or len(sent.numbers) != len(self.rules):
            sent = self._sent[device] = _Sent(device, self.groups, len(self.rules))
        sent.follow(self.rules)
        return sent.numbers, sent.places


class _Sent:
    """Hyperparameters on a device."""

    def __init__(self, device: torch.device, groups: list[int], n: int) -> None:
        self.groups = list(groups)
        self.places = torch.tensor(groups, dtype=torch.int32, device=device)
        self.numbers = torch.zeros((n, 7), dtype=torch.float64, device=device)
        self._upload = Upload(device)
        self._values: list[list[Any]] = []

    def follow(self, rules: Sequence[AdamRule]) -> None:
        """Sends numbers that changed; those that are tensors are copied on the device."""
        values: list[list[Any]] = []
        tensors = []
        for g, rule in enumerate(rules):
            signs = float(rule.decoupled_weight_decay), -1.0 if rule.maximize else 1.0
            values.append([*rule[:5], *signs])
            for k, value in enumerate(rule[:3]):
                if (
                    isinstance(value, Tensor)
                    and value.device.type == "cpu" != self.numbers.device.type
                ):
                    values[g][k] = float(value)
                elif isinstance(value, Tensor):
                    values[g][k] = None
                    tensors.append((g, k, value))
        if values != self._values:
            known = [[value or 0.0 for value in row] for row in values]
            self._upload.send(torch.tensor(known, dtype=torch.float64), self.numbers)
            self._values = values
        for g, k, value in tensors:
            self.numbers[g, k].copy_(value, non_blocking=True)

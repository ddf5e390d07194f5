"""What a step touches, for tests that change one fact of it."""

import ctypes
from typing import Any

import torch
from torch import nn

from tritonamp.kernels._steady import Steady

KEYS = "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreign", "absent"
SHAPES = (4, 8), (6, 8), (2, 3, 4, 5), (3, 8)
UNUSED = 3  # the row without a gradient
UNLIKE, SAME, FLOATS, MOVED = -1, 0, 1, 2  # answers of ``Steady.same``


class Step:
    """What a step of AdamW touches: two groups, half parameters with FP32 masters.

    Row 1 is its own master, row 2 is not contiguous, row 3 has no gradient.
    """

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.randn(shape).half()) for shape in SHAPES]
        self.params[1] = nn.Parameter(torch.randn(SHAPES[1]))
        last = torch.channels_last
        self.params[2] = nn.Parameter(torch.randn(SHAPES[2]).half().to(memory_format=last))
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.masters[1] = self.params[1]
        groups = [{"params": self.masters[:2]}, {"params": self.masters[2:], "lr": 0.5}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for param in self.params[:UNUSED]:
            param.grad = torch.randn_like(param)
        self.fixed = [torch.zeros(8, dtype=torch.int16), torch.zeros(3, 4)]
        self.slots = (ctypes.c_int64 * (2 * len(self.params)))()  # two of each row

    @property
    def group(self) -> dict[str, Any]:
        """The first group."""
        return self.optimizer.param_groups[0]

    @property
    def values(self) -> dict[str, Any]:
        """The state of row 0."""
        return self.optimizer.state[self.masters[0]]

    def record(self) -> Steady | None:
        first = ctypes.addressof(self.slots)
        return Steady.record(
            optimizer=self.optimizer,
            keys=KEYS,
            holders=self.params,
            params=self.params,
            fixed=[self.fixed[:1], self.fixed[1:]],
            slots=[(first + 16 * i, first + 16 * i + 8) for i in range(len(self.params))],
        )

    def steady(self) -> Steady:
        """The value, which the next step finds to be the same."""
        steady = self.record()
        assert steady is not None
        assert (steady.same(), steady.same_gradients(), steady.untouched()) == (SAME, 0, True)
        return steady

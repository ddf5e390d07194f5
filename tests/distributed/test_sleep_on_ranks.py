"""Two gloo ranks on CPU sleep between phases of training, under DDP and FSDP2.

Nothing would move on a CPU: the ranks take its tensors for those of a device. They are this file
run as a script, see two_ranks.py.
"""

import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Shared, sharded
from small_models import uneven_net
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import RANKS, Pair, of_ranks, on_ranks, serve

from tritonamp.step import sleep

pytestmark = of_ranks


def model_by(how: str) -> nn.Module:
    model = uneven_net()
    if how == "FSDP2":
        return sharded(model, policy={"param_dtype": torch.float16})  # type: ignore[no-any-return]
    return DistributedDataParallel(model, gradient_as_bucket_view=how == "DDP views")


class Sleepy(Shared):
    """A run that is asleep after each backward and each step, unless ``weights`` is None."""

    def __init__(self, how: str, weights: bool | None) -> None:
        def adamw(params: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(params, lr=0.01)

        super().__init__(model_by(how), adamw, share=lambda x: x[dist.get_rank() :: RANKS])
        self._weights, self.moved = weights, list[int]()
        ema = self.amp.ema(0.5)
        for step in range(4):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            bad = step == 1 and dist.get_rank() == 0
            self.backward(self.loss(x, "loss" if bad else None))
            self.maybe_sleep()
            self.finish(0.1)
            ema.update()
            self.maybe_sleep()
        values = [*self.amp.master_params(), *self.model.parameters(), *ema.state_dict().values()]
        values += [x for state in self.optimizer.state.values() for x in state.values()]
        parts: list[Any] = [getattr(x, "_local_tensor", x).detach() for x in values]
        self.all_values = torch.cat([part.double().reshape(-1) for part in parts]).tolist()
        assert self.counts("skipped") == [1]
        self.end()

    def maybe_sleep(self) -> None:
        if self._weights is not None:
            self.moved.append(self.amp.sleep(weights=self._weights))
            self.amp.wake()


@on_ranks
def sleeping(how: str, weights: bool) -> bool:
    with mock.patch.object(sleep, "_is_on_device", lambda tensor: tensor.layout is torch.strided):
        never, slept = Sleepy(how, None), Sleepy(how, weights)
    return never.all_values == slept.all_values and all(slept.moved) and len(slept.moved) == 8


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("how", ["DDP", "DDP views", "FSDP2"])
def test_ranks_go_on_with_the_same_bits(pair: Pair, how: str, weights: bool) -> None:
    assert sleeping(pair, how=how, weights=weights) == [True, True]


if __name__ == "__main__":
    serve(*sys.argv[1:])

"""SyncBatchNorm, and the conversion of a model to it."""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` with apex's arguments.

    Args:
        channel_last: whether the channels are the last dimension of the input.
        fuse_relu: whether ReLU is applied to the output.
    """

    channel_last = False
    fuse_relu = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise ``input``, and add ``z``, which has the same shape, before the ReLU."""
        output = super().forward(input.movedim(-1, 1) if self.channel_last else input)
        if self.channel_last:
            output = output.movedim(1, -1)
        if z is not None:
            output = output + z
        return F.relu(output) if self.fuse_relu else output


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Return ``module`` with a SyncBatchNorm instead of every BatchNorm.

    Parameters and statistics are the same objects.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    for norm in converted.modules():
        if type(norm) is nn.SyncBatchNorm:
            norm.__class__ = SyncBatchNorm
            vars(norm)["channel_last"] = channel_last
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this rank's process group, after all ranks form groups of ``group_size``.

    For ``group_size`` 0, return None, which stands for all ranks.

    Raises:
        ValueError: the world size is smaller, or not a multiple of ``group_size``.
    """
    return None if group_size == 0 else dist.new_subgroups(group_size)[0]

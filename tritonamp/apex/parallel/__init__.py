"""Drop-in for ``apex.parallel``."""

from torch.distributed import ReduceOp

from tritonamp.apex.parallel.distributed import DistributedDataParallel, Reducer
from tritonamp.apex.parallel.LARC import LARC
from tritonamp.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

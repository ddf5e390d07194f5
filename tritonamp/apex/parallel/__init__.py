"""Drop-in for ``apex.parallel``."""

from torch.distributed import ReduceOp as ReduceOp

from tritonamp.apex.parallel.distributed import DistributedDataParallel as DistributedDataParallel
from tritonamp.apex.parallel.distributed import Reducer as Reducer
from tritonamp.apex.parallel.LARC import LARC as LARC
from tritonamp.apex.parallel.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from tritonamp.apex.parallel.sync_batchnorm import convert_syncbn_model as convert_syncbn_model
from tritonamp.apex.parallel.sync_batchnorm import (
    create_syncbn_process_group as create_syncbn_process_group,
)

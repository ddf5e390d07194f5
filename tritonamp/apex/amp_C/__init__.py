"""The list functions of apex's extension module ``amp_C``, made of torch's operations on lists.

All take ``(chunk_size, noop_flag, tensor_lists, *arguments)``, as ``multi_tensor_applier`` passes
them. Tensors may be FP32, FP16, BF16 or FP64; the arithmetic is FP32 (FP64 for FP64 tensors), each
result is rounded once to its tensor's dtype. ``chunk_size`` makes no difference, and lists without
tensors are left at that. ``noop_flag``, int32 of one element, becomes 1 where values that are not
finite are found, without a host read. The updates never write it; as apex's kernels, SGD alone
reads it, and leaves every bit as it was where it is not 0.

Raises:
    RuntimeError: another number of lists, lists of different lengths, or tensors of different
        sizes at one place; nothing has been changed then.
"""

from tritonamp.apex.amp_C.adagrad import multi_tensor_adagrad as multi_tensor_adagrad
from tritonamp.apex.amp_C.adam import multi_tensor_adam as multi_tensor_adam
from tritonamp.apex.amp_C.lamb import multi_tensor_lamb as multi_tensor_lamb
from tritonamp.apex.amp_C.lamb import (
    multi_tensor_lamb_stage1_cuda as multi_tensor_lamb_stage1_cuda,
)
from tritonamp.apex.amp_C.lamb import (
    multi_tensor_lamb_stage2_cuda as multi_tensor_lamb_stage2_cuda,
)
from tritonamp.apex.amp_C.norms import multi_tensor_l2norm as multi_tensor_l2norm
from tritonamp.apex.amp_C.norms import multi_tensor_unscale_l2norm as multi_tensor_unscale_l2norm
from tritonamp.apex.amp_C.novograd import multi_tensor_novograd as multi_tensor_novograd
from tritonamp.apex.amp_C.scaling import multi_tensor_axpby as multi_tensor_axpby
from tritonamp.apex.amp_C.scaling import multi_tensor_scale as multi_tensor_scale
from tritonamp.apex.amp_C.scaling import update_scale_hysteresis as update_scale_hysteresis
from tritonamp.apex.amp_C.sgd import multi_tensor_sgd as multi_tensor_sgd

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_lamb",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

"""The list functions of apex's extension module ``amp_C``, made of torch's operations on lists.

All take ``(chunk_size, noop_flag, tensor_lists, *arguments)``, as ``multi_tensor_applier`` passes
them. Tensors may be FP32, FP16, BF16 or FP64; the arithmetic is FP32 (FP64 for FP64 tensors), each
result is rounded once to its tensor's dtype. Lists without tensors are left at that. Arguments that
mean the same wherever they are taken:

Args:
    chunk_size: accepted and not needed.
    noop_flag: int32 of one element, becomes 1 where values that are not finite are found, without a
        host read. The updates never write it; as apex's kernels, SGD alone reads it.
    tensor_lists: what each function names, in that order.
    lr: the learning rate.
    beta1: the decay of the first moments.
    beta2: the decay of the second moments.
    eps: is added to the root of the second moments.
    step: counted from 1.
    mode: 0 adds weight decay to the gradients, 1 decouples it.
    bias_correction: not 0: corrects the moments for their start at 0.
    weight_decay: the factor of the parameters that is added.
    grad_averaging: not 0: gradients enter the first moments times ``1 - beta1``.
    global_grad_norm: one element; where it exceeds ``max_grad_norm``, or ``max_global_grad_norm``,
        gradients are scaled down by as much.
    use_nvlamb: scales updates by the trust ratio also where ``weight_decay`` is 0.

Raises:
    RuntimeError: another number of lists, lists of different lengths, or tensors of different
        sizes at one place; nothing has been changed then.
"""

from tritonamp.apex.amp_C.adagrad import multi_tensor_adagrad
from tritonamp.apex.amp_C.adam import multi_tensor_adam
from tritonamp.apex.amp_C.lamb import (
    multi_tensor_lamb,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
)
from tritonamp.apex.amp_C.norms import multi_tensor_l2norm, multi_tensor_unscale_l2norm
from tritonamp.apex.amp_C.novograd import multi_tensor_novograd
from tritonamp.apex.amp_C.scaling import (
    multi_tensor_axpby,
    multi_tensor_scale,
    update_scale_hysteresis,
)
from tritonamp.apex.amp_C.sgd import multi_tensor_sgd

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

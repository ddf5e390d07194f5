"""The list functions of apex's extension module ``amp_C``, made of torch's operations on lists.

All take ``(chunk_size, noop_flag, tensor_lists, *arguments)``, as ``multi_tensor_applier`` passes
them. Tensors may be FP32, FP16, BF16 or FP64. The arithmetic is FP32 (FP64 for FP64 tensors), and
each result is rounded once to its tensor's dtype. Empty lists are allowed. These arguments have the
same meaning in every function:

Args:
    chunk_size: accepted and ignored.
    noop_flag: int32 of one element. Functions that check values set it to 1 if one is not finite,
        without a host read. The updates never write it, and like in apex only SGD reads it.
    tensor_lists: the lists that each function names, in that order.
    lr: learning rate.
    beta1: decay of the first moments.
    beta2: decay of the second moments.
    eps: summand to the root of the second moments.
    step: number of the step, from 1.
    mode: 0 adds weight decay to the gradients, 1 decouples it.
    bias_correction: 0, or another number to correct the moments for their start at 0.
    weight_decay: factor of the parameters in the update, or in the gradients.
    grad_averaging: 0, or another number to weigh gradients by ``1 - beta1`` in the first moments.
    global_grad_norm: norm of all gradients, of one element. If it exceeds ``max_grad_norm`` or
        ``max_global_grad_norm``, the gradients are scaled down to that norm.
    use_nvlamb: whether updates have a trust ratio even if ``weight_decay`` is 0.

Raises:
    RuntimeError: another number of lists, lists of different lengths, or tensors of different
        sizes at one place. Nothing was changed.
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

"""Drop-in for ``apex.optimizers``: apex's arguments and FP32 arithmetic.

Parameters may have any floating dtype. These arguments have the same meaning in every optimizer:

Args:
    params: parameters, or parameter groups.
    lr: learning rate.
    betas: decays of the first and of the second moment.
    eps: summand to the root by which the update is divided.
    weight_decay: factor of the parameters in the update, or in the gradients.
    bias_correction: whether to correct both moments for their start at 0.
    amsgrad: False; True raises RuntimeError.
    adam_w_mode: whether to decouple the weight decay, as AdamW does; False adds it to the
        gradients.
    grad_averaging: whether to weigh gradients by ``1 - beta1`` in the first moment.
    set_grad_none: whether ``zero_grad()`` sets gradients to None or to zeros.
"""

from tritonamp.apex.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
from tritonamp.apex.optimizers.fused_adam import FusedAdam as FusedAdam
from tritonamp.apex.optimizers.fused_lamb import FusedLAMB as FusedLAMB
from tritonamp.apex.optimizers.fused_mixed_precision_lamb import (
    FusedMixedPrecisionLamb as FusedMixedPrecisionLamb,
)
from tritonamp.apex.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
from tritonamp.apex.optimizers.fused_sgd import FusedSGD as FusedSGD

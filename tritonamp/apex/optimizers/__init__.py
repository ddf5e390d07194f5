"""Drop-in for ``apex.optimizers``: apex's arguments and FP32 arithmetic.

Parameters may be of any floating dtype. Arguments that mean the same wherever they are taken:

Args:
    params: parameters, or parameter groups.
    lr: learning rate.
    betas: decays of the first and of the second moment.
    eps: is added to the root that the update is divided by.
    weight_decay: factor of the parameters in the update, or in the gradients.
    bias_correction: corrects both moments for their start at 0.
    amsgrad: is refused with a RuntimeError.
    adam_w_mode: decouples the weight decay, as AdamW does; False adds it to the gradients.
    grad_averaging: weighs gradients by ``1 - beta1`` in the first moment.
    set_grad_none: what ``zero_grad()`` does: None, or zeros.
"""

from tritonamp.apex.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
from tritonamp.apex.optimizers.fused_adam import FusedAdam as FusedAdam
from tritonamp.apex.optimizers.fused_lamb import FusedLAMB as FusedLAMB
from tritonamp.apex.optimizers.fused_mixed_precision_lamb import (
    FusedMixedPrecisionLamb as FusedMixedPrecisionLamb,
)
from tritonamp.apex.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
from tritonamp.apex.optimizers.fused_sgd import FusedSGD as FusedSGD

"""The functions that O1 casts: apex's lists, then functions that torch has gained since.

Each ``amp.init`` and ``amp.initialize`` reads the lists, so a script may change them before. Names
that this torch does not have are ignored.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional


@dataclass
class Overrides:
    """Names of functions of one module.

    Attributes:
        FP16_FUNCS: functions with half arguments; parameters are cast once per iteration.
        FP32_FUNCS: functions with FP32 arguments.
        CASTS: functions that get FP32 arguments if half and FP32 ones are mixed.
        SEQUENCE_CASTS: functions of a list of tensors, with the rule of ``CASTS``.
        BANNED_FUNCS: name and message of functions that refuse half arguments.
    """

    MODULE: Any
    FP16_FUNCS: list[str] = field(default_factory=list)
    FP32_FUNCS: list[str] = field(default_factory=list)
    CASTS: list[str] = field(default_factory=list)
    SEQUENCE_CASTS: list[str] = field(default_factory=list)
    BANNED_FUNCS: list[tuple[str, str]] = field(default_factory=list)


_CONVOLUTIONS = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu".split()
)
_MATMULS = "addmm addmv addr matmul mm mv addbmm baddbmm bmm einsum chain_matmul".split()
_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan pow
    cumprod cumsum dist norm prod std sum var renorm
    softmax log_softmax logsumexp std_mean var_mean
""".split()
_BINARY = """
    addcdiv addcmul atan2 cross bilinear dot tensordot add div mul sub eq equal ge gt le lt ne
""".split()
_SEQUENCES = "cat stack".split()

torch_overrides = Overrides(torch, [*_CONVOLUTIONS, *_MATMULS], [*_FP32], [*_BINARY], [*_SEQUENCES])

tensor_overrides = Overrides(
    torch.Tensor,
    ["__matmul__", "__rmatmul__", *_MATMULS],
    ["__ipow__", "__pow__", "__rpow__", "cpu", *_FP32],
    """
    __add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__
    __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__
    __truediv__
    """.split()
    + _BINARY,
)

functional_overrides = Overrides(
    torch.nn.functional,
    [*_CONVOLUTIONS, "linear", "scaled_dot_product_attention"],
    """
    interpolate grid_sample softplus softmin log_softmax softmax gelu
    layer_norm group_norm rms_norm local_response_norm normalize
    cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss
    kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss
    multilabel_soft_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits
    smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss huber_loss gaussian_nll_loss
    """.split(),
    ["bilinear"],
    BANNED_FUNCS=[
        (
            "binary_cross_entropy",
            "F.binary_cross_entropy and nn.BCELoss on half tensors: their gradient leaves the half "
            "range near 0 and 1. Use F.binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) "
            "without the sigmoid before it; or call amp.register_float_function(torch, 'sigmoid') "
            "before amp.init or amp.initialize; or amp.init(allow_banned=True), which casts to "
            "FP32",
        )
    ],
)

CELLS = "rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell".split()
LAYERS = "rnn_relu rnn_tanh gru lstm".split()
rnn_overrides = Overrides(torch._VF, [*CELLS, *LAYERS])  # what the modules of torch.nn call

"""The op table: the rule of each op for tensors of an enabled forward.

CUDA gets only the entries where tritonamp differs from torch's own CUDA lists. All other devices
get those lists, too, because torch has other ones for them, or none. A CPU run then shows the
dtypes, and the overflows, of a GPU run.
"""

import functools
from collections.abc import Iterator

import torch

from tritonamp.casts.fused_ops import FUSED
from tritonamp.casts.op_rules import (
    Rule,
    attention_rule,
    baddbmm_rule,
    banned_rule,
    fitting_rule,
    fp32_rule,
    grouped_mm_rule,
    half_rule,
    norm_rule,
    out_dtype_rule,
    promote_rule,
    rounding_rule,
    running_norm_rule,
    storage_on_cpu_rule,
    written_into_rule,
)

HALF = """
    _convolution addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d convolution einsum gru gru_cell
    linalg_multi_dot linalg_vecdot linear lstm lstm_cell matmul mm mv prelu rnn_relu rnn_relu_cell
    rnn_tanh rnn_tanh_cell scaled_dot_product_attention
    _addmm_activation _native_multi_head_attention _transformer_encoder_layer_fwd
""".split()
"""Half in, half out. A CPU computes in FP32 from rounded inputs and rounds once. This is fast
there, and equals the arithmetic of Tensor Cores. The last three are CPU-only fused paths of linear
and nn.TransformerEncoderLayer.
"""

OUT_DTYPE = "mm.dtype addmm.dtype bmm.dtype baddbmm.dtype".split()
"""Products that take the dtype of their result as an argument."""

FP32 = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits
    cdist cosh cosine_embedding_loss cosine_similarity cumprod cumsum dist erfinv exp expm1
    frobenius_norm.dim hinge_embedding_loss huber_loss kl_div l1_loss linalg_matrix_norm
    linalg_vector_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nll_loss_nd norm.Scalar
    norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow prod reciprocal
    renorm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d
""".split()
"""Half inputs are cast to FP32, and the result is FP32."""

PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
""".split()
"""All floating inputs are cast to the widest dtype among the inputs."""

FP32_EVERYWHERE = "var std var_mean std_mean cross_entropy_loss linalg_matrix_exp".split()
"""As FP32, on CUDA, too, where torch's lists lack these ops. They overflow, round or (the last)
fail in half.
"""

SPARSE = """
    _sparse_addmm _sparse_mm hspmm smm sparse_sampled_addmm sspaddmm
""".split()
"""As FP32, on CUDA, too. These ops refuse half and FP32 together, and most have no half kernel.
They also call ops that autocast lists. A cast there, below autograd, would make their backwards
fail.
"""

STORAGE = "layer_norm group_norm rms_norm".split()
"""Computed in FP32, with the result in the input's dtype (half after FP32 results). Half and FP32
weights may be mixed.
"""

RUNNING_NORMS = "batch_norm instance_norm".split()
"""Unchanged where their kernels take the dtypes. Otherwise computed in FP32, with the result in the
input's dtype: where frozen half weights and statistics meet FP32 inputs, or trainable FP32 weights.
"""

PROMOTE_EVERYWHERE = """
    _weight_norm heaviside index_add index_copy index_reduce lerp linalg_cross put scatter.src
    scatter_reduce
""".split()
"""As PROMOTE, on CUDA, too. These ops refuse half and FP32 together, for example frozen half
parameters and trainable FP32 ones.
"""

WRITTEN_INTO = """
    index_put_ index_copy_ index_add_ index_reduce_ scatter_.src scatter_add_ scatter_reduce_.two
    masked_scatter masked_scatter_ put_ lerp_.Scalar lerp_.Tensor
    embedding_bag embedding_bag.padding_idx
""".split()
"""The values that these ops write are cast to the dtype of the tensor that they write into, because
the ops refuse half and FP32 together. torch's lists have only the variants of some that return a
new tensor. embedding_bag multiplies the rows that it sums by factors; these are cast, so that the
table is not copied.
"""

STORAGE_ON_CPU = """
    adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fractional_max_pool2d fractional_max_pool3d
    grid_sampler_2d grid_sampler_3d max_pool3d max_unpool2d max_unpool3d reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d trace
""".split()
"""As STORAGE, on a CPU only, because some half kernels are missing there. These ops are on torch's
CPU list for FP32, and on no CUDA list.
"""

FITTED = """
    masked_fill.Scalar masked_fill_.Scalar masked_fill.Tensor masked_fill_.Tensor
    index_fill.int_Scalar index_fill_.int_Scalar index_fill.int_Tensor index_fill_.int_Tensor
    where.ScalarSelf where.ScalarOther scatter.value scatter_.value fill.Scalar fill_.Scalar
    fill_diagonal_ full_like new_full constant_pad_nd
    clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ hardtanh hardtanh_
""".split()
"""Numbers that these ops write into half tensors, or bound them by, are clamped to the format.
torch refuses such numbers (``where`` makes them inf), but a mask of -1e9 only means a low value.
"""


def overloads(names: list[str]) -> Iterator[str]:
    """Yield every functional overload of the named ops that this torch has: "op", "op.overload"."""
    # private (torch 2.11 to 2.15): torch.ops.aten also has ops that the dispatcher does not know
    existing = set(torch._C._dispatch_get_all_op_names())
    for name in names:
        packet = getattr(torch.ops.aten, name.split(".")[0], None)
        if packet is None:
            continue
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            suffix = "" if overload == "default" else f".{overload}"
            qualified = schema.name.removeprefix("aten::") + suffix
            takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
            functional = takes_tensors and not schema.is_mutable
            wanted = "." not in name or qualified == name
            if functional and wanted and f"aten::{qualified}" in existing:
                yield qualified


@functools.cache
def op_table(device_type: str) -> dict[str, Rule]:
    """Return the op table for a device type. It is cached, because asking torch is slow."""
    rows: list[tuple[list[str], Rule]] = [(FP32_EVERYWHERE, fp32_rule), (SPARSE, fp32_rule)]
    rows += [(STORAGE, norm_rule), (RUNNING_NORMS, running_norm_rule)]
    rows += [(PROMOTE_EVERYWHERE, promote_rule), (["_grouped_mm"], grouped_mm_rule)]
    is_cpu = device_type == "cpu"
    if device_type != "cuda":
        rows += [(HALF, half_rule if is_cpu else rounding_rule)]
        rows += [(FP32, fp32_rule), (PROMOTE, promote_rule)]
        rows += [(["binary_cross_entropy"], banned_rule)]
    if is_cpu:
        rows += [(STORAGE_ON_CPU, storage_on_cpu_rule)]
        rows += [(OUT_DTYPE, out_dtype_rule)]  # last, because they are overloads of HALF's
    table = {op: rule for names, rule in rows for op in overloads(names)}
    table |= dict.fromkeys(WRITTEN_INTO, written_into_rule)
    table |= {"scaled_dot_product_attention": attention_rule, "baddbmm": baddbmm_rule}
    return table | dict.fromkeys(FITTED, fitting_rule) | FUSED

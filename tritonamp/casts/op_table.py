"""The op table: what each op does on the tensors of an enabled forward.

CUDA gets only the entries where tritonamp differs from torch's own CUDA lists. CPU gets those lists
too, because torch's CPU autocast has other ones: a CPU run then shows the dtypes, and the
overflows, of the GPU.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonamp.casts.active import ActivePolicy
from tritonamp.policy import HALF_DTYPES


class Stock(Protocol):
    """The op without our rules: what a rule calls, or runs a function under."""

    plans: dict[Any, Any]  # what rules keep of their choices, by their key
    target: Any  # the op itself

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the op returns where no rule and no autocast applies."""

    def run_without_rules(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)`` where no rule and no autocast applies."""


Rule = Callable[..., Any]
"""``rule(stock, active, *args, **kwargs)`` is what the op returns for these arguments.

It is asked under an op policy; those of ``ALSO_WITHOUT_OP_POLICY`` are asked without one, too.
"""

HALF = """
    _convolution addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d convolution einsum gru gru_cell
    linalg_multi_dot linalg_vecdot linear lstm lstm_cell matmul mm mv prelu rnn_relu rnn_relu_cell
    rnn_tanh rnn_tanh_cell scaled_dot_product_attention
    _addmm_activation _native_multi_head_attention _transformer_encoder_layer_fwd
""".split()
"""Half in, half out. On CPU computed in FP32 from rounded inputs and rounded once: fast there, and
what Tensor Cores do. The last three are CPU-only fused paths of linear and
nn.TransformerEncoderLayer.
"""

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
"""Half inputs are cast up, the result is FP32."""

PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
""".split()
"""All floating inputs are cast to the widest of them."""

FP32_EVERYWHERE = "var std var_mean std_mean cross_entropy_loss linalg_matrix_exp".split()
"""As FP32, on CUDA too: torch lists none of them there, and they overflow, round or (the last) fail
in half.
"""

STORAGE = "layer_norm group_norm rms_norm".split()
"""FP32 inside, the result in the input's dtype; half and FP32 weights may be mixed."""

RUNNING_NORMS = "batch_norm instance_norm".split()
"""As they are where their kernels take the dtypes. Else, where frozen half weights and statistics
meet FP32 inputs, or weights that train, in FP32, the result in the input's dtype.
"""

PROMOTE_EVERYWHERE = """
    _weight_norm heaviside index_add index_copy index_reduce lerp linalg_cross put scatter.src
    scatter_reduce
""".split()
"""As PROMOTE, on CUDA too: they refuse half and FP32 together, as parameters that are frozen and
such that train.
"""

WRITTEN_INTO = """
    index_put_ index_copy_ index_add_ index_reduce_ scatter_.src scatter_add_ scatter_reduce_.two
    masked_scatter masked_scatter_ put_ lerp_.Scalar lerp_.Tensor
    embedding_bag embedding_bag.padding_idx
""".split()
"""What they write takes the dtype of the tensor that it is written into, which stays in place: they
refuse half and FP32 together. torch lists only the variants of some that return a new tensor. So do
the factors of the rows that embedding_bag adds up: its table is not copied.
"""

STORAGE_ON_CPU = """
    adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fractional_max_pool2d fractional_max_pool3d
    grid_sampler_2d grid_sampler_3d max_pool3d max_unpool2d max_unpool3d reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d trace
""".split()
"""On torch's CPU list for FP32, on no CUDA list: as STORAGE, because half kernels are missing here
and there.
"""

FITTED = """
    masked_fill.Scalar masked_fill_.Scalar masked_fill.Tensor masked_fill_.Tensor
    index_fill.int_Scalar index_fill_.int_Scalar index_fill.int_Tensor index_fill_.int_Tensor
    where.ScalarSelf where.ScalarOther scatter.value scatter_.value fill.Scalar fill_.Scalar
    fill_diagonal_ full_like new_full constant_pad_nd
    clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ hardtanh hardtanh_
""".split()
"""Numbers that they write into half tensors, or bound them by, are clamped to the format. torch
refuses them (where makes them inf), and a mask of -1e9 is meant as a low value.
"""


AUTOCAST = *HALF_DTYPES, torch.float32
"""The dtypes that autocast casts."""


def _cast(value: Any, to: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``to`` applied to every float16, bfloat16 or float32 tensor in it."""
    if isinstance(value, Tensor):
        return to(value) if value.dtype in AUTOCAST else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, to) for item in value)
    return value


def floating_dtypes(value: Any) -> Iterator[torch.dtype]:
    """Yield the floating dtypes of the tensors in ``value``, FP64 left out as autocast does."""
    if isinstance(value, Tensor):
        if value.dtype in AUTOCAST:
            yield value.dtype
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from floating_dtypes(item)


def _to_fp32(value: Any) -> Any:
    return _cast(value, lambda t: t.float())


def _half_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    half = torch.get_autocast_dtype("cpu")
    found = set(floating_dtypes(args))
    if not found or (not active.policy.op_policy and found != {half}):
        return stock(*args, **kwargs)
    rounded = _cast(args, lambda t: t.to(half).float())
    return _cast(stock(*rounded, **kwargs), lambda t: t.to(half))


def _grouped_mm_rule(stock: Stock, active: ActivePolicy, *args: Any) -> Any:
    """As for HALF, on CUDA too: torch has it on no list. An ``out_dtype``, the fifth, wins."""
    kind = args[0].device.type
    if kind == "cpu" and len(args) < 5:
        return _half_rule(stock, active, *args)
    if not active.policy.op_policy:
        return stock(*args)
    return stock(*_cast(args, lambda t: t.to(torch.get_autocast_dtype(kind))))


def fp32_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    """Compute in FP32, with an FP32 result; an explicit ``dtype`` wins."""
    if kwargs.get("dtype") is not None:
        return stock(*args, **kwargs)
    return stock(*_to_fp32(args), **kwargs)


def _promote_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    found = set(floating_dtypes(args))
    if len(found) < 2:
        return stock(*args, **kwargs)
    widest = functools.reduce(torch.promote_types, found)
    return stock(*_cast(args, lambda t: t.to(widest)), **kwargs)


def _written_into_rule(
    stock: Stock, active: ActivePolicy, into: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if into.dtype not in AUTOCAST:
        return stock(into, *args, **kwargs)
    return stock(into, *_cast(args, lambda t: t.to(into.dtype)), **kwargs)


def storage_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    """Compute in FP32, and return the result in the dtype of the first argument."""
    result = stock(*_to_fp32(args), **kwargs)
    return _cast(result, lambda t: t.to(args[0].dtype))


def _running_norm_rule(
    stock: Stock,
    active: ActivePolicy,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    updates: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    own = (weight, bias, mean, var)
    found = set(floating_dtypes(own))
    if found in (set(), {torch.float32}, {input.dtype}):
        return stock(input, *own, updates, *args, **kwargs)
    wide = _to_fp32(own)
    result = stock(input, *wide, updates, *args, **kwargs)
    for statistic, new in zip(own[2:], wide[2:], strict=True):
        if updates and statistic is not None and statistic is not new:
            statistic.copy_(new)
    return result


def _fitting_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or next(floating_dtypes(args), None)
    if dtype not in HALF_DTYPES:
        return stock(*args, **kwargs)
    fitted = [_fit(value, dtype) for value in args]
    # those before the last are masks and indices
    if isinstance(args[-1], Tensor) and args[-1].dtype is not dtype:
        fitted[-1] = _fit_tensor(args[-1], dtype)
    return stock(*fitted, **kwargs)


def _fit(value: Any, dtype: torch.dtype) -> Any:
    """Return a finite number clamped to what ``dtype`` holds, and anything else as it is."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return value
    limit = torch.finfo(dtype).max
    return value if -limit <= value <= limit else math.copysign(limit, value)


def _fit_tensor(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` in ``dtype``, with finite values clamped to its range."""
    limit = torch.finfo(dtype).max
    fitted = value.double().clamp(-limit, limit)  # in which the limits are exact
    return torch.where(value.isinf(), value, fitted).to(dtype)


def _banned_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy (nn.BCELoss) inside the forward of a mixed-precision model: its "
        "gradient leaves the half range near 0 and 1. Use binary_cross_entropy_with_logits "
        "(nn.BCEWithLogitsLoss) without the sigmoid, compute the loss outside the model's forward, "
        "or wrap the call in tritonamp.disable_casts() with FP32 inputs"
    )


def _storage_on_cpu_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    return storage_rule(stock, active, *args, **kwargs)


ALSO_WITHOUT_OP_POLICY = frozenset({_half_rule, _grouped_mm_rule, _storage_on_cpu_rule})
"""They compute half models at O3 on a CPU, too, whose half kernels are slow, or missing."""


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
def _rules(device_type: str) -> dict[str, Rule]:
    """Return the rules written here; asking torch for its ops each time is slow."""
    rows: list[tuple[list[str], Rule]] = [(FP32_EVERYWHERE, fp32_rule), (STORAGE, storage_rule)]
    rows += [(RUNNING_NORMS, _running_norm_rule), (PROMOTE_EVERYWHERE, _promote_rule)]
    if device_type == "cpu":
        rows += [(HALF, _half_rule), (FP32, fp32_rule), (PROMOTE, _promote_rule)]
        rows += [(STORAGE_ON_CPU, _storage_on_cpu_rule), (["binary_cross_entropy"], _banned_rule)]
    table = {op: rule for names, rule in rows for op in overloads(names)}
    table |= dict.fromkeys(WRITTEN_INTO, _written_into_rule)
    table |= dict.fromkeys(overloads(["_grouped_mm"]), _grouped_mm_rule)
    return table | dict.fromkeys(FITTED, _fitting_rule)


def op_table(device_type: str, functions: dict[str, Rule]) -> dict[str, Rule]:
    """Return the op table of "cuda" or "cpu", with rules of ops that have a kernel of their own."""
    return {**_rules(device_type), **functions}

"""Every public op of the installed torch that may get half and FP32 together is on a list, or on
the list of ops that need no rule.
"""

import inspect
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tritonamp
from tritonamp.casts import op_table

MODULES = torch, torch.nn.functional, torch.linalg, torch.special, torch.fft, torch.sparse

# aten's public ops on no list of torch's and ours, by what becomes of half and FP32 together
DECIDED: dict[str, str] = {
    "torch promotes them itself": """
        add arctan2 clip copysign cumulative_trapezoid diff div divide eq float_power floor_divide
        fmax fmin fmod ge glu_jvp gradient greater greater_equal gt hypot igamma igammac inner
        isin istft kron ldexp le less less_equal logaddexp logaddexp2 logical_and logical_or
        logical_xor lt max maximum min minimum mul multiply ne nextafter not_equal outer
        pairwise_distance remainder rsub searchsorted bucketize special_gammainc special_gammaincc
        special_xlog1py special_xlogy sub subtract trapezoid trapz true_divide xlogy
    """,
    "what is written takes the dtype of what it is written into": """
        as_strided_scatter copy copy_sparse_to_sparse diagonal_scatter select_scatter
        slice_inverse slice_scatter set unflatten_dense_tensors
    """,
    "one floating tensor; the others are indices, masks, counts or a shape": """
        align_as bernoulli bincount bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift
        bitwise_xor embedding embedding_renorm expand_as gather gcd index index_select is_same_size
        is_set_to lcm lu_unpack masked_select narrow nll_loss2d_forward nll_loss_forward
        repeat_interleave reshape_as resize_as resize_as_sparse result_type segment_reduce
        sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor
        sparse_csc_tensor sparse_csr_tensor sparse_mask take take_along_dim tensor_split to type_as
        view_as
    """,
    "compares or counts, and no training passes through it: torch's error about dtypes": """
        allclose equal histogram histogramdd isclose
    """,
    "parameters of a distribution or a range, not activations": """
        binomial linspace logspace normal randint_like rrelu_with_noise_functional
    """,
    "computed in FP32 and wider alone; its error names half": """
        linalg_ldl_solve linalg_lu_solve linalg_pinv linalg_solve_ex linalg_solve_triangular
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
        special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
        special_laguerre_polynomial_l special_legendre_polynomial_p
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_zeta
    """,
    "complex numbers: a cast of one part would be no favour": "complex",
    "made of ops that are on lists": "cov ger linalg_matmul slow_conv3d thnn_conv2d",
    "below ops that are on lists, and called by nobody else": """
        batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt
        batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats
        conv_depthwise3d convolution_backward_overrideable convolution_overrideable
        glu_backward_jvp native_batch_norm native_group_norm slow_conv3d_forward
        slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d
    """,
    "of integers and quantised tensors": """
        fake_quantize_per_channel_affine fake_quantize_per_channel_affine_cachemask
        fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation
        fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation quantize_per_channel
        quantize_per_tensor quantized_batch_norm quantized_gru quantized_gru_cell quantized_lstm
        quantized_lstm_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell
    """,
}
LIBRARIES = "cudnn_", "miopen_", "mkldnn_"  # beginnings of ops that convolutions and RNNs call

# public functions in Python; what they call is on lists, but for these
FUNCTIONS: dict[str, str] = {
    "made of ops that are on lists": """
        batch_norm binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
        cross_entropy gaussian_nll_loss grid_sample group_norm hinge_embedding_loss huber_loss
        instance_norm kl_div l1_loss layer_norm lobpcg margin_ranking_loss mse_loss
        multi_head_attention_forward multi_margin_loss multilabel_margin_loss
        multilabel_soft_margin_loss nll_loss normalize poisson_nll_loss rms_norm smooth_l1_loss
        soft_margin_loss stft svd_lowrank triplet_margin_loss triplet_margin_with_distance_loss
    """,
    "one floating tensor; the others are indices, lengths or samples": """
        ctc_loss embedding embedding_bag fractional_max_pool2d_with_indices
        fractional_max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d
    """,
    "replaced while a model is enabled": "linear_cross_entropy",
    "torch._grouped_mm, which has a rule": "grouped_mm",
    "of float8 tensors and their scales": "scaled_addmm scaled_addmm_ scaled_grouped_mm scaled_mm",
    "removed from torch: it raises": "lstsq solve",
}


def names_in(decided: dict[str, str]) -> set[str]:
    return {name for names in decided.values() for name in names.split()}


def takes_two_tensors(op: str) -> bool:
    packet, _, overload = op.partition(".")
    schema = torch._C._get_schema(packet, overload)
    tensors = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
    return len(tensors) > 1 and not schema.is_mutable


def public_ops() -> Iterator[str]:
    """Yield the functional aten ops of two and more tensors, by their names without overloads."""
    for op in torch._C._dispatch_get_all_op_names():
        name = op.removeprefix("aten::").split(".")[0]
        private = name.startswith(("_", *LIBRARIES)) or name.endswith("backward")
        if op.startswith("aten::") and not private and takes_two_tensors(op):
            yield name


def public_functions() -> Iterator[str]:
    """Yield the functions in Python whose signatures name two and more tensors."""
    for module in MODULES:
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and not name.startswith("_"):
                annotations = [p.annotation for p in inspect.signature(value).parameters.values()]
                if sum("Tensor" in str(annotation) for annotation in annotations) > 1:
                    yield name


def listed() -> set[str]:
    """The ops that torch's autocast or our op table has a rule for."""
    ours = {op for kind in ("cuda", "cpu") for op in op_table.op_table(kind)}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    torchs = {
        op.removeprefix("aten::")
        for op in torch._C._dispatch_get_all_op_names()
        if any(has_kernel(op, key) for key in ("AutocastCUDA", "AutocastCPU"))
    }
    return {op.split(".")[0] for op in ours | torchs}


def test_each_public_op_is_on_a_list_or_decided() -> None:
    undecided = set(public_ops()) - listed() - names_in(DECIDED)
    assert not undecided, (
        "new in torch, take two tensors, and are on no list: try half and FP32 together in an "
        "enabled forward, then put them on a list of op_table.py, or here with the reason"
    )


def test_each_public_function_is_decided() -> None:
    undecided = set(public_functions()) - names_in(FUNCTIONS)
    assert not undecided, "as above: what does it call, and is that on a list?"


def test_nothing_is_decided_that_has_a_rule() -> None:
    rules = {op.split(".")[0] for op in op_table.op_table("cpu")}
    assert not names_in(DECIDED) & rules


def test_the_walk_finds_what_is_on_no_list() -> None:
    """It would have found the two that it is here for."""
    found = set(public_functions())
    assert "grouped_mm" in found or not hasattr(torch.nn.functional, "grouped_mm")
    assert "linear_cross_entropy" in found or not hasattr(
        torch.nn.functional, "linear_cross_entropy"
    )
    assert {"heaviside", "index_add", "scatter_reduce"} <= set(public_ops())


R = torch.randn
PROMOTED = {
    "heaviside": lambda a, b: torch.heaviside(a(R(3, 4)), b(R(3, 4))),
    "index_add": lambda a, b: a(R(3, 4)).index_add(0, torch.tensor([2, 0]), b(R(2, 4))),
    "put": lambda a, b: a(R(3, 4)).put(torch.tensor([2, 0]), b(R(2))),
    "scatter": lambda a, b: a(R(3, 4)).scatter(0, torch.tensor([[2, 0, 1]]), b(R(1, 4))),
    "scatter_reduce": lambda a, b: a(R(3, 4)).scatter_reduce(
        0, torch.tensor([[2, 0, 1]]), b(R(1, 4)), "amax"
    ),
}


@pytest.mark.parametrize("op", PROMOTED)
def test_half_and_fp32_meet(op: str) -> None:
    """torch refuses them together; the result is that of FP32."""
    call = PROMOTED[op]
    with tritonamp.enable(torch.nn.Linear(1, 1)) as amp:
        for dtypes in ((Tensor.half, Tensor.float), (Tensor.float, Tensor.half)):
            with pytest.raises((RuntimeError, IndexError)):
                call(*dtypes)
            torch.manual_seed(0)
            with amp.autocast():
                found = call(*dtypes)
            torch.manual_seed(0)
            wide = call(*(lambda t, to=to: to(t).float() for to in dtypes))
            assert found.dtype is torch.float32
            assert torch.equal(found, wide)


def experts(dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the weights of two experts, and where the rows of each end."""
    torch.manual_seed(0)
    rows, weights = R(6, 8).to(dtypes[0]), R(2, 8, 16).to(dtypes[1])
    return rows.requires_grad_(), weights.requires_grad_(), torch.tensor([2, 6]).int()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [(0,), (1,), (0, 1), ()], ids=str)
def test_experts_compute_in_half_whatever_they_get(
    half: torch.dtype, wide: tuple[int, ...]
) -> None:
    """As a linear layer: torch refuses half rows with FP32 experts, and leaves two of FP32."""
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("torch has no grouped_mm")
    first, second = (torch.float32 if i in wide else half for i in range(2))
    rows, weights, ends = experts((first, second))
    with tritonamp.enable(torch.nn.Linear(1, 1), dtype=half) as amp, amp.autocast():
        found = torch._grouped_mm(rows, weights, offs=ends)
    assert found.dtype is half
    a, b = rows.detach().to(half).float(), weights.detach().to(half).float()
    expected = torch.cat([a[:2] @ b[0], a[2:] @ b[1]])
    torch.testing.assert_close(found.float(), expected, rtol=torch.finfo(half).eps, atol=1e-3)
    found.sum().backward()
    assert rows.grad is not None and rows.grad.dtype is first
    assert weights.grad is not None and weights.grad.dtype is second
    seed = torch.ones(6, 16)
    rows_grad = torch.cat([seed[:2] @ b[0].t(), seed[2:] @ b[1].t()])
    eps = torch.finfo(half).eps
    torch.testing.assert_close(rows.grad.float(), rows_grad, rtol=eps, atol=16 * eps)


DTYPES = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", DTYPES, ids=str)
def test_experts_give_the_dtype_that_is_asked_for(
    given: torch.dtype, out_dtype: torch.dtype, half: torch.dtype, level: str
) -> None:
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("torch has no grouped_mm")
    if level == "O3" and given is not half:
        pytest.skip("O3 has no op table: torch's error about dtypes")
    rows, weights, ends = experts((given, given))
    with tritonamp.enable(torch.nn.Linear(1, 1), level=level, dtype=half) as amp, amp.autocast():
        plain = torch._grouped_mm(rows, weights, offs=ends)
        found = torch._grouped_mm(rows, weights, offs=ends, out_dtype=out_dtype)
    assert found.dtype is out_dtype
    assert torch.equal(found, plain.to(out_dtype))
    found.sum().backward()
    assert rows.grad is not None and rows.grad.dtype is given


PRODUCTS = {
    "mm": lambda a, b, added, **how: torch.mm(a[0], b[0], **how),
    "bmm": lambda a, b, added, **how: torch.bmm(a, b, **how),
    "addmm": lambda a, b, added, **how: torch.addmm(added[0], a[0], b[0], beta=0.5, **how),
    "baddbmm": lambda a, b, added, **how: torch.baddbmm(added, a, b, alpha=2, **how),
}


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_give_the_dtype_that_is_asked_for(
    product: str, out_dtype: torch.dtype, half: torch.dtype
) -> None:
    """Of half operands, accumulated in FP32, as on a GPU: torch has no CPU kernel that does."""
    torch.manual_seed(0)
    a, b, added = R(2, 3, 4), R(2, 4, 5), R(2, 3, 5)
    call = PRODUCTS[product]
    expected = call(a.to(half).float(), b.to(half).float(), added).to(out_dtype)
    with tritonamp.enable(torch.nn.Linear(1, 1), dtype=half) as amp, amp.autocast():
        for first in (torch.float32, half):
            for second in (torch.float32, half):
                found = call(a.to(first), b.to(second), added, out_dtype=out_dtype)
                assert found.dtype is out_dtype
                assert torch.equal(found, expected)

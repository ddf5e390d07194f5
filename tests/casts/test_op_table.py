"""The op table against torch's own CUDA lists, op by op; and torch left alone outside of it."""

import contextlib
import itertools
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import one_in
from helpers import dispatch_tables, torchs_database
from small_models import EveryList
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.casts import active, dispatch, op_table
from tritonamp.casts.fused_ops import FUSED

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALVES = (FP16, BF16)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _named(op: str) -> bool:
    """Whether it is an overload for named tensors, which torch 2.15 has dropped."""
    return "imname" in op or "names" in op


def listed(key: str) -> list[str]:
    """The functional aten ops that have a kernel of torch's own at an autocast key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    return sorted(n.removeprefix("aten::") for n in names if has(n, key) and not _named(n))


CUDA_LIST, CPU_LIST = listed("AutocastCUDA"), listed("AutocastCPU")
SPARSE = {*op_table.overloads(op_table.SPARSE)}  # in test_sparse.py
TABLE = {op: rule for op, rule in op_table.op_table("cpu").items() if op not in SPARSE}
# where we differ from torch on CUDA
OURS = [op for op in op_table.op_table("cuda") if not _named(op) and op not in SPARSE]

# on CUDA's list, and never tested here: they have no CPU kernel, and are reached through conv2d,
# lstm, lstm_cell, ...
CUDA_KERNELS_ONLY = {
    "_cudnn_rnn",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
}


def target(op: str) -> Any:
    packet, _, overload = op.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


# sample calls

R = torch.randn


def _cell(gates: int) -> tuple[Tensor, ...]:
    return R(4 * gates, 3), R(4 * gates, 4), R(4 * gates), R(4 * gates)


_CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

# for ops that no OpInfo reaches
MORE_SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "_convolution": lambda: (
        R(1, 2, 5, 5),
        R(3, 2, 3, 3),
        R(3),
        *_CONV,
        False,
        False,
        False,
        False,
    ),
    "_convolution.deprecated": lambda: (
        R(1, 2, 5, 5),
        R(3, 2, 3, 3),
        R(3),
        *_CONV,
        False,
        False,
        False,
    ),
    "_grouped_mm": lambda: (R(8, 8), R(2, 8, 8), torch.tensor([4, 8], dtype=torch.int32)),
    "_weight_norm": lambda: (R(3, 4), R(3, 1)),
    "instance_norm": lambda: (R(2, 3, 4), R(3), R(3), None, None, True, 0.1, 1e-5, False),
    "_upsample_bicubic2d_aa": lambda: (R(1, 2, 4, 4), [6, 6], False),
    "_upsample_nearest_exact2d": lambda: (R(1, 2, 4, 4), [6, 6]),
    "_upsample_nearest_exact3d": lambda: (R(1, 2, 4, 4, 4), [6, 6, 6]),
    "chain_matmul": lambda: ([R(2, 3), R(3, 4), R(4, 2)],),
    "clamp_": lambda: (R(3, 4), -0.5, 0.5),
    "clamp_max": lambda: (R(3, 4), 0.5),
    "clamp_max_": lambda: (R(3, 4), 0.5),
    "clamp_min": lambda: (R(3, 4), -0.5),
    "clamp_min_": lambda: (R(3, 4), -0.5),
    "conv_tbc": lambda: (R(5, 2, 3), R(3, 3, 4), R(4)),
    "convolution": lambda: (R(1, 2, 5, 5), R(3, 2, 3, 3), R(3), *_CONV),
    "embedding_bag": lambda: (
        *(R(5, 3), torch.arange(4), torch.tensor([0, 2]), False, 0, False, R(4)),
    ),
    "embedding_bag.padding_idx": lambda: (
        *(R(5, 3), torch.arange(4), torch.tensor([0, 2]), False, 0, False, R(4), False, None),
    ),
    "fill_diagonal_": lambda: (R(3, 4), -2.0),
    "frobenius_norm.dim": lambda: (R(3, 4), [1]),
    "gru_cell": lambda: (R(2, 3), R(2, 4), *_cell(3)),
    "hardtanh_": lambda: (R(3, 4),),
    "index_add_": lambda: (R(3, 4), 0, torch.tensor([2, 0]), R(2, 4)),
    "index_copy_": lambda: (R(3, 4), 0, torch.tensor([2, 0]), R(2, 4)),
    "index_put_": lambda: (R(3, 4), [torch.tensor([2, 0])], R(2, 4)),
    "index_reduce_": lambda: (R(3, 4), 0, torch.tensor([2, 0]), R(2, 4), "mean"),
    "masked_scatter": lambda: (R(3, 4), torch.eye(3, 4) > 0, R(2, 4)),
    "masked_scatter_": lambda: (R(3, 4), torch.eye(3, 4) > 0, R(2, 4)),
    "put_": lambda: (R(3, 4), torch.tensor([2, 0]), R(2)),
    "scatter_.src": lambda: (R(3, 4), 0, torch.tensor([[2, 0, 1, 1]]), R(1, 4)),
    "scatter_add_": lambda: (R(3, 4), 0, torch.tensor([[2, 0, 1, 1]]), R(1, 4)),
    "scatter_reduce_.two": lambda: (R(3, 4), 0, torch.tensor([[2, 0, 1, 1]]), R(1, 4), "amax"),
    "index_fill_.int_Scalar": lambda: (R(3, 4), 1, torch.tensor([2]), -2.0),
    "index_fill_.int_Tensor": lambda: (R(3, 4), 1, torch.tensor([2]), torch.tensor(-2.0)),
    "lerp.Tensor": lambda: (R(3, 4), R(3, 4), R(3, 4)),
    "lerp_.Scalar": lambda: (R(3, 4), R(3, 4), 0.25),
    "lerp_.Tensor": lambda: (R(3, 4), R(3, 4), R(3, 4)),
    "linalg_matrix_norm": lambda: (R(3, 4), 1),
    "lstm_cell": lambda: (R(2, 3), [R(2, 4), R(2, 4)], *_cell(4)),
    "nll_loss2d": lambda: (R(2, 3, 4, 4), torch.randint(3, (2, 4, 4))),
    "masked_fill_.Scalar": lambda: (R(3, 4), torch.eye(3, 4) > 0, -2.0),
    "masked_fill_.Tensor": lambda: (R(3, 4), torch.eye(3, 4) > 0, torch.tensor(-2.0)),
    "norm.Scalar": lambda: (R(3, 4), 2),
    "nuclear_norm": lambda: (R(3, 4),),
    "nuclear_norm.dim": lambda: (R(3, 4), [0, 1]),
    "reflection_pad2d": lambda: (R(2, 4, 4), [1, 1, 1, 1]),
    "replication_pad3d": lambda: (R(2, 4, 4, 4), [1, 1, 1, 1, 1, 1]),
    "rnn_relu_cell": lambda: (R(2, 3), R(2, 4), *_cell(1)),
    "rnn_tanh_cell": lambda: (R(2, 3), R(2, 4), *_cell(1)),
    "scatter.value": lambda: (R(3, 4), 0, torch.zeros(1, 4, dtype=torch.int64), -2.0),
    "upsample_nearest2d": lambda: (R(1, 2, 4, 4), [6, 6]),
    "upsample_nearest3d": lambda: (R(1, 2, 4, 4, 4), [6, 6, 6]),
    "where.ScalarOther": lambda: (torch.eye(3, 4) > 0, R(3, 4), -2.0),
}


@contextlib.contextmanager
def recorder(ops: list[str], calls: dict[str, list[Call]]) -> Iterator[None]:
    """Notes what ``ops`` are called with under torch.autocast("cpu")."""
    below = DispatchKeySet(DispatchKey.AutocastCPU)
    library = torch.library.Library("aten", "IMPL")

    def impl(op: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[op].append((args, kwargs))
            with torch._C._ExcludeDispatchKeyGuard(below):
                return target(op)(*args, **kwargs)

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overriding kernels is what this is about
        for op in ops:
            library.impl(op, impl(op), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Call]]:
    """For each op of torch's lists and of our differences: FP32 arguments, mostly from torch's
    operator database.
    """
    # here, because that takes four seconds in every process that collects this file
    op_db = torchs_database("common_methods_invocations", "op_db")
    torch.manual_seed(0)
    calls: dict[str, list[Call]] = defaultdict(list)
    with recorder(sorted({*CUDA_LIST, *CPU_LIST, *OURS}), calls), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            if FP32 not in info.dtypes:
                continue
            # not sample_inputs: it looks for a unittest in the whole call stack for each sample,
            # which takes minutes under pytest
            inputs = info.sample_inputs_func(info, "cpu", FP32, False)
            for sample, _ in zip(inputs, range(3), strict=False):
                # some expect other states
                with (
                    contextlib.suppress(Exception),
                    torch.autocast("cpu", dtype=BF16),
                ):
                    info.op(sample.input, *sample.args, **sample.kwargs)
    for op, make in MORE_SAMPLES.items():
        calls[op].append((make(), {}))
    return {op: found[:2] for op, found in calls.items()}


def variant(call: Call, *dtypes: torch.dtype) -> Call:
    """The call with its FP32 tensors in ``dtypes``, one after the other and round again."""
    count = 0

    def change(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, Tensor) or value.dtype is not FP32:
            return value
        count += 1
        # a copy: some ops write into it
        return value.detach().to(dtypes[(count - 1) % len(dtypes)], copy=True)

    return tree_map(change, call)  # type: ignore[no-any-return]


def dtypes(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in tree_leaves(value) if isinstance(t, Tensor)]


@contextlib.contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """torch.autocast("cuda") refuses to start where there is no GPU; on fake tensors its rules work
    all the same.
    """
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def outcome(op: str, call: Call) -> list[Any]:
    """Dtypes and values of the results, or the kind of error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)  # attention has dropout
        try:
            return [
                t for t in tree_leaves(target(op)(*call[0], **call[1])) if isinstance(t, Tensor)
            ]
        except Exception as error:
            return [type(error)]


def same_outcomes(a: list[Any], b: list[Any]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return x is y
        return x.dtype is y.dtype and torch.equal(x.nan_to_num(7), y.nan_to_num(7))

    return len(a) == len(b) and all(map(equal, a, b))


def on_fake_cuda(op: str, call: Call, dtype: torch.dtype) -> list[torch.dtype] | None:
    """The dtypes that the op gives on CUDA tensors without values under autocast, or None where it
    fails.
    """

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    with FakeTensorMode(), cuda_autocast(dtype):
        args, kwargs = tree_map(fake, call)
        results = outcome(op, (args, kwargs))
        return None if any(isinstance(r, type) for r in results) else dtypes(results)


VARIANTS = {
    "fp32": (FP32,),
    "fp16": (FP16,),
    "bf16": (BF16,),
    "mixed": (FP16, FP32),
    "mixed, FP32 first": (FP32, FP16),
}
Truth = dict[tuple[str, str], list[Any]]


def half_of(name: str) -> torch.dtype:
    return BF16 if name == "bf16" else FP16


def all_on_fake_cuda(samples: dict[str, list[Call]]) -> Truth:
    """What CUDA autocast gives now, for every variant and sample of the ops that are compared."""
    return {
        (op, name): [
            on_fake_cuda(op, variant(call, *VARIANTS[name]), half_of(name)) for call in samples[op]
        ]
        for op in sorted(COMPARED & samples.keys())
        for name in VARIANTS
    }


def all_on_cpu(samples: dict[str, list[Call]]) -> Truth:
    """What torch.autocast("cpu") gives now, for every op, variant and sample."""
    with torch.autocast("cpu", dtype=BF16):
        return {
            (op, name): [outcome(op, variant(call, *VARIANTS[name])) for call in samples[op]]
            for op in samples
            for name in ("fp32", "fp16", "bf16")
        }


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest, samples: dict[str, list[Call]]) -> tuple[Truth, Truth]:
    """What torch does by itself with the ops of the tests of this run: on fake CUDA, and on CPU."""
    assert not dispatch.is_registered()
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    ops = {test.callspec.params["op"] for test in tests if {"op", "stock"} <= {*test.fixturenames}}
    asked = {op: calls for op, calls in samples.items() if op in ops}
    return all_on_fake_cuda(asked), all_on_cpu(asked)


@pytest.fixture(scope="module")
def amps(stock: Any) -> Iterator[dict[torch.dtype, tritonamp.Amp]]:
    """Handles for both half formats. Keeps the op table registered for the tests of this module,
    which costs 0.1 s.
    """
    handles = {half: tritonamp.enable(nn.Linear(1, 1), level="O1", dtype=half) for half in HALVES}
    yield handles
    for amp in handles.values():
        amp.disable()


@contextlib.contextmanager
def following(amp: tritonamp.Amp) -> Iterator[None]:
    """The rules of ``amp`` alone, for fake CUDA tensors."""
    active.enter(active.number_of(amp.policy, "auto", "cuda"))
    try:
        yield
    finally:
        active.leave()


# registration: before all tests that keep the op table registered


def test_the_last_disable_puts_the_dispatch_tables_back() -> None:
    assert not dispatch.is_registered()
    before = dispatch_tables()
    first = tritonamp.enable(nn.Linear(2, 2))
    changed = dispatch_tables()
    assert changed != before
    second = tritonamp.enable(nn.Linear(2, 2), level="O2")
    assert dispatch_tables() == changed
    first.disable()
    assert dispatch_tables() == changed
    second.disable()
    assert dispatch_tables() == before


# dtypes

COMPARED = {*CUDA_LIST, *OURS} - {*CUDA_KERNELS_ONLY, "binary_cross_entropy"}
STORAGE_ON_CPU = sorted(op_table.overloads(op_table.STORAGE_ON_CPU))
PROMOTED = {*op_table.overloads(op_table.PROMOTE_EVERYWHERE)}


def test_every_op_of_the_cuda_list_has_a_sample(samples: dict[str, list[Call]]) -> None:
    assert {op for op in (*CUDA_LIST, *OURS) if op not in samples} == CUDA_KERNELS_ONLY & {
        *CUDA_LIST
    }
    # or torch's own rule serves
    assert {op for op in CUDA_LIST if op not in TABLE} <= {
        *CUDA_KERNELS_ONLY,
        *CPU_LIST,
    }


def expected_dtypes(
    op: str, call: Call, half: torch.dtype, torchs: list[torch.dtype] | None
) -> list[torch.dtype] | None:
    """What CUDA autocast gives, but for our own differences from it; None where it fails."""
    given = dtypes(call)
    asked = next((value for value in tree_leaves(call) if isinstance(value, torch.dtype)), None)
    if op in op_table.WRITTEN_INTO:
        return [given[0], *[torch.int64] * 3 * op.startswith("embedding_bag")]
    if op in ("softmax.int", *op_table.STORAGE, *op_table.RUNNING_NORMS):
        return [asked or given[0]]
    if op == "_grouped_mm":
        return [half]
    if op in PROMOTED:
        return [FP32 if FP32 in given else given[0]]
    if op in OURS and op not in CUDA_LIST and op not in op_table.FITTED:
        return [asked or FP32] * (2 if "_mean" in op else 1)
    if op == "grid_sampler":  # asks the driver for cuDNN
        return [FP32 if FP32 in given else given[0]]
    if op in ("_convolution", "_convolution.deprecated", "gru_cell"):  # torch 2.11 asks the driver
        return [half]
    if op == "linalg_matrix_norm.str_ord":  # the sum of singular values, of which CUDA has no half
        return [FP32]
    return torchs


@pytest.mark.filterwarnings(
    "ignore:.*degrees of freedom", "ignore:torch.chain_matmul is deprecated"
)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("op", one_in(3, sorted(COMPARED)))
def test_dtypes_are_those_of_cuda(op: str, name: str, samples: Any, stock: Any, amps: Any) -> None:
    half, compared = half_of(name), 0
    for sample, torchs in zip(samples[op], stock[0][op, name], strict=True):
        call = variant(sample, *VARIANTS[name])
        expected = expected_dtypes(op, call, half, torchs)
        if expected is None:
            continue
        compared += 1
        with amps[half].autocast():
            assert dtypes(target(op)(*call[0], **call[1])) == expected
        # elsewhere CUDA has torch's rule; float16's grouped_mm asks the driver for cuBLASLt
        if op in OURS and not (op == "_grouped_mm" and half is FP16):
            with following(amps[half]):
                assert on_fake_cuda(op, call, half) == expected
    assert compared > 0


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("op", STORAGE_ON_CPU)
def test_ops_that_only_torchs_cpu_list_has_keep_half_as_on_cuda(
    op: str, name: str, samples: Any, amps: Any
) -> None:
    for sample in samples[op]:
        call = variant(sample, *VARIANTS[name])
        with amps[half_of(name)].autocast():
            assert dtypes(target(op)(*call[0], **call[1])) == on_fake_cuda(op, call, half_of(name))


# of these CUDA has no half kernel, or a partial one; torch's CPU rule makes them FP32
FP32_ON_CPU = sorted({*CPU_LIST} - {*CUDA_LIST, *TABLE, "cat", "stack", "index_copy"})


@pytest.mark.parametrize("op", FP32_ON_CPU)
def test_other_ops_of_torchs_cpu_list_work_in_fp32(op: str, samples: Any, amps: Any) -> None:
    if op not in samples:
        pytest.skip("no OpInfo reaches it")
    for sample in samples[op]:
        call = variant(sample, FP16)
        with amps[FP16].autocast():
            assert {*dtypes(target(op)(*call[0], **call[1]))} <= {
                FP32,
                torch.complex64,
                torch.int64,
                torch.int32,
            }


def test_a_nested_autocast_region_names_the_half_format(amps: Any) -> None:
    x = R(2, 2)
    with amps[FP16].autocast(), torch.autocast("cpu", dtype=BF16):
        assert (x @ x).dtype is BF16


@pytest.mark.parametrize("on", ["cpu", "fake cuda"])
def test_softmax_dtype(on: str, amps: Any) -> None:
    amp = tritonamp.enable(nn.Linear(1, 1), softmax_dtype=FP32)
    call: Call = ((R(2, 3).half(), -1), {})
    if on == "cpu":
        with amp.autocast():
            assert dtypes(target("softmax.int")(*call[0])) == [FP32]
    else:
        with following(amp):
            assert on_fake_cuda("softmax.int", call, FP16) == [FP32]
    amp.disable()


OUT_DTYPE = {*op_table.overloads(op_table.OUT_DTYPE)}  # on CUDA alone
HALF_OPS = {*op_table.overloads([*op_table.HALF, "_grouped_mm"])}


def forms(op: str, call: Call) -> Iterator[Call]:
    """Yield the call with one and with two of its arguments in another form: None where the schema
    allows it, no dimensions, a bool the other way round.
    """
    schema, (args, kwargs) = target(op)._schema, call
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    other: list[dict[str, Any]] = [{}]
    for argument in schema.arguments:
        kind = str(argument.type)
        if kind == "bool" and argument.has_default_value():
            default = given.get(argument.name, argument.default_value)
            other.append({argument.name: not default})
        if kind.startswith("Optional"):
            other.append({argument.name: None})
        if "List[int]" in kind and "dim" in argument.name:
            other.append({argument.name: []})
    for first, second in itertools.combinations_with_replacement(other, 2):
        changed = given | first | second
        named = {a.name for a in schema.arguments if a.kwarg_only}
        kwargs = {name: value for name, value in changed.items() if name in named}
        yield (), {**kwargs, **{n: v for n, v in changed.items() if n not in named}}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("op", one_in(3, sorted({*TABLE} - {"binary_cross_entropy", *OUT_DTYPE})))
def test_arguments_mean_what_they_mean_in_torch(op: str, samples: Any, amps: Any) -> None:
    """In whatever form: both run, with results of the same shapes, or both refuse them."""
    if op not in samples:
        pytest.skip("no OpInfo reaches it")
    compared = 0
    for sample in samples[op]:
        for form in forms(op, sample):
            expected = outcome(op, variant(form, FP32))
            for half in HALVES:
                with amps[half].autocast():
                    found = outcome(op, variant(form, FP32)), outcome(op, variant(form, half))
                if all(isinstance(t, Tensor) for t in expected):
                    compared += 1
                    for results in found:
                        assert [getattr(t, "shape", t) for t in results] == [
                            t.shape for t in expected
                        ]
                    if op not in HALF_OPS:
                        assert same_outcomes(found[0], expected)
    assert compared > 0


EXPLICIT: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "sum of a dimension": lambda x, dtype: x.sum(0, dtype=dtype),
    "sum of two": lambda x, dtype: torch.sum(x, (0, 1), keepdim=True, dtype=dtype),
    "softmax": lambda x, dtype: x.softmax(-1, dtype=dtype),
    "F.softmax": lambda x, dtype: F.softmax(x, -1, dtype=dtype),
    "log_softmax": lambda x, dtype: x.log_softmax(-1, dtype=dtype),
    "F.log_softmax": lambda x, dtype: F.log_softmax(x, -1, dtype=dtype),
    "cumsum": lambda x, dtype: x.cumsum(0, dtype=dtype),
    "cumprod": lambda x, dtype: x.cumprod(0, dtype=dtype),
    "prod": torch.prod,
    "vector_norm": lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype),
}


@pytest.mark.parametrize("given", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("asked", [FP16, BF16, FP32, FP64], ids=str)
@pytest.mark.parametrize("op", EXPLICIT)
def test_an_explicit_dtype_wins(op: str, asked: torch.dtype, given: torch.dtype, amps: Any) -> None:
    x = torch.rand(3, 4).to(given)
    if op == "vector_norm" and torch.promote_types(asked, given) is not asked:
        pytest.skip("torch refuses to narrow here")
    with amps[FP16].autocast():
        found = EXPLICIT[op](x, dtype=asked)
    assert found.dtype is asked
    expected = EXPLICIT[op](x.double(), dtype=FP64)
    # at most twelve roundings in the narrower of the two formats, of values that grow to the result
    torch.testing.assert_close(
        found.double(), expected, rtol=12 * max(torch.finfo(d).eps for d in (asked, given)), atol=0
    )


# values


def leaves(call: Call, dtype: torch.dtype) -> tuple[Call, list[Tensor]]:
    """The call with its half tensors in ``dtype``, as leaves that require gradients; and those
    leaves.
    """
    found: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in HALVES:
            return value
        found.append(value.to(dtype, copy=True).requires_grad_())
        return found[-1]

    return tree_map(leaf, call), found


ROUNDED_ONCE = sorted(
    {*COMPARED, *STORAGE_ON_CPU}
    & {*TABLE}
    - {*op_table.overloads(op_table.PROMOTE), *PROMOTED, *op_table.RUNNING_NORMS}
    # which adds up rows in torch's own kernel
    - {*op_table.overloads(["embedding_bag"])}
)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", ROUNDED_ONCE)
def test_half_is_computed_in_fp32_and_rounded_once(
    op: str, half: torch.dtype, samples: Any, amps: Any
) -> None:
    """Values and gradients on CPU are those of the op on FP32 copies, rounded to the dtypes of
    results and inputs.
    """
    for sample in samples[op]:
        if any(isinstance(value, torch.dtype) for value in tree_leaves(sample)):
            continue  # an explicit dtype is tested above
        call, inputs = leaves(variant(sample, half), half)
        wide, wide_inputs = leaves(variant(sample, half), FP32)
        with amps[half].autocast():
            found = outcome(op, call)
        plain = outcome(op, wide)
        expected = [
            e.to(f.dtype) if isinstance(f, Tensor) else e for e, f in zip(plain, found, strict=True)
        ]
        assert same_outcomes(found, expected)
        if op in FUSED:
            continue  # their gradients have tests of their own
        pairs = [
            (f, e)
            for f, e in zip(found, expected, strict=True)
            if isinstance(e, Tensor) and e.requires_grad
        ]
        upstream = [torch.randn_like(f) for f, _ in pairs]
        if pairs:
            torch.autograd.backward([f for f, _ in pairs], upstream)
            torch.autograd.backward([e for _, e in pairs], upstream)
        assert [i.grad is None for i in inputs] == [w.grad is None for w in wide_inputs]
        grads = [
            (i.grad, w.grad.to(half))
            for i, w in zip(inputs, wide_inputs, strict=True)
            if w.grad is not None
        ]
        assert same_outcomes([g for g, _ in grads], [w for _, w in grads])


@pytest.mark.parametrize("op", one_in(3, sorted({*TABLE} - {"binary_cross_entropy"})))
def test_fp64_passes_through(op: str, samples: Any, amps: Any) -> None:
    for sample in samples.get(op, []):
        call = variant(sample, FP64)
        expected = outcome(op, call)
        with amps[FP16].autocast():
            assert same_outcomes(outcome(op, call), expected)


OTHER_NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "sum": torch.sum,
    "sum of a dimension": lambda x: x.sum(0),
    "cumsum": lambda x: x.cumsum(0),
    "prod": torch.prod,
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "pow": lambda x: x.pow(2),
    "exp": torch.exp,
    "log": torch.log,
    "reciprocal": torch.reciprocal,
    "dot": lambda x: torch.dot(x[0], x[1]),
    "norm": lambda x: torch.linalg.vector_norm(x) if x.is_complex() else x,
    "var": lambda x: torch.var(x) if x.is_complex() else x,
    "pad": lambda x: F.pad(x[None], (1, 1), mode="replicate") if x.is_complex() else x,
}


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.complex64, torch.complex128], ids=str
)
@pytest.mark.parametrize("op", OTHER_NUMBERS)
def test_integers_and_complex_numbers_pass_through(op: str, dtype: torch.dtype, amps: Any) -> None:
    x = torch.randint(1, 5, (3, 3)).to(dtype)
    expected = OTHER_NUMBERS[op](x)
    with amps[FP16].autocast():
        found = OTHER_NUMBERS[op](x)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


LARGE = torch.tensor([[60000.0, 60000.0, -60000.0], [60000.0, -60000.0, 60000.0]])
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": torch.sum,
    "last": lambda x: x.sum(-1),
    "first, kept": lambda x: x.sum(0, keepdim=True),
    "both": lambda x: x.sum((0, 1)),
    "none named": lambda x: x.sum([]),
    "strided": lambda x: x.t().sum(1),
    "many": lambda x: x[:1, :1].expand(4096, 4096).sum(),
    "F": lambda x: tritonamp.functional.sum(x, -1, dtype=FP32),
}


@pytest.mark.parametrize("how", SUMS)
def test_sums_never_overflow_on_the_way(how: str, amps: Any) -> None:
    x = LARGE.half().requires_grad_()
    with amps[FP16].autocast():
        found = SUMS[how](x)
    assert found.dtype is FP32
    assert torch.equal(found, SUMS[how](LARGE))  # sums of few bits: exact
    found.sum().backward()
    assert x.grad.dtype is FP16


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_that_of_fp32(half: torch.dtype, reduction: str, amps: Any) -> None:
    logits, target = (30 * R(5, 7)).to(half), torch.randint(7, (5,))
    with amps[half].autocast():
        found = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1)
    expected = F.cross_entropy(logits.float(), target, reduction=reduction, label_smoothing=0.1)
    assert found.dtype is FP32
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "fused", [F.binary_cross_entropy, nn.BCELoss()], ids=["function", "module"]
)
def test_binary_cross_entropy_is_refused_with_the_remedy(
    fused: Callable[..., Tensor], amps: Any
) -> None:
    p, y = torch.rand(3).half(), torch.ones(3).half()
    with amps[FP16].autocast():
        with pytest.raises(
            RuntimeError,
            match=r"Use binary_cross_entropy_with_logits \(nn.BCEWithLogitsLoss\) without",
        ):
            fused(p, y)
        assert F.binary_cross_entropy_with_logits(p, y).dtype is FP32
        with tritonamp.disable_casts():
            assert fused(p.float(), y.float()).dtype is FP32
    assert fused(p.float(), y.float()).dtype is FP32


def _assign(x: Tensor, y: Tensor) -> None:
    x[torch.tensor([0, 2])] = y


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "x[i] = y": _assign,
    "index_put_": lambda x, y: x.index_put_((ROWS,), y[:1], accumulate=True),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([2, 2]), y, alpha=3),
    "scatter_add_": lambda x, y: x.scatter_add_(0, torch.tensor([[2, 2, 1], [0, 2, 2]]), y),
}


@pytest.mark.parametrize(("into", "what"), [(FP16, FP32), (FP32, FP16), (BF16, FP16)], ids=str)
@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_takes_the_dtype_of_what_it_is_written_into(
    how: str, into: torch.dtype, what: torch.dtype, amps: Any
) -> None:
    x, y = R(3, 3).to(into), R(2, 3).to(what).requires_grad_()
    found, expected = x.clone(), x.clone()
    with amps[FP16].autocast():
        WRITES[how](found, y)
    WRITES[how](expected, y.detach().to(into))
    assert torch.equal(found, expected)
    found.sum().backward()
    assert y.grad is not None and y.grad.dtype is what
    with pytest.raises(RuntimeError):  # outside it is torch's
        WRITES[how](x.clone(), y.detach())


MASK = torch.tensor([[True, False, False], [False, True, True]])
ROWS = torch.tensor([0])
FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda x, v: x.masked_fill(MASK, v),
    "masked_fill_": lambda x, v: x.clone().masked_fill_(MASK, v),
    "masked_fill, tensor": lambda x, v: x.masked_fill(MASK, torch.tensor(v)),
    "masked_fill_, tensor": lambda x, v: x.clone().masked_fill_(MASK, torch.tensor(v)),
    "masked_fill, BF16": lambda x, v: x.masked_fill(MASK, torch.tensor(v, dtype=BF16)),
    "masked_fill, FP64": lambda x, v: x.masked_fill(MASK, torch.tensor(v, dtype=FP64)),
    "masked_fill, 0-d mask": lambda x, v: x.masked_fill(torch.tensor(True), v),
    "where": lambda x, v: torch.where(MASK, v, x),
    "where, other": lambda x, v: torch.where(MASK, x, v),
    "index_fill": lambda x, v: x.index_fill(0, ROWS, v),
    "index_fill, 0-d index": lambda x, v: x.index_fill(0, ROWS[0], v),
    "index_fill, tensor": lambda x, v: x.index_fill(0, ROWS, torch.tensor(v)),
    "index_fill_": lambda x, v: x.clone().index_fill_(0, ROWS, v),
    "index_fill_, tensor": lambda x, v: x.clone().index_fill_(0, ROWS, torch.tensor(v)),
    "scatter": lambda x, v: x.scatter(0, MASK.long(), v),
    "scatter_": lambda x, v: x.clone().scatter_(0, MASK.long(), v),
    "fill": lambda x, v: torch.fill(x, v),
    "fill_": lambda x, v: x.clone().fill_(v),
    "fill_diagonal_": lambda x, v: x.clone().fill_diagonal_(v),
    "full_like": lambda x, v: torch.full_like(x, v),
    "new_full": lambda x, v: x.new_full((2,), v),
    "pad": lambda x, v: F.pad(x, (1, 1), value=v),
    "clamp": lambda x, v: x.clamp(-v, v) if v > 0 else x.clamp(v, -v),
    "clamp_": lambda x, v: x.clone().clamp_(min=v),
    "clamp_min": lambda x, v: x.clamp_min(v),
    "clamp_min_": lambda x, v: x.clone().clamp_min_(v),
    "clamp_max": lambda x, v: x.clamp_max(v),
    "clamp_max_": lambda x, v: x.clone().clamp_max_(v),
    "hardtanh": lambda x, v: F.hardtanh(x, -abs(v), abs(v)),
    "hardtanh_": lambda x, v: F.hardtanh(x.clone(), -abs(v), abs(v), inplace=True),
}
VALUES = [-1e9, 1e9, -7e4, 65519.0, torch.finfo(FP32).min, 1e300, -3.0, -float("inf"), float("nan")]


def within(wide: Tensor, half: torch.dtype) -> Tensor:
    """Finite values clamped to the format, then rounded to it."""
    limit = torch.finfo(half).max
    return torch.where(wide.isinf(), wide, wide.clamp(-limit, limit)).to(half)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("how", FILLS)
def test_numbers_are_clamped_to_the_format(
    how: str, value: float, half: torch.dtype, amps: Any
) -> None:
    """Values and gradients are otherwise those of FP64."""
    x = R(2, 3).to(half).requires_grad_()
    wide = x.detach().double().requires_grad_()
    with amps[half].autocast():
        found = FILLS[how](x, value)
    # torch.tensor(1e300) is inf
    format = FP32 if how.endswith("tensor") else BF16 if how.endswith("BF16") else FP64
    expected = FILLS[how](wide, float(torch.tensor(value, dtype=format)))
    assert found.dtype is half
    torch.testing.assert_close(found, within(expected, half), rtol=0, atol=0, equal_nan=True)
    if expected.requires_grad:
        upstream = torch.randn_like(found)
        found.backward(upstream)
        expected.backward(upstream.double())
        assert same_outcomes([x.grad], [wide.grad.to(half)])


@pytest.mark.parametrize("how", FILLS)
def test_numbers_reach_other_formats_as_they_are(how: str, amps: Any) -> None:
    x = R(2, 3)
    expected = FILLS[how](x, -1e9)
    with amps[FP16].autocast():
        assert torch.equal(FILLS[how](x, -1e9), expected)
        assert torch.full_like(x.half(), -1e9, dtype=FP32).eq(-1e9).all()
        assert x.long().masked_fill(MASK, -(10**9)).min() == -(10**9)


@pytest.mark.parametrize("value", [-(10**9), torch.tensor(-(10**9))], ids=["int", "int tensor"])
def test_whole_numbers_are_clamped_too(value: Any, amps: Any) -> None:
    with amps[FP16].autocast():
        assert R(2, 3).half().masked_fill(MASK, value).min() == torch.finfo(FP16).min


def test_the_value_of_a_mask_may_be_trained(amps: Any) -> None:
    value = torch.tensor(-3.0, requires_grad=True)
    with amps[FP16].autocast():
        R(2, 3).half().masked_fill(MASK, value).sum().backward()
    assert value.grad == MASK.sum()


class Masked(nn.Module):
    """Attention scores under a mask of which one row is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x) @ x.mT
        blocked = torch.tensor([[True, True], [False, True]], device=x.device)
        scores = scores.masked_fill(blocked, torch.finfo(FP32).min)
        return scores.softmax(-1)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_masked_row_is_that_of_fp32(level: str, device: torch.device) -> None:
    """At O3, which has no op policy, torch refuses the mask."""
    model, x = Masked().to(device), R(2, 3, device=device)
    expected = model(x)
    amp = tritonamp.enable(model, level=level)
    if level == "O3":
        with pytest.raises(RuntimeError, match="without overflow"):
            model(x)
    else:
        assert torch.equal(model(x), expected)  # 0, 1 and 1/2: exact in every format
    amp.disable()


@pytest.mark.compiled
@pytest.mark.parametrize("how", FILLS)
def test_compiled_numbers_are_clamped_too(how: str) -> None:
    torch.compiler.reset()

    class Fills(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return FILLS[how](super().forward(x), -1e9)

    model, x = Fills(3, 3), R(2, 3)
    amp = tritonamp.enable(model, cast_outputs=None)
    expected = model(x)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
    amp.disable()


# outside, torch is left alone


@pytest.mark.parametrize("how", FILLS)
def test_outside_torch_refuses_numbers_beyond_the_format(how: str, amps: Any) -> None:
    x = R(2, 3).half()
    with torch.autocast("cpu", dtype=BF16), contextlib.suppress(RuntimeError):
        assert FILLS[how](x, -1e9).isinf().any()  # where; all else raises


@pytest.mark.parametrize(
    "op", one_in(4, sorted({*CUDA_LIST, *CPU_LIST, *OURS} - CUDA_KERNELS_ONLY))
)
def test_stock_cpu_autocast_is_what_it_was(op: str, samples: Any, stock: Any, amps: Any) -> None:
    if op not in samples:
        pytest.skip("no OpInfo reaches it")
    assert dispatch.is_registered()
    for name in ("fp32", "fp16", "bf16"):
        for sample, before in zip(samples[op], stock[1][op, name], strict=True):
            with torch.autocast("cpu", dtype=BF16):
                assert same_outcomes(outcome(op, variant(sample, *VARIANTS[name])), before)


@pytest.mark.parametrize("op", one_in(4, sorted(COMPARED & {*OURS})))
def test_stock_cuda_autocast_is_what_it_was(op: str, samples: Any, stock: Any, amps: Any) -> None:
    assert dispatch.is_registered()
    for name in VARIANTS:
        for sample, before in zip(samples[op], stock[0][op, name], strict=True):
            assert on_fake_cuda(op, variant(sample, *VARIANTS[name]), half_of(name)) == before


@pytest.mark.parametrize(
    "off", [lambda: torch.autocast("cpu", enabled=False), tritonamp.disable_casts]
)
def test_a_nested_region_without_autocast_has_no_rules(off: Callable[[], Any], amps: Any) -> None:
    x, wide = R(3, 3).half(), R(3, 3)
    with amps[FP16].autocast():
        assert x.sum().dtype is FP32
        with off():
            assert x.sum().dtype is FP16
            assert x.exp().dtype is FP16
            assert (wide @ wide).dtype is FP32
        assert (wide @ wide).dtype is FP16


class TwoBlocks(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, EveryList(), EveryList()

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.kind == "plain":
            return block(x)
        return checkpoint(block, x, use_reentrant=self.kind == "reentrant")

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.second, self.run(self.first, x))


def enabled_blocks(kind: str = "plain", **fields: Any) -> tuple[nn.Module, tritonamp.Amp, Tensor]:
    torch.manual_seed(0)
    model, x = TwoBlocks(kind), R(3, 4, requires_grad=True)
    return model, tritonamp.enable(model, **fields), x


@pytest.mark.parametrize("fault", ["in forward", "in an op", "refused"])
def test_an_exception_leaves_no_rule_behind(fault: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if fault == "in forward":
                raise KeyError("broken")
            if fault == "in an op":
                return x @ R(3, 3)
            return F.binary_cross_entropy(x.sigmoid(), x)

    model = Broken()
    amp = tritonamp.enable(model)
    with pytest.raises((KeyError, RuntimeError)):
        model(R(2, 4))
    assert active.active() is None
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises((KeyError, RuntimeError)), amp.autocast():
        model(R(2, 4))
    assert active.active() is None
    with torch.autocast("cpu", dtype=BF16):
        assert R(2, 4).half().softmax(-1).dtype is FP16  # stock: not on torch's CPU list
    amp.disable()


def test_nested_enabled_models_follow_their_own_policies() -> None:
    inner, outer = EveryList(), nn.Sequential(nn.Linear(4, 4))
    inner_amp = tritonamp.enable(inner, dtype=BF16, softmax_dtype=FP32, cast_outputs=None)
    outer_amp = tritonamp.enable(outer)
    dtypes_seen = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        dtypes_seen.append([active.active().policy.dtype, output.dtype, inner(output).dtype])  # type: ignore[union-attr]
        dtypes_seen.append([active.active().policy.dtype, (output @ output.t()).dtype])  # type: ignore[union-attr]

    outer[0].register_forward_hook(hook)
    outer(R(2, 4))
    assert dtypes_seen == [[FP16, FP16, FP32], [FP16, FP16]]
    inner_amp.disable()
    outer_amp.disable()


def test_an_enabled_forward_leaves_other_threads_alone() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[Any] = []

    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).softmax(-1).sum(-1)
            inside.set()
            assert done.wait(30)
            return y + super().forward(x).softmax(-1).sum(-1)

    model = Waits(4, 4)
    amp = tritonamp.enable(model, cast_outputs=None)
    x = R(3, 4)

    def stock() -> None:
        assert inside.wait(30)
        seen.append(active.active())
        with torch.autocast("cpu", dtype=BF16):
            y = F.linear(x, model.weight)
            seen.extend([y.dtype, y.softmax(-1).dtype, y.sum().dtype, y.exp().dtype])
        done.set()

    thread = threading.Thread(target=stock)
    thread.start()
    output = model(x)
    thread.join()
    assert seen == [None, BF16, BF16, BF16, BF16]
    assert output.dtype is FP32  # of the sums
    amp.disable()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_enabled_model_is_followed_by_backwards_in_other_threads(level: str) -> None:
    model, amp, x = enabled_blocks("non-reentrant", level=level)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    found: list[Tensor] = []
    loss = model(x).sum()
    thread = threading.Thread(target=lambda: found.append(torch.autograd.grad(loss, x)[0]))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)
    amp.disable()


# torch.func


def _loss(model: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.functional_call(model, params, (x,)).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module, dict[str, Tensor], Tensor], Any]] = {
    "functional_call": lambda m, p, x: torch.func.functional_call(m, p, (x,)),
    "vmap": lambda m, p, x: torch.func.vmap(m)(x),
    "grad": lambda m, p, x: torch.func.grad(lambda p: _loss(m, p, x))(p),
    "per-sample grad": lambda m, p, x: torch.func.vmap(
        torch.func.grad(lambda p, x: _loss(m, p, x)), in_dims=(None, 0)
    )(p, x),
    "jvp": lambda m, p, x: torch.func.jvp(m, (x,), (x,)),
    "jacrev": lambda m, p, x: torch.func.jacrev(m)(x[0]),
    "jacfwd": lambda m, p, x: torch.func.jacfwd(m)(x[0]),
}


# torch's own, in forward-mode derivatives
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func(transform: str, level: str) -> None:
    model, amp, x = enabled_blocks(level=level)
    params, x = {name: p.detach() for name, p in model.named_parameters()}, x.detach()
    found = tree_leaves(TRANSFORMS[transform](model, params, x))
    amp.disable()
    expected = tree_leaves(
        TRANSFORMS[transform](model, {n: p.float() for n, p in params.items()}, x)
    )
    largest = max(float(e.detach().abs().max()) for e in expected)
    for f, e in zip(found, expected, strict=True):
        # forward and backward pass some eight roundings each; 2: the gain of what comes after a
        # rounding
        torch.testing.assert_close(
            f.float(), e, rtol=0, atol=2 * 16 * torch.finfo(FP16).eps / 2 * largest
        )


# torch.compile and checkpoints


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*torch._dynamo")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_compiled_equals_eager(level: str) -> None:
    torch.compiler.reset()
    model, amp, x = enabled_blocks(level=level)
    expected = model(x)
    expected_grad = torch.autograd.grad(expected.sum(), x)[0]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the call that compiles, and one that runs what was compiled
        output = compiled(x)
        assert active.active() is None
        assert torch.equal(output, expected)
        assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected_grad)
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)
    assert active.active() is None
    assert not torch.is_autocast_enabled("cpu")
    amp.disable()


class Breaks(nn.Module):
    """What torch.compile cannot trace in one piece."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "graph break":
            torch._dynamo.graph_break()
        elif self.how == "read by the host" and float(y.detach().sum()) > 1e9:
            return y
        return self.rest(y) if self.how == "disabled" else y.exp()  # FP32 under the rules alone

    @torch.compiler.disable
    def rest(self, y: Tensor) -> Tensor:
        return y.exp()


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, at graph breaks
@pytest.mark.parametrize("how", ["graph break", "read by the host", "disabled"])
def test_the_rules_reach_all_parts_of_a_broken_graph(how: str) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), Breaks(how), nn.Linear(4, 4))
    amp = tritonamp.enable(model, cast_outputs=None)
    seen: list[torch.dtype] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    x = R(3, 4)
    expected = model(x)
    assert seen == [FP32]
    with pytest.raises((torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert active.active() is None
    assert torch.equal(model(x), expected)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
        assert active.active() is None
        with torch.autocast("cpu", dtype=BF16):
            assert x.half().exp().dtype is FP16
    assert {*seen} == {FP32}
    amp.disable()


@pytest.mark.compiled
def test_a_trace_given_up_half_way_does_not_reach_the_next() -> None:
    torch.compiler.reset()
    model = Breaks("graph break")
    amp = tritonamp.enable(model)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="aot_eager", fullgraph=True)(R(3, 4))

    def plain(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return x.exp()

    assert torch.compile(plain, backend="aot_eager", fullgraph=True)(R(3, 4).half()).dtype is FP16
    amp.disable()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_checkpoints_recompute_with_the_same_rules(kind: str, level: str) -> None:
    grads = {}
    for each in ("plain", kind):
        model, amp, x = enabled_blocks(
            each, level=level, softmax_dtype=FP32 if level != "O3" else None
        )
        model(x).square().sum().backward()
        grads[each] = [x.grad, *(p.grad.clone() for p in model.parameters())]
        amp.disable()
    assert same_outcomes(grads[kind], grads["plain"])
    assert active.active() is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_nested_checkpoints(use_reentrant: bool) -> None:
    def grads(wrap: Callable[..., Tensor]) -> list[Tensor]:
        class Nested(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = EveryList()

            def forward(self, x: Tensor) -> Tensor:
                return wrap(lambda y: wrap(self.inner, y) * 2, x)

        torch.manual_seed(0)
        model, x = Nested(), R(3, 4, requires_grad=True)
        amp = tritonamp.enable(model)
        model(x).square().sum().backward()
        amp.disable()
        return [x.grad, *(p.grad for p in model.parameters())]

    expected = grads(lambda function, x: function(x))
    assert same_outcomes(
        grads(lambda function, x: checkpoint(function, x, use_reentrant=use_reentrant)), expected
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_checkpoint_under_stock_autocast_is_left_alone(level: str, use_reentrant: bool) -> None:
    def grads() -> list[Tensor]:
        torch.manual_seed(1)
        block, x = EveryList(), R(3, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=BF16):
            output = checkpoint(block, x, use_reentrant=use_reentrant)
        output.float().square().sum().backward()
        return [x.grad, *(p.grad for p in block.parameters())]

    expected = grads()
    model, amp, x = enabled_blocks(level=level)
    model(x)
    assert same_outcomes(grads(), expected)
    amp.disable()

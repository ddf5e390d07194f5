"""What each op does inside an enabled forward: the op table, and its registration at torch's autocast keys.

Outside an enabled forward every entry hands over to the kernel that torch had there before.

CUDA gets only the entries where tritonamp differs from torch's own CUDA lists. CPU gets those lists too, because
torch's CPU autocast has other ones: a CPU run then shows the dtypes, and the overflows, of the GPU.
"""

import functools
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._guards import TracingContext

from tritonamp.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])


class Forward(NamedTuple):
    """What the ops of an enabled forward follow."""

    policy: Policy
    backend: str


class Stock(Protocol):
    """The op without our rules: what a rule calls, or runs a function under."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


Rule = Callable[..., Any]
"""``rule(stock, forward, *args, **kwargs)`` is what the op returns for these arguments."""

HALF = """
    _convolution addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution einsum gru gru_cell linalg_multi_dot linalg_vecdot linear lstm
    lstm_cell matmul mm mv prelu rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention
    _addmm_activation _native_multi_head_attention _transformer_encoder_layer_fwd
""".split()
"""Half in, half out. On CPU computed in FP32 from rounded inputs and rounded once: fast there, and what Tensor
Cores do. The last three are CPU-only fused paths of linear and nn.TransformerEncoderLayer."""

FP32 = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
    cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm.dim hinge_embedding_loss huber_loss kl_div
    l1_loss linalg_matrix_norm linalg_vector_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nll_loss_nd norm.Scalar
    norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh
    smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
""".split()
"""Half inputs are cast up, the result is FP32."""

PROMOTE = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot".split()
"""All floating inputs are cast to the widest of them."""

FP32_EVERYWHERE = "var std var_mean std_mean cross_entropy_loss linalg_matrix_exp".split()
"""As FP32, on CUDA too: torch lists none of them there, and they overflow, round or (the last) fail in half."""

STORAGE = "layer_norm group_norm rms_norm".split()
"""FP32 inside, the result in the input's dtype; half and FP32 weights may be mixed."""

STORAGE_ON_CPU = """
    adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fractional_max_pool2d fractional_max_pool3d grid_sampler_2d
    grid_sampler_3d max_pool3d max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d replication_pad3d trace
""".split()
"""On torch's CPU list for FP32, on no CUDA list: as STORAGE, because half kernels are missing here and there."""


MARKS = 128  # changes between kinds of enabled forwards that a backward can look back on


def _cast(value: Any, to: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``to`` applied to every tensor of float16, bfloat16 or float32 in it."""
    if isinstance(value, Tensor):
        return to(value) if value.dtype in (torch.float16, torch.bfloat16, torch.float32) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, to) for item in value)
    return value


def _dtypes(value: Any) -> Iterator[torch.dtype]:
    """The floating dtypes of the tensors in ``value``, FP64 left out as autocast does."""
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16, torch.float32):
        yield value.dtype
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _dtypes(item)


def _to_fp32(value: Any) -> Any:
    return _cast(value, lambda t: t.float())


def _half_rule(stock: Stock, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    half = torch.get_autocast_dtype("cpu")
    found = set(_dtypes(args))
    if not found or (not forward.policy.op_policy and found != {half}):
        return stock(*args, **kwargs)
    rounded = _cast(args, lambda t: t.to(half).float())
    return _cast(stock(*rounded, **kwargs), lambda t: t.to(half))


def _fp32_rule(stock: Stock, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    if not forward.policy.op_policy or kwargs.get("dtype") is not None:
        return stock(*args, **kwargs)
    return stock(*_to_fp32(args), **kwargs)


def _promote_rule(stock: Stock, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    found = set(_dtypes(args))
    if not forward.policy.op_policy or len(found) < 2:
        return stock(*args, **kwargs)
    widest = functools.reduce(torch.promote_types, found)
    return stock(*_cast(args, lambda t: t.to(widest)), **kwargs)


def _storage_rule(stock: Stock, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    if not forward.policy.op_policy:
        return stock(*args, **kwargs)
    return _storage_on_cpu_rule(stock, forward, *args, **kwargs)


def _storage_on_cpu_rule(stock: Stock, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    result = stock(*_to_fp32(args), **kwargs)
    return _cast(result, lambda t: t.to(args[0].dtype))


def _banned_rule(stock: Stock, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    if not forward.policy.op_policy:
        return stock(*args, **kwargs)
    raise RuntimeError(
        "binary_cross_entropy (nn.BCELoss) inside the forward of a mixed-precision model: its gradient leaves the half "
        "range near 0 and 1. Use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) without the sigmoid, compute "
        "the loss outside the model's forward, or wrap the call in tritonamp.disable_casts() with FP32 inputs"
    )


def _overloads(names: list[str]) -> Iterator[str]:
    """Every functional overload ("op" or "op.overload") of the named ops that this torch has."""
    existing = set(torch._C._dispatch_get_all_op_names())
    for name in names:
        packet = getattr(torch.ops.aten, name.split(".")[0], None)
        if packet is None:
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            qualified = op._schema.name.removeprefix("aten::") + (f".{overload}" if overload != "default" else "")
            takes_tensors = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
            functional = takes_tensors and not op._schema.is_mutable and f"aten::{qualified}" in existing
            if functional and ("." not in name or qualified == name):
                yield qualified


def _table(device_type: str, functions: dict[str, Rule]) -> dict[str, Rule]:
    """The op table of one device type: op to rule."""
    rows: list[tuple[list[str], Rule]] = [(FP32_EVERYWHERE, _fp32_rule), (STORAGE, _storage_rule)]
    if device_type == "cpu":
        rows += [(HALF, _half_rule), (FP32, _fp32_rule), (PROMOTE, _promote_rule)]
        rows += [(STORAGE_ON_CPU, _storage_on_cpu_rule), (["binary_cross_entropy"], _banned_rule)]
    table = {op: rule for names, rule in rows for op in _overloads(names)}
    return {**table, **functions}


class _Kind(NamedTuple):
    """Enabled forwards of one policy and backend, and the setting of autocast's cache in them."""

    forward: Forward
    cache: bool


class _Active(threading.local):
    """The enabled forwards that this thread is in, innermost last, and the trace that each is part of.

    Attributes:
        in_rule: this thread is inside a rule's stock op; no rule applies there.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[_Kind, TracingContext | None]] = []
        self.in_rule = False

    def live(self) -> list[tuple[_Kind, TracingContext | None]]:
        """The stack, without what traces that were given up half-way have left on it."""
        if self.stack and self.stack[-1][1] is not None:
            trace = TracingContext.try_get()
            while self.stack and self.stack[-1][1] not in (None, trace):
                self.stack.pop()
        return self.stack


class _Registration:
    """The one piece of module state: the forwards that ``enter`` knows, and the libraries while they are registered.

    Attributes:
        marks: what kind of forward autograd's nodes come from, beginning with the node of that sequence number.
    """

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.marks: deque[tuple[int, _Kind]] = deque(maxlen=MARKS)
        self.libraries: list[torch.library.Library] = []
        self.undivided: list[Callable[..., Any]] = []
        self.owners = 0

    def mark(self, kind: _Kind) -> None:
        """From here on forwards are of this kind."""
        if not self.marks or self.marks[-1][1] != kind:
            self.marks.append((torch._C._autograd._get_sequence_nr(), kind))

    def origin(self, node: Any) -> _Kind | None:
        """The kind of forward that a node of autograd was made in; the latest, of one from a backward's thread."""
        if not self.marks:
            return None
        made = [] if node is None else [mark for mark in self.marks if mark[0] <= node._sequence_nr()]
        return max(reversed(made), key=lambda mark: mark[0], default=self.marks[-1])[1]


_active = _Active()
_registration = _Registration()


def forward_id(policy: Policy, backend: str) -> int:
    """A small number for ``enter``: a traced graph can carry a number, not a Policy."""
    forward = Forward(policy, backend)
    if forward not in _registration.forwards:
        _registration.forwards.append(forward)
    return _registration.forwards.index(forward)


def undivided(function: F) -> F:
    """Has torch.compile trace ``function`` as a part of its caller, or else run it as it is.

    Were it compiled in parts, around a graph break in the user's forward, the parts after ``enter`` would lack it.
    """
    _registration.undivided.append(function)
    return function


@undivided
def enter(number: int, cache: bool = True) -> None:
    """From here to ``leave``, ops of this thread that run under autocast follow the forward of that number.

    ``cache`` is the setting of autocast's cache in that forward.

    Both are leaf calls to torch.compile, which runs them while it traces: the graph holds what the rules chose.
    """
    kind = _Kind(_registration.forwards[number], cache)
    _registration.mark(kind)
    _active.live().append((kind, TracingContext.try_get()))


@undivided
def leave() -> None:
    """Ends the innermost ``enter``."""
    stack = _active.live()
    if stack:
        stack.pop()
    if stack:
        _registration.mark(stack[-1][0])


def active() -> Forward | None:
    """What ops of this thread follow now, or None outside enabled forwards."""
    stack = _active.live()
    if stack:
        return stack[-1][0].forward
    if torch._C._current_graph_task_id() != -1:
        # a backward that runs forward ops under autocast is recomputing a checkpointed segment: torch.utils.checkpoint
        # restores autocast but cannot know of ``enter``. The cache setting tells torch's own from ours
        kind = _registration.origin(torch._C._current_autograd_node())
        if kind is not None and torch.is_autocast_cache_enabled() == kind.cache:
            return kind.forward
    return None


def active_policy() -> Policy | None:
    """The policy that ops of this thread follow now, or None outside enabled forwards."""
    forward = active()
    return None if forward is None else forward.policy


def under_op_policy() -> bool:
    """Whether functions of the user's own are cast now. To torch.compile a constant, read while it traces."""
    policy = active_policy()
    return policy is not None and policy.op_policy


def is_registered() -> bool:
    """Whether torch's dispatch tables hold the op table now."""
    return len(_registration.libraries) > 0


def acquire(functions: dict[str, Rule]) -> None:
    """Registers the op table for one more enabled model.

    Args:
        functions: rules for single ops ("softmax.int"), the same on every device type.
    """
    _registration.owners += 1
    ensure(functions)


def ensure(functions: dict[str, Rule]) -> None:
    """Registers the op table if it is not: a copy of an enabled model may outlive it."""
    if _registration.libraries:
        return
    for function in (enter, leave):
        torch.compiler.allow_in_graph(function)
        torch.fx.node.has_side_effect(function)
    torch._dynamo.assume_constant_result(under_op_policy)
    for function in _registration.undivided:
        torch._dynamo.eval_frame.skip_code(function.__code__)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            library = torch.library.Library("aten", "IMPL")
            for op, rule in _table(device_type, functions).items():
                library.impl(op, _implementation(op, rule, key), key, with_keyset=True)
            _registration.libraries.append(library)


def release() -> None:
    """Takes back one ``acquire``; the last one puts torch's dispatch tables back as they were."""
    _registration.owners -= 1
    if _registration.owners == 0:
        for library in _registration.libraries:
            library._destroy()
        _registration.libraries.clear()


class _Op:
    """One op at one autocast key, without our rules."""

    def __init__(self, op: str, key_name: str) -> None:
        packet, _, overload = op.partition(".")
        self.target = getattr(getattr(torch.ops.aten, packet), overload or "default")
        key = getattr(DispatchKey, key_name)
        self.autocast, self.after = DispatchKeySet(key), torch._C._dispatch_keyset_full_after(key)
        self.kernel = None
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key_name):
            self.kernel = torch.library.get_kernel(self.target, key_name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.target, *args, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` where no rule and no autocast applies."""
        before, _active.in_rule = _active.in_rule, True
        try:
            with torch._C._ExcludeDispatchKeyGuard(self.autocast):
                return function(*args, **kwargs)
        finally:
            _active.in_rule = before

    def torchs(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """What torch would have done at this key."""
        if self.kernel is not None and not _active.in_rule:  # torch.func comes back here from below, the guard undone
            return self.kernel.call_boxed(keyset, *args, **kwargs)
        return self.target.redispatch(keyset & self.after, *args, **kwargs)


def _implementation(op: str, rule: Rule, key_name: str) -> Callable[..., Any]:
    stock = _Op(op, key_name)

    def implementation(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        forward = None if _active.in_rule else active()
        if forward is None:
            return stock.torchs(keyset, *args, **kwargs)
        return rule(stock, forward, *args, **kwargs)

    # torch.compile gets the graph of what rules call; the rules themselves are not worth compiling
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(implementation.__code__, skip)
    return implementation

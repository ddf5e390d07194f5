"""Bytes that a forward and a backward on the GPU in software move, by kind and by line of source.

Each operation reads each argument once and writes each result once, in the tensors' formats. The
exceptions:

- Views and new memory move nothing. An expanded tensor has the bytes of its own memory.
- A lookup reads as many elements as it returns. A write by indices reads and writes those alone.
- Attention is one kernel. It reads q, k, v and a mask, and writes the output and an FP32 number per
  row. Its backward reads these and the output's gradient, and writes the gradients of q, k, v and
  of a mask that needs one.
"""

import contextlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from gpuless.facts import facts
from gpuless.gpu import Observer
from gpuless.nested import tensors_of
from torch import Tensor

import tritonamp
from tritonamp.watched.ops import UNWRITTEN

PRODUCTS, WEIGHTS, ACTIVATIONS = "products", "casts of weights", "casts of activations"
FP32, HALF, OURS = "other FP32", "other half", "our kernels"
KINDS = PRODUCTS, WEIGHTS, ACTIVATIONS, FP32, HALF, OURS
PRODUCT_OPS = {
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_grouped_mm", "convolution",
    "convolution_backward", "_convolution",
}  # fmt: skip
ADDS = {"addmm", "baddbmm", "addbmm", "addmv"}
"""Products whose first argument is added, like a bias."""
NO_WORK = UNWRITTEN | {"_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "set_"}
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}
LOOKUPS = {"embedding", "index", "index_select", "gather"}
"""Operations that read as many elements of their first argument as they return."""
TARGETS_READ = {"nll_loss_forward", "nll_loss2d_forward"}
"""Operations that read as many elements of their first argument as there are targets."""
SIZES_READ = {"nll_loss_backward", "nll_loss2d_backward"}
"""Operations that read only the sizes of their second argument."""
SCATTERS = {
    "index_put_": 2, "_index_put_impl_": 2, "_unsafe_index_put": 2, "index_add_": 3,
    "index_copy_": 3, "scatter_": 3, "scatter_add_": 3,
}  # fmt: skip
"""Positions of the values, of operations that write elements of their first argument."""
WIDE = {torch.float32, torch.float64}
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
ROOT = Path(__file__).resolve().parents[1]
NO_SOURCE = (
    *torch.__path__, *tritonamp.__path__, str(ROOT / "kernels"), str(ROOT / "tests" / "gpuless"),
    __file__, contextlib.__file__,
)  # fmt: skip

Moved = list[tuple[Tensor, int]]
"""Tensors, with the numbers of elements that are read or written."""


class Work(NamedTuple):
    """Calls of one operation at one line.

    Attributes:
        op: name of the operation or of our kernel; the kind and the result's format of a cast.
        line: file and line of the innermost frame outside torch and this package. For a backward,
            that of the forward operation; "backward of ..." if it is not known.
        direction: "forward" or "backward".
    """

    op: str
    line: str
    direction: str


class Attention(NamedTuple):
    """The arguments of a call: numbers of elements, and what they take."""

    inputs: list[Tensor]
    output: int
    rows: int
    line: str


class Traffic(Observer):
    """Counts what is computed while it is the GPU's observer, by one thread and its backward.

    Attributes:
        bytes: bytes of each work, by kind.
        calls: number of calls of each work.
        bound: the fewest bytes with each product in a kernel of its own, and all tensors half. Each
            product reads its operands and writes its result; ``add_gradients`` adds the rest. All
            other work would be fused into the products: no program is known to get there.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.bytes: dict[Work, Counter[str]] = defaultdict(Counter)
        self.calls: Counter[Work] = Counter()
        self.bound = 0
        self._parameters = {memory(p) for p in parameters}
        self._copies: dict[int, int] = {}  # memory of a cast weight -> that of the weight
        self._in_products: set[int] = set()
        # By the number that autograd gives to a node of the graph. private (torch 2.11 to 2.15)
        self._lines: dict[int, str] = {}
        self._weight_casts: set[int] = set()
        self._attention: dict[int, Attention] = {}
        self._known = torch._C._autograd._get_sequence_nr()
        self._made = range(0)  # by the last operation of the forward
        self._inside = False

    def total(self) -> dict[str, int]:
        """Return the bytes by kind."""
        found = Counter(dict.fromkeys(KINDS, 0))
        for counted in self.bytes.values():
            found.update(counted)
        return dict(found)

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add to the bound one write of each gradient that is the result of no product."""
        for p in parameters:
            if p.grad is not None and memory(p) not in self._in_products:
                self.bound += 2 * p.numel()

    # the observer

    def computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        line, direction, number = self._place()
        known = facts(func)
        name = known.name
        if known.is_view or name in NO_WORK or func.namespace != "aten":
            return
        if number in self._attention:
            self._attention_backward(number)
        if self._inside or number in self._attention:
            return
        work = Work(name, line, direction)
        reads, writes = touched(func, args, kwargs, result)
        if name in PRODUCT_OPS:
            summands = 1 if name in ADDS else 0
            self._product(work, reads + writes, operands=reads[summands:])
            return
        size = Counter[str]()
        for x, elements in reads + writes:
            size[FP32 if x.dtype in WIDE else HALF] += elements * x.itemsize
        if name in COPIES and is_cast(reads, writes):
            source, target = reads[0][0], writes[0][0]
            kind = self._kind_of_cast(number, source, target)
            work = work._replace(op=f"{kind} to {target.dtype}".replace("torch.", ""))
            size = Counter({kind: size.total()})
        self.calls[work] += 1
        self.bytes[work] += size

    def launched(self, kernel: str, tensors: tuple[Tensor, ...]) -> None:
        line, direction, _ = self._place()
        work = Work(kernel, line, direction)
        self.calls[work] += 1
        different = {(x.data_ptr(), x.shape): x for x in tensors}
        self.bytes[work][OURS] += sum(own(x) * x.itemsize for x in different.values())

    @contextlib.contextmanager
    def attention(self, args: Any, kwargs: Any) -> Iterator[None]:
        line, direction, _ = self._place()
        q, k, v = args[:3]
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        inputs = [q, k, v] if mask is None else [q, k, v, mask]
        rows = q.numel() // q.shape[-1]
        call = Attention(inputs, rows * v.shape[-1], rows, line)
        work = Work("scaled_dot_product_attention", line, direction)
        result = q.new_empty(0), call.output
        self._product(work, [(x, own(x)) for x in inputs] + [result], statistics=4 * rows)
        first, self._inside = self._known, True
        yield
        self._place()
        self._inside = False
        self._attention |= dict.fromkeys(range(first, self._known), call)

    def _attention_backward(self, number: int) -> None:
        call = self._attention[number]
        if call.rows < 0:  # its kernel has been counted
            return
        for key, other in self._attention.items():
            if other is call:
                self._attention[key] = call._replace(rows=-1)
        result = call.inputs[0], call.output
        moved = [(x, own(x)) for x in call.inputs] + 2 * [result]
        moved += [(x, own(x)) for i, x in enumerate(call.inputs) if i < 3 or x.requires_grad]
        work = Work("scaled_dot_product_attention", call.line, "backward")
        self._product(work, moved, statistics=4 * call.rows)

    # kinds

    def _product(
        self, work: Work, moved: Moved, operands: Moved | None = None, statistics: int = 0
    ) -> None:
        self.calls[work] += 1
        self.bytes[work][PRODUCTS] += sum(n * x.itemsize for x, n in moved) + statistics
        self.bound += sum(n * (2 if x.is_floating_point() else x.itemsize) for x, n in moved)
        for x, _ in operands or ():
            key = memory(x)
            self._in_products.add(self._copies.get(key, key))

    def _kind_of_cast(self, number: int | None, source: Tensor, target: Tensor) -> str:
        """Return the kind of a cast; gradients of weights count as weights."""
        key = memory(source)
        if number is None and key in self._parameters:
            self._copies[memory(target)] = key
            if self._made:
                self._weight_casts.add(self._known - 1)
            return WEIGHTS
        of_weight = number in self._weight_casts or number == LEAF
        return WEIGHTS if of_weight else ACTIVATIONS

    # places

    def _place(self) -> tuple[str, str, int | None]:
        """Return line, direction, and in a backward the number of the node.

        Nodes that the forward has made since the last call belong to the line of this one.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            line = source_line()
            made = torch._C._autograd._get_sequence_nr()
            self._made = range(self._known, made)
            self._lines |= dict.fromkeys(self._made, line)
            self._known = max(self._known, made)
            return line, "forward", None
        number = node._sequence_nr()
        if number == LEAF:
            return "gradients of parameters", "backward", number
        return self._lines.get(number, f"backward of {node.name()}"), "backward", number


LEAF = (1 << 64) - 1
"""Number of all nodes that add up the gradient of a parameter."""


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def own(x: Tensor) -> int:
    """Return the number of different elements of a tensor, which may be expanded."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) if x.numel() else 0


def touched(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Moved, Moved]:
    """Return what an operation reads, and what it writes."""
    known = facts(func)
    written = tensors_of(known.writes(args, kwargs))
    written += [x for group in known.writes(args, kwargs) if isinstance(group, list) for x in group]
    results = [] if known.is_in_place else tensors_of(result if is_many(result) else [result])
    given = tensors_of([*args, *kwargs.values()]) if known.reads_values else []
    writes = {id(x): (x, own(x)) for x in written + results}
    reads = {id(x): (x, own(x)) for x in given}
    if known.name in OVERWRITES or func._overloadname == "out":
        reads = {key: read for key, read in reads.items() if key not in writes}
    first = id(args[0]) if args else 0
    if known.name in LOOKUPS:
        reads[first] = args[0], result.numel()
    elif known.name in TARGETS_READ:
        reads[first] = args[0], args[1].numel()
    elif known.name in SIZES_READ:
        del reads[id(args[1])]
    elif known.name == "index_put":  # torch has it in place on a GPU
        return [(args[2], own(args[2]))], [(result, args[2].numel())]
    elif known.name in SCATTERS:
        place = SCATTERS[known.name]
        values = args[place]
        number = values.numel() if isinstance(values, Tensor) else args[place - 1].numel()
        reads[first] = args[0], number
        if first in writes:
            writes[first] = args[0], number
    return list(reads.values()), list(writes.values())


def is_many(result: Any) -> bool:
    return isinstance(result, tuple | list)


def is_cast(reads: Moved, writes: Moved) -> bool:
    """Return whether a copy is from one floating format to another."""
    source, target = reads[0][0].dtype, writes[0][0].dtype
    return source != target and source.is_floating_point and target.is_floating_point


def source_line() -> str:
    """Return file and line of the innermost frame outside torch, this package and this file."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(NO_SOURCE):
        frame = frame.f_back
    if frame is None:
        return "no line"
    file = frame.f_code.co_filename
    for folder in (f"{ROOT}/", *(f"{path}/" for path in sys.path if path)):
        if file.startswith(folder):
            file = file.removeprefix(folder)
            break
    return f"{file}:{frame.f_lineno}"

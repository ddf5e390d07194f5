"""Bytes that a forward and a backward on the GPU in software move, by kind and by line of source.

Operations of torch move the bytes of ``op_bytes.touched``, and our kernels those of their different
arguments, once. Attention is one kernel. It reads q, k, v and a mask, and writes the output and an
FP32 number per row. Its backward reads these and the output's gradient, and writes the gradients of
q, k, v and of a mask that needs one.
"""

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from gpuless.facts import facts
from gpuless.gpu import Observer
from op_bytes import NO_WORK, Moved, is_cast, own, touched
from torch import Tensor

import tritonamp

PRODUCTS, WEIGHTS, ACTIVATIONS = "products", "casts of weights", "casts of activations"
FP32, HALF, OURS = "other FP32", "other half", "our kernels"
ATTENTION = "scaled_dot_product_attention"
KINDS = PRODUCTS, WEIGHTS, ACTIVATIONS, FP32, HALF, OURS
PRODUCT_OPS = {
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_grouped_mm", "convolution",
    "convolution_backward", "_convolution",
}  # fmt: skip
ADDS = {"addmm", "baddbmm", "addbmm", "addmv"}
"""Products whose first argument is added, like a bias."""
WIDE = {torch.float32, torch.float64}
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
LEAF = (1 << 64) - 1
"""Number of all nodes that add up the gradient of a parameter."""
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = *torch.__path__, *tritonamp.__path__, ROOT / "kernels", ROOT / "tests" / "gpuless"
NO_SOURCE = *(f"{folder}/" for folder in PACKAGES), __file__, contextlib.__file__


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


@dataclass
class Attention:
    """A call of attention whose backward is to come.

    Attributes:
        inputs: q, k, v, and a mask if there is one.
        output: number of elements of the output.
        rows: number of rows of q.
        line: line of the call.
        has_run: whether the backward has begun.
    """

    inputs: list[Tensor]
    output: int
    rows: int
    line: str
    has_run: bool = False

    def forward(self) -> Moved:
        return [(x, own(x)) for x in self.inputs] + [(self.inputs[0], self.output)]

    def backward(self) -> Moved:
        """Return the same, the gradient of the output, and the gradients of the inputs."""
        trained = [x for i, x in enumerate(self.inputs) if i < 3 or x.requires_grad]
        output = self.inputs[0], self.output
        return [*self.forward(), output, *((x, own(x)) for x in trained)]


class Traffic(Observer):
    """Counts the operations of one thread and its backward while it is the GPU's observer.

    Attributes:
        bytes: bytes of each work, by kind.
        calls: number of calls of each work.
        bound: the fewest bytes with each product in a kernel of its own, and all tensors half. Each
            product reads its operands and writes its result. ``add_gradients`` adds the gradients
            of other parameters. All other work would be fused into the products; no program is
            known to reach this bound.
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
            self._attention_backward(self._attention[number])
            return
        if self._inside:
            return
        work = Work(name, line, direction)
        reads, writes = touched(func, args, kwargs, result)
        if name.removesuffix("_") in PRODUCT_OPS:
            summands = 1 if name.removesuffix("_") in ADDS else 0
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
        rows = q.numel() // q.shape[-1]
        call = Attention(
            [x for x in (q, k, v, mask) if x is not None], rows * v.shape[-1], rows, line
        )
        self._product(Work(ATTENTION, line, direction), call.forward(), statistics=4 * rows)
        first, self._inside = self._known, True
        yield
        self._place()
        self._inside = False
        self._attention |= dict.fromkeys(range(first, self._known), call)

    def _attention_backward(self, call: Attention) -> None:
        if not call.has_run:
            call.has_run = True
            work = Work(ATTENTION, call.line, "backward")
            self._product(work, call.backward(), statistics=4 * call.rows)

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


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


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

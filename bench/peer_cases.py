"""What is counted side by side: operations, shapes, and who does them (adapters of this folder).

Everything is float16: every GPU has it. Counts are taken at ``COUNTED`` elements, of long lines at
``LONG``, so that there are as many lines as a GPU has programs to give; errors, for which every
program has to run, at ``CHECKED`` and more.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import group_norm_ops
import loss_ops
import norm_ops
import row_ops
import torch
import torch.nn.functional as F
from torch import Tensor

HALF = torch.float16
COUNTED, LONG, CHECKED = 1 << 22, 1 << 25, 1 << 16
FROM, FROM_OF_NORMS = 50257, 4096  # elements of a long line; weights have partial gradients
LENGTHS = {
    "softmax": (256, 1000, 1024, 4095, 4096, 16384, 50257, 131072),
    "log_softmax": (1024, 50257),
    "sum": (1024, 50257),
    "layer_norm": (256, 1000, 1024, 4096),
    "rms_norm": (1000, 1024, 4096),
    "add_rms_norm": (1024, 4096),
    "cross_entropy": (1000, 8192, 50257),
}
IMAGES = {"320x32x32": (320, 32, 32), "256x14x14": (256, 14, 14)}
HEAD = 1024, 8192, 256  # rows, classes, features: as many classes a feature as Llama has
LOSS_ROWS = 128
GRADIENT = 2.0**-20  # of a mean over so many

Forward = Callable[[tuple[Any, ...]], Any]


class Question(NamedTuple):
    """One operation on one shape.

    Attributes:
        op, name: of the operation; of the case.
        n: what lines are long.
        inputs: maker of the tensors on the CPU, given their number of elements; None is none.
        peers: by name, what makes the operation on a device, and whether weights are half.
        exact: the operation in FP64.
        loss: whether its result is one number.
        both: whether one of forward and backward does the work of the other.
        counted: elements that counts are taken at.
    """

    op: str
    name: str
    n: int
    inputs: Callable[[int], tuple[Tensor | None, ...]]
    peers: dict[str, tuple[Callable[[torch.device], Forward], bool]]
    exact: Forward
    loss: bool = False
    both: bool = False

    @property
    def counted(self) -> int:
        long = self.n >= (FROM_OF_NORMS if self.op in norm_ops.KINDS else FROM)
        return LONG if long else COUNTED


def questions() -> Iterator[Question]:
    for op in row_ops.OPS:
        for n in LENGTHS[op.name]:
            yield _rows(op, n)
    for kind in norm_ops.KINDS:
        for n in LENGTHS[kind]:
            yield _norm(kind, n)
    for name, image in IMAGES.items():
        yield _group_norm(name, image)
    for n in LENGTHS["cross_entropy"]:
        yield _loss(n)
    yield _head()


def _spread(function: Callable[..., Any]) -> Forward:
    return lambda given: function(*given)


def _with_gems(peers: dict[str, Any], name: str) -> dict[str, Any]:
    """Return these peers, and FlagGems, which stands in for torch's ``name``."""
    kept = {p: peers[p] for p in ("tritonamp", "compile", "Liger-Kernel") if p in peers}
    return {**kept, "FlagGems": peers[name]}


def _rows(op: row_ops.Op, n: int) -> Question:
    def inputs(elements: int) -> tuple[Tensor, ...]:
        return (torch.randn(max(1, elements // n), n).to(HALF),)

    def peer(make: row_ops.Make) -> tuple[Callable[[torch.device], Forward], bool]:
        return lambda device: _spread(make(device)), False

    makers = {name: peer(make) for name, make in row_ops.forwards(op, False).items()}
    exact = _spread(functools.partial(getattr(torch, op.name), dim=-1))
    return Question(op.name, f"{op.name} n={n}", n, inputs, _with_gems(makers, "eager"), exact)


def _norm(kind: str, n: int) -> Question:
    def inputs(elements: int) -> tuple[Tensor | None, ...]:
        given = norm_ops.inputs(kind, (max(1, elements // n), n), HALF, False, "cpu")
        return tuple(None if x is None else x.detach() for x in given)

    def peer(made: tuple[Any, bool]) -> tuple[Callable[[torch.device], Forward], bool]:
        make, half = made

        def maker(device: torch.device) -> Forward:
            norm = make(device)
            return lambda given: norm(norm_ops.Inputs(*given))

        return maker, half

    makers = {name: peer(made) for name, made in norm_ops.peers().items()}
    return Question(
        kind, f"{kind} n={n}", n, inputs, _with_gems(makers, "eager"),
        lambda given: norm_ops.torchs(norm_ops.Inputs(*given)),
    )  # fmt: skip


def _group_norm(name: str, image: tuple[int, int, int]) -> Question:
    n = image[0] * image[1] * image[2]

    def inputs(elements: int) -> tuple[Tensor, ...]:
        x = torch.randn(max(1, elements // n), *image).to(HALF)
        return x, torch.rand(image[0]), torch.rand(image[0])

    def peer(made: tuple[Any, bool]) -> tuple[Callable[[torch.device], Forward], bool]:
        make, half = made

        def maker(device: torch.device) -> Forward:
            norm = make(device)
            return lambda given: norm(group_norm_ops.Inputs(*given))

        return maker, half

    makers = {peer_name: peer(made) for peer_name, made in group_norm_ops.peers().items()}
    return Question(
        "group_norm", f"group_norm {name}", n // group_norm_ops.GROUPS, inputs,
        _with_gems(makers, "eager"),
        lambda given: group_norm_ops.torchs(group_norm_ops.Inputs(*given)),
    )  # fmt: skip


def _loss(n: int) -> Question:
    def inputs(elements: int) -> tuple[Tensor, ...]:
        rows = max(LOSS_ROWS, elements // n)
        return torch.randn(rows, n).to(HALF), torch.randint(n, (rows,))

    def peer(make: Any) -> tuple[Callable[[torch.device], Forward], bool]:
        return lambda device: _spread(make(device)), False

    makers = {name: peer(make) for name, make in loss_ops.peers().items()}
    return Question(
        "cross_entropy", f"cross_entropy n={n}", n, inputs, _with_gems(makers, "fp32"),
        _spread(F.cross_entropy), loss=True,
    )  # fmt: skip


def _head() -> Question:
    rows, classes, features = HEAD

    def inputs(elements: int) -> tuple[Tensor, ...]:
        count = rows if elements == COUNTED else LOSS_ROWS
        x = torch.randn(count, features).to(HALF)
        weight = torch.randn(classes, features).mul_(0.02).to(HALF)
        return x, weight, torch.randint(classes, (count,))

    def peer(make: Any) -> tuple[Callable[[torch.device], Forward], bool]:
        return lambda device: _spread(make(device)), False

    makers = {name: peer(make) for name, make in loss_ops.linear_peers().items()}
    kept = {p: makers[p] for p in ("tritonamp", "compile", "Liger-Kernel")}
    return Question(
        "linear cross_entropy", "linear cross_entropy {}x{}x{}".format(*HEAD), classes, inputs,
        kept, lambda given: F.cross_entropy(F.linear(given[0], given[1]), given[2]),
        loss=True, both=True,
    )  # fmt: skip

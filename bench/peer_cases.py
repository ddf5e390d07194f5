"""Operations and shapes that are counted side by side; the peers are in other files.

Everything is float16, because every GPU has it. Counts are taken at ``COUNTED`` elements, or at
``LONG`` for long lines, so that there are enough lines to fill a GPU. Errors are measured at
``CHECKED`` elements and more, because they need every program.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import group_norm_ops
import loss_ops
import norm_ops
import row_ops
import torch
import torch.nn.functional as F
from op_cases import Forward, Op, Shape
from side_by_side import NAMES
from torch import Tensor

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


class Question(NamedTuple):
    """One operation on one shape.

    Attributes:
        op: the operation.
        name: name of the case.
        n: length of a line.
        exact: the operation in FP64.
        counted: shape at which instructions and bytes are counted.
        checked: shape at which errors are measured.
        both: whether one of forward and backward does the work of the other.
    """

    op: Op
    name: str
    n: int
    exact: Forward
    counted: Shape
    checked: Shape
    both: bool = False

    @property
    def has_backward(self) -> bool:
        """Whether a backward computes anything; the backward of a sum copies one number."""
        return self.op.name != "sum"

    @property
    def peers(self) -> list[str]:
        return [peer for peer in NAMES if peer in self.op.peers]


def questions() -> Iterator[Question]:
    for op, _ in row_ops.LENGTHS:
        exact = functools.partial(getattr(torch, op.name), dim=-1)
        for n in LENGTHS[op.name]:
            yield _question(op, exact, n, (n,))
    for op in norm_ops.OPS:
        for n in LENGTHS[op.name]:
            yield _question(op, norm_ops.torchs, n, (n,), FROM_OF_NORMS)
    op = group_norm_ops.OPS[""]
    for name, image in IMAGES.items():
        n = math.prod(image) // group_norm_ops.GROUPS
        question = _question(op, group_norm_ops.torchs, n, image)
        yield question._replace(name=f"{op.name} {name}")
    op = loss_ops.CROSS_ENTROPY
    for n in LENGTHS[op.name]:
        yield _question(op, F.cross_entropy, n, (n,), rows=LOSS_ROWS)
    name = "linear cross_entropy {}x{}x{}".format(*HEAD)
    checked = LOSS_ROWS, *HEAD[1:]
    yield Question(loss_ops.LINEAR, name, HEAD[1], _exact_head, HEAD, checked, both=True)


def _exact_head(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def _question(
    op: Op, exact: Forward, n: int, line: Shape, long: int = FROM, rows: int = 1
) -> Question:
    """Return a question with ``rows`` or more lines, which are long from length ``long``."""
    counted, checked = (
        (max(rows, elements // math.prod(line)), *line)
        for elements in (LONG if n >= long else COUNTED, CHECKED)
    )
    return Question(op, f"{op.name} n={n}", n, exact, counted, checked)

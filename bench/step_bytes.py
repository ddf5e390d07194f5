"""What each parameter keeps, and what a step with a clip reads and writes, in bytes.

Our numbers follow from the formats, and ``tests/kernels/test_step_bytes.py`` counts the same in
Triton's interpreter. Numbers of peers come from their sources, which the table names.
"""

from typing import NamedTuple

from markdown import table

from tritonamp.kernels._state_formats import FORMATS

HALF, WIDE, REMAINDER = 2, 4, 2
CASTS, UNSCALE, CLIP = 6, 8, 12
"""A pass of torch.amp with FP32 gradients: casts of the weights in the forward, ``unscale_``, and
``clip_grad_norm_`` (4 for the norm, 8 for the product).
"""
HALF_CLIP = 6  # clip_grad_norm_ of half gradients


class Ours(NamedTuple):
    """A step of ours on half parameters with half gradients.

    Attributes:
        name: name of the optimizer.
        operation: name of the operation.
        states: number of states of a parameter.
        state: format of the states.
        packed: whether the master is the half parameter and a remainder.
    """

    name: str
    operation: str
    states: int
    state: str = "fp32"
    packed: bool = False

    @property
    def kept(self) -> float:
        """Bytes of a parameter with its gradient, its master and its states."""
        master = REMAINDER if self.packed else WIDE
        return HALF + HALF + master + self.states * FORMATS[self.state].bytes_per_element()

    @property
    def update(self) -> float:
        """Bytes that the update reads and writes: gradient, parameter, master and states."""
        stored = 2 * (HALF + REMAINDER) if self.packed else 2 * WIDE + HALF
        return HALF + stored + 2 * self.states * FORMATS[self.state].bytes_per_element()

    @property
    def moved(self) -> float:
        """Bytes of a step with the check and the clip, for which statistics read gradients once."""
        return HALF + self.update

    @property
    def options(self) -> str:
        words = [f'state="{self.state}"'] if self.state != "fp32" else []
        words += ['masters="packed"'] if self.packed and not FORMATS[self.state].in_blocks else []
        return ", ".join(words) or "default"


OURS = [
    Ours("AdamW", "adamw", 2),
    Ours("AdamW", "adamw", 2, packed=True),
    Ours("AdamW", "adamw", 2, "bf16"),
    Ours("AdamW", "adamw", 2, "bf16", packed=True),
    Ours("AdamW", "adamw", 2, "8bit", packed=True),
    Ours("Lion", "lion", 1),
    Ours("Lion", "lion", 1, packed=True),
    Ours("Lion", "lion", 1, "8bit", packed=True),
    Ours("SGD", "sgd", 1),
    Ours("SGD", "sgd", 1, packed=True),
    Ours("SGD", "sgd", 1, "8bit", packed=True),
    Ours("RMSprop", "rmsprop", 1),
    Ours("RMSprop", "rmsprop", 1, packed=True),
]


class Theirs(NamedTuple):
    """A step of a peer.

    Attributes:
        peer: name of the peer.
        name: name of the optimizer.
        options: options, or the number format of the parameters.
        kept: bytes of a parameter with its gradient, its master, its states, and the half copy that
            autocast makes of a weight.
        update: bytes that the update reads and writes.
        around: bytes of casts, check and clip.
        masters: form of the master, or "none".
        skips: whether a step is skipped on the device, without a wait of the host.
        source: how ``update`` was counted.
    """

    peer: str
    name: str
    options: str
    kept: float
    update: float
    around: float
    masters: str
    skips: bool
    source: str

    @property
    def moved(self) -> float:
        return self.update + self.around


AMP = CASTS + UNSCALE + CLIP
OF_AMP = WIDE + WIDE + HALF  # parameter, gradient, half copy
FLASH, BLOCKWISE = 2 / 32, 4 / 256  # bytes of scales for a code: 16 bits for 32, FP32 for 256
OPERANDS = "operands of torch's kernels"
OF_FLASH = "0.1.4, `optimizers.py`"
OF_BLOCKS = "0.50.2, `optim/optimizer.py`"
THEIRS = [
    Theirs("torch.amp", "AdamW", "fused, FP32 parameters",
           OF_AMP + 8, 28, AMP, "FP32", True, OPERANDS),
    Theirs("half pipeline", "AdamW", "fused, FP32 masters and gradients",
           20, 28, AMP + CASTS, "FP32", True, OPERANDS),
    Theirs("apex", "AdamW", "capturable, master_weights",
           16, 30, 4 + HALF_CLIP, "FP32", True, "`multi_tensor_adam.cu`"),
    Theirs("Transformer Engine", "AdamW", "master_weights",
           16, 28, HALF_CLIP, "FP32", False, "`multi_tensor/adam.cu`"),
    Theirs("Transformer Engine", "AdamW", "store_param_remainders, bfloat16 moments",
           10, 18, HALF_CLIP, "packed, bfloat16 alone", False, "`multi_tensor/adam.cu`"),
    Theirs("optimi", "AdamW", "bfloat16, Kahan sums",
           10, 18, HALF_CLIP, "none", False, "`counts.py --peers`"),
    Theirs("FlashOptim", "AdamW", "master_weight_bits=32",
           8 + 2 * FLASH, 14 + 4 * FLASH, HALF_CLIP, "packed", False, OF_FLASH),
    Theirs("FlashOptim", "AdamW", "master_weight_bits=24",
           7 + 2 * FLASH, 12 + 4 * FLASH, HALF_CLIP, "24 bits", False, OF_FLASH),
    Theirs("bitsandbytes", "AdamW", "8 bits, FP32 parameters",
           OF_AMP + 2 + 2 * BLOCKWISE, 16 + 4 * BLOCKWISE, AMP, "FP32", False, OF_BLOCKS),
    Theirs("torchao", "AdamW", "8 bits, FP32 parameters",
           OF_AMP + 2 + 2 * BLOCKWISE, 16 + 4 * BLOCKWISE, AMP, "FP32", False,
           "0.18.0, `optim/adam.py`, at least"),
    Theirs("FlashOptim", "Lion", "master_weight_bits=24",
           6 + FLASH, 10 + 2 * FLASH, HALF_CLIP, "24 bits", False, OF_FLASH),
    Theirs("optimi", "Lion", "bfloat16, Kahan sums",
           8, 14, HALF_CLIP, "none", False, "0.3.3, `lion.py`"),
    Theirs("bitsandbytes", "Lion", "8 bits, FP32 parameters",
           OF_AMP + 1 + BLOCKWISE, 14 + 2 * BLOCKWISE, AMP, "FP32", False, OF_BLOCKS),
    Theirs("torch.amp", "SGD", "fused, FP32 parameters",
           OF_AMP + 4, 20, AMP, "FP32", True, OPERANDS),
    Theirs("FlashOptim", "SGD", "master_weight_bits=24",
           6 + FLASH, 10 + 2 * FLASH, HALF_CLIP, "24 bits", False, OF_FLASH),
    Theirs("torch.amp", "RMSprop", "foreach, FP32 parameters",
           OF_AMP + 4, 52, AMP, "FP32", False, OPERANDS),
]  # fmt: skip


def page() -> str:
    """Return the table of all steps, by optimizer."""
    head = (
        "optimizer", "package", "options", "kept", "moved", "FP32 masters", "skip", "clip",
        "counted",
    )  # fmt: skip
    rows = [
        (row.name, "**tritonamp**", row.options, _bytes(row.kept), f"**{_bytes(row.moved)}**",
         "packed" if row.packed else "FP32", "on the device", "in the update", "by a test")
        for row in OURS
    ]  # fmt: skip
    rows += [
        (row.name, row.peer, row.options, _bytes(row.kept),
         f"{_bytes(row.moved)} ({_bytes(row.update)})", row.masters,
         "on the device" if row.skips else "no", "before the update", row.source)
        for row in THEIRS
    ]  # fmt: skip
    names = list(dict.fromkeys(row.name for row in OURS))
    return table(head, sorted(rows, key=lambda row: names.index(row[0])))


def _bytes(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")

"""The blocks of rl.md, to run alone or in another order than that of the page."""

from pathlib import Path
from typing import Any

from test_readme import Block, blocks

import tritonamp

PAGE = Path(tritonamp.__file__).parent / "integrations" / "rl.md"


def first_with(text: str) -> Block:
    """Return the first block of the page that contains a text."""
    return next(block for block in blocks(PAGE) if text in block.code)


MODEL, GRPO, PPO, TRL, VERL, RECEIVER, SAMPLER = map(
    first_with,
    [
        "class Transformer",
        "def iterate",
        "class ActorCritic",
        "(GRPOTrainer)",
        "def train_in_half",
        "def receive",
        "amp.changes(dense_above",
    ],
)


def run(block: Block, names: dict[str, Any], before: str | None = None) -> None:
    """Run a block with these names as its globals, or the part of it before a text."""
    code = block.code if before is None else block.code[: block.code.index(before)]
    exec(compile("\n" * (block.line - 1) + code, str(PAGE), "exec"), names)

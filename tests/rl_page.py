"""The blocks of rl.md, to run alone or in another order than that of the page."""

from pathlib import Path
from typing import Any

from test_readme import Block, blocks

import tritonamp

PAGE = Path(tritonamp.__file__).parent / "integrations" / "rl.md"
MODEL, GRPO, PPO, TRL, VERL, SAMPLER = (block for block in blocks(PAGE) if not block.mark)


def run(block: Block, names: dict[str, Any], before: str | None = None) -> None:
    """Run a block with these names as its globals, or the part of it before a text."""
    code = block.code if before is None else block.code[: block.code.index(before)]
    exec(compile("\n" * (block.line - 1) + code, str(PAGE), "exec"), names)

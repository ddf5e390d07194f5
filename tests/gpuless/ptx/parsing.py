"""PTX as Triton writes it, taken apart: one kernel, its basic blocks, their instructions."""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple


class Unsupported(NotImplementedError):
    """Something in PTX that the kernels have not used so far; README.md says how to add it."""


class Guard(NamedTuple):
    """A predicate register, and whether its opposite is asked for."""

    register: str
    negated: bool


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        text: without its guard.
        opcode: its parts, like ("ld", "global", "v4", "b32").
        operands: those in braces or brackets are one.
        guard: which lanes run it; None: all.
    """

    text: str
    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: Guard | None

    @property
    def registers(self) -> list[str]:
        """Names in the first operand, which may be a vector in braces."""
        return names(self.operands[0])


@dataclass
class Block:
    """Instructions without a jump among them, and how they end.

    Attributes:
        instructions: instructions before the end.
        end: "fall" (to the next block), "bra", "ret" or "bar".
        guard: guard of the end.
        target: number of the next block of a jump.
        opcodes: opcodes of all instructions including the end, for counting.
    """

    instructions: list[Instruction] = field(default_factory=list)
    end: str = "fall"
    guard: Guard | None = None
    target: int = -1
    opcodes: list[str] = field(default_factory=list)


@dataclass
class Kernel:
    """A kernel.

    Attributes:
        name: name of the entry.
        threads: number of threads of a program.
        parameters: types by name, in order.
        blocks: blocks in the order of the text.
    """

    name: str
    threads: int
    parameters: dict[str, str]
    blocks: list[Block]


def parse(text: str) -> Kernel:
    """Return the one kernel in ``text``.

    Raises:
        Unsupported: there is a statement that no kernel of Triton's had so far.
    """
    entry, threads = re.search(r"\.entry\s+(\w+)", text), re.search(r"\.reqntid\s+(\d+)", text)
    if entry is None or threads is None:
        raise Unsupported("PTX without .entry and .reqntid")
    header, body = text[entry.start() :].split("{", 1)
    parameters = re.findall(r"\.param\s+\.(\w+)[^,)]*?(\w+)\s*[,)\n]", header)
    body = re.sub(r"//[^\n]*", "", body[: body.index("\n}")])
    body = re.sub(r"^\s*\.[a-z][^\n]*$", "", body, flags=re.MULTILINE)  # .reg, .loc and the like
    by_name = {name: kind for kind, name in parameters}
    return Kernel(entry[1], int(threads[1]), by_name, _blocks(body))


def names(operand: str) -> list[str]:
    """Return the registers in a vector or of two results, or the one register, without signs."""
    return [part.strip(" %") for part in re.split(r"[,|]", operand.strip("{}"))]


def address(operand: str) -> tuple[str, int]:
    """Return base and offset of "[%rd1 + 16]"."""
    base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
    return base, int(offset or 0)


def _blocks(body: str) -> list[Block]:
    blocks, labels, jumps = [Block()], dict[str, int](), list[tuple[Block, str]]()
    aims = set(re.findall(r"\bbra\S*\s+(\$\w+)", body))  # most labels are for debuggers
    for line in body.splitlines():
        statement = " ".join(line.split())
        if label := re.fullmatch(r"(\$\w+):", statement):
            if blocks[-1].opcodes and label[1] in aims:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
        elif statement:
            if not statement.endswith(";") or ";" in statement[:-1]:
                raise Unsupported(statement)
            block, found = blocks[-1], _instruction(statement[:-1])
            block.opcodes.append(".".join(found.opcode))
            if not _ends_block(found):
                block.instructions.append(found)
                continue
            block.end, block.guard = found.opcode[0], found.guard
            if block.end == "bra":
                jumps.append((block, found.operands[0]))
            blocks.append(Block())
    for block, name in jumps:
        block.target = labels[name]
    return blocks


@lru_cache(maxsize=1 << 16)
def _instruction(statement: str) -> Instruction:
    guard = None
    if found := re.match(r"@(!?)%(p\d+) (.*)", statement):
        guard, statement = Guard(found[2], bool(found[1])), found[3]
    opcode, _, rest = statement.partition(" ")
    opcode = opcode.replace("::cta", "")  # as Triton 3.8 writes it: of this program, as ever
    parts = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,{\[]+", rest)
    operands = tuple(part.strip() for part in parts if part.strip(" ,"))
    return Instruction(statement, tuple(opcode.split(".")), operands, guard)


def _ends_block(found: Instruction) -> bool:
    if found.opcode[:2] == ("bar", "sync"):
        if found.operands != ("0",) or found.guard:
            raise Unsupported(found.text)
        return True
    return found.opcode[0] in ("bra", "ret")

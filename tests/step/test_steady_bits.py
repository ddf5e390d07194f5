"""Random programs have the same bits by steps like the last one and by plain steps.

If one fails, the test removes all actions that it fails without, and prints the rest: an argument
of ``difference``.
"""

from typing import Any

import pytest
from covering import more
from helpers import of_kernels
from random_use import Program, Used, program_of
from two_ways import repeats, steps, stored_bits

pytestmark = of_kernels
SEEDS = range(60)
IN_A_PLAIN_RUN = 26, 35, 44  # short programs, in which steps repeat the last one


def trace_of(program: Program, plain: bool) -> list[dict[str, Any]]:
    """Return what can be seen after each action: all bits, numbers of the handle, and errors."""
    found = []
    with steps(plain), Used(program.setup) as run:
        for name, number in program.actions:
            error = None
            try:
                getattr(run, name)(number)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            numbers = repr((run.amp.stats(), run.causes))  # text, because NaN is not NaN
            found.append({"error": error, "numbers": numbers, **stored_bits(run)})
        return found


def difference(program: Program) -> str:
    """Return the first difference between the two ways, or nothing."""
    ways = trace_of(program, plain=False), trace_of(program, plain=True)
    for number, (found, expected) in enumerate(zip(*ways, strict=True)):
        unlike = [k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k)]
        if unlike:
            texts = [
                f"{found.get(k)} {expected.get(k)}" for k in unlike if k in ("error", "numbers")
            ]
            return f"after action {number}, {program.actions[number]}: {sorted(unlike)} {texts}"
    return ""


def smallest(program: Program) -> Program:
    """Return the program without the actions that it fails without."""
    for number in reversed(range(len(program.actions))):
        actions = program.actions[:number] + program.actions[number + 1 :]
        if difference(program._replace(actions=actions)):
            program = program._replace(actions=actions)
    return program


@pytest.mark.parametrize(
    "seed", [*IN_A_PLAIN_RUN, *more(seed for seed in SEEDS if seed not in IN_A_PLAIN_RUN)]
)
def test_the_same_bits(seed: int) -> None:
    program = program_of(seed)
    with repeats() as noted:
        unlike = difference(program)
    if unlike:
        program = smallest(program)
        pytest.fail(f"{program}: {difference(program)}")
    if seed in IN_A_PLAIN_RUN:
        assert len(noted) >= 4, "few steps of this program are like the last one: take another"

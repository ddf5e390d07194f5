"""The bytes that updates move, counted in Triton's interpreter, and ``bench/step_bytes.py``."""

import pytest
import step_bytes
import torch

from tests.kernels.conftest import Traffic, numpy_warns
from tests.kernels.update_rows import CODES, FORMS, ROWS, Form, Row, each_form, each_row
from tests.kernels.updates import Updates
from tritonamp.kernels._memory_order import BLOCK
from tritonamp.kernels._tables import stored

pytestmark = numpy_warns

SIZE = 1 << 13


def moved_bytes(form: Form, states: int, rows: int, size: str = "real") -> tuple[float, float]:
    """Return the bytes that a step reads and writes for each element, with rows of changed bits."""

    def of(dtype: torch.dtype) -> int:
        # the interpreter has bfloat16 in FP32
        return (dtype if size == "real" else stored(dtype)).itemsize

    state = (1 + 1 / BLOCK if form.state is CODES else of(form.state)) * states
    stays = of(form.param) + 2 * form.packed + state
    copied = of(form.copy) if form.copy else 0
    # the bits of earlier steps are read; the old copies are not
    return stays + of(form.grad) + min(rows, 1) / 8, stays + copied + rows / 8


@pytest.mark.parametrize("rows", [0, 1, 2])
@each_form()
@each_row
def test_bytes(
    triton_device: torch.device, traffic: Traffic, row: Row, form: str, rows: int
) -> None:
    """256 elements more of the same programs move just the bytes of ``moved_bytes`` more. For the
    rest, numbers and pointers of each program, 2 % are enough. A skip reads the flag alone.
    """
    for rule in row.rules[:2]:
        found = []
        for n in (SIZE, SIZE - 256):
            run = Updates(row, triton_device, form, [rule], [(n,)], changes=rows)
            run.lists = {name: own[:1] for name, own in run.lists.items()}
            traffic.read = traffic.written = 0
            run.step("triton")
            found.append((traffic.read, traffic.written))
        expected = moved_bytes(run.form, len(row.states(rule)), rows, "stored")
        for more, less, each in zip(*found, expected, strict=True):
            assert more - less == 256 * each
            assert more <= 1.02 * each * SIZE
        traffic.read = traffic.written = 0
        run.step("triton", None, 1.0)
        assert (traffic.read, traffic.written) == (4 * (2 + ("steps" in run.lists)), 0)


FORM_OF = {  # a format of state, and whether masters are packed
    ("fp32", False): "masters",
    ("fp32", True): "packed",
    ("bf16", False): "bf16",
    ("bf16", True): "packed bf16",
    ("8bit", True): "8bit",
}


@pytest.mark.parametrize(
    "ours", step_bytes.OURS, ids=lambda ours: f"{ours.operation} {ours.state} {ours.packed}"
)
def test_the_table_has_these_bytes(ours: step_bytes.Ours) -> None:
    row, form = ROWS[ours.operation], FORM_OF[ours.state, ours.packed]
    assert ours.states == len(row.states(row.rules[0]))
    assert ours.update == sum(moved_bytes(FORMS[form], ours.states, 0))
    lists = Updates(row, torch.device("cpu"), form, shapes=[(SIZE,)]).lists
    kept = {own[0] for name, own in lists.items() if name != "steps"}
    assert ours.kept == sum(t.nbytes for t in kept) / SIZE

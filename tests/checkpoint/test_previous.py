"""Files of the previous commit load, and training goes on from them with the same bits.

tests/fixtures/make_previous.py made them, and says how.
"""

import json
from pathlib import Path

import pytest
import torch
from fixtures import make_previous
from fresh_python import FreshPython

from tritonamp import Policy

FOLDER = Path(make_previous.__file__).parent / "previous"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def test_every_file_is_tried() -> None:
    assert list(EXPECTED) == list(make_previous.CONTINUATIONS)


@pytest.mark.parametrize("name", make_previous.CONTINUATIONS)
def test_training_goes_on_with_the_same_bits(name: str) -> None:
    if "DDP" in name and not torch.__version__.startswith("2.11."):
        pytest.skip("torch reads pickles of a DDP in the version that wrote them, here 2.11")
    found = make_previous.numbers(make_previous.CONTINUATIONS[name](FOLDER))
    expected = EXPECTED[name]
    if name == "policy":  # fields that there were not then have their defaults
        expected = json.loads(Policy().to_json()) | expected
    assert json.loads(json.dumps(found)) == expected


def test_pickles_need_nothing_imported_before(fresh_python: FreshPython, tmp_path: Path) -> None:
    """Unpickling imports ``tritonamp.installing``, and with it ``tritonamp``, by itself."""
    code = f"import torch; torch.load({str(FOLDER / 'model_O2.pt')!r}, weights_only=False)"
    done = fresh_python.run(code, tmp_path)
    assert done.returncode == 0, done.stderr

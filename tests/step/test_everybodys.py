"""Installed optimizers of other packages behave as tritonamp/step/optimizers.md says."""

import everybodys
import pytest
from everybodys import COLUMNS, KINDS, Kind
from gpuless import driver

QUICK = "RMSprop", "Muon"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind.name in QUICK else pytest.mark.long) for kind in KINDS],
    ids=lambda kind: f"{kind.name} of {kind.package}",
)
def test_the_table_is_true(kind: Kind) -> None:
    if kind.version is None:
        pytest.skip(f"{kind.package} is not installed")
    line = everybodys.row(kind)
    known = everybodys.committed()[everybodys.key(line)]
    # behind the version, which may be another one; waits are counted on the GPU in software alone
    cells = slice(3, 3 + len(COLUMNS) + (driver.obstacle() is None))
    assert line.split("|")[cells] == known.split("|")[cells]


def test_every_optimizer_has_a_line() -> None:
    assert [*everybodys.committed()] == [(kind.name, kind.package) for kind in KINDS]

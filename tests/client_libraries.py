"""Libraries of the extra ``clients``. A test skips itself through ``pytest.importorskip`` if its
library is not installed; with ``--need-clients``, which CI passes, the test fails instead.
"""

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
import_or_skip = pytest.importorskip


@functools.cache
def client_libraries(here: bool = False) -> frozenset[str]:
    """Return the names to import of the clients' libraries, which are those of their packages.

    here: only those that exist for this version of Python.
    """
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    found, waiting = set[str](), ["clients"]
    while waiting:
        for requirement in map(Requirement, extras[waiting.pop()]):
            if requirement.name == "tritonamp":
                waiting += requirement.extras
            elif not here or requirement.marker is None or requirement.marker.evaluate():
                found.add(requirement.name)
    return frozenset(found)


def import_or_fail(modname: str, *args: str | None, **kwargs: object) -> ModuleType:
    """Stand in for ``pytest.importorskip``: import a client's library, or raise ImportError."""
    __tracebackhide__ = True  # so that a skip names the line of the test
    if modname.partition(".")[0] in client_libraries(here=True):
        return importlib.import_module(modname)
    return import_or_skip(modname, *args, **kwargs)  # type: ignore[arg-type, no-any-return]


# tests/conftest.py takes these hooks over


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--need-clients",
        action="store_true",
        help="a test fails, instead of being skipped, if a library of the extra 'clients' is "
        "not installed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.need_clients:
        pytest.importorskip = import_or_fail

"""Tests of other libraries skip themselves without these, and CI notices if they do."""

import ast
import sys
from pathlib import Path

import pytest
from client_libraries import client_libraries, import_or_fail
from small_project import run_pytest

TESTS = Path(__file__).parent


def test_names_are_those_of_all_clients() -> None:
    names = "accelerate bitsandbytes diffusers lightning peft tensorboard torchao transformers trl"
    assert client_libraries() == set(names.split())
    assert {"accelerate", "lightning"} <= client_libraries(here=True) <= client_libraries()


def roots(node: ast.stmt) -> set[str]:
    """Return what an import statement imports, without what follows the first dot.

    A module of ``tritonamp.integrations`` is named for the library that it imports.
    """
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return set()
    return {name.removeprefix("tritonamp.integrations.").partition(".")[0] for name in names}


def skips(node: ast.stmt) -> set[str]:
    """Return the libraries without which a statement skips the file."""
    calls = (call for call in ast.walk(node) if isinstance(call, ast.Call))
    return {
        ast.literal_eval(call.args[0]).partition(".")[0]
        for call in calls
        if ast.unparse(call.func) == "pytest.importorskip"
    }


def top_level(path: Path) -> list[ast.stmt]:
    body = ast.parse(path.read_text()).body
    return [node for node in body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def test_files_import_clients_after_they_may_have_skipped() -> None:
    """Otherwise ``pytest`` cannot collect them without these libraries."""
    shared = {path.stem: set().union(*map(skips, top_level(path))) for path in TESTS.glob("*.py")}
    unguarded = []
    for path in sorted(TESTS.rglob("*.py")):
        guarded = set[str]()
        for node in top_level(path):
            imported = roots(node)
            guarded |= skips(node).union(*(shared.get(name, set()) for name in imported))
            unguarded += [
                f"{path.relative_to(TESTS)}:{node.lineno}, of {name}"
                for name in imported & client_libraries() - guarded
            ]
    assert not unguarded, f"imports without a pytest.importorskip before them: {unguarded}"


def test_a_missing_client_fails_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in client_libraries():  # not there, on whatever machine
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="lightning"):
        import_or_fail("lightning")
    with pytest.raises(pytest.skip.Exception, match="no_such_library"):
        import_or_fail("no_such_library", reason="no_such_library is not installed")


FILE = """
import sys
import pytest
sys.modules["accelerate"] = None
accelerate = pytest.importorskip("accelerate")

def test():
    pass
"""


def test_the_option(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FILE)
    command = ["-q", "-p", "client_libraries", "test_it.py"]
    assert "1 skipped" in run_pytest(tmp_path, *command).stdout
    shown = run_pytest(tmp_path, *command, "--need-clients").stdout
    assert "1 error" in shown and "accelerate" in shown and "skipped" not in shown

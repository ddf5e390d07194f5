"""Issue forms and the workflow in ``.github`` fit GitHub's rules, the commands and ``.ci/run``."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import tritonamp
from tritonamp.__main__ import _parser

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
KEYS = {"textarea": {"label"}, "markdown": {"value"}}


def from_yaml(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_are_as_github_wants_them(path: Path) -> None:
    form = from_yaml(path)
    assert form.keys() == {"name", "description", "body"}
    for field in form["body"]:
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        assert KEYS[field["type"]] <= field["attributes"].keys()
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(set(ids)) == len(ids) > 0
    assert any(field.get("validations", {}).get("required") for field in form["body"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_ask_for_what_there_is(path: Path) -> None:
    text = path.read_text()
    for command in re.findall(r"python -m tritonamp ([\w -]*\w)", text):
        _parser().parse_args(command.split())
    for method, arguments in re.findall(r"amp\.(\w+)\(([^)]*)\)", text):
        inspect.signature(getattr(tritonamp.Amp, method)).bind(None, *filter(None, [arguments]))
    for script in re.findall(r"`(bench/\S+)`", text):
        assert (ROOT / script).is_file()
    assert "http" not in text


def test_forms_ask_for_doctor_and_bundle_and_selftest() -> None:
    bug, gpu = (path.read_text() for path in FORMS)
    assert "`python -m tritonamp doctor --json`" in bug and "`amp.write_bundle(" in bug
    assert "python -m tritonamp doctor --selftest --json > selftest.json" in gpu


def test_the_workflow_runs_every_part_of_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    parts = re.search(r"^parts=\((.*)\)", script, re.MULTILINE)[1].split()
    assert all(f"\n{part}() {{" in script for part in parts)
    path = ROOT / ".github" / "workflows" / "ci.yml"
    workflow = from_yaml(path)
    job = workflow["jobs"]["part"]
    assert job["strategy"]["matrix"]["part"] == parts
    assert job["steps"][-1]["run"] == ".ci/run ${{ matrix.part }}"
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in actions)
    assert workflow["permissions"] == {"contents": "read"} and "secrets" not in path.read_text()

"""bench/first_gpu.sh, with a Python that only notes what it is asked for: its parts, what becomes
of a failing one, exit status, files. The parts themselves run in its dry run, which CI has.
"""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "first_gpu.sh"
STUB = r"""#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
    *kernels/__init__.py*) exit "${NOT_INSTALLED:-0}" ;;
    *provenance*) echo "${GPU:-}" ;;
    *"$FAILS"*) echo "FAILED tests/test_x.py - it is wrong"; exit 3 ;;
    *"import expecttest"*) exit "${NO_EXPECTTEST:-0}" ;;
    *"-m pytest"*) echo "SKIPPED [2] tests/helpers.py:44: needs expecttest: optim_db" ;;
    *json.load*) echo "the table of the selftest" ;;
    *doctor*) echo "{}" ;;
    *run.py*) echo "$OUT/nvidia-h100.json" ;;
esac
"""

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or shutil.which("timeout") is None, reason="needs bash, timeout"
)


@pytest.fixture
def first_gpu(tmp_path: Path):
    """Runs the script; returns exit status, output, and the calls of Python."""
    stub = tmp_path / "bin" / "python-stub"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(stub.stat().st_mode | stat.S_IEXEC)

    def run(*arguments: str, **variables: str) -> tuple[int, str, list[str]]:
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = os.environ | {
            "PYTHON": str(stub), "CALLS": str(calls), "OUT": str(tmp_path),
            "FAILS": "nothing fails",
        } | variables  # fmt: skip
        done = subprocess.run(
            [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, calls.read_text().splitlines()

    return run


def called(calls: list[str], what: str) -> str:
    (call,) = [call for call in calls if what in call]
    return call


def test_on_a_gpu(first_gpu, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    status, text, calls = first_gpu(str(folder), GPU="nvidia-h100")
    assert status == 0
    assert called(calls, "doctor") == "-X faulthandler -m tritonamp doctor --selftest --json"
    assert called(calls, "-m pytest").endswith(f" -n {len(os.sched_getaffinity(0))} --cuda")
    assert re.search(rf"--minutes 8\.[56] --folder {folder}$", called(calls, "bench/run.py"))
    assert called(calls, "bench/report.py").endswith(f"--folder {folder}")
    for line in ("nvidia-h100, ", "selftest: ok", "the table of the selftest", "tests: ok"):
        assert line in text
    assert "measurements: ok" in text and "nvidia-h100.json" in text
    assert (folder / "summary.txt").read_text() == text
    assert {path.name for path in folder.iterdir()} == {
        "summary.txt", "selftest.json", "selftest.log", "tests.log", "measurements.log",
        "tables.md",
    }  # fmt: skip
    assert not any("pip" in call for call in calls)


@pytest.mark.smoke
def test_without_one_it_is_a_dry_run(first_gpu, tmp_path: Path) -> None:
    status, text, calls = first_gpu(str(tmp_path / "out"))
    assert status == 0 and "no GPU: a dry run, which measures nothing" in text
    assert " --fake-cuda" in called(calls, "-m pytest")
    assert " --toy --quick" in called(calls, "bench/run.py")


@pytest.mark.parametrize("part", ["doctor", "-m pytest", "run.py"])
def test_a_part_that_fails_hides_no_other(first_gpu, tmp_path: Path, part: str) -> None:
    status, text, calls = first_gpu(str(tmp_path / "out"), GPU="nvidia-h100", FAILS=part)
    name = {"doctor": "selftest", "-m pytest": "tests", "run.py": "measurements"}[part]
    assert status == 1
    assert re.search(rf"^{name}: FAILED with exit status 3 after \d s, see {name}.log$", text, re.M)
    assert text.count(": ok, ") == 2 and any("run.py" in call for call in calls)
    assert ("FAILED tests/test_x.py - it is wrong" in text) == (part == "-m pytest")


def test_what_needs_expecttest_is_named_where_it_is_absent(first_gpu, tmp_path: Path) -> None:
    status, text, _ = first_gpu(str(tmp_path / "out"), GPU="nvidia-h100", NO_EXPECTTEST="1")
    assert status == 0
    assert "expecttest is absent; left out are:" in text
    assert "SKIPPED [2] tests/helpers.py:44: needs expecttest: optim_db" in text


def test_a_checkout_that_python_does_not_find_is_installed_without_a_network(
    first_gpu, tmp_path: Path
) -> None:
    _, _, calls = first_gpu(str(tmp_path / "out"), NOT_INSTALLED="1")
    install = called(calls, "pip install")
    for option in ("--no-index", "--no-deps", "--no-build-isolation", "-e ."):
        assert option in install


def test_tools(first_gpu, tmp_path: Path) -> None:
    for tool in ("ncu", "compute-sanitizer"):
        path = tmp_path / "bin" / tool
        path.write_text('#!/usr/bin/env bash\necho "$(basename "$0") $*" >>"$CALLS"\n')
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    found = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    status, _, calls = first_gpu("--tools", str(tmp_path / "out"), GPU="x", PATH=found)
    assert status == 0
    for check in ("memcheck", "racecheck", "synccheck"):
        assert called(calls, f"--tool {check}").endswith("doctor --selftest kernel")
    assert called(calls, "--clock-control none").endswith("doctor --selftest speed")
    assert not any("-m pytest" in call for call in calls)


def test_tools_that_are_absent_are_named(first_gpu, tmp_path: Path) -> None:
    if shutil.which("ncu") or shutil.which("compute-sanitizer"):
        pytest.skip("they are here")
    status, text, _ = first_gpu("--tools", str(tmp_path / "out"))
    assert status == 0
    assert "compute-sanitizer is absent" in text and "ncu is absent" in text


def test_a_folder_that_cannot_be_written_is_told_at_once(first_gpu, tmp_path: Path) -> None:
    (tmp_path / "out" / "summary.txt").mkdir(parents=True)
    status, _, calls = first_gpu(str(tmp_path / "out"), GPU="nvidia-h100")
    assert status == 2
    assert not any("doctor" in call or "-m pytest" in call for call in calls)


def test_a_folder_whose_name_has_spaces(first_gpu, tmp_path: Path) -> None:
    status, text, calls = first_gpu(str(tmp_path / "my out"), GPU="nvidia-h100")
    assert status == 0 and "the table of the selftest" in text
    assert called(calls, "bench/run.py").endswith(f"--folder {tmp_path / 'my out'}")

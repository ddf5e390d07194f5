"""What first_gpu.sh needs of the machine: this tree importable, wheels, processes that end."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import commits
from commits import ROOT

KILLED_AFTER = 3.0  # seconds after Ctrl-C
FOR_TESTS = "expecttest", "hypothesis", "pytest"  # other wheels are peers: some of them warn


def ended(
    command: Sequence[str], tree: Path, log: Path, seconds: float, environment: dict[str, str]
) -> int | None:
    """Run a command with all that it starts; return its exit status, None where it was cut off."""
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=tree, env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            print(error, file=file)
            return 127
        try:
            return process.wait(max(seconds - KILLED_AFTER, 0.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_AFTER)
            return None
        finally:  # also where this process is stopped itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def pack(folder: Path, path: Path) -> None:
    """Write the archive of a folder, so that there is a whole one at every moment."""
    new = path.with_name(path.name + ".new")
    with tarfile.open(new, "w:gz") as archive:
        archive.add(folder, "logs")
    new.replace(path)


def importable_tree(work: Path) -> Path:
    """Return the tree to run in: this one where Python finds it, else a copy that needs no pip.

    The copy has a link to kernels/ where the installed package has that folder.
    """
    spec = importlib.util.find_spec("tritonamp")
    if spec is not None and Path(str(spec.origin)).resolve() == ROOT / "tritonamp" / "__init__.py":
        return ROOT
    tree = work / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "__pycache__"), symlinks=True)
    (tree / "tritonamp" / "kernels").symlink_to(tree / "kernels")
    paths = str(tree), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ[commits.VARIABLE] = commits.commit()
    return tree


def install(wheels: Path, work: Path) -> Iterator[str]:
    """Install the wheels, each by itself; yield what pip says of those that it cannot install."""
    for wheel in sorted(wheels.glob("*.whl")):
        target = work / ("tests" if wheel.name.startswith(FOR_TESTS) else "peers")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--no-cache-dir", "--target", str(target), str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{wheel.name}: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}"


def facts(tree: Path) -> dict[str, str]:
    """Return ``provenance.machine``, and as "run" the name of a run; "" without a GPU.

    Another process asks torch, so that this one holds no memory of the GPU.
    """
    code = (
        "import json, provenance, torch; gpu = torch.cuda.is_available(); "
        "machine = provenance.machine(torch.device('cuda' if gpu else 'cpu')); "
        "print(json.dumps(machine | {'run': provenance.run_name() if gpu else ''}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tree / "bench", capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"torch cannot be asked for the GPU:\n{done.stderr[-2000:]}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found

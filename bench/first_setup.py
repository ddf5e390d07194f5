"""The machine under first_gpu.sh: an importable tree, wheels, commands with a time limit."""

import contextlib
import functools
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
LIMIT = 60.0  # seconds for a question to torch, or for pip
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
FOR_TESTS = "expecttest", "hypothesis", "pytest"  # other wheels are peers: some of them warn


def ended(
    command: Sequence[str], tree: Path, log: Path, seconds: float, environment: dict[str, str]
) -> int | None:
    """Run a command and its children; return its exit status, or None if the time was up."""
    # A signal that arrives within Popen would leave a process that nothing here can kill.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=tree, env=environment, start_new_session=True, preexec_fn=unblock,
            )  # fmt: skip
        except OSError as error:
            unblock()
            print(error, file=file)
            return 127
        try:
            unblock()
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
    """Replace the archive of a folder atomically."""
    new = path.with_name(path.name + ".new")
    with tarfile.open(new, "w:gz") as archive:
        archive.add(folder, "logs")
    new.replace(path)


def facts_and_tree(work: Path) -> tuple[dict[str, str], Path]:
    """Return ``facts`` and the tree to run in: this one if Python finds it, else a copy."""
    spec = importlib.util.find_spec("tritonamp")
    if spec is not None and Path(str(spec.origin)).resolve() == ROOT / "tritonamp" / "__init__.py":
        with contextlib.suppress(subprocess.CalledProcessError):  # kernels/ is not found
            return facts(ROOT), ROOT
    tree = importable_copy(work)
    try:
        return facts(tree), tree
    except subprocess.CalledProcessError as error:
        sys.exit(f"torch cannot be asked for the GPU:\n{error.stderr[-2000:]}")


def importable_copy(work: Path) -> Path:
    """Copy this tree so that processes find it without pip.

    The copy has a link to kernels/ where the installed package has that folder.
    """
    tree = work / "tree"
    ignore = shutil.ignore_patterns(".git", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=ignore, symlinks=True)
    link = tree / "tritonamp" / "kernels"
    if not link.exists():
        link.symlink_to(tree / "kernels")
    paths = str(tree), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ[commits.VARIABLE] = commits.commit()
    return tree


def install(wheels: Path, work: Path) -> Iterator[str]:
    """Install each wheel by itself; yield pip's message for each failure."""
    for wheel in sorted(wheels.glob("*.whl")):
        target = work / ("tests" if wheel.name.startswith(FOR_TESTS) else "peers")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--no-cache-dir", "--target", str(target), str(wheel)]
        try:
            run(command, ROOT)
        except subprocess.CalledProcessError as error:
            yield f"{wheel.name}: {(error.stderr.strip().splitlines() or ['?'])[-1][:200]}"


def facts(tree: Path) -> dict[str, str]:
    """Return ``provenance.machine``, and as "run" the name of a run; "" without a GPU.

    It asks torch in another process, so that this one holds no memory of the GPU.

    Raises:
        CalledProcessError: the tree cannot be imported, or torch fails.
    """
    code = (
        "import json, provenance, torch; gpu = torch.cuda.is_available(); "
        "machine = provenance.machine(torch.device('cuda' if gpu else 'cpu')); "
        "print(json.dumps(machine | {'run': provenance.run_name() if gpu else ''}))"
    )
    said = run([sys.executable, "-c", code], tree / "bench")
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    return found


def run(command: list[str], folder: Path) -> str:
    """Run a command; return its output.

    Raises:
        CalledProcessError: the command failed, or took longer than ``LIMIT``; "stderr" says why.
    """
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=LIMIT
        ).stdout
    except subprocess.TimeoutExpired as error:
        why = f"no answer within {LIMIT:g} s"
        raise subprocess.CalledProcessError(1, command, stderr=why) from error

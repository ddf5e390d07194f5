"""Programs in a Python that has imported torch and nothing of ours: forks of one process.

To import torch takes two seconds of CPU time, a fork milliseconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def run_compiled(
    *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments where kernels are compiled, and assert that it succeeds.

    Args:
        arguments: the arguments of ``python``.
        cwd: the folder in which it runs.
        environment: further variables.
    """
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        env=own | environment,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


FORKS = """
import json, os, sys, tempfile, traceback
import torch

def run(program, folder, environment):
    try:
        os.chdir(folder)
        os.environ.update(environment)
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)

sys.argv = ["-c"]
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            run(*json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        print(json.dumps([status, out.read(), err.read()]), flush=True)
"""


class FreshPython:
    """One process, from which each program gets a fork of its own."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS], stdin=pipe, stdout=pipe, text=True
        )

    def run(
        self, program: str, folder: Path, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as ``python -c`` does; ``sys.path`` begins with ``folder``.

        Args:
            program: text of the program.
            folder: working directory.
            environment: variables in addition to those of this process.

        Returns:
            The exit status, 1 after any exception, and the output.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(json.dumps([program, str(folder), environment or {}]), file=stdin, flush=True)
        return subprocess.CompletedProcess([], *json.loads(stdout.readline()))

    def close(self) -> None:
        self._process.communicate()  # the end of its stdin is its end

"""The selftest in parallel processes. A fault ends only its own process."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import IO, Any

from tritonamp.commands.selftest.check import CUT_OFF, FAILED

WORKER = (sys.executable, "-X", "faulthandler", "-m", "tritonamp.commands.selftest.worker")
LIMIT = 120.0
"""Seconds that a check may take, with the kernels that it compiles."""

Outcome = dict[str, Any]


class Workers:
    """Runs checks in processes. After a fatal check a new process continues with the next check.

    Args:
        tell: function that gets the outcome of each check, called by one thread at a time.
        worker: command that starts ``worker.py``.
        limit: longest duration of a check in seconds.
    """

    def __init__(
        self,
        tell: Callable[[Outcome], object],
        worker: Sequence[str] = WORKER,
        limit: float = LIMIT,
    ) -> None:
        self._tell, self._worker, self._limit = tell, worker, limit
        self._one_at_a_time = threading.Lock()
        self._started: list[subprocess.Popen[str]] = []
        self._is_stopped = False

    def run(self, groups: Sequence[str], count: int) -> None:
        """Run the groups' checks in ``count`` processes. Ctrl-C ends them and is raised again."""
        with ThreadPoolExecutor(count) as threads:
            try:
                parts = [threads.submit(self._run_part, groups, i, count) for i in range(count)]
                while wait(parts, timeout=0.5).not_done:
                    pass  # wakes up for Ctrl-C, which another thread may have received
                for part in parts:
                    part.result()
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        with self._one_at_a_time:
            self._is_stopped = True
            for process in self._started:
                process.kill()

    def _run_part(self, groups: Sequence[str], part: int, count: int) -> None:
        first: int | None = 0
        while first is not None:
            command = [*self._worker, ",".join(groups), str(part), str(count), str(first)]
            first = self._follow(command)

    def _follow(self, command: list[str]) -> int | None:
        """Run one process. Return the number of the next check for a new process, or None."""
        current: Outcome | None = None  # the line of the running check
        number, last = -1, {}
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = self._start(command, errors)
            if process is None:
                return None
            stack.enter_context(process)  # waits for its end, and closes stdout
            stack.callback(process.kill)
            began, limit = time.monotonic(), self._kill_later(process)
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):  # output of a tool around the process
                    print(line, end="", file=sys.stderr, flush=True)
                    continue
                found = json.loads(line)
                if "starts" in found:
                    number, current = found.pop("starts"), found
                    limit.cancel()
                    began, limit = time.monotonic(), self._kill_later(process)
                else:
                    current, last = None, found
                    self._report(found)
            limit.cancel()
            status = process.wait()
            if current is None and (status == 0 or number >= 0):
                # after a signal between two checks, the other checks must still run
                return number + 1 if "spoiled" in last or status < 0 else None
            seconds = round(time.monotonic() - began, 3)
            is_late = seconds >= self._limit
            why = f"no answer within {self._limit:g} s" if is_late else _end_of(status, errors)
        where = current or {"group": "selftest", "name": "a process"}
        # Ctrl-C goes to all processes, and may end this one before ``_stop`` does
        stopped = self._is_stopped or status == -signal.SIGINT
        cut = {"status": CUT_OFF, "detail": "it was running when the selftest was stopped"}
        fate = cut if stopped else {"status": FAILED, "detail": why}
        self._report(where | fate | {"seconds": seconds})
        return None if stopped or current is None else number + 1

    def _start(self, command: list[str], errors: IO[str]) -> "subprocess.Popen[str] | None":
        """Start a process; None after ``_stop``."""
        with self._one_at_a_time:
            if self._is_stopped:
                return None
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            self._started.append(process)
            return process

    def _kill_later(self, process: "subprocess.Popen[str]") -> threading.Timer:
        """Kill the process at the limit, unless the returned timer is cancelled before."""
        timer = threading.Timer(self._limit, process.kill)
        timer.daemon = True
        timer.start()
        return timer

    def _report(self, outcome: Outcome) -> None:
        with self._one_at_a_time:
            self._tell(outcome)


def _end_of(status: int, errors: IO[str]) -> str:
    """Describe the end of a process, with the most informative line of its stderr."""
    errors.seek(0)
    said = [line.strip() for line in errors if line.strip()] or ["without a word"]
    fatal = [line for line in said if line.startswith("Fatal Python error")]
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return f"its process ended with {how}: {(fatal or said)[-1][:300]}"

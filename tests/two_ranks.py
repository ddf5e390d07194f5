"""Two processes, or more, that meet through gloo on CPU and run functions of a test.

A test file that uses them is also their program: run as a script it calls ``serve``.
"""

import datetime
import importlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritonamp

RANKS = 2
TIMEOUT = 30  # seconds: a deadlock fails
SCENARIOS: dict[str, Callable[..., Any]] = {}
HANDLES: list[tritonamp.Amp] = []

of_ranks = [
    pytest.mark.ranks,
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
]
"""The marks of a test file that uses them."""


def on_ranks(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a function that runs ``function`` on all ranks of a Pair and returns their results."""
    SCENARIOS[function.__name__] = function
    return lambda pair, **arguments: pair.run(function.__name__, **arguments)


def enable(*args: Any, **fields: Any) -> tritonamp.Amp:
    """``tritonamp.enable``; on a rank it is undone when the scenario has ended."""
    HANDLES.append(tritonamp.enable(*args, **fields))
    return HANDLES[-1]


def _disable_all() -> None:
    while HANDLES:
        amp = HANDLES.pop()
        if amp._enabled:
            amp.disable()


def whole(tensor: Any) -> list[float]:
    """Return all numbers of a tensor, of which this rank may hold a shard."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    values: list[float] = full.detach().double().flatten().tolist()
    return values


def refused(act: Callable[[], Any]) -> str:
    """Return the error that an act raises, with its class, or "done"."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


class Pair:
    """Processes that have met, and run functions by name."""

    def __init__(self, folder: Path, file: str, number: int = RANKS) -> None:
        self._number = number
        self._folder, self._file, self._starts, self._ranks = (
            folder,
            file,
            0,
            list[subprocess.Popen[str]](),
        )

    def run(self, name: str, **arguments: Any) -> list[Any]:
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            print(json.dumps([name, arguments]), file=rank.stdin, flush=True)
        # the first time they import torch
        seconds = 3 * TIMEOUT * self._number / RANKS
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        try:
            answers = [rank.stdout.readline() for rank in self._ranks]
        finally:
            timer.cancel()
        failed = [answer for answer in answers if not answer.startswith("[")]
        if failed:
            self.stop()
            died = f"a rank has died, or was killed after {seconds:g} s"
            pytest.fail("\n".join(json.loads(text) if text else died for text in failed))
        return [json.loads(answer)[0] for answer in answers]

    def _start(self) -> None:
        self._starts += 1
        paths = [str(Path(tritonamp.__file__).parent.parent), str(Path(__file__).parent)]
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        environment = {
            **os.environ,
            **on_cpu,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        }
        for rank in range(self._number):
            command = [
                sys.executable,
                "-W",
                "error",
                self._file,
                str(self._folder / f"store{self._starts}"),
                str(rank),
                str(self._number),
            ]
            pipe = subprocess.PIPE
            self._ranks.append(
                subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
            )

    def _kill(self) -> None:
        """Have whoever waits for an answer read the end of the pipe: for the timer's thread."""
        for rank in self._ranks:
            rank.kill()

    def stop(self) -> None:
        self._kill()
        for rank in self._ranks:
            rank.communicate()
        self._ranks.clear()


def serve(store: str, rank: str, number: str) -> None:
    """Read names and arguments on a rank, and write a list of the result, or an error."""
    importlib.import_module("every_test")  # what it does to Triton's interpreter
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(number),
        timeout=timeout,
    )
    for line in sys.stdin:
        name, arguments = json.loads(line)
        torch.manual_seed(0)
        try:
            answer: Any = [SCENARIOS[name](**arguments)]
        except BaseException:  # torch's CheckpointException is no Exception
            answer = f"rank {rank}: {traceback.format_exc()}"
        _disable_all()
        print(json.dumps(answer), file=answers, flush=True)

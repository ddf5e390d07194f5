"""Host time of calls without a GPU, with stubs instead of kernel launches.

    python bench/host.py
    python bench/host.py --json  # only the ratios to torch's host time, of host_ratios.py

Times are microseconds of this machine's CPU, the least of many calls: a softmax inside an enabled
forward, ``torch.empty_like``, and an O2 step on 148 small tensors. Add 1.6 to 3 us for each real
launch, because a stub only looks up its key.

The second table is eager torch on the CPU: a whole step (unscale, check, clip, update) of 11.5 M
parameters at each level, as a ratio to unscaling, clipping and ``torch.optim`` with
``foreach=True``.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import host_ratios
import provenance
import steps
import torch
from host_stubs import CPU, least_us, least_us_of, stub_launches

import tritonamp


def measure(repeats: int) -> dict[str, float]:
    """Return microseconds, and the launches of a step."""
    x = torch.randn(256, 1024).half()
    inputs = {"softmax": x, "softmax, with autograd": x.clone().requires_grad_()}
    found = {"torch.empty_like": least_us(lambda: torch.empty_like(x), repeats, 50)}
    with stub_launches() as count:
        with tritonamp.enable(torch.nn.Linear(2, 2), level="O1") as amp, amp.autocast():
            for name, given in inputs.items():
                call = functools.partial(torch.softmax, given, -1)
                found[f"{name}, overridden"] = least_us(call, repeats, 50)
        work = steps.full_step(steps.SETS["148 small"][1], CPU)
        found["O2 step, 148 tensors, clipped"] = least_us(work.calls[0], repeats, 1)
        before = count[0]
        work.calls[0]()
        found["launches of that step"] = count[0] - before
        work.close()
    return found


ADAMW, SGD = torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)
STEPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "AdamW": (ADAMW, ADAMW),
    "SGD": (SGD, SGD),
    "Lion, to torch's AdamW": (ADAMW, tritonamp.optim.Lion),
}
"""By name, torch's optimizer and the enabled one."""


def ratios(repeats: int, build: steps.Build) -> dict[str, float]:
    """Return CPU time of our eager step relative to torch's, each the least of ``repeats``."""
    found = {}
    for name, (theirs, ours) in STEPS.items():
        for level in ("O0", "O1", "O2"):
            params = steps.parameters(build, CPU, torch.float32)
            call = steps.torchs_step(theirs(params, lr=steps.LR, foreach=True), params)
            model = build()
            work = steps.our_step(model, ours(model.parameters(), lr=steps.LR), level=level)
            # of the process, whoever else runs on the machine
            times = least_us_of([*work.calls, call], repeats, 1, clock=time.process_time)
            work.close()
            found[f"{name}, {level}"] = times[0] / times[1]
    return found


def model_of_11_million() -> torch.nn.Module:
    return steps.gpt(4000, 64, 512, 3)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Host microseconds of a call, launches replaced by a stub."
    )
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="host time relative to torch, as JSON")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.json:
        print(json.dumps(host_ratios.measure_all(args.repeats), indent=2))
        return 0
    print("{device}, torch {torch}, commit {commit}".format(**provenance.machine(CPU)))
    for name, number in measure(args.repeats).items():
        print(f"{name:34}{number:8.1f}")
    build = steps.SETS["148 small"][1] if args.repeats < 10 else model_of_11_million
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, number in ratios(min(args.repeats, 7), build).items():
            print(f"{name + f', {threads} thread(s)':34}{number:8.2f} of torch's CPU time")
    return 0


if __name__ == "__main__":
    sys.exit(main())

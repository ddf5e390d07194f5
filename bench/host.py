"""What the host pays for a call, without a GPU: a stub stands for kernel launches.

    python bench/host.py
    python bench/host.py --json  # host time as ratios to torch's own alone, see host_ratios.py

Then, on the CPU in eager torch: a whole step (unscale, check, clip, update) of 11.5 M parameters
at O0 and O2, as a ratio to ``torch.optim``'s own with ``foreach=True``, unscaling and clipping.

The stub only looks up its key. Microseconds of this machine's CPU, the least of many: one softmax
inside an enabled forward against ``torch.empty_like``, and an O2 step on 148 small tensors. Add 1.6
to 3 us for each real launch.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import host_ratios
import provenance
import steps
import torch
from host_stubs import least_us, stub_launches

import tritonamp


def measure(repeats: int) -> dict[str, float]:
    """Microseconds, and launches of a step."""
    x = torch.randn(256, 1024).half()
    found = {"torch.empty_like": least_us(lambda: torch.empty_like(x), repeats, 50)}
    with stub_launches() as count:
        amp = tritonamp.enable(torch.nn.Linear(2, 2), level="O1")
        try:
            with amp.autocast():
                for name, given in (
                    ("softmax", x),
                    ("softmax, with autograd", x.clone().requires_grad_()),
                ):
                    found[f"{name}, overridden"] = least_us(
                        lambda given=given: torch.softmax(given, -1), repeats, 50
                    )
        finally:
            amp.disable()
        work = steps.our_step(steps.SETS["148 small"][1], torch.device("cpu"))
        found["O2 step, 148 tensors, clipped"] = least_us(work.calls[0], repeats, 1)
        before = count[0]
        work.calls[0]()
        found["launches of that step"] = count[0] - before
        work.close()
    return found


Make = Callable[[Any], torch.optim.Optimizer]
STEPS: dict[str, tuple[Make, Make]] = {
    "AdamW": (
        lambda params: torch.optim.AdamW(params, lr=1e-6, foreach=True),
        lambda params: torch.optim.AdamW(params, lr=1e-6),
    ),
    "SGD": (
        lambda params: torch.optim.SGD(params, lr=1e-6, momentum=0.9, foreach=True),
        lambda params: torch.optim.SGD(params, lr=1e-6, momentum=0.9),
    ),
    "Lion, to torch's AdamW": (
        lambda params: torch.optim.AdamW(params, lr=1e-6, foreach=True),
        lambda params: tritonamp.optim.Lion(params, lr=1e-6),
    ),
}
"""Torch's optimizer, and the one that is enabled."""


def torchs_step(make: Make, build: steps.Build) -> Callable[[], Any]:
    params = list(build().parameters())
    optimizer, one, found = make(params), torch.ones(()), torch.zeros(())
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)

    def call() -> None:
        grads = [param.grad for param in params if param.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, one)
        torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=True)
        if not found:
            optimizer.step()

    return call


def ratios(repeats: int, build: steps.Build) -> dict[str, float]:
    """Return CPU time of our eager step over that of torch's, each the least of ``repeats``."""
    found = {}
    for name, (theirs, ours) in STEPS.items():
        for level in ("O0", "O1", "O2"):
            model = build()
            optimizer = ours(model.parameters())
            with tritonamp.enable(model, optimizer, level=level) as amp:
                for param in model.parameters():
                    param.grad = 1e-3 * torch.randn_like(param)

                def call(amp: Any = amp, optimizer: Any = optimizer) -> None:
                    amp.scaler.scale(torch.ones(()))  # the backward has been
                    amp.clip_grad_norm_(1e9)
                    optimizer.step()

                calls = torchs_step(theirs, build), call
                times = [[cpu_time(c) for c in calls] for _ in range(repeats + 1)][1:]
            least = [min(column) for column in zip(*times, strict=True)]
            found[f"{name}, {level}"] = least[1] / least[0]
    return found


def model_of_11_million() -> torch.nn.Module:
    return steps.gpt(4000, 64, 512, 3)


def cpu_time(call: Callable[[], Any]) -> float:
    """Return seconds of the process, whoever else runs on the machine."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Host microseconds of a call, launches replaced by a stub."
    )
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="host time beside torch's own, as JSON")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.json:
        print(json.dumps(host_ratios.measure(args.repeats), indent=2))
        return 0
    print(
        "{device}, torch {torch}, commit {commit}".format(**provenance.machine(torch.device("cpu")))
    )
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

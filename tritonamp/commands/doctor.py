"""``python -m tritonamp doctor``: the parts of this machine, its backends, and the reasons."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tritonamp
from tritonamp.casts.batch_invariance import notes
from tritonamp.commands import selftest
from tritonamp.commands.progress import Checks, wrote
from tritonamp.commands.selftest.training import LEVELS as TRIALS
from tritonamp.commands.selftest.training import SmallTraining
from tritonamp.diagnosis.terminal import fitted, table
from tritonamp.kernels import _native
from tritonamp.kernels import device as hardware
from tritonamp.kernels._implementations import operations
from tritonamp.kernels._optimizers import FUSED, OPTIMIZERS

MOST_JOBS = 8  # processes, each of which takes half a GB of the GPU's memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "What this machine has, which backend each device will use, and why."
    parser.epilog = "Exit status of --selftest: 0 all is right, 1 something is wrong."
    parser.add_argument(
        "--selftest",
        nargs="*",
        choices=tuple(selftest.GROUPS),
        help="instead, within a minute: each kernel against its eager twin; each level trained "
        "for 30 steps, a skip, a resume, a CUDA graph; the fraction of the copy bandwidth that a "
        "kernel reaches (default: all three)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON; the progress of a selftest goes to stderr",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="run the selftest in N processes; 0: in this one, so that a debugger can follow it "
        "(default: up to 8 on a GPU, 0 on a CPU)",
    )
    parser.add_argument(
        "--lines",
        type=Path,
        metavar="FILE",
        help="append a line of JSON to FILE for each check of the selftest, when it is done",
    )


def run(args: argparse.Namespace, fail: Callable[[str], Any]) -> int:
    """Print the report, or the selftest of the first GPU; return the exit status.

    ``fail`` ends the command with a message.
    """
    if args.selftest is None:
        given = {"jobs": args.jobs is not None, "lines": args.lines is not None}
        for option, is_given in given.items():
            if is_given:
                fail(f"expected --selftest with --{option}, which is an option of the selftest")
        print(json.dumps(facts(), indent=1) if args.json else report())
        return 0
    device = selftest.first_device()
    jobs = args.jobs
    if jobs is None:
        jobs = min(os.cpu_count() or 1, MOST_JOBS) if device.type == "cuda" else 0
    elif jobs < 0:
        fail(f"expected --jobs of at least 0, got {jobs}")
    if args.lines:
        try:
            args.lines.parent.mkdir(parents=True, exist_ok=True)
            args.lines.open("a").close()
        except OSError as error:
            fail(f"--lines {args.lines} cannot be written: {error}")
    start, checks = time.perf_counter(), Checks(selftest.backend_on(device).name)

    def tell(outcome: dict[str, Any]) -> None:
        _tell(args, outcome)
        checks.tell(f"{outcome['group']} {outcome['name']}")

    found = selftest.run(device, args.selftest, tell, jobs, checks.expect)
    checks.end()
    print(json.dumps(found, indent=1) if args.json else selftest.text(found))
    if args.json:
        print(selftest.title(found), selftest.verdict(found), sep="\n", file=sys.stderr)
    if args.lines:
        print(wrote(args.lines, start), file=sys.stderr if args.json else sys.stdout)
    return 1 if selftest.is_wrong(found) else 0


def _tell(args: argparse.Namespace, outcome: dict[str, Any]) -> None:
    """Print the outcome of one check to stderr, and append it to ``--lines``, if requested."""
    if args.json:
        detail = f", {outcome['detail']}" if outcome["status"] == "FAILED" else ""
        where = f"{outcome['group']} {outcome['name']}"
        print(f"{where}: {outcome['status']}{detail}", file=sys.stderr)
    if args.lines:
        with args.lines.open("a") as lines:
            print(json.dumps(outcome), file=lines)


def report() -> str:
    parts = [table(("what", "found"), _versions()), *(fitted(str(note)) for note in notes())]
    alike: dict[tuple[str, str], list[str]] = {}
    for device in _devices():
        trials = [_trial(*trial, device) for trial in TRIALS]
        about = f"{_describe(device)}\n{_backend(device)}"
        drawn = table(("level", "dtype", "one training step"), trials)
        alike.setdefault((about, drawn), []).append(str(device))
    for (about, drawn), names in alike.items():
        parts += [fitted(f"{', '.join(names)}: {about}"), drawn]
    parts.append(table(("optimizer with a fused step", "from", "state", "offload"), _fused()))
    return "\n\n".join(parts)


def _fused() -> list[tuple[str, str, str, str]]:
    """Return name, origin, formats of state and offload of each optimizer with a fused step."""
    return [
        (
            name,
            " and ".join(["torch.optim"] * known.in_torch + ["tritonamp.optim"] * known.in_optim),
            ", ".join(known.states),
            "yes" if known.in_parts else "no",
        )
        for name, known in OPTIMIZERS.items()
        if name in FUSED
    ]


def facts() -> dict[str, Any]:
    """Return what ``report`` shows of this machine: strings, lists and dicts, for JSON."""
    columns = "level", "dtype", "step"
    return {
        "versions": dict(_versions()),
        "notes": [str(note) for note in notes()],
        "devices": [
            {
                "device": str(device),
                "description": _describe(device),
                "backend": _backend(device),
                "levels": [dict(zip(columns, _trial(*t, device), strict=True)) for t in TRIALS],
            }
            for device in _devices()
        ],
    }


def _versions() -> list[tuple[str, str]]:
    gpus = torch.cuda.device_count()
    implementation, system = platform.python_implementation(), platform.system()
    has_kernels = any(map(hardware.runs_triton, _devices()))
    return [
        ("python", f"{platform.python_version()} ({implementation}, {system})"),
        ("tritonamp", tritonamp.__version__),
        ("torch", torch.__version__),
        ("triton", hardware.triton_version() or "cannot be imported"),
        ("CUDA", _cuda()),
        ("GPUs", str(gpus) if gpus else _without_gpus()),
        *([("C++ for steps", _cpp_for_steps())] if has_kernels else []),
    ]


def _cpp_for_steps() -> str:
    problem = _native.build().problem
    return f"none, so that each step takes the host longer: {problem}" if problem else "built"


def _without_gpus() -> str:
    other = _other_accelerator()
    return f"none of CUDA or ROCm, but {other.type}" if other else "none that torch can use"


def _other_accelerator() -> torch.device | None:
    """Return an accelerator that is neither CUDA's nor ROCm's, if torch can use one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "cuda" else torch.device(found.type, 0)


def _cuda() -> str:
    if torch.version.cuda is not None:
        return f"{torch.version.cuda} (what torch was built for)"
    return (
        f"none: torch was built for ROCm {torch.version.hip}"
        if torch.version.hip
        else "none: a CPU build of torch"
    )


def _devices() -> list[torch.device]:
    """Return the GPUs; else another accelerator, or the CPU."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [
        _other_accelerator() or torch.device("cpu")
    ]


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        processor, threads = platform.processor() or platform.machine(), torch.get_num_threads()
        return (
            f"{processor}, {threads} thread{'s' * (threads != 1)}; half matmuls are computed in "
            "FP32 and rounded: for trying things out, not for speed"
        )
    if device.type != "cuda":
        return f"an accelerator that torch calls {device.type}"
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    fault = hardware.known_fault(device)
    return f"{properties.name}, {_kind(device)}, {memory}" + (f"\n{fault}" if fault else "")


def _kind(device: torch.device) -> str:
    capability, amd = hardware.capability(device), hardware.amd_architecture(device)
    if capability is not None:
        return "compute capability {}.{}".format(*capability)
    if amd not in hardware.AMD_WAVES:
        return amd or "no compute capability"
    return f"{amd}, waves of {hardware.AMD_WAVES[amd]}, kernels built ahead of time, never run"


def _backend(device: torch.device) -> str:
    backend = hardware.choose_backend("auto", device)
    how = "Triton kernels" if backend.name == "triton" else "eager torch, no kernels"
    return f"{len(operations())} operations run as {how}: {backend.reason}"


def _trial(level: str, dtype: torch.dtype, device: torch.device) -> tuple[str, str, str]:
    shown_dtype = "float32" if level == "O0" else str(dtype).removeprefix("torch.")
    run = SmallTraining(device)
    try:
        with tritonamp.enable(run.model, run.optimizer, level=level, dtype=dtype) as run.amp:
            run.step()
            stats = run.amp.stats()
    except Exception as error:  # the error is the answer
        return level, shown_dtype, f"no: {error}"
    if stats["skipped"]:
        return level, shown_dtype, f"no: the step was skipped, {stats['last_skip_reason']}"
    return level, shown_dtype, f"works, loss scale {stats['scale']:g}"

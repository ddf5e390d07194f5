"""What eager torch, Triton's interpreter, and compiled code make of the cases, in a file.

    cd tests && python -m gpuless.ptx.results results.pt --interpreted
    cd tests && python -m gpuless.ptx.results results.pt --compiled "90 up" "80 lockstep"

Whether kernels are interpreted is settled when they are imported: hence two commands. The file
holds by name ("eager", "interpreter", "90 up"): results by the cases' names, what the emulator
found, and which kernels ran.
"""

import argparse
import os
from contextlib import ExitStack
from typing import Any

from gpuless import driver

LEVELS = "O1", "O2"


def results(on: str) -> dict[str, Any]:
    """Run all cases on "eager", "interpreter", or an architecture in an order of its warps."""
    from gpuless.fake_cuda import in_software, interpreted
    from gpuless.ptx.cases import cases, train
    from gpuless.ptx.emulated import emulated, on_cpu
    from gpuless.ptx.machine import Options
    from gpuless.ptx.session import compiled_for, faults

    backend = "eager" if on == "eager" else "triton"
    found: dict[str, Any] = {"results": {}, "faults": [], "kernels": set()}
    kernels = interpreted
    with ExitStack() as stack:
        if " " in on:
            arch, schedule = on.split()
            options = Options(schedule=schedule)
            kernels = compiled_for(int(arch), options)
            emulator = stack.enter_context(emulated(int(arch), options))
            stack.enter_context(on_cpu())
        for name, case in cases():
            found["results"][name] = case(backend)
        if " " in on:
            found["kernels"] = {launch.kernel for launch in emulator.launches}
            found["faults"] = faults(emulator.findings)
    for level in LEVELS:
        with in_software(kernels):
            found["results"][f"train {level}"] = train(level, backend)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--interpreted", action="store_true")
    which.add_argument("--compiled", nargs="+")
    args = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = str(int(args.interpreted))
    driver.load()  # before torch
    import torch

    names = ["eager", "interpreter"] if args.interpreted else args.compiled
    torch.save({name: results(name) for name in names}, args.out)


if __name__ == "__main__":
    main()

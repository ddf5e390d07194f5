"""The calls of all samples of all operations, launched by Triton's launcher, and checked.

    cd tests && TRITON_INTERPRET=0 python -m gpuless.launcher.samples

Prints a JSON object for each operation: how many launches there were, and what was wrong.
"""

import json
from unittest import mock

from gpuless.launcher import libcuda

CUDA = libcuda.load()  # before torch

import torch  # noqa: E402
from gpuless.fake_cuda import in_software  # noqa: E402
from torch import Tensor  # noqa: E402

from tritonamp.kernels._implementations import Implementations, operations  # noqa: E402
from tritonamp.kernels._launch import Launch  # noqa: E402

SCRATCH = [0, 0]  # what Triton adds: memory of the whole grid and for profiles, here none
HALVES = [torch.float16, torch.bfloat16]


def faults(launch: Launch, tensors: tuple[Tensor, ...], seen: list[libcuda.Launched]) -> list[str]:
    """Return what differs between a launch and what libcuda was asked for."""
    name = launch.kernel.__name__
    if len(seen) != 1:
        return [f"{name}: {len(seen)} launches"]
    addresses = [tensor.data_ptr() for tensor in tensors]
    expected = libcuda.Launched(
        kernel=name,
        grid=launch.grid,
        block=(32 * launch.num_warps, 1, 1),
        shared=launch._find(tensors).metadata.shared,
        stream=CUDA.stream,
        attributes=0,
        parameters=[*addresses, *map(rounded, launch.sizes), *SCRATCH],
    )
    return [
        f"{name}: {field} {got}, expected {want}"
        for field, got, want in zip(expected._fields, seen[0], expected, strict=True)
        if got != want
    ]


def rounded(size: float) -> float:
    """Return a size as the kernel gets it."""
    return libcuda.TYPES["f32"](size).value if isinstance(size, float) else size


def wrong_launches(operation: Implementations) -> list[str]:
    """Return the faults of the launches of an operation's samples."""
    found: list[str] = []
    call_launch = Launch.__call__

    def checked(launch: Launch, *given: Tensor) -> tuple[Tensor, ...]:
        before = len(CUDA.launches)
        results = call_launch(launch, *given)
        tensors = *launch.all_tensors(given), *results
        found.extend(faults(launch, tensors, CUDA.launches[before:]))
        return results

    with mock.patch.object(Launch, "__call__", checked):
        for sample in operation.samples:
            for call in sample.calls(torch.device("cuda"), HALVES):
                before = len(CUDA.launches)
                operation.triton_function(*call.args())
                if len(CUDA.launches) == before:
                    found.append(f"{sample.variant} {call.what}: no launch")
    return found


def main() -> None:
    with in_software(CUDA.launching):
        for name, operation in operations().items():
            before = len(CUDA.launches)
            wrong = wrong_launches(operation)
            launches = len(CUDA.launches) - before
            print(json.dumps({"operation": name, "launches": launches, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()

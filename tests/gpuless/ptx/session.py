"""What ``pytest --fake-cuda=ptx`` runs kernels on, and which findings fail a test."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import pytest
import torch
from gpuless.ptx.emulated import emulated
from gpuless.ptx.findings import Findings
from gpuless.ptx.machine import Options

if TYPE_CHECKING:
    from gpuless.fake_cuda import FakeCuda, Kernels


class Benign(NamedTuple):
    """Findings that are no faults.

    Attributes:
        kernel: regular expression of its name.
        kind: regular expression of what is found.
        reason: why no order of the threads changes a result.
    """

    kernel: str
    kind: str
    reason: str


LOADED_BY_ALL = (
    "global (read-after-write race|write-after-read race(, same values)?) of (warps|lanes)"
)
STORED_TWICE = "global write-write race, same values of (programs|warps|lanes)"
REDUNDANT = (
    "What is left of a tensor after whole vectors, or one number, has fewer elements than the "
    "program has threads: several load and compute the same, one of them stores. What the others "
    "have loaded goes nowhere."
)
COPIES = (
    "A tile with fewer elements than the program has threads is held more than once: all its "
    "copies are stored, and have the same bits. Where they differ, that is another kind."
)
FLAG = "Whoever finds an overflow stores a 1, and nobody anything else."
UPDATES = "update_kernel|muon_prepare_kernel"
BENIGN = [
    Benign("decide_kernel|count_steps_kernel", LOADED_BY_ALL, REDUNDANT),
    Benign(f"{UPDATES}|ema_kernel", LOADED_BY_ALL, REDUNDANT),
    Benign(f"{UPDATES}|cast_kernel", STORED_TWICE, FLAG),
    Benign(".*", "shared write-write race, same values of (warps|lanes)", COPIES),
    Benign("add_kernel", LOADED_BY_ALL, REDUNDANT),  # of tests/kernels/test_multi_tensor.py
]


def faults(findings: Findings) -> list[str]:
    """Return what was found and is not benign."""
    return [
        str(finding)
        for finding in findings.values()
        if not any(
            re.fullmatch(b.kernel, finding.kernel) and re.fullmatch(b.kind, finding.kind)
            for b in BENIGN
        )
    ]


def on_the_gpu(config: pytest.Config) -> "Kernels":
    """Return what runs kernels on the GPU in software as the command line says."""
    chosen = config.option
    return compiled_for(chosen.arch, Options(schedule=chosen.schedule, jitter=chosen.jitter))


def compiled_for(arch: int, options: Options) -> "Kernels":
    """Return what runs kernels on the GPU in software; it raises where something was found."""

    @contextlib.contextmanager
    def kernels(gpu: "FakeCuda") -> Iterator[None]:
        def submit(name: str, work: Callable[[], None]) -> None:
            gpu.launches.append(name)
            gpu.do(work)

        with (
            emulated(arch, options, submit) as emulator,
            mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(arch, 10)),
        ):
            yield
        found = faults(emulator.findings)
        assert not found, "\n".join(found)

    return kernels

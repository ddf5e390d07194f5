"""What kernels of peers move and execute beside ours, counted by one machine, and their errors.

    python bench/counts.py --peers --only "softmax n=1024"

A process for each peer: some patch torch for everybody. Kernels run in the emulator of
tests/gpuless/ptx, compiled for sm_90. Torch's own kernels, which it cannot run, count as a launch
that reads and writes each operand once.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # the emulator is the tests'

from gpuless import driver

driver.load()  # before torch

import numpy as np
import roofline
import steps
import torch
import torch.nn.functional as F
import triton
from gpuless import tensors
from gpuless.fake_cuda import FakeCuda, in_software
from gpuless.ptx.emulated import Emulator, Launch, emulated
from gpuless.ptx.machine import Options
from gpuless.ptx.regions import extent
from peer_cases import CHECKED, COUNTED, GRADIENT, HALF, Question, questions
from torch import Tensor

ARCH = 90
PROGRAMS = 4
SCALES = 1.0, 2.0**16


def middles(total: int) -> np.ndarray:
    """Return numbers of programs that stand for all; the last ones often have less to do."""
    count = min(total, PROGRAMS)
    return ((np.arange(count) + 0.5) * total / count).astype(int)


COUNTING = Options(accesses=True, races=False, programs=middles)
CHECKING = Options(races=False)
CUDA = torch.device("cuda", 0)
NO_KERNEL = {"_local_scalar_dense", "is_pinned", "detach", "set_", "_reshape_alias"}
WRITTEN_ONLY = {"copy_", "fill_", "zero_"}

Row = dict[str, Any]


class Machine:
    """The GPU in software, and what runs on it.

    Attributes:
        emulator: of kernels.
        own: bytes that operations of torch itself move, by name; "launches" of them.
        gems: by name of an operation, what FlagGems has in its place.
        refused: of these, those that do not compile.
    """

    def __init__(self) -> None:
        self.own: list[tuple[str, int]] = []
        self.gems: dict[str, Callable[..., Any]] = {}
        self.refused: dict[str, str] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        run = tensors.run

        @contextlib.contextmanager
        def kernels(gpu: FakeCuda) -> Iterator[None]:
            def submit(name: str, work: Callable[[], None]) -> None:
                gpu.do(work)

            with emulated(ARCH, COUNTING, submit) as self.emulator:
                yield

        def watched(gpu: Any, func: Any, args: Any, kwargs: Any) -> Any:
            return self._run(run, gpu, func, args, kwargs)

        def by_torch(func: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(self, "gems", {}):
                return watched(tensors.CudaTensor.gpu, func, args, kwargs)

        self.by_torch = by_torch
        with in_software(kernels), mock.patch.object(tensors, "run", watched):
            yield

    def _run(self, run: Any, gpu: Any, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        key = f"{name}.{func._schema.overload_name}".rstrip(".")
        on_gpu = any(isinstance(x, tensors.CudaTensor) for x in tensors._tensors(args, kwargs))
        on_gpu |= torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if on_gpu and key in self.gems and key not in self.refused:
            try:
                with tensors.FakeCudaMode():
                    return self.gems[key](*args, **kwargs)
            except triton.CompilationError as error:
                self.refused[key] = str(error)
        result = run(gpu, func, args, kwargs)
        moved = _operands(func, name, args, kwargs, result)
        if moved is not None:
            self.own.append((key, moved))
        return result

    def clear(self) -> None:
        self.own.clear()
        self.emulator.launches.clear()
        self.emulator.findings.clear()


def _operands(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the bytes of an operation's operands; None where no kernel of torch runs."""
    aliases = [r.alias_info for r in func._schema.returns]
    views = any(info is not None and not info.is_write for info in aliases)
    if views or name in NO_KERNEL or "empty" in name:
        return None
    given = tensors._tensors(args, kwargs)[name in WRITTEN_ONLY :]
    results = result if isinstance(result, tuple | list) else [result]
    moved = [x for x in [*given, *results] if isinstance(x, tensors.CudaTensor)]
    return sum(extent(x) for x in moved) if moved else None


@contextlib.contextmanager
def of_peer(peer: str, machine: Machine) -> Iterator[None]:
    """Do what has to be done once for a peer."""
    with contextlib.ExitStack() as stack:
        if peer == "compile":
            from inductor import without_gpu

            stack.enter_context(without_gpu(ARCH))
        if peer == "FlagGems":
            os.environ["GEMS_VENDOR"] = "nvidia"
            import flag_gems

            whole = flag_gems.rms_norm  # the dispatcher finds it before torch takes it to pieces
            from flag_gems.utils.codegen_config_utils import get_codegen_config

            get_codegen_config().prefer_block_pointer = False  # Triton 3.8 refuses its use of them
            machine.gems = {entry[0]: entry[1] for entry in flag_gems._FULL_CONFIG}
            stack.enter_context(mock.patch.object(F, "rms_norm", whole))
            redispatch = machine.by_torch
            stack.enter_context(mock.patch.object(torch._ops.OpOverload, "redispatch", redispatch))
        yield


def given(question: Question, elements: int, half_weights: bool) -> list[Tensor | None]:
    """Return the inputs on the CPU, as the peer takes them."""
    torch.manual_seed(0)
    found = question.inputs(elements)
    return [
        x.to(HALF) if half_weights and x is not None and x.is_floating_point() else x for x in found
    ]


def leaves(found: list[Tensor | None], move: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    return [
        None if x is None else move(x).requires_grad_(x.is_floating_point()) for x in found
    ]


def gradients(results: list[Tensor], scale: float, loss: bool) -> list[Tensor]:
    """Return what comes from above, in the dtypes of results: the same for everybody."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for y in results:
        above = torch.ones(()) if loss else torch.randn(y.shape, generator=generator) * GRADIENT
        found.append(tensors.wrap((above * scale).to(y.dtype)))  # no copy that would be counted
    return found


def _results(forward: Any, inputs: list[Tensor | None], loss: bool) -> list[Tensor]:
    """Return what a peer computes; a loss in FP32, as what is scaled is."""
    found = _listed(forward(tuple(inputs)))
    return [found[0].float()] if loss else found


def _listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _wanted(inputs: list[Tensor | None]) -> list[Tensor]:
    return [x for x in inputs if x is not None and x.requires_grad]


def counted(question: Question, peer: str, machine: Machine) -> Iterator[Row]:
    """Count forward and backward on ``COUNTED`` elements, by some programs of each launch."""
    make, half = question.peers[peer]
    host, machine.emulator.options = given(question, COUNTED, half), COUNTING
    elements, inputs = _elements(question, host), leaves(host, lambda x: x.to(CUDA))
    forward = make(CUDA)
    machine.clear()
    started = time.time()
    results = _results(forward, inputs, question.loss)
    if not question.both:
        yield _row(f"{question.name} forward", peer, elements, machine, started)
        machine.clear()
        started = time.time()
    if question.op != "sum":
        above = gradients(results, SCALES[1], question.loss)
        torch.autograd.grad(results, _wanted(inputs), above)
        name = f"{question.name} {'both' if question.both else 'backward'}"
        yield _row(name, peer, elements, machine, started)
    machine.clear()


def _elements(question: Question, host: list[Tensor | None]) -> int:
    if question.both:
        assert host[0] is not None
        return host[0].shape[0] * question.n
    return max(x.numel() for x in host if x is not None)


def _row(case: str, peer: str, elements: int, machine: Machine, started: float) -> Row:
    launches = machine.emulator.launches
    kernels = [_kernel(launch) for launch in launches]
    own = sum(moved for _, moved in machine.own)
    ran = roofline.Work(elements, kernels, [moved for _, moved in machine.own])
    requests = {kind: _over_all(launches, "requests", kind) for kind in ("ld", "st")}
    sectors = {kind: _over_all(launches, "sectors", kind) for kind in ("ld", "st")}
    return {
        "case": case,
        "peer": peer,
        "bytes": round((sum(k["bytes"] for k in kernels) + own) / elements, 3),
        "asked": round(sum(k["asked"] for k in kernels) / elements, 3),
        "instructions": round(sum(k["instructions"] for k in kernels) / elements, 3),
        "sectors_load": round(sectors["ld"] / max(requests["ld"], 1), 2),
        "sectors_store": round(sectors["st"] / max(requests["st"], 1), 2),
        "launches": len(kernels) + len(machine.own),
        "by_torch": sorted({name for name, _ in machine.own}),
        "limit": roofline.limit(ran),
        "roofline": roofline.estimates(ran),
        "seconds": round(time.time() - started, 2),
        "kernels": kernels,
    }


def _over_all(launches: list[Launch], what: str, kind: str) -> float:
    return sum(getattr(launch.counters, what)[kind] / launch.share for launch in launches)


def _kernel(launch: Launch) -> Row:
    counters, share = launch.counters, launch.share
    built = roofline.built(launch.program.text, ARCH)
    moved = sum(size * (2 if kind == "atom" else 1) for kind, size in launch.bytes.items())
    return {
        "kernel": launch.kernel,
        "grid": launch.grid,
        "warps": launch.program.kernel.threads // 32,
        "shared": launch.shared,
        **built._asdict(),
        "bytes": round(moved),
        "asked": round(32 * sum(counters.sectors.values()) / share),
        "instructions": round(32 * sum(counters.instructions.values()) / share),
    }


def adam(peer: str, machine: Machine) -> Iterator[Row]:
    """Count a step of AdamW; by all programs, since tables say what is whose."""
    machine.emulator.options = Options(accesses=True, races=False)
    work = steps.adamw(peer, parameters_of_adam, CUDA)
    work.calls[0]()  # state is there from then on
    machine.clear()
    started = time.time()
    work.calls[0]()
    elements = sum(p.numel() for p in parameters_of_adam().parameters())
    yield _row("AdamW step", peer, elements, machine, started)
    machine.clear()


def parameters_of_adam() -> torch.nn.Module:
    return torch.nn.ModuleList([torch.nn.Linear(1024, 512), torch.nn.Linear(512, 1000)])


def checked(question: Question, peer: str, machine: Machine) -> Row:
    """Hold results and gradients against FP64, at both loss scales."""
    make, half = question.peers[peer]
    host, machine.emulator.options = given(question, CHECKED, half), CHECKING
    exact_inputs = leaves(host, lambda x: x.double() if x.is_floating_point() else x)
    exact = _listed(question.exact(tuple(exact_inputs)))
    row: Row = {"case": question.name, "peer": peer, "rows": exact_inputs[0].shape[0]}
    for scale in SCALES:
        inputs = leaves(host, lambda x: x.to(CUDA))
        results = _results(make(CUDA), inputs, question.loss)
        row["forward"] = max(
            largest_error(y.detach().cpu(), z.detach()) for y, z in zip(results, exact, strict=True)
        )
        if question.op == "sum":
            continue
        above = gradients(results, scale, question.loss)
        same = [g.cpu().double() for g in above]  # before somebody writes into them
        should = torch.autograd.grad(exact, _wanted(exact_inputs), same, retain_graph=True)
        got = [g.cpu() for g in torch.autograd.grad(results, _wanted(inputs), above)]
        rounded = [s.to(g.dtype) for g, s in zip(got, should, strict=True)]
        row[f"scale {scale:g}"] = {
            "not_finite": sum(int((~g.isfinite()).sum()) for g in got) / sum(g.numel() for g in got),
            "zeroed": zeroed(got, should),
            "zeroed_by_rounding": zeroed(rounded, should),
            "error": max(map(largest_error, got, should)),
            "error_by_rounding": max(map(largest_error, rounded, should)),
        }
    machine.clear()
    return row


def zeroed(got: Any, exact: Any) -> float:
    """Return the share of entries that are 0 where FP64 is not."""
    lost = sum(int(((g == 0) & (s != 0)).sum()) for g, s in zip(got, exact, strict=True))
    return lost / max(1, sum(int((s != 0).sum()) for s in exact))


def largest_error(got: Tensor, exact: Tensor) -> float:
    """Return the largest relative error among entries of at least the median magnitude."""
    size = exact.abs()
    large = size >= size.median()
    error = ((got.double() - exact).abs() / size.clamp(min=1e-300))[large]
    return float(error.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def child(peer: str, only: str, path: Path, errors: bool) -> None:
    """Count what one peer does, and append a line for each row."""
    machine = Machine()
    with path.open("a") as lines, machine.running(), of_peer(peer, machine):

        def tell(row: Row) -> None:
            print(json.dumps(row), file=lines, flush=True)

        def attempt(name: str, rows: Callable[[], Iterator[Row]]) -> None:
            started = time.time()
            try:
                for row in rows():
                    tell(row)
            except Exception as error:  # a peer can fail in any way; the others go on
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                tell({"case": name, "peer": peer, "reason": reason})
            print(f"{peer}: {name} {time.time() - started:.1f} s", flush=True)

        if peer in ("tritonamp", "optimi") and re.search(only, "AdamW step"):
            attempt("AdamW step", lambda: adam(peer, machine))
        for question in questions():
            if peer not in question.peers or not re.search(only, question.name):
                continue
            attempt(question.name, lambda q=question: counted(q, peer, machine))
            if errors:
                attempt(question.name, lambda q=question: iter([checked(q, peer, machine)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("peer")
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-errors", action="store_true")
    args = parser.parse_args()
    child(args.peer, args.only, args.path, not args.no_errors)

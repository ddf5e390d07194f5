"""Bytes, instructions and errors of peers' kernels and of ours, counted in one emulator.

    python bench/counts.py --peers --only "softmax n=1024"

This file starts a process for each peer, because some peers patch torch. Kernels are compiled for
sm_90 and run in the emulator of tests/gpuless/ptx. The emulator cannot run torch's own kernels, so
each counts as a launch that reads and writes each operand once.
"""

import argparse
import functools
import json
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import peer_machine  # before torch
import provenance
import roofline
import torch
import update_rows
from case import Case
from gpuless.ptx.emulated import Launch
from matrix import all_cases
from op_cases import LOSS_SCALE, results_of, wanted
from peer_cases import Question, questions
from peer_errors import checked, gradients, host_inputs, moved
from peer_machine import ARCH, COUNTING, COUNTING_ALL, CUDA, Machine, of_peer

Row = dict[str, Any]
WITH_ADAM = "tritonamp", "optimi"


def counted(question: Question, peer: str, machine: Machine) -> Iterator[Row]:
    """Count forward and backward, by some programs of each launch."""
    host = host_inputs(question, peer, question.counted)
    machine.emulator.options = COUNTING
    elements, inputs = _elements(question, host), moved(host, lambda x: x.to(CUDA))
    forward = question.op.forward_of(peer, CUDA)
    machine.clear()
    started = time.time()
    results = results_of(forward, inputs)
    if not question.both:
        yield _row(f"{question.name} forward", peer, elements, machine, started)
        machine.clear()
        started = time.time()
    if question.has_backward:
        above = gradients(results, LOSS_SCALE)
        torch.autograd.grad(results, wanted(inputs), above)
        name = f"{question.name} {'both' if question.both else 'backward'}"
        yield _row(name, peer, elements, machine, started)
    machine.clear()


def _elements(question: Question, host: list[Any]) -> int:
    if question.both:  # logits, which nobody is given
        return host[0].shape[0] * question.n
    return max(x.numel() for x in host if x is not None)


def adam(peer: str, machine: Machine) -> Iterator[Row]:
    """Count a step of AdamW by all programs, because the programs of a list of tensors differ."""
    machine.emulator.options = COUNTING_ALL
    work = update_rows.stepping(*update_rows.ADAMWS[peer], _parameters, CUDA)
    work.calls[0]()  # state is there from then on
    machine.clear()
    started = time.time()
    work.calls[0]()
    elements = sum(p.numel() for p in _parameters().parameters())
    yield _row("AdamW step", peer, elements, machine, started)
    machine.clear()


def _parameters() -> torch.nn.Module:
    return torch.nn.ModuleList([torch.nn.Linear(1024, 512), torch.nn.Linear(512, 1000)])


def _row(case: str, peer: str, elements: int, machine: Machine, started: float) -> Row:
    launches, own = machine.emulator.launches, [moved for _, moved in machine.own]
    kernels = [_kernel(launch) for launch in launches]
    ran = roofline.Work(elements, kernels, own)

    def of_all(what: str, kind: str) -> float:
        return sum(getattr(launch.counters, what)[kind] / launch.share for launch in launches)

    return {
        "case": case,
        "peer": peer,
        "elements": elements,
        "bytes": round((sum(k["bytes"] for k in kernels) + sum(own)) / elements, 3),
        "asked": round(sum(k["asked"] for k in kernels) / elements, 3),
        "instructions": round(sum(k["instructions"] for k in kernels) / elements, 3),
        "sectors_load": round(of_all("sectors", "ld") / max(of_all("requests", "ld"), 1), 2),
        "sectors_store": round(of_all("sectors", "st") / max(of_all("requests", "st"), 1), 2),
        "launches": len(kernels) + len(own),
        "by_torch": sorted({name for name, _ in machine.own}),
        "limit": roofline.limit(ran),
        "roofline": roofline.estimates(ran),
        "seconds": round(time.time() - started, 2),
        "kernels": kernels,
    }


def _kernel(launch: Launch) -> Row:
    counters = launch.counters
    moved = sum(size * (2 if kind == "atom" else 1) for kind, size in launch.bytes.items())
    return {
        "kernel": launch.kernel,
        "grid": launch.grid,
        "warps": launch.program.kernel.threads // 32,
        "shared": launch.shared,
        **roofline.built(launch.program.text, ARCH)._asdict(),
        "bytes": round(moved),
        "asked": round(32 * sum(counters.sectors.values()) / launch.share),
        "instructions": round(32 * sum(counters.instructions.values()) / launch.share),
    }


def calls(peer: str, machine: Machine) -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
    """Yield the peer's calls of all cases of this folder at toy size, to check that they run."""

    def call(case: Case) -> Iterator[Row]:
        torch.manual_seed(0)
        machine.emulator.options = peer_machine.CHECKING
        case.peers[peer](CUDA).calls[0]()
        machine.clear()
        yield {"case": case.name, "peer": peer, "called": True}

    for case in all_cases(toy=True):
        if peer in case.peers and case.group != "training step":
            yield case.name, functools.partial(call, case)


def counts(peer: str, machine: Machine) -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
    """Yield names of cases with the functions that count or check them."""
    if peer in WITH_ADAM:
        yield "AdamW step", lambda: adam(peer, machine)
    for question in questions():
        if peer in question.peers:
            yield question.name, functools.partial(counted, question, peer, machine)
            yield question.name, functools.partial(checked, question, peer, machine)


def count_to_file(peer: str, only: str, path: Path, what: Any) -> None:
    """Run one peer's cases, and append a line for each row."""
    machine = Machine()
    with path.open("a") as lines, machine.running(), of_peer(peer, machine):

        def write_row(row: Row) -> None:
            print(json.dumps(row), file=lines, flush=True)

        for name, rows in what(peer, machine):
            if not re.search(only, name):
                continue
            started = time.time()
            try:
                for row in rows():
                    write_row(row)
            except Exception as error:  # a peer can fail in any way; the others go on
                traceback.print_exc(limit=-2)
                write_row({"case": name, "peer": peer, "reason": provenance.reason_of(error)})
            print(f"{peer}: {name} {time.time() - started:.1f} s", flush=True)
        for name, reason in machine.refused.items():
            write_row(
                {"peer": peer, "reason": f"{name} is torch's, its own does not compile: {reason}"}
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("peer")
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--calls", action="store_true", help="of all cases, at toy size")
    args = parser.parse_args()
    count_to_file(args.peer, args.only, args.path, calls if args.calls else counts)

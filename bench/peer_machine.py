"""The GPU in software, which runs and counts Triton kernels, and counts torch's own kernels.

Torch's own kernels cannot run there. Their operations are computed on the CPU, and each counts as
one launch that moves each operand once.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import software_gpu  # noqa: F401  before torch
import torch
import torch.nn.functional as F
import triton
from gpuless import tensors
from gpuless.fake_cuda import FakeCuda, in_software
from gpuless.nested import tensors_of
from gpuless.ptx.emulated import Emulator, emulated
from gpuless.ptx.machine import Options
from gpuless.ptx.regions import extent

ARCH = 90
CUDA = torch.device("cuda", 0)
PROGRAMS = 4  # of each launch
NO_KERNEL = {"_local_scalar_dense", "is_pinned", "detach", "set_", "_reshape_alias"}
WRITTEN_ONLY = {"copy_", "fill_", "zero_"}
PICKS = {"nll_loss2d_forward", "nll_loss_forward", "gather", "index", "index_select", "embedding"}


def middles(total: int) -> np.ndarray:
    """Return the numbers of programs to run instead of all, not the last ones, which do less."""
    count = min(total, PROGRAMS)
    return ((np.arange(count) + 0.5) * total / count).astype(int)


COUNTING = Options(accesses=True, races=False, programs=middles)
COUNTING_ALL = Options(accesses=True, races=False)
CHECKING = Options(races=False)


class Machine:
    """The GPU in software, with records of what ran on it.

    Attributes:
        emulator: emulator of kernels, whose options choose the programs that run and the counters.
        own: names of torch's own kernels, with the bytes of their operands.
        gems: FlagGems' replacements by name of the operation.
        refused: operations of ``gems`` that Triton does not compile, with reasons.
    """

    emulator: Emulator

    def __init__(self) -> None:
        self.own: list[tuple[str, int]] = []
        self.gems: dict[str, Callable[..., Any]] = {}
        self.refused: dict[str, str] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._torchs = tensors.run

        @contextlib.contextmanager
        def kernels(gpu: FakeCuda) -> Iterator[None]:
            def submit(name: str, work: Callable[[], None]) -> None:
                gpu.do(work)

            with emulated(ARCH, COUNTING, submit) as self.emulator:
                yield

        with in_software(kernels), mock.patch.object(tensors, "run", self._run):
            yield

    def clear(self) -> None:
        self.own.clear()
        self.emulator.launches.clear()
        self.emulator.findings.clear()

    def by_torch(self, func: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace ``OpOverload.redispatch``, by which FlagGems leaves an operation to torch."""
        with mock.patch.object(self, "gems", {}):
            return self._run(tensors.CudaTensor.gpu, func, args, kwargs)

    def _run(self, gpu: Any, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        key = f"{name}.{func._schema.overload_name}".rstrip(".")
        random = torch.Tag.nondeterministic_seeded in func.tags  # its state is a real GPU's
        replaced = key in self.gems and key not in self.refused
        if replaced and not random and _on_gpu(args, kwargs):
            try:
                with tensors.FakeCudaMode():
                    return self.gems[key](*args, **kwargs)
            except triton.CompilationError as error:
                self.refused[key] = " ".join(str(error).split())[-200:]
        result = self._torchs(gpu, func, args, kwargs)
        moved = _operands(func, name, args, kwargs, result)
        if moved is not None:
            self.own.append((key, moved))
        return result


def _on_gpu(args: Any, kwargs: Any) -> bool:
    given = tensors_of([*args, *kwargs.values()])
    if any(isinstance(x, tensors.CudaTensor) for x in given):
        return True
    return torch.device(kwargs.get("device") or "cpu").type == "cuda"


def _operands(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the bytes of an operation's operands; None if it runs no kernel of torch."""
    aliases = [r.alias_info for r in func._schema.returns]
    views = any(info is not None and not info.is_write for info in aliases)
    if views or name in NO_KERNEL or "empty" in name:
        return None
    outs = {a.name for a in func._schema.arguments if a.is_out}  # written, not read
    named = (value for key, value in kwargs.items() if key not in outs)
    given = tensors_of([*args, *named])[name in WRITTEN_ONLY :]
    results = list(result) if isinstance(result, tuple | list) else [result]
    if name in PICKS:  # reads as much of its first operand as it returns
        given[0] = results[0]
    moved = [x for x in [*given, *results] if isinstance(x, tensors.CudaTensor)]
    return sum(map(extent, moved)) if moved else None


@contextlib.contextmanager
def of_peer(peer: str, machine: Machine) -> Iterator[None]:
    """Make a peer's own kernels run inside the block, as they would on a GPU."""
    with contextlib.ExitStack() as stack:
        if peer == "compile":
            from inductor import without_gpu

            stack.enter_context(without_gpu(ARCH))
        if peer == "FlagGems":
            os.environ["GEMS_VENDOR"] = "nvidia"
            import flag_gems
            from flag_gems.utils.codegen_config_utils import get_codegen_config

            get_codegen_config().prefer_block_pointer = False  # Triton 3.8 refuses its use of them
            machine.gems = {entry[0]: entry[1] for entry in flag_gems._FULL_CONFIG}
            for owner, name, value in (
                (F, "rms_norm", flag_gems.rms_norm),  # before torch takes it to pieces
                (torch._ops.OpOverload, "redispatch", lambda *a, **k: machine.by_torch(*a, **k)),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
        if peer == "optimi":
            import optimi.utils

            name = "_foreach_supported_types"  # of tensors that are on a GPU
            types = [*getattr(optimi.utils, name), tensors.CudaTensor]
            stack.enter_context(mock.patch.object(optimi.utils, name, types))
        yield

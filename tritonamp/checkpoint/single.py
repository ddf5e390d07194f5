"""Checkpoints in one file that is replaced as a whole, verifies itself and keeps its predecessor.

A save, in this order, so that whatever instant a kill or power loss picks, the old or the new
checkpoint loads:
    write <path>.saving-<random>, fsync     a name of its own: concurrent savers never share a file
    hard link <path> as <that>.prev         where links are refused: rename <path> to <path>.prev
    rename <path>.saving-<random> to <path>
    rename <that>.prev to <path>.prev       only now: a damaged <path> must not cost the good one
    before it fsync the folder
"""

import os
import warnings
from contextlib import suppress
from typing import Any

from tritonamp.checkpoint import durable
from tritonamp.checkpoint.agreement import gather, on_all_ranks
from tritonamp.checkpoint.content import collect
from tritonamp.checkpoint.in_place import load_into
from tritonamp.kernels.device import rank


def save(path: str | os.PathLike[str], **objects: Any) -> None:
    """Write `objects` under their names to the one file `path`, keeping the old as `<path>.prev`.

    An object is anything with `state_dict()`, a tensor (stored detached; dtype, strides and shared
    storage are kept), None, bool, int, float, complex, str, torch.dtype, torch.device, torch.Size,
    or a list, tuple or dict of these. With torch.distributed initialised, call it on every rank:
    rank 0's objects are written, and all return after that. Where the Amp of a stage of a pipeline
    is among them, a file is written for each path, by the first rank that gives it.

    `load(path, model=model, ...)` puts everything back, `load(path)` returns it. Once it has
    returned, the file is on the disk; at every instant before, `load` gives the old or the new
    checkpoint, complete. An error before the new one is in place leaves the folder
    as it was. A kill may leave a `<path>.saving-*`, which a save ten minutes later removes. Raises,
    before anything is written, ValueError (no objects, or the key path of a value that cannot be
    stored), IsADirectoryError or FileNotFoundError (unusable `path`); later OSError as the system
    gave it (disk full). An error on one rank is raised there, and on the others as a RuntimeError
    with its text.
    """
    call = f"save({path!r})"
    with on_all_ranks(call):
        if not objects:
            raise ValueError(
                f"{call} got nothing to save; name the objects, as in save(path, model=model)"
            )
        content = collect(objects)
        target = os.path.realpath(path)
    # an Amp says whether its model is a stage of a pipeline
    own = target if any(getattr(o, "_is_stage", False) for o in objects.values()) else ""
    writes = gather(own).index(own) == rank()
    with on_all_ranks(call):
        if writes:
            _commit(target, content)


def load(path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
    """Load what `save` wrote to `path` into `objects`, and return the rest by name.

        saved = tritonamp.load("run.pt", model=model, optimizer=optimizer, amp=amp, rng=rng)
        first_epoch = saved["epoch"]

    Without `objects` everything is returned: state dicts, plain values, tensors on the CPU. With
    them, each (or each in a list, tuple or dict, as they were saved) loads its own state, in the
    order they need, whatever the order of the names: models, optimizers, the Amp, all others,
    RNGState. Every state in the file wants its object; None has it returned as it is.

    The checksum is verified and unpickling is `weights_only`. If `path` is damaged or missing and
    `<path>.prev` is good, gives that one, with a RuntimeWarning naming both. No collectives: under
    torch.distributed every rank reads. Raises FileNotFoundError if neither file exists,
    RuntimeError saying what is wrong with each if neither is usable, IsADirectoryError for a
    folder. With `objects`, before anything is changed, ValueError listing names, keys or shapes
    that are only on one side; and RuntimeError where an object refuses its state after others have
    loaded theirs, saying which.
    """
    content = _read_newest(path)
    if objects:
        load_into(content, objects, f"load({os.fspath(path)!r})")
    return {name: state for name, state in content.items() if objects.get(name) is None}


def _read_newest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of the file, or, with a warning, of the one before it."""
    current = os.path.realpath(path)
    previous = current + ".prev"
    if os.path.isdir(current):
        raise IsADirectoryError(
            f"cannot load {current}: it is a folder; those are for load_sharded, name a file"
        )
    try:
        return _read(current)
    except Exception as error:  # a damaged file can make the unpickler raise anything
        fault = error
    try:
        content = _read(previous)
    except Exception as error:
        if isinstance(fault, FileNotFoundError) and isinstance(error, FileNotFoundError):
            raise FileNotFoundError(
                f"no checkpoint: neither {current} nor {previous} exists; check the path"
            ) from None
        if isinstance(fault, durable.WrittenByTorchError):
            raise RuntimeError(
                f"cannot load {current}: it was {fault}, so there is no checksum, and no order in "
                "which to load: saved = torch.load(path, weights_only=True), then, after "
                "tritonamp.enable, model.load_state_dict(...) before optimizer.load_state_dict(...)"
                "; tritonamp.save(path, model=model, optimizer=optimizer, amp=amp) from then on"
            ) from fault
        found = f"{current}: {fault}; {previous}: {error}"
        raise RuntimeError(
            f"no usable checkpoint ({found}); restore one from a copy or start afresh"
        ) from fault
    warnings.warn(
        f"{current} is unusable ({fault}); loaded the older {previous}",
        RuntimeWarning,
        stacklevel=3,
    )
    return content


def _read(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        return durable.read(file)


def _commit(target: str, content: dict[str, Any]) -> None:
    """Write and rename in the order of the module docstring."""
    folder = os.path.dirname(target)
    if os.path.exists(target) and not os.path.isfile(target):
        raise IsADirectoryError(
            f"cannot save to {target}: it is a folder or a device; name a file, or use "
            "save_sharded for a folder"
        )
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"cannot save to {target}: its folder does not exist; create it first"
        )
    durable.remove_leftovers(target, "*")
    fresh = durable.fresh_name(target)
    kept = fresh + ".prev"
    try:
        durable.write(fresh, content)
        try:
            os.link(target, kept)
        except OSError:
            if os.path.exists(target):
                os.replace(target, target + ".prev")
        os.replace(fresh, target)
        if os.path.exists(kept):
            os.replace(kept, target + ".prev")
    finally:
        for path in (fresh, kept):
            with suppress(OSError):
                os.unlink(path)
    durable.sync_folder(folder)

"""Checkpoints in one file that is replaced as a whole, verifies itself and keeps its predecessor.

A save takes these steps in this order, so that the old or the new checkpoint loads after a kill or
power loss at any instant:
    write <path>.saving-<random>, fsync     concurrent savers never share a file
    hard link <path> as <that>.prev         if links are refused: rename <path> to <path>.prev
    rename <path>.saving-<random> to <path>
    rename <that>.prev to <path>.prev       only now, because the new <path> might be damaged
    fsync the folder
"""

import os
from typing import Any

from tritonamp.checkpoint import durable
from tritonamp.checkpoint.agreement import gather, on_all_ranks
from tritonamp.checkpoint.content import collect
from tritonamp.checkpoint.in_place import load_into
from tritonamp.kernels.device import rank


def save(path: str | os.PathLike[str], **objects: Any) -> None:
    """Write `objects` under their names to one file, and keep the old one as `<path>.prev`.

    With torch.distributed, call it on every rank: rank 0 writes its objects, and all ranks return
    after that. For stages of a pipeline give each stage its own path; the first rank with a path
    writes it. When it returns, the file is on the disk. A kill or an error at any instant leaves
    the old or the new checkpoint complete. A kill may leave a `<path>.saving-*`, which a save at
    least ten minutes later removes.

    Args:
        path: path of the file.
        objects: objects with `state_dict()`; tensors (stored detached, with dtype, strides and
            shared storage); None, bool, int, float, complex, str, torch.dtype, torch.device,
            torch.Size; lists, tuples and dicts of all these.

    Raises:
        ValueError: no objects, or a value that cannot be stored; names its key path. Nothing was
            written.
        IsADirectoryError, FileNotFoundError: `path` is not usable.
        OSError: the system's error, such as a full disk.
        RuntimeError: another rank failed; has the text of its error.
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
    """Load a file of `save` into `objects`, and return the rest by name.

        saved = tritonamp.load("run.pt", model=model, optimizer=optimizer, amp=amp, rng=rng)
        first_epoch = saved["epoch"]

    The checksum is verified, and unpickling is `weights_only`. If `path` is damaged or missing and
    `<path>.prev` is good, that one is loaded, with a RuntimeWarning. Uses no collectives: under
    torch.distributed every rank reads.

    Args:
        path: path of the file.
        objects: objects by name, or lists, tuples and dicts of objects in the form in which they
            were saved. They load in the order they need: models, optimizers, the Amp, others,
            RNGState. With objects, every state in the file needs its object; None returns the
            state instead.

    Returns:
        state dicts and plain values without an object, with tensors on the CPU.

    Raises:
        FileNotFoundError: neither `path` nor `<path>.prev` exists.
        IsADirectoryError: `path` is a folder.
        RuntimeError: both files are damaged, or an object refused its state; names the objects
            that were loaded before.
        ValueError: names, keys or shapes differ; lists them. Nothing was changed.
    """
    content = _read_newest(path)
    if objects:
        load_into(content, objects, f"load({os.fspath(path)!r})")
    return {name: state for name, state in content.items() if objects.get(name) is None}


def _read_newest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of the file, or of <path>.prev, with a warning, if it is unusable."""
    current = os.path.realpath(path)
    if os.path.isdir(current):
        raise IsADirectoryError(
            f"cannot load {current}: it is a folder; those are for load_sharded, name a file"
        )
    try:
        return durable.newest([current, current + ".prev"], _read)
    except RuntimeError as error:
        fault = error.__cause__
        if not isinstance(fault, durable.WrittenByTorchError):
            raise
        raise RuntimeError(
            f"cannot load {current}: it was {fault}, so there is no checksum, and no order in "
            "which to load: saved = torch.load(path, weights_only=True), then, after "
            "tritonamp.enable, model.load_state_dict(...) before optimizer.load_state_dict(...)"
            "; tritonamp.save(path, model=model, optimizer=optimizer, amp=amp) from then on"
        ) from fault


def _read(path: str) -> dict[str, Any] | Exception:
    """Return the content of the file, or the error if it is unusable."""
    try:
        with open(path, "rb") as file:
            return durable.read(file)
    except Exception as error:  # a damaged file can make the unpickler raise anything
        return error


def _commit(target: str, content: dict[str, Any]) -> None:
    """Write and rename in the order that the module docstring gives."""
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
            durable.remove(path)
    durable.sync_folder(folder)

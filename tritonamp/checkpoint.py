"""Crash-safe checkpoints: one file that is replaced as a whole, verifies itself and keeps its predecessor.

Format: what `torch.save` writes, with its SHA-256 as the comment of the zip archive. Comments are part of that format:
`torch.load(path, weights_only=True)` reads the file as it is, and no sidecar can get lost or stale.

A save, in this order, so that whatever instant a kill or power loss picks, the old or the new checkpoint loads:
    write <path>.saving-<random>, fsync     a name of its own: concurrent savers never share a file
    hard link <path> as <that>.prev         where links are refused: rename <path> to <path>.prev
    rename <path>.saving-<random> to <path>
    rename <that>.prev to <path>.prev       only now: a damaged <path> must not cost the good one before it
    fsync the folder
"""

import errno
import glob
import hashlib
import os
import secrets
import sys
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

# Exact types, no more than torch's weights_only unpickler takes; it refuses subclasses (numpy.float64 is a float).
_SCALARS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


def save(path: str | os.PathLike[str], **objects: Any) -> None:
    """Write `objects` under their names to the one file `path`, keeping the checkpoint before it as `<path>.prev`.
    An object is anything with `state_dict()`, a tensor (stored detached; dtype, strides and shared storage are kept),
    None, bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, or a list, tuple or dict of these.
    With torch.distributed initialised, call it on every rank: rank 0's objects are written, and all return after that.

    Once it has returned, the file is on the disk; at every instant before, `load(path)` gives the old or the new
    checkpoint, complete. An error before the new one is in place leaves the folder as it was. A kill may leave a
    `<path>.saving-*`, which a save ten minutes later removes.
    Raises, before anything is written, ValueError (no objects, or the key path of a value that cannot be stored),
    IsADirectoryError or FileNotFoundError (unusable `path`); later OSError as the system gave it (disk full).
    An error on one rank is raised there, and on the others as a RuntimeError with its text.
    """
    with _on_all_ranks(path):
        if not objects:
            raise ValueError(f"save({path!r}) got nothing to save; name the objects, as in save(path, model=model)")
        content = {name: _plain(value, name, stateful=True) for name, value in objects.items()}
    with _on_all_ranks(path) as writes:
        if writes:
            _commit(os.path.realpath(path), content)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The objects that `save` wrote to `path`, by name: state dicts, plain values, tensors on the CPU.

    The checksum is verified and unpickling is `weights_only`. If `path` is damaged or missing and `<path>.prev` is
    good, gives that one, with a RuntimeWarning naming both. No collectives: under torch.distributed every rank reads.
    Raises FileNotFoundError if neither file exists, RuntimeError saying what is wrong with each if neither is usable.
    """
    current = os.path.realpath(path)
    previous = current + ".prev"
    try:
        return _read(current)
    except Exception as error:  # a damaged file can make the unpickler raise anything
        fault = error
    try:
        content = _read(previous)
    except Exception as error:
        if isinstance(fault, FileNotFoundError) and isinstance(error, FileNotFoundError):
            raise FileNotFoundError(f"no checkpoint: neither {current} nor {previous} exists; check the path") from None
        found = f"{current}: {fault}; {previous}: {error}"
        raise RuntimeError(f"no usable checkpoint ({found}); restore one from a copy or start afresh") from fault
    warnings.warn(f"{current} is unusable ({fault}); loaded the older {previous}", RuntimeWarning, stacklevel=2)
    return content


@contextmanager
def _on_all_ranks(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Gives whether this rank is the one that writes. Either every rank leaves the block, or every rank raises."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    error = None
    try:
        yield ranks == 1 or dist.get_rank() == 0
    except Exception as caught:
        error = caught
    texts: list[str | None] = [None] * ranks
    if ranks > 1:
        dist.all_gather_object(texts, f"{type(error).__name__}: {error}" if error is not None else None)
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
        raise RuntimeError(f"save({path!r}) failed on {'; '.join(failed)}")


def _plain(value: Any, where: str, stateful: bool = False) -> Any:
    """`value` in containers of our own, its tensors detached; ValueError naming `where` for what could not be loaded.
    Only `stateful` calls `state_dict()`: within a state dict it would hide an object that `load_state_dict` misses."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
        return value.detach()  # also drops attributes hung on a parameter, which may be anything
    if kind in _SCALARS and not (kind is int and value.bit_length() > 2032):
        return value
    if kind in (list, tuple):
        return kind(_plain(item, f"{where}[{i}]", stateful) for i, item in enumerate(value))
    if kind in (dict, OrderedDict, Counter):  # Counter: the milestones of MultiStepLR
        items = {_plain(k, f"a key of {where}"): _plain(v, f"{where}[{k!r}]", stateful) for k, v in value.items()}
        copy = kind(items)
        if kind is OrderedDict:  # Module.state_dict() hangs the modules' versions on it
            vars(copy).update(_plain(vars(value), f"vars({where})"))
        return copy
    if stateful and not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return _plain(value.state_dict(), f"{where}.state_dict()")
    raise ValueError(
        f"cannot save {where}: got {kind.__module__}.{kind.__qualname__}; allowed are tensors (no subclass, not on the "
        "meta device), None, bool, int (up to 2032 bits), float, complex, str, torch.dtype, torch.device, torch.Size, "
        "lists, tuples, dicts of these, and by name objects with state_dict(); convert it (.full_tensor()) or omit it"
    )


def _commit(target: str, content: dict[str, Any]) -> None:
    """The sequence of the module docstring."""
    folder = os.path.dirname(target)
    if os.path.exists(target) and not os.path.isfile(target):
        raise IsADirectoryError(f"cannot save to {target}: it is a folder or a device; name a file")
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"cannot save to {target}: its folder does not exist; create it first")
    _remove_leftovers(target)
    fresh = f"{target}.saving-{secrets.token_hex(8)}"
    kept = fresh + ".prev"
    try:
        _write(fresh, content)
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
    if os.name != "nt":  # which opens no folders
        _sync(folder)


def _remove_leftovers(target: str) -> None:
    """Of killed savers only: a running one writes to or links its files more often than every ten minutes."""
    for path in glob.glob(f"{glob.escape(target)}.saving-{'[0-9a-f]' * 16}*"):
        with suppress(OSError):
            if time.time() - os.stat(path).st_ctime > 600:
                os.unlink(path)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _write(path: str, content: dict[str, Any]) -> None:
    outer = sys.exc_info()[1]  # of a caller that saves in its except block
    with open(path, "x+b") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # over the error of a failed write torch raises one of its own
            raise error if error.__context__ in (None, outer) else error.__context__ from None
        file.write(_comment(file, file.seek(-2, os.SEEK_END)))
        file.flush()
        os.fsync(file.fileno())


def _read(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        end = max(file.seek(0, os.SEEK_END) - len(_comment(file, 0)), 0)
        file.seek(end)
        if file.read() != _comment(file, end):
            raise ValueError("checksum missing or wrong: cut off, changed on the disk, or not from tritonamp.save")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=False)  # no mmap: the file is open already


def _comment(file: BinaryIO, end: int) -> bytes:
    """The zip comment for `file[:end]`, behind its length (`torch.save`: two zero bytes). Leaves `file` at `end`."""
    sha256 = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(min(1 << 20, end - file.tell())):
        sha256.update(chunk)
    comment = b"tritonamp checkpoint 1, sha256 " + sha256.hexdigest().encode()
    return len(comment).to_bytes(2, "little") + comment

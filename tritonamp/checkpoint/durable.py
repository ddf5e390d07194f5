"""Files that verify themselves, and removal of files that killed writers left behind.

A file is that of `torch.save`, with its SHA-256 as the comment of the zip archive. So
`torch.load(path, weights_only=True)` reads it, and there is no second file that could get lost.
"""

import errno
import glob
import hashlib
import os
import secrets
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TypeVar

import torch

Content = TypeVar("Content")


def fresh_name(target: str) -> str:
    """Return a unique name next to `target`, because concurrent savers must not share a file."""
    return f"{target}.saving-{secrets.token_hex(8)}"


def remove_leftovers(target: str, suffix: str = "") -> None:
    """Remove files and folders named `fresh_name(target) + suffix` that killed savers left.

    Only those that did not change for ten minutes, because a running saver writes more often.
    `suffix` may be a glob pattern.
    """
    for path in glob.glob(f"{glob.escape(target)}.saving-{'[0-9a-f]' * 16}{suffix}"):
        with suppress(OSError):
            if time.time() - _last_change(path) > 600:
                remove(path)


def remove(path: str) -> None:
    """Remove a file or a folder, and ignore errors."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        os.unlink(path)


def _last_change(path: str) -> float:
    inside = [entry.path for entry in os.scandir(path)] if os.path.isdir(path) else []
    return max(os.stat(name).st_ctime for name in [path, *inside])


def sync_folder(folder: str) -> None:
    """Sync to the disk which files `folder` has, after files were created, renamed or removed."""
    if os.name == "nt":  # which opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def newest(paths: Sequence[str], read: Callable[[str], Content | Exception]) -> Content:
    """Return the content of the first usable one of ``paths``, and warn of unusable ones before.

    Call it in a function that the user's call calls, because the warning names the user's line.

    Args:
        paths: path of the checkpoint, then those of older ones.
        read: function that returns the content of a path, or the error if it is unusable. An error
            that ``read`` raises, such as that of a lost rank, says nothing about the checkpoints,
            and ends the search.

    Raises:
        FileNotFoundError: no path exists.
        RuntimeError: all are unusable; names the fault of each, and has the first one as its cause.
    """
    faults: dict[str, Exception] = {}
    for path in paths:
        found = read(path)
        if isinstance(found, Exception):
            faults[path] = found
            continue
        if faults:
            unusable = "; ".join(f"{name} is unusable ({fault})" for name, fault in faults.items())
            warnings.warn(f"{unusable}; loaded the older {path}", RuntimeWarning, stacklevel=4)
        return found
    if all(isinstance(fault, FileNotFoundError) for fault in faults.values()):
        raise FileNotFoundError(
            f"no checkpoint: neither {paths[0]} nor {paths[1]} exists; check the path"
        )
    wrong = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    raise RuntimeError(
        f"no usable checkpoint ({wrong}); restore one from a copy or start afresh"
    ) from faults[paths[0]]


class WrittenByTorchError(ValueError):
    """Raised for a complete file of ``torch.save``, which has no checksum."""


@contextmanager
def errors_of_writes() -> Iterator[None]:
    """Raise the error of a failed write instead of the one that ``torch.save`` raises over it."""
    outer = sys.exc_info()[1]  # of a caller that saves in its except block
    try:
        yield
    except RuntimeError as error:
        behind = error.__context__
        raise (error if behind in (None, outer) else behind) from None


def write(path: str, content: dict[str, Any]) -> None:
    """Write a new file, and sync it to the disk."""
    with open(path, "x+b") as file:
        with errors_of_writes():
            torch.save(content, file)
        file.write(_comment(file, file.seek(-2, os.SEEK_END)))
        file.flush()
        os.fsync(file.fileno())


def read(file: BinaryIO) -> dict[str, Any]:
    """Return the content of a file of `write`, with tensors on the CPU.

    Raises:
        ValueError: the file was changed, or ``torch.save`` wrote it.
        Exception: the error of unpickling, if the file has another format.
    """
    end = max(file.seek(0, os.SEEK_END) - len(_comment(file, 0)), 0)
    file.seek(end)
    if file.read() != _comment(file, end):
        if _is_of_torch_save(file):
            raise WrittenByTorchError("written by torch.save, not by tritonamp.save")
        raise ValueError(
            "checksum missing or wrong: cut off, changed on the disk, or not from tritonamp.save"
        )
    file.seek(0)
    # it is open already
    content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    return content


def _is_of_torch_save(file: BinaryIO) -> bool:
    """Return whether a file begins like one of ``torch.save`` and ends as a zip without comment."""
    file.seek(0)
    head = file.read(256)
    file.seek(-min(22, file.seek(0, os.SEEK_END)), os.SEEK_END)
    tail = file.read()
    is_zip = head.startswith(b"PK\3\4") and tail.startswith(b"PK\5\6") and tail.endswith(b"\0\0")
    return is_zip and b"/data.pkl" in head


def _comment(file: BinaryIO, end: int) -> bytes:
    """Return the length and the zip comment for `file[:end]`, and leave `file` at `end`.

    They replace the length that `torch.save` wrote, which is two zero bytes.
    """
    file.seek(0)
    comment = b"tritonamp checkpoint 1, sha256 " + sha256_of(file, end).encode()
    return len(comment).to_bytes(2, "little") + comment


def sha256_of(file: BinaryIO, end: int | None = None) -> str:
    """Return the SHA-256 of `file` from its current position to `end`."""
    sha256 = hashlib.sha256()
    while chunk := file.read(1 << 20 if end is None else min(1 << 20, end - file.tell())):
        sha256.update(chunk)
    return sha256.hexdigest()

"""torch.distributed.checkpoint over one folder, with hashed files and restricted unpickling.

Each rank hashes its bytes on their way to the disk. So no file is read again, the ranks share the
work, and the hash is that of the intended content, not of what a page cache returns.
"""

import hashlib
import io
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tritonamp.checkpoint.durable import errors_of_writes
from tritonamp.kernels.device import is_distributed, rank

METADATA = ".metadata"  # where torch.distributed.checkpoint says which tensor is in which file

_CLASSES = (  # all that a .metadata of torch 2.11 to 2.15 names
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.serialization._get_layout,
)


# filters of warnings belong to the process: threads that save would undo one another's
_one_at_a_time = threading.Lock()


def write(folder: str, content: dict[str, Any], call: str) -> dict[str, tuple[int, str]]:
    """Write `content` into a new folder: each rank its parts of DTensors, rank 0 the rest.

    Returns:
        size and SHA-256 of each file that this rank has written and synced to the disk.

    Raises:
        Exception: this rank's error, or a RuntimeError with the other ranks' errors. If one rank
            raises, all do.
    """
    writer = _FolderWriter(folder)
    # of what differs between ranks no mix
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    _agreed(
        call,
        lambda: save(content, storage_writer=writer, planner=planner, no_dist=not is_distributed()),
    )
    return writer.written


def read_metadata(files: "Folder") -> metadata.Metadata:
    """Return the table of which tensor is in which file.

    Raises:
        UnpicklingError: the file names other classes than those of such tables.
    """
    with files.open(METADATA) as stream:
        found = _MetadataUnpickler(stream).load()
    if not isinstance(found, metadata.Metadata):
        raise ValueError(f"{METADATA} holds {type(found).__name__}")
    return found


def read(files: "Folder", found: metadata.Metadata, tensors: dict[str, Tensor], call: str) -> None:
    """Fill `tensors`, which are whole or this rank's parts, by their names in the checkpoint.

    `found` is the result of `read_metadata`, and `call` the user's call, for messages.

    Raises:
        Exception: as `write`.
    """
    reader = _FolderReader(files, found)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _agreed(
        call,
        lambda: load(
            dict(tensors), storage_reader=reader, planner=planner, no_dist=not is_distributed()
        ),
    )


def _agreed(call: str, function: Callable[[], Any]) -> None:
    try:
        if is_distributed():
            function()
        else:
            with _one_at_a_time, warnings.catch_warnings():
                # as it should be
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                function()
    except CheckpointException as error:  # on all ranks
        failures = {number: failure[0] for number, failure in error.failures.items()}
        if rank() in failures:
            raise failures[rank()] from None
        texts = [
            f"rank {number}: {type(failure).__name__}: {failure}"
            for number, failure in failures.items()
        ]
        raise RuntimeError(f"{call} failed on {'; '.join(texts)}") from None


class Folder:
    """An open folder: reads go to the same folder even if another is renamed to its path."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY) if os.open in os.supports_dir_fd else None

    def open(self, name: str) -> BinaryIO:
        """Open a file of the folder for reading."""
        if self._descriptor is None:
            return open(os.path.join(self.path, name), "rb")
        return open(
            name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=self._descriptor)
        )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class _Stream(io.BufferedWriter):
    """A new file that hashes its content, and that `close` syncs to the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()


class _WrittenFiles(filesystem.FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with _Stream(path) as stream, errors_of_writes():
            yield stream
        self.written[path.name] = (os.stat(path).st_size, stream.sha256.hexdigest())

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[new_path.name] = self.written.pop(path.name)


class _FolderWriter(filesystem.FileSystemWriter):
    def __init__(self, folder: str) -> None:
        # streams sync themselves; torch 2.11 does it before flushing
        super().__init__(folder, sync_files=False)
        self.fs = files = _WrittenFiles()
        self.written = files.written

    def storage_meta(self) -> metadata.StorageMeta:
        return metadata.StorageMeta()  # not the path, which is about to change


class _ReadFiles(filesystem.FileSystem):
    def __init__(self, files: Folder) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._files.open(os.path.relpath(path, self._files.path)) as stream:
            yield stream


class _FolderReader(filesystem.FileSystemReader):
    def __init__(self, files: Folder, found: metadata.Metadata) -> None:
        super().__init__(files.path)
        self.fs = _ReadFiles(files)
        self._found = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self._found


class _MetadataUnpickler(pickle.Unpickler):
    """Loads only the classes of torch.distributed.checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        for known in _CLASSES:
            if (known.__module__, known.__qualname__) == (module, name):
                return known
        raise pickle.UnpicklingError(
            f"{METADATA} asks for {module}.{name}, which has no place in one"
        )

"""Commits a folder of parts as a sharded checkpoint, and verifies it when it is loaded.

The manifest is a file in the format of `save`. It holds size and SHA-256 of every other file, and
the saved objects with tensors on the meta device. A save takes these steps in this order, so that
the old or the new checkpoint loads after a kill at any instant:
    all ranks write their parts to <folder>.saving-<random>, fsync each, and agree that all have
        succeeded
    rank 0 writes the manifest, fsyncs it and the folder
    rename <folder>.prev to <another>.old
    rename <folder> to <folder>.prev        for an instant there is only .prev, because a rename
                                            cannot replace a folder
    rename <folder>.saving-<random> to <folder>
    fsync the folder around them
    remove <another>.old                    only now, because <folder> might be damaged
"""

import errno
import glob
import os
from contextlib import suppress
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from tritonamp.checkpoint import durable
from tritonamp.checkpoint.agreement import gather
from tritonamp.checkpoint.content import find_tensors, key_of
from tritonamp.checkpoint.distributed import METADATA, Folder, read_metadata
from tritonamp.kernels.device import rank, world_size

MANIFEST = "tritonamp.manifest"
_FORMAT = "tritonamp sharded checkpoint 1"


class Manifest(NamedTuple):
    """Expected files and content of a sharded checkpoint."""

    files: dict[str, tuple[int, str]]  # size and SHA-256 by name
    objects: list[str]  # names of the values that were saved as objects
    content: dict[str, Any]  # all that was saved, by name; tensors on the meta device
    format: str = _FORMAT


class Checkpoint(NamedTuple):
    """A checkpoint whose files are verified."""

    files: Folder
    manifest: Manifest
    metadata: Metadata


def check_target(target: str) -> None:
    """Raise if `target` cannot be saved to, or if it or its .prev holds something else.

    Raises:
        FileNotFoundError: the folder around `target` does not exist.
        NotADirectoryError: a path is a file.
        FileExistsError: a path is a folder of other files.
    """
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(
            f"cannot save to {target}: the folder around it does not exist; create it first"
        )
    for path in (target, target + ".prev"):
        if os.path.isfile(path):  # one question: another thread may rename the folder between two
            raise NotADirectoryError(
                f"cannot save to {target}: {path} is a file; name a folder, or use save"
            )
        names = _names_in(path)
        if names and not any(
            name in (MANIFEST, METADATA) or name.endswith(".distcp") for name in names
        ):
            raise FileExistsError(
                f"cannot save to {target}: {path} is a folder of something else; name another"
            )


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:  # never there, or another saver has just renamed it
        return []


def commit(fresh: str, target: str, manifest: Manifest) -> None:
    """Rename `fresh`, into which all ranks have written their parts, to the checkpoint `target`."""
    for name, (size, _) in manifest.files.items():
        path = os.path.join(fresh, name)
        if not os.path.exists(path) or os.path.getsize(path) != size:
            raise RuntimeError(
                f"{path} is not there, though a rank has written it: name a folder that all ranks "
                "see"
            )
    durable.write(os.path.join(fresh, MANIFEST), manifest._asdict())
    durable.sync_folder(fresh)
    put_aside = _rename(fresh, target)
    durable.sync_folder(os.path.dirname(target))
    for path in put_aside:
        durable.remove(path)
    durable.remove_leftovers(target, ".old")


def _rename(fresh: str, target: str) -> list[str]:
    """Replace `target` by `fresh`, and return the paths to which older checkpoints were moved."""
    put_aside: list[str] = []
    for _ in range(100):
        try:
            if _names_in(target):
                put_aside.append(durable.fresh_name(target) + ".old")
                with suppress(FileNotFoundError):
                    os.rename(target + ".prev", put_aside[-1])
                with suppress(FileNotFoundError):
                    os.rename(target, target + ".prev")
            os.rename(fresh, target)
            return put_aside
        except OSError as error:  # another saver was between our renames
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    raise RuntimeError(f"others keep saving to {target}: let each run have a folder of its own")


def choose(target: str) -> Checkpoint:
    """Return the newest undamaged checkpoint, the same one on all ranks.

    Raises:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: all are damaged; names the damage of each.
    """
    # by savers that were killed
    put_aside = glob.glob(f"{glob.escape(target)}.saving-{'[0-9a-f]' * 16}.old")
    return durable.newest(gather([target, target + ".prev", *put_aside])[0], _open)


def _open(path: str) -> Checkpoint | Exception:
    """Return the checkpoint at `path`, or an error that names its damage, the same on all ranks.

    It is a FileNotFoundError if `path` does not exist. Each rank verifies its share of the files.
    """
    files, found, fault = None, None, None
    try:
        files = Folder(path)
        found = Checkpoint(files, _read_manifest(files), read_metadata(files))
        _check_metadata(found)
        for name in sorted(found.manifest.files)[rank() :: world_size()]:
            with files.open(name) as file:
                size = os.fstat(file.fileno()).st_size
                if (size, durable.sha256_of(file)) != found.manifest.files[name]:
                    raise ValueError(f"{name} is not as it was written")
    except Exception as error:  # a damaged file can make the unpickler raise anything
        fault = str(error)
    ranks = gather((fault, found and found.manifest.files))
    faults = [text for text, _ in ranks if text is not None]
    if not faults and any(listed != ranks[0][1] for _, listed in ranks):
        faults = ["ranks found different ones there, as while it is being saved: load again"]
    if found is not None and not faults:
        return found
    if files is not None:
        files.close()
    kind = ValueError if os.path.exists(path) else FileNotFoundError
    return kind(faults[0])


def _read_manifest(files: Folder) -> Manifest:
    try:
        with files.open(MANIFEST) as file:
            content = durable.read(file)
    except FileNotFoundError:
        raise ValueError(
            f"no {MANIFEST} in it, so not from save_sharded; torch.distributed.checkpoint.load may "
            "read it"
        ) from None
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{MANIFEST} has the format {content.get('format')!r}, known is {_FORMAT!r}"
        )
    manifest = Manifest(**content)
    if strange := [name for name in manifest.files if os.path.basename(name) != name]:
        raise ValueError(f"{MANIFEST} lists {strange[0]!r}, which is not in this folder")
    return manifest


def _check_metadata(found: Checkpoint) -> None:
    """Check that torch's metadata lists the manifest's tensors, and no files but the manifest's."""
    for path, tensor in find_tensors(found.manifest.content).items():
        known: Any = found.metadata.state_dict_metadata.get(key_of(path))
        if known is None or (known.size, known.properties.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"{MANIFEST} and {METADATA} disagree about {key_of(path)}")
    storage: dict[Any, Any] = found.metadata.storage_data
    if strange := {info.relative_path for info in storage.values()} - set(found.manifest.files):
        raise ValueError(f"{METADATA} leads to {strange.pop()!r}, which is not one of its files")

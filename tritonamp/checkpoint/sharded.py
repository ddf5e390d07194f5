"""Checkpoints in a folder that all ranks write: torch.distributed.checkpoint's and a manifest."""

import os
from typing import Any

from tritonamp.checkpoint import durable, restoring
from tritonamp.checkpoint.agreement import gather, on_all_ranks
from tritonamp.checkpoint.content import collect, find_tensors, key_of, outline, with_lists
from tritonamp.checkpoint.in_place import loading_turn


def save_sharded(folder: str | os.PathLike[str], **objects: Any) -> None:
    """Write `objects` under their names into `folder`, keeping the old as `<folder>.prev`.

    An object is what `save` takes, and DTensors, of which each rank writes its parts; of everything
    else rank 0's is written. What shares storage is written once for each tensor. Call it on every
    rank, with the same names, for a folder that all ranks see; without torch.distributed it saves
    alone.

    `load_sharded` reads it, on any number of ranks; so does torch.distributed.checkpoint. Once it
    has returned, all files are on the disk; at every instant before, `load_sharded` gives the old
    or the new checkpoint, complete. An error before the new one is in place leaves the old one. A
    kill may leave a `<folder>.saving-*`, which a save ten minutes later removes. Raises, before
    anything is written, ValueError (no objects, the key path of a value that cannot be stored, or
    ranks that differ in what they have), FileExistsError, NotADirectoryError or FileNotFoundError
    (unusable `folder`); later OSError as the system gave it (disk full). An error on one rank is
    raised there, and on the others as a RuntimeError with its text.
    """
    from tritonamp.checkpoint import distributed, manifest  # import a second's worth of torch

    call = f"save_sharded({folder!r})"
    with on_all_ranks(call) as first:
        if not objects:
            raise ValueError(
                f"{call} got nothing to save; name the objects, as in save_sharded(folder, "
                "model=model)"
            )
        if any(getattr(o, "_is_stage", False) for o in objects.values()):
            raise ValueError(
                "cannot save stages of a pipeline, which hold other tensors each: give save a path "
                "for each stage; stages under FSDP2 or tensor parallelism are for "
                "torch.distributed.checkpoint, under a name for each stage"
            )
        content = collect(objects, sharded=True)
        tensors = _described(content)
        if first:
            manifest.check_target(os.path.realpath(folder))
            durable.remove_leftovers(os.path.realpath(folder))
    with on_all_ranks(call):
        _check_same(gather(tensors))
    target, fresh = gather(
        (os.path.realpath(folder), durable.fresh_name(os.path.realpath(folder)))
    )[0]
    try:
        written = distributed.write(fresh, with_lists(content), call)
        with on_all_ranks(call):
            files = {name: entry for part in gather(written) for name, entry in part.items()}
            if first:
                stateful = [name for name, value in objects.items() if hasattr(value, "state_dict")]
                manifest.commit(fresh, target, manifest.Manifest(files, stateful, outline(content)))
    finally:
        if first:
            durable.remove(fresh)


def load_sharded(folder: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
    """Load what `save_sharded` wrote to `folder` into `objects`, and return the other values.

    An object is anything with `state_dict()` and `load_state_dict()`, built as it was when saved,
    under the name it was saved under; sharded in any way, on any number of ranks, and optimizers
    before their first step. None leaves a name out. Returned are tensors, on the CPU and whole, and
    plain values. Call it on every rank.

    All files are verified against the manifest, unpickling is restricted to tensors, plain values
    and the metadata classes of torch.distributed.checkpoint. If `folder` is damaged or missing and
    `<folder>.prev` is good, takes that one on all ranks, with a RuntimeWarning naming both. Raises,
    before anything is changed, FileNotFoundError (neither exists), RuntimeError saying what is
    wrong with each (neither is usable), NotADirectoryError (a file), ValueError listing names or
    keys that are only on one side, or other shapes; what an object's own `load_state_dict` raises
    comes after models have been read. An error on one rank is raised there, and on the others as a
    RuntimeError with its text.
    """
    from tritonamp.checkpoint import distributed, manifest  # import a second's worth of torch

    call = f"load_sharded({folder!r})"
    target = gather(os.path.realpath(folder))[0]
    with on_all_ranks(call):
        if os.path.isfile(target):
            raise NotADirectoryError(
                f"cannot load {target}: it is a file; those are for load, name a folder"
            )
    found = manifest.choose(target)
    try:
        with on_all_ranks(call):
            states = restoring.targets(found.manifest.content, found.manifest.objects, objects)
        tensors = {key_of(path): tensor for path, tensor in find_tensors(states).items()}
        distributed.read(found.files, found.metadata, tensors, call)
        with on_all_ranks(call):
            given = {name: value for name, value in objects.items() if value is not None}
            for name in sorted(given, key=lambda name: loading_turn(given[name])):
                given[name].load_state_dict(states[name])
    finally:
        found.files.close()
    return {name: state for name, state in states.items() if name not in objects}


def _described(content: dict[str, Any]) -> dict[str, str]:
    """Return what each tensor is, by its name in the checkpoint.

    Raises:
        ValueError: two have one name.
    """
    described: dict[str, str] = {}
    for path, tensor in find_tensors(content).items():
        key = key_of(path)
        if key in described:
            raise ValueError(
                f"cannot save {key}: two tensors have this name once keys are joined by dots; "
                "rename one"
            )
        described[key] = f"{tuple(tensor.shape)} {tensor.dtype}"
    return described


def _check_same(ranks: list[dict[str, str]]) -> None:
    for number, tensors in enumerate(ranks):
        names = {**ranks[0], **tensors}
        if differing := [name for name in names if ranks[0].get(name) != tensors.get(name)]:
            raise ValueError(
                f"ranks differ in what they save: {', '.join(differing[:5])} ({len(differing)} in "
                f"all) is not the same on ranks 0 and {number}: save the same objects everywhere, "
                "as DTensors what is sharded"
            )

"""Checkpoints in a folder that all ranks write: torch.distributed.checkpoint with a manifest."""

import os
from typing import Any

from tritonamp.checkpoint import durable, restoring
from tritonamp.checkpoint.agreement import gather, on_all_ranks
from tritonamp.checkpoint.content import collect, find_tensors, key_of, outline, with_lists
from tritonamp.checkpoint.in_place import loading_turn


def save_sharded(folder: str | os.PathLike[str], **objects: Any) -> None:
    """Write `objects` under their names into `folder`, and keep the old one as `<folder>.prev`.

    Call it on every rank, with the same names, and with a folder that all ranks see. Without
    torch.distributed it saves alone. `load_sharded` and torch.distributed.checkpoint read it, on
    any number of ranks. When it returns, all files are on the disk. A kill or an error at any
    instant leaves the old or the new checkpoint complete. A kill may leave a `<folder>.saving-*`,
    which a save at least ten minutes later removes.

    Args:
        folder: path of the checkpoint.
        objects: as for `save`, and DTensors. Each rank writes its parts of DTensors, and rank 0
            everything else. Tensors that share storage are written once each.

    Raises:
        ValueError: no objects, a value that cannot be stored (names its key path), or ranks with
            different objects. Nothing was written.
        FileExistsError, NotADirectoryError, FileNotFoundError: `folder` is not usable.
        OSError: the system's error, such as a full disk.
        RuntimeError: another rank failed; has the text of its error.
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
    """Load a checkpoint of `save_sharded` into `objects`, and return its other values by name.

    Call it on every rank. All files are verified against the manifest. Unpickling is restricted to
    tensors, plain values and the metadata classes of torch.distributed.checkpoint. If `folder` is
    damaged or missing and `<folder>.prev` is good, all ranks load that one, with a RuntimeWarning.

    Args:
        folder: path of the checkpoint.
        objects: objects with `state_dict()` and `load_state_dict()`, under the names they were
            saved under, built as they were then. They may be sharded in any way, on any number of
            ranks; optimizers need not have stepped. None leaves a name out.

    Returns:
        the values that were not saved as objects; tensors are whole and on the CPU.

    Raises:
        FileNotFoundError: neither `folder` nor `<folder>.prev` exists.
        NotADirectoryError: `folder` is a file.
        RuntimeError: both are damaged, or another rank failed; has the texts.
        ValueError: names, keys or shapes differ; lists them. Nothing was changed.
        Exception: an object's own `load_state_dict` raised, after models were read.
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
    """Return shape and dtype of each tensor as text, by its name in the checkpoint.

    Raises:
        ValueError: two tensors have the same name.
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

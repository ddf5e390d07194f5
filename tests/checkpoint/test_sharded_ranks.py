"""`save_sharded` and `load_sharded` on two gloo ranks: parts, meshes and numbers of ranks, errors,
damage and kills.

The ranks are this file run as a script, see two_ranks.py; those that are killed are forked by a
script below.
"""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import all_values, mesh_of, sharded
from saves import Scheduled, damage
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from two_ranks import RANKS, Pair, enable, of_ranks, on_ranks, refused, serve

import tritonamp
from tritonamp import load_sharded, save_sharded
from tritonamp.checkpoint import distributed

pytestmark = of_ranks


class Uneven(Scheduled):
    """A run of a model that two ranks cannot share evenly, with a bias that one of them lacks."""

    def __init__(self, level: str, kind: str, seed: int, mesh: str | None = None) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Dropout(0.2), nn.Linear(7, 1))
        if mesh is not None:
            policy = {"param_dtype": torch.float16 if level == "O2" else None}
            sharded(model, [model[0]], policy, mesh=mesh_of(mesh))
        kind = {"SGD": "SGD momentum"}.get(kind, kind)
        super().__init__(model, kind, level, enable=enable)

    def train_on(self) -> list[Any]:
        """Take three steps, of which one is skipped, and return all values."""
        self.go_on(3, bad=1)
        return self.whole_values()

    def whole_values(self) -> list[Any]:
        return all_values(self.model, self.optimizer)


@on_ranks
def save_and_resume(path: str, level: str, kind: str, mesh: str, other: str) -> list[Any]:
    """Trains, saves, trains on; and the same from the checkpoint, on another mesh."""
    run, again, elsewhere = (
        Uneven(level, kind, seed, each) for seed, each in enumerate((mesh, mesh, other))
    )
    torch.manual_seed(dist.get_rank())
    saved = run.train_on()
    save_sharded(path, **run.objects(), rng=tritonamp.RNGState(), epoch=7)
    continued = run.train_on()
    assert load_sharded(path, **again.objects(), rng=tritonamp.RNGState()) == {"epoch": 7}
    resumed = again.train_on()
    load_sharded(path, **elsewhere.objects(), rng=None)
    return [saved, elsewhere.whole_values(), continued, resumed]


@on_ranks
def loaded_by_two(path: str, level: str, kind: str) -> list[Any]:
    run = Uneven(level, kind, 1, "one")
    load_sharded(path, **run.objects())
    return run.whole_values()


@pytest.mark.parametrize(
    ("level", "kind", "mesh", "other"),
    [
        ("O1", "AdamW", "one", "copies"),
        ("O2", "AdamW", "one", "shards"),
        ("O2", "SGD", "one", "one"),
        ("O1", "SGD", "copies", "one"),
    ],
)
def test_resumes_are_bit_identical_and_any_number_of_ranks_reads(
    pair: Pair, tmp_path: Path, level: str, kind: str, mesh: str, other: str
) -> None:
    path = str(tmp_path / "run")
    answers = save_and_resume(pair, path=path, level=level, kind=kind, mesh=mesh, other=other)
    for saved, moved, continued, resumed in answers:
        assert saved == moved == answers[0][0]
        assert continued == resumed != saved
    run, alone = Uneven(level, kind, 3), str(tmp_path / "alone")
    load_sharded(path, **run.objects(), rng=None)
    assert run.whole_values() == answers[0][0]
    expected = run.train_on()
    save_sharded(alone, **run.objects())
    run.end()
    assert loaded_by_two(pair, path=alone, level=level, kind=kind) == [expected, expected]


def in_parts(whole: Tensor) -> Any:
    return distribute_tensor(whole, init_device_mesh("cpu", (RANKS,)), [Shard(0)])


@on_ranks
def of_ranks_that_differ(path: str) -> list[Any]:
    """Plain values and tensors, and what is returned of DTensors."""
    rank = dist.get_rank()
    whole = torch.arange(10.0).reshape(5, 2)
    part = in_parts(whole)
    save_sharded(path, rank=rank, tensor=torch.full((3,), rank), part=part, pair=(part, [rank]))
    content = load_sharded(path)
    assert type(content["part"]) is torch.Tensor and torch.equal(content["part"], whole)
    assert torch.equal(content["pair"][0], whole)
    sizes = {name: os.path.getsize(os.path.join(path, name)) > 0 for name in os.listdir(path)}
    return [content["rank"], content["tensor"].tolist(), content["pair"][1], sizes]


def test_of_what_is_not_sharded_rank_0s_is_written(pair: Pair, tmp_path: Path) -> None:
    files = dict.fromkeys([".metadata", "__0_0.distcp", "__1_0.distcp", "tritonamp.manifest"], True)
    for rank, tensor, inner, sizes in of_ranks_that_differ(pair, path=str(tmp_path / "run")):
        assert (rank, tensor, inner, sizes) == (0, [0, 0, 0], [0], files)


@on_ranks
def under_ddp(path: str) -> list[Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 2))
    save_sharded(path, model=model)
    torch.manual_seed(1)
    again = DistributedDataParallel(nn.Linear(2, 2))
    load_sharded(path, model=again)
    return [torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)]


def test_ddp(pair: Pair, tmp_path: Path) -> None:
    assert under_ddp(pair, path=str(tmp_path / "run")) == [[True, True], [True, True]]


# Errors on one rank


@on_ranks
def goes_wrong(path: str, what: str) -> list[str]:
    """On rank 1."""
    here = dist.get_rank() == 1
    save_sharded(path, step=torch.ones(3), model=nn.Linear(2, 2))
    if what == "full disk":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        whole = torch.ones(100_000)
        part = in_parts(whole)
        try:
            if here:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
            text = refused(lambda: save_sharded(path, step=torch.full((3,), 2.0), part=part))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    elif what == "value":
        text = refused(lambda: save_sharded(path, step=print if here else 1))
    elif what == "names":
        text = refused(
            lambda: save_sharded(path, step=1, **({"more": torch.ones(1)} if here else {}))
        )
    elif what == "shapes":
        text = refused(lambda: save_sharded(path, step=torch.ones(3 + here)))
    elif what == "no folder":  # only rank 0 looks
        text = refused(lambda: save_sharded(os.path.join(path, "missing", "x"), step=1))
    elif what == "load":
        text = refused(lambda: load_sharded(path, model=nn.Linear(2, 2 + here)))
    assert load_sharded(path, model=None)["step"].tolist() == [1.0] * 3
    return [text, *sorted(os.listdir(os.path.dirname(path)))]


WRONG = {
    "full disk": (
        "RuntimeError: save_sharded(.*) failed on rank 1: OSError: .*File too large",
        "OSError: .*File too",
    ),
    "value": (
        "RuntimeError: save_sharded(.*) failed on rank 1: ValueError: cannot save step",
        "ValueError: cannot",
    ),
    "names": (
        "ValueError: ranks differ in what they save: more .1 in all. is not the same on ranks 0 "
        "and 1",
    )
    * 2,
    "shapes": (
        "ValueError: ranks differ in what they save: step .1 in all. is not the same on ranks 0 "
        "and 1",
    )
    * 2,
    "no folder": (
        "FileNotFoundError: .*create it first",
        "RuntimeError: .* failed on rank 0: FileNotFoundError",
    ),
    "load": (
        "RuntimeError: load_sharded(.*) failed on rank 1: ValueError: model",
        "ValueError: model is not what",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_error_on_one_rank_is_one_on_all_and_leaves_the_old(
    pair: Pair, tmp_path: Path, what: str
) -> None:
    for expected, (text, *names) in zip(
        WRONG[what], goes_wrong(pair, path=str(tmp_path / "run"), what=what), strict=True
    ):
        assert re.match(expected, text), text
        assert names == ["run"]


# Damage


@on_ranks
def two_saves(path: str) -> None:
    for step in (1, 2):
        save_sharded(path, step=step, part=in_parts(torch.full((4,), float(step))))


@on_ranks
def read_again(path: str) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        content = load_sharded(path)
    assert set(content["part"].tolist()) == {content["step"]}
    return [content["step"], [str(warning.message) for warning in caught]]


@pytest.mark.parametrize(
    "name", [".metadata", "__0_0.distcp", "__1_0.distcp", "tritonamp.manifest", None]
)
def test_all_ranks_fall_back_together(pair: Pair, tmp_path: Path, name: str | None) -> None:
    path = tmp_path / "run"
    two_saves(pair, path=str(path))
    if name is None:
        path.rename(tmp_path / "elsewhere")
    else:
        damage(path / name)
    for step, texts in read_again(pair, path=str(path)):
        assert step == 1
        assert len(texts) == 1
        assert re.search(f"{path} is unusable .*; loaded the older {path}.prev", texts[0])


@on_ranks
def looking_at_different_ones(path: str) -> str:
    """Rank 1 finds the two swapped, as ranks may while another job saves."""
    opened = distributed.Folder.__init__

    def other(self: Any, name: str) -> None:
        opened(self, path if name.endswith(".prev") else f"{path}.prev")

    for step in (1, 2):
        save_sharded(path, step=step)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(distributed.Folder, "__init__", other)
        return refused(lambda: load_sharded(path))


def test_ranks_never_load_different_ones(pair: Pair, tmp_path: Path) -> None:
    for text in looking_at_different_ones(pair, path=str(tmp_path / "run")):
        assert re.match(
            "RuntimeError: no usable checkpoint .*ranks found different ones there, .*load again",
            text,
        )


# Kills. Forked processes, since a new Python at each point would take minutes.

KILLS = """
import datetime, io, json, os, shutil, signal, sys, warnings
import torch, torch.distributed as dist
import torch.distributed.checkpoint
import torch._dynamo, numpy.random  # which each fork would import for itself
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tritonamp import load_sharded, save_sharded
from tritonamp.checkpoint import durable

folder, victims, saves = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
warnings.simplefilter("ignore")
os.fsync = os.fstat  # a killed process loses nothing it wrote, so only the calls count

def on_both(name, function):
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            store = f"file://{folder}/{name}.store"
            dist.init_process_group(
                "gloo",
                init_method=store,
                rank=rank,
                world_size=2,
                timeout=datetime.timedelta(seconds=20),
            )
            try:
                function(rank)
            except RuntimeError as error:  # the other rank is gone
                print(error, file=sys.stderr)
                os._exit(1)
            dist.barrier()
            os._exit(0)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

def save(path, step):
    whole = torch.full((4,), float(step))
    part = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    save_sharded(path, step=step, part=part, whole=whole)

def killed_at(at, path):
    def call():
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
    def before(function):
        return lambda *args, **kwargs: (call(), function(*args, **kwargs))[1]
    class File(io.FileIO):
        def write(self, data):
            half = super().write(memoryview(data)[:len(data) // 2])
            call()
            return half + super().write(memoryview(data)[half:])
    count = 0
    io.FileIO = File
    durable.open = lambda path, mode: io.BufferedRandom(File(path, mode.replace("b", "")))
    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, before(getattr(os, name)))
    lists = "scatter_object_list", "broadcast_object_list"
    for name in ("all_gather_object", "gather_object", *lists):  # all collectives of a save
        setattr(dist, name, before(getattr(dist, name)))
    save(path, saves)

def read(path):
    try:
        content = load_sharded(path)
    except FileNotFoundError:
        return -1
    assert {*content["part"].tolist(), *content["whole"].tolist()} == {content["step"]}
    return content["step"]

def saved_before(rank):
    for step in range(saves):
        save(f"{folder}/x", step)

def again(rank):
    for path, step in found.items():
        assert read(path) == step, path
        save(path, 9)
        assert read(path) == 9, path

on_both("first", saved_before)
found = {}
for at in range(1, 1000):
    os.mkdir(f"{folder}/{at}")
    path = f"{folder}/{at}/x"
    for suffix in ("", ".prev"):
        if os.path.exists(f"{folder}/x{suffix}"):
            shutil.copytree(f"{folder}/x{suffix}", f"{path}{suffix}")
    codes = on_both(f"{at}/kill", lambda rank: killed_at(at if rank in victims else 0, path))
    if all(codes[rank] != -signal.SIGKILL for rank in victims):
        break
    found[path] = read(path)
codes = on_both("again", again)
print(json.dumps([list(found.values()), codes]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("victims", "before"), [([0], 1), ([1], 1), ([0, 1], 0)], ids=["rank 0", "rank 1", "both"]
)
def test_sigkill_at_every_point(tmp_path: Path, victims: list[int], before: int) -> None:
    root = str(Path(tritonamp.__file__).parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", KILLS, str(tmp_path), json.dumps(victims), str(before)]
    options: dict[str, Any] = {"env": environment, "cwd": tmp_path, "timeout": 240}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    steps, codes = json.loads(done.stdout)
    assert codes == [0, 0], done.stderr  # both ranks have found the same, and have saved over it
    assert steps == sorted(steps)  # first the old one, from the rename on the new one
    # older pathlib took hold of os.mkdir when it was imported
    files = {0: 10, 1: 3 if sys.version_info >= (3, 11) else 2}  # of 1: folder, writing, fsync
    collectives = 8
    assert len(steps) >= files[victims[0]] + collectives
    assert set(steps) == {before - 1, before}  # rank 1 may die before it hears that rank 0 is done


if __name__ == "__main__":
    serve(*sys.argv[1:])

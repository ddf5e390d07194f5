"""What `save_sharded` and `load_sharded` promise in one process; test_sharded_ranks.py has those of
two.
"""

import copy
import errno
import hashlib
import io
import os
import pickle
import shutil
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Faults, Killed
from saves import DTYPES, VIEWS, Scheduled, StepSaves, bits_of, damage, names
from torch import nn

import tritonamp
from tritonamp import load_sharded, save_sharded
from tritonamp.checkpoint import distributed, durable, manifest
from tritonamp.checkpoint.manifest import MANIFEST

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs torch.distributed"
)


@pytest.fixture(autouse=True)
def _instant_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing it wrote, so only the calls count here."""
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


SAVES = StepSaves(save_sharded, load_sharded)
read, write = SAVES.read, SAVES.write


# Round trips


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_bit_for_bit(folder: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(
        0, 256, (4, 4 * torch.empty((), dtype=dtype).element_size()), dtype=torch.uint8
    )
    tensor = (raw % 2).bool()[:, :4] if dtype == torch.bool else raw.view(dtype)
    views = {name: view(tensor) for name, view in VIEWS.items()}
    save_sharded(folder, views=views)
    for name, loaded in load_sharded(folder)["views"].items():
        assert (loaded.dtype, loaded.shape) == (dtype, views[name].shape)
        assert bits_of(loaded) == bits_of(views[name])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**2032 - 1,
        1.5,
        2 + 3j,
        "",
        "text \ud800 \0 ü",
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.Size([2, 3]),
        [],
        (),
        {},
        (1, [2, {"a": (None,)}]),
        {"x": 1, 2: 3, None: 5, (1, "y"): {}},
        OrderedDict(b=1, a=2),
        Counter({30: 2, 60: 1}),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_plain_values_come_back(folder: Path, value: Any) -> None:
    save_sharded(folder, value=value, among=(torch.ones(1), [value]))
    loaded = load_sharded(folder)
    assert (loaded["value"], type(loaded["value"])) == (value, type(value))
    assert isinstance(loaded["among"], tuple)
    assert loaded["among"][1] == [value]


def test_metadata_of_a_state_dict_comes_back(folder: Path) -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    save_sharded(folder, state=state)
    assert load_sharded(folder)["state"]._metadata == state._metadata  # type: ignore[attr-defined]


def droppy(level: str, kind: str, seed: int = 0) -> Scheduled:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    return Scheduled(model, {"SGD": "SGD momentum"}.get(kind, kind), level)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.*:UserWarning")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_save_load_continue_is_bit_identical_to_not_stopping(
    folder: Path, level: str, kind: str
) -> None:
    run, again = droppy(level, kind), droppy(level, kind, seed=1)
    run.go_on(3, bad=1)
    save_sharded(folder, **run.objects(), rng=tritonamp.RNGState(), epoch=7)
    run.go_on(3, bad=1)
    assert load_sharded(folder, **again.objects(), rng=tritonamp.RNGState()) == {"epoch": 7}
    again.go_on(3, bad=1)
    for each in (run, again):
        assert each.amp.stats()["skipped"] >= 2 and each.amp.stats()["steps"] > 0
        each.end()
    assert again.scheduler.get_last_lr() == run.scheduler.get_last_lr()
    assert again.amp.state_dict() == run.amp.state_dict()
    for name, value in run.model.state_dict().items():
        assert bits_of(again.model.state_dict()[name]) == bits_of(value), name
    for number, state in run.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found = again.optimizer.state_dict()["state"][number][name]
            assert bits_of(found) == bits_of(value), name


def test_masters_come_back_unrounded_where_the_state_dict_is_half(folder: Path) -> None:
    def model(seed: int, **fields: Any) -> tuple[nn.Module, Any, tritonamp.Amp]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters())
        return model, optimizer, tritonamp.enable(model, optimizer, level="O2", **fields)

    saved, _, amp = model(0)
    save_sharded(folder, model=saved)
    amp.disable()
    loaded, _, amp = model(1, state_dict_dtype=torch.float16)
    load_sharded(folder, model=loaded)
    amp.disable()
    assert all(
        torch.equal(p, q) for p, q in zip(saved.parameters(), loaded.parameters(), strict=True)
    )


def test_an_optimizer_that_has_stepped_takes_the_saved_state(folder: Path) -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([p, q], lr=torch.tensor(0.1), foreach=False)

    def step(by: float) -> None:
        (p.sum() * by + q).backward()
        optimizer.step()

    step(1.0)
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    save_sharded(folder, optimizer=optimizer)
    step(-3.0)
    load_sharded(folder, optimizer=optimizer)
    state = optimizer.state_dict()
    assert all(
        torch.equal(state["state"][i][key], value)
        for i, old in saved.items()
        for key, value in old.items()
    )
    assert torch.equal(state["param_groups"][0]["lr"], torch.tensor(0.1))


def test_masters_of_half_parameters(folder: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, tritonamp.optim.AdamW]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4).half()
        return model, tritonamp.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = build(0)
    model(torch.ones(2, 4, dtype=torch.float16)).sum().backward()
    optimizer.step()
    save_sharded(folder, model=model, optimizer=optimizer)
    again, optimizer_again = build(1)
    load_sharded(folder, model=again, optimizer=optimizer_again)
    state, state_again = optimizer.state_dict()["state"], optimizer_again.state_dict()["state"]
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)
    )
    for number, values in state.items():
        for name, value in values.items():
            loaded = state_again[number][name]
            assert (loaded.dtype, bits_of(loaded)) == (value.dtype, bits_of(value)), name


class Average:
    """An object of the user's own: FP32 values that it replaces when it loads."""

    def __init__(self, value: float) -> None:
        self.values = {"a": torch.full((3,), value), "steps": [value]}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_objects_of_the_users_own(folder: Path) -> None:
    saved, loaded = Average(1.0), Average(2.0)
    before = loaded.values["a"]
    save_sharded(folder, average=saved, parts=[saved, {"x": saved}])
    content = load_sharded(folder, average=loaded)
    assert content.keys() == {"parts"}
    for values in (loaded.values, content["parts"][0], content["parts"][1]["x"]):
        assert values["steps"] == [1.0] and torch.equal(values["a"], torch.ones(3))
    assert torch.equal(before, torch.full((3,), 2.0))  # it was asked, not written to


def test_torch_reads_the_folder(folder: Path) -> None:
    run = droppy("O0", "AdamW")
    model, optimizer = run.model, run.optimizer
    run.amp.backward(model(torch.randn(8, 4)).sum())
    optimizer.step()
    save_sharded(folder, model=model, optimizer=optimizer, pair=(torch.ones(2), 1))
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "pair": [torch.zeros(2), 0],
    }
    expected = [(value, bits_of(value)) for value in state["model"].values()]
    for value, _ in expected:
        value.zero_()
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    assert all(bits_of(value) == before for value, before in expected)
    assert state["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(state["pair"][0], torch.ones(2))


# Names and keys


def refusals() -> Iterator[tuple[str, str, Callable[[Path], Any]]]:
    """What was done, what the error says."""
    linear = nn.Linear

    def sgd(*modules: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD([{"params": m.parameters()} for m in modules])

    yield (
        "forgotten",
        r"also has the state of optimizer: give .*or optimizer=None to leave it out",
        lambda p: load_sharded(p, model=linear(2, 3)),
    )
    yield (
        "unknown",
        "not in the checkpoint: net; it has model, optimizer, step",
        lambda p: load_sharded(p, model=linear(2, 3), optimizer=None, net=linear(2, 3)),
    )
    yield (
        "no object",
        r"step: expected an object with state_dict\(\).*got int",
        lambda p: load_sharded(p, model=None, optimizer=None, step=3),
    )
    yield (
        "keys",
        (
            "model is not what was saved; missing in the checkpoint: 0.weight, 0.bias; not in the "
            "module: weight, bias"
        ),
        lambda p: load_sharded(p, model=nn.Sequential(linear(2, 3)), optimizer=None),
    )
    yield (
        "shapes",
        r"of other shapes: weight \(saved \(3, 2\), here \(2, 2\)\), bias",
        lambda p: load_sharded(p, model=linear(2, 2), optimizer=None),
    )
    yield (
        "meta",
        r"on the meta device \(call to_empty first\): weight, bias",
        lambda p: load_sharded(p, model=linear(2, 3).to("meta"), optimizer=None),
    )
    yield (
        "groups",
        r"optimizer is not what was saved: \[2, 2\] parameters in its groups, "
        r"\[2\] in the checkpoint",
        (lambda p: load_sharded(p, model=None, optimizer=sgd(linear(2, 3), linear(2, 3)))),
    )
    yield (
        "kinds",
        r"model is not what was saved: \[2\] parameters in its groups, \[\] in the checkpoint",
        (lambda p: load_sharded(p, optimizer=None, step=None, model=sgd(linear(2, 3)))),
    )


@pytest.mark.parametrize(
    ("text", "act"), [pytest.param(*rest, id=what) for what, *rest in refusals()]
)
def test_names_and_keys_on_one_side_are_refused(
    folder: Path, text: str, act: Callable[[Path], Any]
) -> None:
    model = nn.Linear(2, 3)
    save_sharded(folder, model=model, optimizer=torch.optim.SGD(model.parameters()), step=1)
    with pytest.raises(ValueError, match=text):
        act(folder)


def test_nothing_is_changed_by_a_refused_load(folder: Path) -> None:
    saved = nn.Linear(2, 3)
    save_sharded(folder, model=saved, other=nn.Linear(1, 1))
    model = nn.Linear(2, 3)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="other is not what was saved"):
        load_sharded(folder, model=model, other=nn.Linear(2, 2))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


class Tensor2(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (print, "value: .*got builtins.builtin_function_or_method"),
        (torch.ones(1).as_subclass(Tensor2), "value: .*got .*Tensor2"),
        (torch.ones(2).to_sparse(), "value: expected strided tensors .*got torch.Tensor"),
        ({1: torch.ones(1), "1": torch.ones(1)}, "cannot save value.1: two tensors have this name"),
    ],
    ids=["function", "subclass", "sparse", "collision"],
)
def test_what_could_not_be_loaded_is_refused_and_nothing_is_written(
    folder: Path, value: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        save_sharded(folder, good=torch.ones(1), value=value)
    assert not names(folder.parent)


def test_unusable_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got nothing to save"):
        save_sharded(folder)
    with pytest.raises(
        FileNotFoundError, match="the folder around it does not exist; create it first"
    ):
        save_sharded(tmp_path / "missing" / "x", step=1)
    tritonamp.save(tmp_path / "file", step=1)
    with pytest.raises(NotADirectoryError, match="file is a file; name a folder, or use save"):
        save_sharded(tmp_path / "file", step=1)
    with pytest.raises(NotADirectoryError, match="it is a file; those are for load, name a folder"):
        load_sharded(tmp_path / "file")
    for occupied in (folder, Path(f"{folder}.prev")):
        occupied.mkdir()
        (occupied / "notes.txt").touch()
        with pytest.raises(
            FileExistsError, match=f"{occupied} is a folder of something else; name another"
        ):
            save_sharded(folder, step=1)
        shutil.rmtree(occupied)
    write(folder, 1)
    with pytest.raises(IsADirectoryError, match="or use save_sharded for a folder"):
        tritonamp.save(folder, step=1)
    with pytest.raises(IsADirectoryError, match="it is a folder; those are for load_sharded"):
        tritonamp.load(folder)


def test_an_empty_folder_is_taken(folder: Path) -> None:
    folder.mkdir()
    write(folder, 1)
    assert names(folder.parent) == ["run"]
    assert read(folder) == 1


# The folder


def test_the_one_before_is_kept(folder: Path) -> None:
    write(folder, 1)
    assert names(folder.parent) == ["run"]
    for step in (2, 3):
        write(folder, step)
        assert names(folder.parent) == ["run", "run.prev"]
        assert (read(folder), read(f"{folder}.prev")) == (step, step - 1)


def test_leftovers_of_killed_savers_are_removed_once_they_are_old(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = "0123456789abcdef"
    leftovers = [f"run.saving-{digits}", f"run.saving-{digits}.old"]
    others = ["run.saving-mine", f"other.saving-{digits}"]
    for name in leftovers + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").touch()
    write(folder, 1)
    assert names(tmp_path) == sorted(["run", *leftovers, *others])
    now = durable.time.time()
    monkeypatch.setattr(durable.time, "time", lambda: now + 700)
    write(folder, 2)
    assert names(tmp_path) == sorted(["run", "run.prev", *others])


def test_threads_may_save_one_folder(folder: Path) -> None:
    def work(step: int) -> None:
        try:
            for _ in range(5):
                write(folder, step)
        except BaseException as error:
            errors.append(error)

    errors: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(step,)) for step in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert {read(folder), read(f"{folder}.prev")} <= {0, 1, 2}
    assert names(folder.parent) == ["run", "run.prev"]


@pytest.mark.parametrize("look", range(3))
def test_another_saver_renames_while_one_looks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    listdir, looks = os.listdir, []

    def renamed_first(path: str) -> list[str]:
        looks.append(path)
        if len(looks) != look + 1:
            return listdir(path)
        os.rename(path, f"{path}.elsewhere")
        try:
            return listdir(path)
        finally:
            os.rename(f"{path}.elsewhere", path)

    write(folder, 1)
    write(folder, 2)
    monkeypatch.setattr(os, "listdir", renamed_first)
    write(folder, 3)
    assert len(looks) > look
    assert read(folder) == 3
    assert names(folder.parent) == ["run", "run.prev"]


def test_a_save_in_the_middle_of_a_load_makes_no_mix(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then_read(*args: Any) -> None:
        write(folder, 2, size=4)
        before(*args)

    before = distributed.read
    write(folder, 1)
    monkeypatch.setattr(distributed, "read", then_read)
    assert read(folder) == 1
    monkeypatch.undo()
    assert read(folder) == 2


# Damage


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", MANIFEST])
@pytest.mark.parametrize("how", [0.0, 0.3, 0.6, 0.95, 1.0, "cut", "grown", "gone"])
def test_a_damaged_file_is_seen(folder: Path, name: str, how: float | str) -> None:
    write(folder, 1)
    write(folder, 2)
    path = folder / name
    if isinstance(how, float):
        damage(path, how)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if how == "cut" else path.read_bytes() + b"\0")
    with pytest.warns(
        RuntimeWarning, match=f"{folder} is unusable .*; loaded the older {folder}.prev"
    ):
        assert read(folder) == 1


def test_a_missing_folder_is_seen(folder: Path) -> None:
    write(folder, 1)
    write(folder, 2)
    shutil.rmtree(folder)
    with pytest.warns(
        RuntimeWarning, match=f"{folder} is unusable .*; loaded the older {folder}.prev"
    ):
        assert read(folder) == 1


def test_a_file_of_another_save_is_no_mix(folder: Path) -> None:
    write(folder, 1)
    write(folder, 2)
    shutil.copy(Path(f"{folder}.prev") / "__0_0.distcp", folder)
    with pytest.warns(RuntimeWarning, match="__0_0.distcp is not as it was written"):
        assert read(folder) == 1


def test_both_damaged_is_an_error_that_names_both(folder: Path) -> None:
    write(folder, 1)
    write(folder, 2)
    damage(folder / "__0_0.distcp")
    damage(Path(f"{folder}.prev") / MANIFEST)
    text = (
        rf"no usable checkpoint \({folder}: __0_0.distcp is not .*; "
        rf"{folder}.prev: checksum .*restore one"
    )
    with pytest.raises(RuntimeError, match=text):
        load_sharded(folder)


def test_a_lost_rank_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sharded(folder, epoch=3)
    answers = iter([manifest.gather])

    def gather(value: Any) -> list[Any]:
        answer = next(answers, None)
        if answer is None:
            raise RuntimeError("the other ranks did not answer")
        return answer(value)

    monkeypatch.setattr(manifest, "gather", gather)
    with pytest.raises(RuntimeError, match=r"^the other ranks did not answer$"):
        load_sharded(folder)


def test_nothing_there_is_file_not_found(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"neither {folder} nor {folder}.prev exists"):
        load_sharded(folder)


def test_a_folder_of_torch_is_refused(folder: Path) -> None:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torch.distributed.checkpoint.save({"x": torch.ones(1)}, checkpoint_id=folder)
    with pytest.raises(
        RuntimeError, match=rf"no {MANIFEST} in it, .*torch.distributed.checkpoint.load may read it"
    ):
        load_sharded(folder)


class Foreign:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("foreign code ran",))


@contextmanager
def tampered(folder: Path) -> Iterator[dict[str, Any]]:
    """Gives the manifest to change, and writes it with right checksums of everything."""
    path = folder / MANIFEST
    with path.open("rb") as file:
        manifest = durable.read(file)
    yield manifest
    for name in manifest["files"]:
        if (folder / name).exists():
            data = (folder / name).read_bytes()
            manifest["files"][name] = (len(data), hashlib.sha256(data).hexdigest())
    path.unlink()
    durable.write(str(path), manifest)


def foreign_metadata(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Foreign()))


def foreign_attribute(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04ctorch\nload\n.")


def foreign_tensor(folder: Path, manifest: dict[str, Any]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    for info in metadata.storage_data.values():
        stream = io.BytesIO()
        torch.save(Foreign(), stream)
        info.offset, info.length = len(data), len(stream.getvalue())
        data += stream.getvalue()
    (folder / "__0_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def other_file(folder: Path, manifest: dict[str, Any]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def listed_elsewhere(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["files"]["../elsewhere"] = (0, "")


def other_shapes(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["content"]["weights"][0] = torch.empty(4, device="meta")


def other_format(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["format"] = "tritonamp sharded checkpoint 2"


TAMPERING = {
    foreign_metadata: "asks for .*mkdir, which has no place in one",
    foreign_attribute: "asks for torch.load",
    foreign_tensor: "Weights only load failed|weights_only",
    other_file: "leads to '../elsewhere', which is not one of its files",
    listed_elsewhere: "lists '../elsewhere', which is not in this folder",
    other_shapes: "disagree about weights.0",
    other_format: "has the format 'tritonamp sharded checkpoint 2', known is",
}


@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
def test_tampering_is_refused_even_with_right_checksums(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[Path, dict[str, Any]], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(folder, 1)
    with tampered(folder) as manifest:
        tamper(folder, manifest)
    with pytest.raises(Exception, match=TAMPERING[tamper]):
        load_sharded(folder)
    assert names(tmp_path) == ["run"]


# Kills and errors at every write, fsync and rename


CALLS = "fsync", "rename", "replace", "unlink", "rmdir", "mkdir"


def calls(tmp_path: Path, before: int) -> list[str]:
    """The system calls of one save."""
    folder = tmp_path / "dry run" / "x"
    SAVES.prepare(folder, before)
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, CALLS)
        write(folder, before)
    return faults.log


def in_place(log: list[str], at: int, before: int) -> bool:
    """Whether the new one has its name: DCP renames its metadata, then come ours."""
    # older pathlib took hold of os.rename when it was imported
    by_dcp = sys.version_info >= (3, 11)
    return log[: at - 1].count("rename") >= by_dcp + {0: 1, 1: 3, 2: 3}[before]


def test_content_is_on_the_disk_before_it_gets_the_name_and_the_name_before_save_returns(
    tmp_path: Path,
) -> None:
    log = calls(tmp_path, 2)
    last_write = max(i for i, name in enumerate(log) if name == "write")
    assert log[last_write + 1 : last_write + 7] == [
        "fsync",
        "fsync",
        "rename",
        "rename",
        "rename",
        "fsync",
    ]
    assert log[:last_write].count("fsync") == 2  # the shard, the metadata
    assert set(log[last_write + 7 :]) <= {"unlink", "rmdir"}


@pytest.mark.crash
@pytest.mark.parametrize("before", [0, 1, 2])
def test_killed_at_any_point_the_old_or_the_new_loads(tmp_path: Path, before: int) -> None:
    log = calls(tmp_path, before)
    for at in range(1, len(log) + 1):
        folder = tmp_path / str(at) / "x"
        SAVES.prepare(folder, before)
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, CALLS, at)
            with pytest.raises(Killed):
                write(folder, before)
        if in_place(log, at, before):
            assert read(folder) == before
        elif before == 0:
            with pytest.raises(FileNotFoundError):
                read(folder)
        elif folder.exists():
            assert read(folder) == before - 1
        else:
            with pytest.warns(RuntimeWarning, match="loaded the older"):
                assert read(folder) == before - 1
        write(folder, 9)  # a restarted run saves over whatever is there
        assert read(folder) == 9


@pytest.mark.crash
def test_a_damaged_folder_never_costs_the_good_one_before_it(tmp_path: Path) -> None:
    log = calls(tmp_path, 2)
    for at in range(1, len(log) + 1):
        folder = tmp_path / str(at) / "x"
        SAVES.prepare(folder, 2)
        damage(folder / "__0_0.distcp")
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, CALLS, at)
            with pytest.raises(Killed):
                write(folder, 2)
        if in_place(log, at, 2):
            assert read(folder) == 2
        else:
            with pytest.warns(RuntimeWarning, match="loaded the older"):
                assert read(folder) == 0
        write(folder, 9)
        assert read(folder) == 9


def test_an_error_at_any_point_reaches_the_caller_and_leaves_the_old_or_the_new(
    tmp_path: Path,
) -> None:
    log = calls(tmp_path, 2)
    for at, name in enumerate(log, 1):
        if name in ("unlink", "rmdir"):
            continue  # clean-up itself
        folder = tmp_path / str(at) / "x"
        SAVES.prepare(folder, 2)
        error = OSError(errno.ENOSPC, "No space left on device")
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, CALLS, at, error)
            with pytest.raises(OSError, match="No space left") as caught:
                write(folder, 2)
            assert caught.value is error
        kept = [entry for entry in names(folder.parent) if not entry.endswith(".old")]
        assert set(kept) <= {"x", "x.prev"}
        if folder.exists():
            assert read(folder) == (2 if in_place(log, at, 2) else 1)
        else:
            with pytest.warns(RuntimeWarning, match="loaded the older"):
                assert read(folder) == 1


def test_a_saver_that_others_keep_coming_before_gives_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def occupied(source: Any, target: Any) -> None:
        if os.path.isdir(source):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rename(source, target)

    write(folder, 1)
    rename = os.rename
    monkeypatch.setattr(os, "rename", occupied)
    with pytest.raises(
        RuntimeError, match=r"others keep saving to .*: let each run have a folder of its own"
    ):
        write(folder, 2)
    assert read(folder) == 1
    assert names(folder.parent) == ["run"]

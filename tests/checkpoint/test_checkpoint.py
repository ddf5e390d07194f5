"""What `save` promises, with the process killed, the disk failing and the file damaged at every
point there is.
"""

import argparse
import errno
import importlib
import os
import random
import re
import subprocess
import sys
import threading
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Faults, Killed
from saves import DTYPES, VIEWS, Scheduled, StepSaves, bits_of, damage, names

import tritonamp
from tritonamp.checkpoint import durable, load, save

SAVES = StepSaves(save, load)
read, write = SAVES.read, SAVES.write


@pytest.fixture(autouse=True)
def _instant_fsync(monkeypatch):
    """A killed process loses nothing it wrote, so only the calls count here; other processes below
    sync for real.
    """
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.ckpt"


# Round trips


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_tensors_come_back_bit_for_bit(path, dtype, view):
    raw = torch.randint(
        0, 256, (4, 4 * torch.empty((), dtype=dtype).element_size()), dtype=torch.uint8
    )
    tensor = view((raw % 2).bool()[:, :4] if dtype == torch.bool else raw.view(dtype))
    save(path, tensor=tensor)
    loaded = load(path)["tensor"]
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert bits_of(loaded) == bits_of(tensor)


def test_special_values_keep_their_bits(path):
    patterns = torch.tensor(
        [0x7FC12345, 0x7F800001, -0x800000, 0x7F800000, -(2**31), 1], dtype=torch.int32
    )
    save(path, x=patterns.view(torch.float32), y=float("-inf"), z=-0.0)
    loaded = load(path)
    assert loaded["x"].view(torch.int32).tolist() == patterns.tolist()
    assert (loaded["y"], str(loaded["z"])) == (float("-inf"), "-0.0")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**2032 - 1,
        1.5,
        2 + 3j,
        "",
        "text \ud800 \0 ü",
        torch.bfloat16,
        torch.uint3,
        torch.device("cuda", 1),
        torch.Size([2, 3]),
        [],
        (),
        {},
        (1, [2, {"a": (None,)}]),
        {"x": 1, 2: 3, 1.5: 4, None: 5, (1, "y"): 6, torch.float16: 7},
        OrderedDict(b=1, a=2),
        Counter({30: 2, 60: 1}),
        random.Random(0).getstate(),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_plain_values_come_back(path, value):
    save(path, value=value)
    loaded = load(path)["value"]
    assert (loaded, type(loaded)) == (value, type(value))


def test_metadata_of_a_state_dict_comes_back(path):
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    save(path, state=state)
    assert load(path)["state"]._metadata == state._metadata


def test_tensors_are_stored_detached_and_keep_shared_storage(path):
    weight = torch.nn.Parameter(torch.randn(1000))
    weight.note = lambda: "not for weights_only"
    save(path, weight=weight, tied=[weight, weight[:10], weight * 1])
    loaded = load(path)
    assert type(loaded["weight"]) is torch.Tensor
    assert not loaded["tied"][2].requires_grad
    assert loaded["tied"][1].data_ptr() == loaded["weight"].data_ptr()


def test_save_load_continue_is_bit_identical_to_not_stopping(path):
    def begun(seed):
        torch.manual_seed(seed)
        parts = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        return Scheduled(torch.nn.Sequential(*parts).bfloat16(), level=None)

    run, again = begun(0), begun(1)
    run.go_on(3)
    parts = [run.optimizer, {"scheduler": run.scheduler}]
    save(path, model=run.model, parts=parts, rng=torch.get_rng_state(), epoch=7)
    run.go_on(3)
    content = load(path)
    again.model.load_state_dict(content["model"])
    again.optimizer.load_state_dict(content["parts"][0])
    again.scheduler.load_state_dict(content["parts"][1]["scheduler"])
    torch.set_rng_state(content["rng"])
    again.go_on(3)
    assert content["epoch"] == 7
    assert again.scheduler.get_last_lr() == run.scheduler.get_last_lr()
    for name, value in run.model.state_dict().items():
        assert bits_of(again.model.state_dict()[name]) == bits_of(value), name


def schedulers(optimizer):
    lr = torch.optim.lr_scheduler
    return [
        lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        lr.StepLR(optimizer, 2),
        lr.ExponentialLR(optimizer, 0.9),
        lr.CosineAnnealingWarmRestarts(optimizer, 2),
        lr.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
        lr.OneCycleLR(optimizer, 0.1, 10),
        lr.ReduceLROnPlateau(optimizer),
        lr.SequentialLR(
            optimizer, [lr.LinearLR(optimizer), lr.MultiStepLR(optimizer, [3, 5])], [2]
        ),
    ]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.*:UserWarning")
def test_every_kind_of_scheduler_and_optimizer_state_is_plain(path):
    model = torch.nn.Linear(2, 2)
    optimizers = [
        kind(model.parameters(), lr=0.1)
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS)
    ]
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step(lambda: model(torch.ones(1, 2)).sum())
    average = torch.optim.swa_utils.AveragedModel(model)
    save(path, optimizers=optimizers, schedulers=schedulers(optimizers[0]), average=average)
    assert load(path).keys() == {"optimizers", "schedulers", "average"}


# The file


def test_the_file_is_what_torch_load_and_zip_readers_expect(path):
    write(path, 3)
    for mmap in (False, True):
        assert torch.load(path, weights_only=True, mmap=mmap)["step"] == 3
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b"tritonamp checkpoint 1, sha256 ")


def test_the_one_before_is_kept(path):
    write(path, 1)
    assert names(path.parent) == ["model.ckpt"]
    for step in (2, 3):
        write(path, step)
        assert names(path.parent) == ["model.ckpt", "model.ckpt.prev"]
        assert (read(path), read(f"{path}.prev")) == (step, step - 1)


def test_the_target_of_a_symbolic_link_is_written(path, tmp_path):
    (tmp_path / "disk").mkdir()
    path.symlink_to(tmp_path / "disk" / "real")
    write(path, 1)
    write(path, 2)
    assert path.is_symlink()
    assert names(tmp_path / "disk") == ["real", "real.prev"]
    assert read(path) == 2


def test_leftovers_of_killed_savers_are_removed_once_they_are_old(path, tmp_path, monkeypatch):
    digits = "0123456789abcdef"
    leftovers = [f"model.ckpt.saving-{digits}", f"model.ckpt.saving-{digits}.prev"]
    others = ["model.ckpt.saving-mine", f"other.ckpt.saving-{digits}"]
    for name in leftovers + others:
        (tmp_path / name).touch()
    write(path, 1)
    assert names(tmp_path) == sorted(["model.ckpt", *leftovers, *others])
    now = durable.time.time()
    monkeypatch.setattr(durable.time, "time", lambda: now + 700)
    write(path, 2)
    assert names(tmp_path) == sorted(["model.ckpt", "model.ckpt.prev", *others])


def test_threads_may_save_one_path(path):
    def work(step):
        try:
            for _ in range(5):
                write(path, step)
        except BaseException as error:
            errors.append(error)

    errors = []
    threads = [threading.Thread(target=work, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            read(path)
    assert not errors
    assert {read(path), read(f"{path}.prev")} <= {0, 1, 2, 3}
    assert names(path.parent) == ["model.ckpt", "model.ckpt.prev"]


# Damage


@pytest.mark.parametrize("fraction", [0, 0.01, 0.2, 0.4, 0.6, 0.8, 0.95, 0.99, 1])
def test_a_changed_byte_is_seen(path, fraction):
    write(path, 1)
    write(path, 2, size=500)
    damage(path, fraction)
    with pytest.warns(
        RuntimeWarning, match=f"{path} is unusable .*checksum.*; loaded the older {path}.prev"
    ):
        assert read(path) == 1


@pytest.mark.parametrize("keep", [0, 1, 50, 0.5, -96, -1])
def test_a_cut_file_is_seen(path, keep):
    write(path, 1)
    write(path, 2)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep == 0.5 else keep])
    with pytest.warns(RuntimeWarning, match="checksum missing or wrong"):
        assert read(path) == 1


@pytest.mark.parametrize(
    "make", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes() + b"\0")]
)
def test_a_missing_or_grown_file_is_seen(path, make):
    write(path, 1)
    write(path, 2)
    make(path)
    with pytest.warns(RuntimeWarning, match=f"{path} is unusable"):
        assert read(path) == 1


def test_a_file_of_torch_save_is_refused(path):
    torch.save({"step": 1}, path)
    written = rf"cannot load {path}: it was written by torch.save, not by tritonamp.save.*"
    with pytest.raises(RuntimeError, match=written + r"torch.load\(path, .*tritonamp.save\(path"):
        load(path)
    damage(path)  # which is not what is wrong with it
    with pytest.raises(RuntimeError, match=written):
        load(path)


def test_a_file_of_torch_save_costs_no_checkpoint_before_it(path):
    write(path, 1)
    write(path, 2)
    torch.save({"step": 3}, path)
    with pytest.warns(RuntimeWarning, match=rf"{path} is unusable \(written by torch.save"):
        assert read(path) == 1


@pytest.mark.parametrize("bytes_lost", [1, 5, 97])
def test_one_that_was_cut_off_is_not_taken_for_one_of_torch_save(path, bytes_lost):
    write(path, 1)
    Path(path).write_bytes(Path(path).read_bytes()[:-bytes_lost])
    with pytest.raises(RuntimeError, match="checksum missing or wrong: cut off"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"PK", bytes(100)])
def test_other_files_are_not_taken_for_ones_of_torch_save(path, content):
    Path(path).write_bytes(content)
    with pytest.raises(RuntimeError, match="checksum missing or wrong"):
        load(path)


def test_both_damaged_is_an_error_that_names_both(path):
    write(path, 1)
    write(path, 2)
    damage(path)
    damage(Path(f"{path}.prev"))
    found = rf"no usable checkpoint \({path}: checksum.*; {path}.prev: checksum.*restore one"
    with pytest.raises(RuntimeError, match=found):
        load(path)


def test_nothing_there_is_file_not_found(path):
    with pytest.raises(FileNotFoundError, match=f"neither {path} nor {path}.prev exists"):
        load(path)


def test_a_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(
        IsADirectoryError, match="it is a folder; those are for load_sharded, name a file"
    ):
        load(tmp_path)


class Foreign:
    def __reduce__(self):
        return (os.mkdir, ("foreign code ran",))


def test_foreign_code_is_refused_even_with_a_right_checksum(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    durable.write(str(path), {"step": Foreign()})
    with pytest.raises(RuntimeError, match="no usable checkpoint"):
        load(path)
    assert names(tmp_path) == ["model.ckpt"]


def test_the_default_mmap_setting_of_torch_does_not_matter(path):
    # torch itself imports it late
    config = importlib.import_module("torch.utils.serialization.config").load
    before = config.mmap
    config.mmap = True  # by hand: monkeypatch would remove the entry at the end
    try:
        write(path, 1)
        assert read(path) == 1
    finally:
        config.mmap = before


# Misuse


class UnpicklableScheduler:
    def state_dict(self):
        return {"base": [0.1, {"fn": print}]}


class StateOfModules:
    def state_dict(self):
        return {"inner": torch.nn.Linear(1, 1)}


class TensorSubclass(torch.Tensor):
    pass


REFUSED = [
    (print, "value: .*got builtins.builtin_function_or_method"),
    (object(), "value: .*got builtins.object"),
    (torch.nn.Linear, "value: .*got builtins.type"),
    (np.datetime64("2026-11-25T06:03:39.000000"), "value: .*got numpy.datetime64"),
    (np.zeros(1), r"value: .*got numpy.ndarray; convert it \(torch.from_numpy\(array\)\) or omit"),
    (argparse.Namespace(lr=1), r"value: .*Namespace; convert it \(vars\(namespace\)\) or omit"),
    (b"bytes", "value: .*got builtins.bytes"),
    ({1}, "value: .*got builtins.set"),
    (2**2032, "value: .*got builtins.int"),
    (torch.ones(1).as_subclass(TensorSubclass), "value: .*got .*TensorSubclass"),
    (torch.empty(1, device="meta"), "value: .*got torch.Tensor"),
    (errno, "value: .*got builtins.module"),
    ([1, (2, {"a": print})], r"value\[1\]\[1\]\['a'\]: .*got"),
    ({frozenset(): 1}, "a key of value: .*got builtins.frozenset"),
    (UnpicklableScheduler(), r"value.state_dict\(\)\['base'\]\[1\]\['fn'\]: .*got"),
    ([UnpicklableScheduler()], r"value\[0\].state_dict\(\)\['base'\]"),
    (StateOfModules(), r"value.state_dict\(\)\['inner'\]: .*got torch.nn.modules.linear.Linear"),
    (torch.optim.lr_scheduler.StepLR, "value: .*got builtins.type"),
]


@pytest.mark.parametrize(
    "value",
    [np.float64(0.1), np.float32(0.1), np.int64(7), np.bool_(True), np.str_("a")],
    ids=lambda value: type(value).__name__,
)
def test_scalars_of_numpy_come_back_as_plain_ones(path, value):
    save(path, value=value, nested={"best": [value]})
    loaded = load(path)
    for found in (loaded["value"], loaded["nested"]["best"][0]):
        assert type(found) is type(value.item()) and found == value.item()


@pytest.mark.parametrize(("value", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_could_not_be_loaded_is_refused_by_key_path_and_nothing_is_written(path, value, text):
    write(path, 1)
    with pytest.raises(ValueError, match=f"cannot save {text}") as raised:
        save(path, good=torch.ones(1), value=value)
    assert re.search(r": expected tensors .*meta device.*, got .*; convert it", str(raised.value))
    assert names(path.parent) == ["model.ckpt"]
    assert read(path) == 1


def test_metadata_that_could_not_be_loaded_is_refused(path):
    state = OrderedDict(a=torch.ones(1))
    state._metadata = {"": {"hook": print}}
    with pytest.raises(ValueError, match=r"vars\(state\)\['_metadata'\]\[''\]\['hook'\]"):
        save(path, state=state)
    assert not names(path.parent)


def test_unusable_paths(tmp_path):
    with pytest.raises(ValueError, match="got nothing to save"):
        save(tmp_path / "x")
    with pytest.raises(IsADirectoryError, match="is a folder or a device"):
        save(tmp_path, step=1)
    with pytest.raises(IsADirectoryError, match="is a folder or a device"):
        save(os.devnull, step=1)
    with pytest.raises(FileNotFoundError, match="its folder does not exist; create it first"):
        save(tmp_path / "missing" / "x", step=1)
    assert not names(tmp_path)
    assert Path(os.devnull).is_char_device()


# Kills and errors at every write, fsync, link and rename


def no_links(*_):
    raise OSError(errno.EPERM, "Operation not permitted")


def faults_of(monkeypatch, at=None, error=None, links=True):
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    return Faults(monkeypatch, ("fsync", "link", "replace", "unlink"), at, error)


def calls(tmp_path, before, links):
    """The system calls of one save."""
    path = tmp_path / "dry run" / "x"
    SAVES.prepare(path, before)
    with pytest.MonkeyPatch.context() as patch:
        faults = faults_of(patch, links=links)
        write(path, before)
    return faults.log


def test_content_is_on_the_disk_before_it_gets_the_name_and_the_name_before_save_returns(tmp_path):
    log = [name for name in calls(tmp_path, 2, links=True) if name != "unlink"]
    first = log.index("fsync")
    assert set(log[:first]) == {"write"}
    assert log[first:] == ["fsync", "link", "replace", "replace", "fsync"]


def test_the_file_is_complete_when_it_is_synced(path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    write(path, 1)
    assert sizes[0] == path.stat().st_size


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_killed_at_any_point_the_old_or_the_new_loads(tmp_path, before, links):
    log = calls(tmp_path, before, links)
    assert {"write", "fsync", "link", "replace"} <= set(log)
    for at in range(1, len(log) + 1):
        path = tmp_path / str(at) / "x"
        SAVES.prepare(path, before)
        with pytest.MonkeyPatch.context() as patch:
            faults_of(patch, at, links=links)
            with pytest.raises(Killed):
                write(path, before)
        in_place = log[: at - 1].count("replace") >= (1 if links or not before else 2)
        if in_place:
            assert read(path) == before
        elif before == 0:
            with pytest.raises(FileNotFoundError):
                read(path)
        elif path.exists():
            assert read(path) == before - 1
        else:
            assert not links
            with pytest.warns(RuntimeWarning, match="loaded the older"):
                assert read(path) == before - 1
        write(path, 9)  # a restarted run saves over whatever is there
        assert read(path) == 9


def test_a_damaged_file_never_costs_the_good_one_before_it(tmp_path):
    for at in range(1, len(calls(tmp_path, 2, links=True)) + 1):
        path = tmp_path / str(at) / "x"
        SAVES.prepare(path, 2)
        damage(path)
        with pytest.MonkeyPatch.context() as patch:
            faults = faults_of(patch, at)
            with pytest.raises(Killed):
                write(path, 2)
        if "replace" in faults.log[: at - 1]:
            assert read(path) == 2
        else:
            with pytest.warns(RuntimeWarning, match="loaded the older"):
                assert read(path) == 0


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_an_error_at_any_point_reaches_the_caller_and_leaves_no_litter(tmp_path, links):
    log = calls(tmp_path, 2, links)
    for at, name in enumerate(log, 1):
        if name == "unlink":
            continue  # clean-up itself
        path = tmp_path / str(at) / "x"
        SAVES.prepare(path, 2)
        error = OSError(errno.ENOSPC, "No space left on device")
        with pytest.MonkeyPatch.context() as patch:
            faults_of(patch, at, error, links)
            if name == "link":  # which falls back to renaming
                write(path, 2)
            else:
                with pytest.raises(OSError, match="No space left") as caught:
                    write(path, 2)
                assert caught.value is error
        assert set(names(path.parent)) <= {"x", "x.prev"}
        done = log[: at - 1].count("replace") >= (1 if links else 2) or name == "link"
        if not path.exists():
            assert not links
            with pytest.warns(RuntimeWarning, match="loaded the older"):
                assert read(path) == 1
        else:
            assert read(path) == (2 if done else 1)
            if not done:
                assert read(f"{path}.prev") == 0


def test_an_interrupt_while_writing_stays_an_interrupt(path, monkeypatch):
    write(path, 1)
    faults_of(monkeypatch, at=5, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write(path, 2)
    assert names(path.parent) == ["model.ckpt"]


def test_an_error_of_torch_is_not_taken_for_the_one_being_handled(path, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch, "save", fail)
    try:
        raise OSError("what the caller saves because of")
    except OSError:
        with pytest.raises(RuntimeError, match="CUDA error"):
            save(path, step=1)
    assert not names(path.parent)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF])
def test_a_file_system_that_cannot_sync_folders_is_no_error(path, monkeypatch, code):
    def fsync(descriptor):
        synced.append(descriptor)
        if os.path.isdir(descriptor):
            raise OSError(code, "")

    synced = []
    monkeypatch.setattr(os, "fsync", fsync)
    write(path, 1)
    assert len(synced) == 2
    assert read(path) == 1


def test_a_full_disk(path):
    """A real failure of the system's write: no file may grow beyond 100 kB."""
    resource = pytest.importorskip("resource")
    write(path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(path, 2, size=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(path.parent) == ["model.ckpt"]
    assert read(path) == 1


# Other processes


def script(text, folder, *args):
    """Starts Python in `folder` on `text`, with `tritonamp` from where it is here and warnings as
    errors.
    """
    root = str(Path(tritonamp.__file__).parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "error", "-c", text, *map(str, (folder, *args))]
    options = {"env": environment, "cwd": folder, "text": True}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def output(process, timeout=60):
    try:
        text, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, text
    return text.splitlines()


KILL_EVERYWHERE = """
import io, os, shutil, signal, sys
import torch
from tritonamp.checkpoint import durable, save

folder = sys.argv[1]
def content(step):
    return {"step": step, "weights": [torch.full((3,), float(step)) for _ in range(2)]}

for at in range(1, 1000):
    path = os.path.join(folder, str(at))
    for step in range(2):
        save(path, **content(step))
    child = os.fork()
    if child == 0:
        count = 0
        def call():
            global count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
        class File(io.FileIO):
            def write(self, data):
                super().write(memoryview(data)[:len(data) // 2])
                call()
                return len(data) // 2 + super().write(memoryview(data)[len(data) // 2:])
        durable.open = lambda path, mode: File(path, mode.replace("b", ""))
        def before(function):
            return lambda *args: (call(), function(*args))[1]
        for name in ("fsync", "link", "replace"):
            setattr(os, name, before(getattr(os, name)))
        save(path, **content(2))
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
    print(at)
"""


@pytest.mark.crash
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sigkill_at_every_point(tmp_path):
    killed = [int(line) for line in output(script(KILL_EVERYWHERE, tmp_path))]
    assert len(killed) > 10
    steps = [read(tmp_path / str(at)) for at in killed]
    assert steps == sorted(steps)  # first the old one, from the rename on the new one
    assert set(steps) == {1, 2}


TWO_RANKS = """
import datetime, os, sys
import torch
import torch.distributed as dist
from tritonamp.checkpoint import load, save

folder, store, rank = *sys.argv[1:3], int(sys.argv[3])
path = os.path.join(folder, "x")

def fails(kind, text, *args, **objects):
    try:
        save(*args, **objects)
    except kind as error:
        assert type(error) is kind and text in str(error), repr(error)
    else:
        raise AssertionError(f"no {kind}")

# not initialised: both write the one path, and each finds a whole checkpoint there
for _ in range(10):
    save(path, step=rank, x=torch.full((1000,), rank))
    content = load(path)
    assert (content["x"] == content["step"]).all()

dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=20))
for step in range(3):
    save(path, step=step, x=torch.full((1000,), rank))
    content = load(path)  # on every rank, at once after the save: rank 0's
    assert content["step"] == step and not content["x"].any()
    dist.barrier()

text = "FileNotFoundError: cannot save to"
missing = os.path.join(folder, "missing", "x")
if rank == 0:
    fails(FileNotFoundError, "its folder does not exist", missing, step=1)
    save(path, step=3, x=0)
    fails(RuntimeError, "failed on rank 1: ValueError: cannot save x: expected", path, step=4, x=0)
else:
    fails(RuntimeError, "failed on rank 0: FileNotFoundError: cannot save to", missing, step=1)
    save(missing, step=3, x=0)  # only the writing rank needs the folder
    fails(ValueError, "cannot save x: expected", path, step=4, x=print)
assert load(path)["step"] == 3
fails(ValueError, "got nothing to save", path)
dist.destroy_process_group()
print("done")
"""


@pytest.mark.ranks
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_ranks_save_one_path(tmp_path):
    # the ranks meet in a file outside it, which torch may or may not remove
    folder = tmp_path / "saved"
    folder.mkdir()
    ranks = [script(TWO_RANKS, folder, tmp_path / "store", rank) for rank in range(2)]
    for rank in ranks:
        assert output(rank) == ["done"]
    assert names(folder) == ["x", "x.prev"]

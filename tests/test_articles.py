"""bench/articles.py: batches made on the device, every mode at toy size, lines and tables."""

import importlib
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpuless.fake_cuda import FakeCuda
from torch import Tensor

from tritonamp.apex import amp as apex_amp

CPU = torch.device("cpu")
MODES = "FP32", "TF32", "torch.amp", "apex O1", "apex O2", "tritonamp O2"
ABOUT = {
    "device": "NVIDIA Test", "torch": "2.15.0", "triton": "3.9.0", "commit": "abc",
    "data": "generated", "batch": 256, "epochs": 3, "command": "python bench/articles.py",
}  # fmt: skip
NUMBERS = {
    "seconds_per_epoch": 4.5, "images_per_second": 11093.3, "peak_mib": 3500.4,
    "accuracy": 81.256, "final_loss": 0.51234, "skipped": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def articles() -> Any:
    return importlib.import_module("articles")


@pytest.fixture(scope="module")
def epochs() -> Any:
    return importlib.import_module("epochs")


@pytest.fixture(scope="module")
def images() -> Any:
    return importlib.import_module("images")


@pytest.fixture(autouse=True)
def process_is_as_before() -> Iterator[None]:
    """The command leaves these two behind, since each mode has a process."""
    precision = torch.backends.cudnn.conv.fp32_precision
    yield
    torch.backends.cudnn.conv.fp32_precision = precision
    apex_amp._amp_state.handle._deactivate()


# Images


@pytest.mark.smoke
def test_a_crop_is_a_window_of_the_padded_image(images: Any) -> None:
    """Every pixel has a value of its own, and every corner and both mirrorings are drawn."""
    n, height, width, most = 3, 4, 5, 2 * images.MARGIN
    padded = torch.arange(n * 2 * (height + most) * (width + most))
    padded = padded.view(n, 2, height + most, width + most)
    drawn = [
        (row, top, left, mirrored)
        for row in (2, 0)
        for top in (0, 3, most)
        for left in (0, 1, most)
        for mirrored in (False, True)
    ]
    found = images.crops(padded, *map(torch.tensor, zip(*drawn, strict=True)))
    for crop, (row, top, left, mirrored) in zip(found, drawn, strict=True):
        window = padded[row, :, top : top + height, left : left + width]
        assert torch.equal(crop, window.flip(-1) if mirrored else window)


def test_random_crops_reach_every_place(images: Any) -> None:
    """Of 2,000 crops each of 81 places, in both mirrorings, has 12 on average."""
    side = 2 * images.MARGIN + 1
    padded = torch.zeros(1, 1, side + 1, side + 1, dtype=torch.long)
    padded[0, 0] = torch.arange((side + 1) ** 2).view(side + 1, side + 1)
    found = images.random_crops(padded, torch.zeros(2000, dtype=torch.long))
    corners = {tuple(crop[0, 0].tolist()) for crop in found}  # of windows of two pixels each way
    left_to_right = {(i, i + 1) for i in range((side + 1) * side) if i % (side + 1) != side}
    assert corners == left_to_right | {(right, left) for left, right in left_to_right}


def test_an_epoch_has_every_image_once(images: Any) -> None:
    """But for the last batch, which is not full; batches are normalised, and seeds repeat them."""
    n, size = 50, 6
    train = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 3, size, size)
    classes = torch.arange(n) % images.CLASSES
    data = images.prepared(train.contiguous(), classes, train, classes)
    mean, std = torch.arange(n).double().mean(), train[:, 0].double().std()
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(list(data.epoch(16)))
    assert [(x.shape, x.dtype) for x, _ in drawn[0]] == [((16, 3, size, size), torch.float32)] * 3
    seen = []
    for (x, y), (again, _) in zip(*drawn, strict=True):
        assert torch.equal(x, again)
        values = (x.double() * std + mean).amax((1, 2, 3)).round().long()  # the margin is 0
        assert torch.equal(values % images.CLASSES, y)
        seen += values.tolist()
    assert len(set(seen)) == 48 and seen != sorted(seen)
    tests = [y for _, y in data.tests(16)]
    assert torch.equal(torch.cat(tests), classes)


def test_cifar10_comes_from_torchvision(images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)

    def read(root: str, train: bool) -> Any:
        assert root == "folder"
        return SimpleNamespace(data=pixels if train else pixels[:1], targets=[7, 3][: 1 + train])

    datasets = ModuleType("torchvision.datasets")
    datasets.CIFAR10 = read
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    data = images.cifar10(Path("folder"), CPU)
    assert data.test.shape == (1, 3, 4, 5) and data.test_classes.tolist() == [7]
    margin = images.MARGIN
    inside = data.padded[:, :, margin:-margin, margin:-margin]
    assert torch.equal(inside, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert data.padded.sum() == inside.sum() and data.classes.tolist() == [7, 3]


def test_cifar10_without_torchvision(images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchvision"):
        images.cifar10(Path("folder"), CPU)


def test_generated_images_are_bytes_in_range(images: Any) -> None:
    torch.manual_seed(0)
    data = images.generated(300, 20, 8, CPU)
    assert data.padded.dtype is data.test.dtype is torch.uint8
    assert data.test.shape == (20, 3, 8, 8) and set(data.classes.tolist()) == set(range(10))
    assert (data.mean - 128).abs().max() < 20 and data.std.min() > 20
    clamped = (data.test == 0) | (data.test == 255)
    assert clamped.float().mean() < 0.05


# Modes


@pytest.fixture(scope="module")
def task(articles: Any) -> Any:
    return articles.TOY._replace(train=96, test=32, epochs=2)


@pytest.fixture(scope="module")
def fp32(epochs: Any, task: Any) -> dict[str, Any]:
    return epochs.measure("FP32", task, CPU)


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=[pytest.mark.smoke] * (m == "apex O2")) for m in MODES[1:]]
)
def test_a_mode_trains_as_fp32_does(
    epochs: Any, task: Any, fp32: dict[str, Any], mode: str
) -> None:
    """Batches are equal, so that losses are close until rounding errors have grown."""
    found = epochs.measure(mode, task, CPU)
    assert found.keys() == fp32.keys() and found["skipped"] == 0
    assert (found["images"], found["test_images"], found["peak_mib"]) == (96, 32, None)
    assert found["losses"][0] == pytest.approx(fp32["losses"][0], rel=0.01)
    assert found["final_loss"] == found["losses"][-1]
    assert found["final_loss"] == pytest.approx(fp32["final_loss"], rel=0.1)
    assert 0 <= found["accuracy"] <= 100 and found["seconds_per_epoch"] > 0


@pytest.mark.parametrize(
    ("mode", "weights", "outputs"),
    [
        ("FP32", torch.float32, torch.float32),
        ("torch.amp", torch.float32, torch.float16),
        ("apex O1", torch.float32, torch.float16),
        ("apex O2", torch.float16, torch.float16),
        ("tritonamp O2", torch.float16, torch.float16),
    ],
)
def test_a_mode_is_what_its_name_says(
    epochs: Any, task: Any, mode: str, weights: torch.dtype, outputs: torch.dtype
) -> None:
    """In training and in the evaluation."""
    seen = []

    def build() -> Any:
        model = task.build()
        model[0].register_forward_hook(
            lambda conv, _, output: seen.append((conv.training, conv.weight.dtype, output.dtype))
        )
        return model

    epochs.measure(mode, task._replace(build=build, train=16, test=16), CPU)
    assert set(seen) == {(training, weights, outputs) for training in (True, False)}


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_does_not_wait_for_the_device(
    epochs: Any,
    task: Any,
    fake_cuda: FakeCuda,
    plans: None,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """The second; in the first plans are made."""
    waits, train_epoch = [], epochs.train_epoch

    def watched(*args: Any) -> tuple[Tensor, Tensor]:
        with fake_cuda.watch() as records:
            found = train_epoch(*args)
        waits.append(records)
        return found

    monkeypatch.setattr(epochs, "train_epoch", watched)
    found = epochs.measure(mode, task._replace(train=32, test=16), torch.device("cuda"))
    assert waits[1] == []
    assert found["peak_mib"] == 1 and found["losses"][1] < 3


@pytest.mark.long
def test_the_command_at_toy_size(
    articles: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two modes learn: of 256 test images chance has 10 % right, with a deviation of 1.9."""
    path, modes = tmp_path / "x.jsonl", ["FP32", "apex O1"]
    monkeypatch.setattr(articles, "MODES", modes)
    assert articles.main(["--toy", "--lines", str(path)]) == 0
    rows = articles.jsonl.read(path)
    assert [row["mode"] for row in rows] == modes
    assert all(row["accuracy"] > 15 and row["final_loss"] < 2.3 for row in rows)
    assert {row["batch"] for row in rows} == {16} and {row["epochs"] for row in rows} == {4}
    assert all(row.keys() >= {"torch", "triton", "commit", "device", "date"} for row in rows)
    table = capfd.readouterr().out
    assert all(f"| {mode} | " in table for mode in modes)


# Lines and tables


def test_a_mode_that_fails_leaves_a_line_and_the_others_go_on(
    articles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One raises, one dies, one takes all the time that is left."""
    now, path = [0.0], tmp_path / "x.jsonl"

    def measure(mode: str, task: Any, device: torch.device) -> dict[str, Any]:
        assert task.epochs == 7
        if mode == "torch.amp":
            raise RuntimeError("CUDA error:\nan illegal memory access")
        return NUMBERS

    def run(command: list[str], timeout: float, check: bool) -> Any:
        mode = command[command.index("--mode") + 1]
        if mode == "apex O2":
            now[0] += timeout
            raise subprocess.TimeoutExpired(command, timeout)
        now[0] += 10.0
        dies = mode == "apex O1"
        return SimpleNamespace(returncode=-11 if dies else articles.main(command[2:]))

    monkeypatch.setattr(articles, "measure", measure)
    commits = chain(["first"], repeat("changed by the first line"))
    monkeypatch.setattr(articles.provenance, "commit", lambda: next(commits))
    processes = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(articles, "subprocess", processes)
    clock = SimpleNamespace(time=lambda: now[0], strftime=time.strftime)
    monkeypatch.setattr(articles, "time", clock)
    options = ["--toy", "--epochs", "7", "--seconds", "100", "--lines", str(path)]
    assert articles.main(options) == 1
    assert now[0] == 100.0 and {row["commit"] for row in articles.jsonl.read(path)} == {"first"}
    assert {row["mode"]: row.get("reason") for row in articles.jsonl.read(path)} == {
        "FP32": None,
        "TF32": None,
        "torch.amp": "RuntimeError: CUDA error: an illegal memory access",
        "apex O1": "its process ended early: exit status -11",
        "apex O2": "out of time",
        "tritonamp O2": "out of time",
    }
    text = articles.tables(path)
    assert "| TF32 | 4.50 |" in text and "| apex O2 |" not in text
    assert "apex O1: its process ended early: exit status -11;" in " ".join(text.split())


def test_fp32_is_not_tf32(articles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def measure(mode: str, *args: Any) -> dict[str, Any]:
        seen[mode] = torch.backends.cudnn.conv.fp32_precision
        return NUMBERS

    monkeypatch.setattr(articles, "measure", measure)
    for mode in ("TF32", "FP32"):
        articles.main(["--toy", "--lines", str(tmp_path / "x.jsonl"), "--mode", mode])
    assert seen == {"TF32": "tf32", "FP32": "ieee"}


def test_tables(articles: Any, tmp_path: Path) -> None:
    """The last line of a mode counts; other commits have tables of their own."""
    path = tmp_path / "articles-nvidia-test.jsonl"
    assert articles.results(tmp_path) == "Not measured yet: `python bench/articles.py`"
    first = {"mode": "torch.amp", "reason": "out of time"} | ABOUT
    for row in (
        first, {"mode": "apex O2"} | NUMBERS | ABOUT, {"mode": "torch.amp"} | NUMBERS | ABOUT,
        first | {"commit": "def"},
    ):  # fmt: skip
        articles.jsonl.append(path, row)
    text = articles.results(tmp_path)
    assert text.splitlines()[:4] == [
        "| mode | s an epoch | images a second | peak MiB | accuracy, % | loss | skipped |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| torch.amp | 4.50 | 11093 | 3500 | 81.26 | 0.5123 | 2 |",
        "| apex O2 | 4.50 | 11093 | 3500 | 81.26 | 0.5123 | 2 |",
    ]
    assert "generated images, batch 256, 3 epochs, on NVIDIA Test" in text
    assert " ".join(text.split()).endswith(
        "commit def, `python bench/articles.py`. Not measured: torch.amp: out of time."
    )


def test_the_page_shows_them(articles: Any) -> None:
    report = importlib.import_module("report")
    text = report.README.read_text()
    assert text == report.filled(text, "articles", articles.results(report.RESULTS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_nothing_is_written_without_a_gpu(
    articles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(articles, "RESULTS", tmp_path)
    assert articles.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_toys_are_no_results(articles: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        articles.main(["--toy"])
    assert "expected --lines with --toy" in capsys.readouterr().err

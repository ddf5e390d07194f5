"""doctor --selftest: what it finds, what it says, and that one failure hides no other."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonamp.__main__ import main
from tritonamp.commands import selftest
from tritonamp.commands.selftest import kernels, speed, training
from tritonamp.kernels import _sample
from tritonamp.kernels import device as hardware
from tritonamp.kernels._implementations import operations
from tritonamp.kernels._launch import KernelError

CPU = torch.device("cpu")
FEW = "softmax", "cast", "decide"
needs_kernels = pytest.mark.skipif(not hardware.INTERPRETED, reason="for kernels on the CPU")


@pytest.fixture(autouse=True)
def _toy_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, changes in {
        training: {"STEPS": 6, "LAST": 2},
        speed: {"COPY_BYTES": 1 << 16, "WARM_UP": 1, "SAMPLES": 1, "CALLS": 1},
        _sample: {"LARGE": 1 << 12},
    }.items():
        for name, value in changes.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU as users have it: without Triton's interpreter."""
    monkeypatch.setattr(hardware, "INTERPRETED", False)


@pytest.fixture
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three operations; test_samples.py has them all."""
    few = {name: operations()[name] for name in FEW}
    monkeypatch.setattr(kernels, "operations", lambda: few)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selftest.GROUPS, "training", lambda *place: ())


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{check['group']} {check['name']}": check for check in found["checks"]}


def failures(found: dict[str, Any]) -> dict[str, str]:
    names = by_name(found).items()
    return {name: check["detail"] for name, check in names if check["status"] == "FAILED"}


# What is run


@pytest.mark.smoke
@pytest.mark.usefixtures("eager")
def test_a_cpu_runs_the_eager_twins_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--selftest"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "selftest on cpu: eager twins, no kernels (cpu is not an NVIDIA GPU)\n\ncheck     of  "
    )
    assert "CUDA graphs need a GPU" in text and "speed" not in text
    lines = text.splitlines()
    for name in operations():
        assert any(line.startswith(f"kernel    {name} ") for line in lines)
    for level in ("O0 ", "O1 float16", "O2 float16", "O3 float16", "O1 bfloat16"):
        assert any(line.startswith(f"training  {level}") and " ok " in line for line in lines)


@pytest.mark.usefixtures("eager")
def test_a_cpu_says_why_it_has_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--selftest", "speed"]) == 0
    why = "No check can be tried here, because no kernels run: cpu is not an NVIDIA GPU. 0 s"
    assert capsys.readouterr().out.splitlines()[1:] == ["", why]


@needs_kernels
@pytest.mark.usefixtures("few_kernels", "no_training")
def test_kernels_run_in_the_interpreter_where_it_is_asked_for() -> None:
    found = selftest.run(CPU)
    assert (found["backend"], found["failed"]) == ("triton", 0)
    text = selftest.text(found)
    assert "kernels (TRITON_INTERPRET=1 runs kernels in Triton's interpreter)" in text
    assert [check["name"] for check in found["checks"]] == [
        "softmax", "softmax log", "cast", "decide clean", "decide overflow",
    ]  # fmt: skip
    assert all(check["calls"] >= 2 for check in found["checks"])
    due = {"softmax log": 64}  # its results are FP32
    assert all(check["max_ulps"] <= due.get(check["name"], 2) for check in found["checks"])


@pytest.mark.usefixtures("few_kernels")
def test_a_gpu_is_trained_captured_and_timed(cuda: torch.device) -> None:
    found = selftest.run(cuda)
    assert failures(found) == {}
    checks = by_name(found)
    assert checks["training a CUDA graph"]["detail"].endswith("the same bits")
    moving = [
        name
        for name, op in operations().items()
        if any(sample.large(cuda, torch.float16).moves for sample in op.samples)
    ]
    assert [check["name"] for check in found["checks"] if check["group"] == "speed"] == [
        "copy",
        *moving,
    ]
    assert all(checks[f"speed {name}"]["fraction_of_copy"] > 0 for name in moving)


# What it finds


def broken(name: str, monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Any]) -> None:
    monkeypatch.setattr(operations()[name], "triton_function", kernel)


@needs_kernels
@pytest.mark.usefixtures("few_kernels", "no_training")
def test_a_wrong_kernel_is_named_with_shape_error_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    softmax = operations()["softmax"].torch_function

    def forgets_the_last_of_many(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
        y = softmax(x, dim, dtype, log)
        if x.shape[dim] == 50257 and not log:
            y[..., -1] = 0.0
        return y

    broken("softmax", monkeypatch, forgets_the_last_of_many)
    assert main(["doctor", "--selftest"]) == 1
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if " FAILED " in line]
    assert row.startswith("kernel  softmax ")
    assert "1 of 8 calls: float16 [2, 50257] along 1: " in row
    assert "ulps of torch.float16 off its eager twin, 2 are due" in row
    assert "1 of 5 failed. Please report this table" in text and 'backend="eager"' in text


@needs_kernels
@pytest.mark.usefixtures("few_kernels", "no_training")
def test_a_kernel_that_does_not_compile_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise KernelError("cast_kernel cannot be compiled: no ptxas")

    broken("cast", monkeypatch, fails)
    broken("decide", monkeypatch, lambda *args: None)
    found = selftest.run(CPU)
    failed = failures(found)
    assert list(failed) == ["kernel cast", "kernel decide clean", "kernel decide overflow"]
    assert failed["kernel cast"] == (
        "2 of 2 calls: float16 tensors of 0 to 12289 elements: "
        "KernelError: cast_kernel cannot be compiled: no ptxas"
    )
    assert "ulps of torch.float32 off its eager twin" in failed["kernel decide clean"]
    assert by_name(found)["kernel softmax"]["status"] == "ok"


@pytest.mark.usefixtures("eager")
def test_a_step_that_does_nothing_fails_the_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations()["adamw"], "_on_cpu", lambda *args: None)
    found = failures(selftest.run(CPU))
    assert "the loss does not fall: loss 1.7" in found["training O2 float16"]
    assert found["training a skip"] == "the step after the skip was not taken"


@pytest.mark.usefixtures("eager")
def test_a_decision_that_never_skips_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = operations()["decide"].torch_function

    def optimistic(*args: Any) -> None:
        decide(*args)
        args[7].found_inf.zero_()

    monkeypatch.setattr(operations()["decide"], "torch_function", optimistic)
    found = failures(selftest.run(CPU))
    assert list(found) == ["training a skip"]


# How it is told


@pytest.mark.usefixtures("eager", "few_kernels", "no_training")
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--selftest", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-2].startswith("selftest on cpu: eager twins, no kernels")
    assert printed.err.splitlines()[-1].startswith("All 5 hold.")
    found = json.loads(printed.out)
    expected = "device tritonamp python torch triton backend reason failed checks"
    assert " ".join(found) == expected
    for check in found["checks"]:
        assert list(check)[:5] == ["group", "name", "status", "detail", "seconds"]
        assert check["status"] in ("ok", "FAILED", "not here")


# Ulps

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("actual", "expected", "dtype", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], torch.float16, 0.0),
        ([1.0 + 2.0**-10], [1.0], torch.float16, 1.0),
        ([1.0 + 2.0**-7], [1.0], torch.bfloat16, 1.0),
        ([1.0, 2.0**-23], [1.0, 0.0], torch.float32, 2.0),  # of the mean, which is 1/2
        ([1.0, 0.0], [1.0, 0.5], torch.float16, 1024.0),  # of the mean, which is above 1/2
        ([INF, NAN, 1.0], [NAN, -INF, 1.0], torch.float16, 0.0),
        ([INF, 1.0], [1.0, 1.0], torch.float16, INF),
        ([1], [2], torch.int32, INF),
        ([], [], torch.float32, 0.0),
    ],
)
def test_ulps(actual: list[float], expected: list[float], dtype: torch.dtype, error: float) -> None:
    assert kernels.ulps(torch.tensor(actual, dtype=dtype), torch.tensor(expected, dtype=dtype)) == (
        error
    )


def test_another_dtype_or_shape_is_no_rounding() -> None:
    x = torch.ones(3)
    assert kernels.ulps(x, x.half()) == kernels.ulps(x, x[:2]) == INF

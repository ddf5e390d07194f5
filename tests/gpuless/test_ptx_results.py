"""Eager torch, Triton's interpreter, and compiled code of each architecture, in every order of the
warps: one result. They come from two processes, see ``gpuless/ptx/results.py``.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuless import driver

pytestmark = [
    pytest.mark.static,
    pytest.mark.skipif(driver.obstacle() is not None, reason=str(driver.obstacle())),
]
TESTS = Path(__file__).resolve().parents[1]
KERNELS = TESTS.parent / "kernels"
COMPILED = ["80 up", "75 down"]  # sm_90 is what the tests of the kernels run as
# largest magnitudes and checksums
SAME_ARITHMETIC = re.compile(r"cast|decide|(grad|checked)_stats .* 0$|checked_stats .* 2$")
NORM = re.compile(r"(grad|checked)_stats .* 1$")
ULPS = 2.0
"""Of the largest number in a result. Parts of a line are added in another order, products are
contracted or not, exp2 is correctly rounded or not: 1.25 was measured."""
NORM_ULPS = 8.0
"""Of the sum of the squares of all gradients, of which eager torch has an order of its own: 5.8 was
measured."""
TRAINED = 1e-4
"""A hundredth of the learning rate. Adam divides by the root of what it has seen, so that gradients
that are all rounding error move weights as far as others: 2e-5 was measured."""


def results(out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "gpuless.ptx.results", str(out), *arguments]
    subprocess.run(command, check=True, cwd=TESTS)
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def everybody(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of all, by name."""
    folder = tmp_path_factory.mktemp("results")
    found = results(folder / "interpreted.pt", "--interpreted")
    return found | results(folder / "compiled.pt", "--compiled", *COMPILED)


def numbers(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    results = found["results"].items()
    return {f"{case} {name}": x for case, r in results for name, x in r.items() if x.numel()}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().view(torch.uint8)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two results, in ulps of the largest number in them."""
    dtype = a.dtype if a.dtype.is_floating_point else torch.float32
    a, b = a.double(), b.double()
    assert torch.equal(a.isfinite(), b.isfinite())
    a, b = (x[x.isfinite()] for x in (a, b))
    return float((a - b).abs().max() / (torch.finfo(dtype).eps * b.abs().max().clamp(min=1e-30)))


def test_nothing_is_found(everybody: dict[str, dict[str, Any]]) -> None:
    assert [fault for name in COMPILED for fault in everybody[name]["faults"]] == []


def test_every_kernel_ran(everybody: dict[str, dict[str, Any]]) -> None:
    text = "".join(path.read_text() for path in KERNELS.glob("*.py"))
    defined = set(re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE))
    assert everybody[COMPILED[0]]["kernels"] == defined


@pytest.mark.parametrize("name", COMPILED[1:])
def test_orders_of_warps_and_architectures_give_the_same_bits(
    everybody: dict[str, dict[str, Any]], name: str
) -> None:
    expected = numbers(everybody[COMPILED[0]])
    different = [
        case
        for case, x in numbers(everybody[name]).items()
        if not torch.equal(bits(x), bits(expected[case]))
    ]
    assert different == []


@pytest.mark.parametrize("name", ["eager", "interpreter"])
def test_compiled_code_computes_what_the_others_do(
    everybody: dict[str, dict[str, Any]], name: str
) -> None:
    """Bit for bit where the arithmetic is the same."""
    expected = numbers(everybody[name])
    for case, x in numbers(everybody[COMPILED[0]]).items():
        if case.startswith("train"):
            assert (x - expected[case]).abs().max() < TRAINED, case
        elif SAME_ARITHMETIC.match(case):
            assert torch.equal(x, expected[case]), case
        else:
            allowed = NORM_ULPS if NORM.match(case) else ULPS
            assert distance(x, expected[case]) <= allowed, case

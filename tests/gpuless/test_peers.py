"""bench/: its calls into peers run on the GPU in software, and what it counts of known kernels.

Peers that are not installed are skipped; the extra ``peers`` has the pinned ones.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fresh_python import run_compiled

pytestmark = pytest.mark.static
BENCH = Path(__file__).resolve().parents[2] / "bench"
PEERS = {"Liger-Kernel": "liger_kernel", "FlagGems": "flag_gems", "optimi": "optimi"}
TOYS = "float16.*(x(1000|1024|50257|8192)|320x|last)|GPT-2 124M"  # shapes are toys, names are not


def rows(tmp_path: Path, peer: str, *options: str) -> list[dict[str, Any]]:
    path = tmp_path / "rows.jsonl"
    run_compiled("peer_counts.py", peer, str(path), *options, cwd=BENCH)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("peer", PEERS)
def test_calls_of_a_peer(tmp_path: Path, peer: str) -> None:
    """At toy size: a GPU should only have to measure."""
    if find_spec(PEERS[peer]) is None:  # FlagGems cannot be imported where there is no GPU
        pytest.skip(f"{peer} is not installed: pip install -e .[peers]")
    found = rows(tmp_path, peer, "--calls", "--only", TOYS)
    assert found and not [row for row in found if "reason" in row]


def test_bytes_of_a_line_that_fits_in_registers(tmp_path: Path) -> None:
    """Forward reads and writes a half once; backward reads two and writes one."""
    forward, backward, errors = rows(tmp_path, "tritonamp", "--only", "^softmax n=1024$")
    assert (forward["bytes"], backward["bytes"]) == (4.0, 6.0)
    assert forward["launches"] == backward["launches"] == 1 and not forward["by_torch"]
    assert forward["limit"] == "memory"
    low, estimate, high = forward["roofline"]["H100"]
    assert low == pytest.approx(1e12 * 4 / 3350e9, rel=1e-3) and low <= estimate <= high
    assert errors["scale 65536"]["zeroed"] == errors["scale 65536"]["zeroed_by_rounding"] < 0.01


def test_compiled_softmax_is_counted(tmp_path: Path) -> None:
    """Inductor's own source, made without a GPU; it moves as little."""
    forward, backward, errors = rows(tmp_path, "compile", "--only", "^softmax n=1024$")
    assert (forward["bytes"], backward["bytes"]) == (4.0, 6.0)
    assert errors["forward"] < 2**-10


def test_results_of_torchs_products_are_only_written(tmp_path: Path) -> None:
    """Inductor gives products an ``out``; its kernels read logits twice, and write them once."""
    both, _ = rows(tmp_path, "compile", "--only", "^linear cross_entropy 1024x8192x256$")
    r, v, d = 1024, 8192, 256
    products = 3 * 2 * (r * v + r * d + v * d)
    # targets and statistics of rows are next to nothing
    assert both["bytes"] == pytest.approx(products / (r * v) + 6, abs=0.02)

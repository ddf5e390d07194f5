"""bench/: the arithmetic of the rows, what the report makes of them, and that nothing is claimed
without a GPU.

``pytest bench`` itself runs every case of every peer.
"""

import importlib
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tritonamp
from tritonamp.kernels import _facts
from tritonamp.kernels import device as hardware
from tritonamp.kernels._implementations import operations
from tritonamp.policy import HALF_DTYPES, STATES

pytest.importorskip("matplotlib")

CPU = torch.device("cpu")
MACHINE = {
    "device": "NVIDIA Test",
    "torch": "2.15.0",
    "triton": "3.9.0",
    "tritonamp": "0.1.0",
    "commit": "abc",
    "date": "2026-01-01",
}
NO_PEER = {"peer": "apex", "reason": "apex is not installed"}


@pytest.fixture(scope="module")
def bench() -> SimpleNamespace:
    """The modules of bench/, which pytest's ``pythonpath`` finds by name."""
    names = (
        "activation_ops",
        "bitflips",
        "convergence",
        "group_norm_ops",
        "host",
        "host_ratios",
        "host_stubs",
        "jsonl",
        "loss_ops",
        "matrix",
        "norm_ops",
        "op_cases",
        "peers",
        "pictures",
        "provenance",
        "report",
        "rl",
        "row_ops",
        "run",
        "steps",
        "timing",
    )
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def stopwatch(bench: SimpleNamespace) -> Any:
    return bench.timing.Stopwatch(CPU, 1e-3, 1 << 16)


@pytest.fixture(scope="module")
def rows(bench: SimpleNamespace) -> list[dict[str, Any]]:
    """Made up: every peer takes 100 us on every case, ours 50, but 200 in the last of the softmax
    forward cases.
    """
    made = []
    cases = bench.matrix.all_cases(toy=True)
    lost = [case.name for case in cases if case.group == "softmax forward"][-1]
    for case in cases:
        for peer in case.peers:
            us = 100.0 if not peer.startswith("tritonamp") else 200.0 if case.name == lost else 50.0
            timing = bench.timing.Timing(us, 7.0, 1 << 20, "events", 10)
            made.append(bench.run.row_of(case, peer, timing, 3e12) | MACHINE)
    return made


@pytest.fixture
def results(bench: SimpleNamespace, rows: list[dict[str, Any]], tmp_path: Path) -> Path:
    """A folder with the results of one run."""
    write(bench, tmp_path / "nvidia-test", rows)
    return tmp_path


def write(bench: SimpleNamespace, folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    (folder / bench.jsonl.ROWS).write_text("\n".join(map(json.dumps, [*rows, NO_PEER])) + "\n")


# Rows


def test_rows_can_be_recomputed(bench: SimpleNamespace, results: Path) -> None:
    rows = bench.report.load(results)["nvidia-test"]["rows"]
    us = {(row["case"], row["peer"]): row["us"] for row in rows}
    for row in rows:
        if row["bytes_per_element"]:
            rate = row["elements"] * row["bytes_per_element"] / (row["us"] * 1e-6)
            assert row["gb_per_s"] == pytest.approx(rate / 1e9)
            assert row["fraction_of_copy"] == pytest.approx(rate / (row["copy_gb_per_s"] * 1e9))
        others = {
            peer: t for (case, peer), t in us.items() if case == row["case"] and peer != row["peer"]
        }
        assert row["ratio"] == {peer: t / row["us"] for peer, t in others.items()}
        assert row.keys() >= {"host_us", "peak_bytes", *MACHINE}


def test_names_are_unique_and_every_kernel_has_a_row(bench: SimpleNamespace) -> None:
    cases = bench.matrix.all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert set(operations()) == {
        name for case in cases if "tritonamp" in case.peers for name in case.operations
    }
    assert {case.name for case in cases} == {case.name for case in bench.matrix.all_cases(toy=True)}


def test_every_peer_is_known(bench: SimpleNamespace) -> None:
    used = {peer for case in bench.matrix.all_cases(toy=True) for peer in case.peers}
    assert used <= set(bench.peers.PEERS)


@pytest.mark.smoke
def test_declared_bytes(bench: SimpleNamespace) -> None:
    by_name = {case.name: case for case in bench.matrix.all_cases()}
    softmax = by_name["softmax backward bfloat16 131072x1024"]
    assert softmax.bytes == 6 and softmax.path_bytes["autocast"] == 36
    assert by_name["full step GPT-2 124M"].path_bytes == {
        "tritonamp": 30,
        "half pipeline": 60,
        "torch.amp": 54,
    }
    assert by_name["full step GPT-2 124M"].elements == 124_439_808  # as counted by its authors
    assert 1.25e9 < by_name["full step 1.3B"].elements < 1.35e9


@pytest.mark.parametrize(
    ("name", "count"), [("GPT-2 124M", 148), ("148 small", 148), ("4000 tiny", 4000)]
)
def test_parameter_sets_have_the_tensors_they_are_named_for(
    bench: SimpleNamespace, name: str, count: int
) -> None:
    with torch.device("meta"):
        assert len(list(bench.steps.SETS[name][0]().parameters())) == count
    assert len(list(bench.steps.SETS["148 small"][1]().parameters())) == 148


# by operation: a shape, peers that compute it on a CPU, relative and absolute tolerance
OPERATIONS: dict[str, tuple[tuple[int, ...], str, float, float]] = {
    "softmax": ((4, 65), "eager autocast", 2e-2, 2e-2),
    "masked_softmax": ((2, 3, 4, 65), "eager compile", 2e-2, 2e-2),
    "causal_softmax": ((2, 3, 4, 65), "eager compile", 2e-2, 2e-2),
    "swiglu": ((4, 65), "eager compile", 2e-2, 5e-2),
    "quick_gelu": ((4, 65), "eager compile", 2e-2, 2e-2),
    "log_softmax": ((4, 65), "eager", 2e-2, 2e-2),  # not in torch's CPU lists
    "sum": ((4, 65), "eager", 2e-2, 2e-2),  # nor is that
    "layer_norm": ((4, 64), "eager compile", 3e-2, 5e-2),
    "rms_norm": ((4, 64), "eager compile", 3e-2, 5e-2),
    "add_rms_norm": ((4, 64), "eager compile", 3e-2, 5e-2),
    "group_norm": ((2, 64, 4, 4), "eager compile", 3e-2, 5e-2),
    "group_norm channels last": ((2, 64, 4, 4), "eager compile", 3e-2, 5e-2),
    "cross_entropy": ((4, 65), "fp32 autocast", 2e-2, 2e-2),
    "token_log_probs": ((4, 65), "fp32 compile", 2e-2, 2e-2),
}


def results_of(bench: SimpleNamespace, op: Any, peer: str, *how: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    if peer == "compile":  # what it compiles
        op, peer = op._replace(forwards={"plain": op.forwards[peer]}), "plain"
    (call,) = bench.op_cases.work(op, peer, *how, torch.bfloat16, CPU).calls
    found = call()
    return list(found) if isinstance(found, list | tuple) else [found]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_peers_compute_the_same(bench: SimpleNamespace, name: str, direction: str) -> None:
    ops = [op for op, _ in bench.row_ops.LENGTHS] + bench.norm_ops.OPS
    ops += [bench.row_ops.MASKED, bench.row_ops.CAUSAL]
    ops += [bench.activation_ops.SWIGLU, bench.activation_ops.QUICK_GELU]
    ops += [bench.loss_ops.CROSS_ENTROPY, bench.loss_ops.LOG_PROBS]
    found = {op.name: op for op in ops}
    found |= {f"group_norm{form}": op for form, op in bench.group_norm_ops.OPS.items()}
    shape, peers, rtol, atol = OPERATIONS[name]
    ours, theirs, *others = (
        results_of(bench, found[name], peer, direction, shape)
        for peer in ("tritonamp", *peers.split())
    )
    for results in (ours, *others):
        for got, expected in zip(results, theirs, strict=True):
            torch.testing.assert_close(got.float(), expected.float(), rtol=rtol, atol=atol)


def test_linear_losses_of_peers_are_the_same(bench: SimpleNamespace) -> None:
    ours, theirs = (
        results_of(bench, bench.loss_ops.LINEAR, peer, "both", (8, 33, 16))
        for peer in ("tritonamp", "fp32")
    )
    for result, expected in zip(ours, theirs, strict=True):
        # a few roundings of gradients, scaled by 2**16
        atol = 2**-6 * float(expected.float().abs().max())
        torch.testing.assert_close(result, expected, rtol=0, atol=atol)


# Timing


def test_cpu_timing_says_that_it_is_one(stopwatch: Any, bench: SimpleNamespace) -> None:
    closed = []
    timing = stopwatch.measure(
        lambda: bench.timing.Work([lambda: time.sleep(1e-3)], lambda: closed.append(True))
    )
    assert timing.us >= 1000
    assert (timing.clock, timing.host_us, timing.peak_bytes, closed) == ("host", None, None, [True])


def works(device: torch.device) -> Any:
    return importlib.import_module("timing").Work([lambda: None])


def fails(device: torch.device) -> None:
    raise MemoryError("too much")


def case_of(bench: SimpleNamespace, **peers: Any) -> Any:
    return bench.matrix.Case("g", "n", "float16", "1", 1, 2, peers)


def test_a_failing_peer_does_not_end_the_run(stopwatch: Any, bench: SimpleNamespace) -> None:
    case = case_of(bench, eager=fails, autocast=works)
    pairs = [(case, peer) for peer in case.peers]
    before, bad, cut, good = bench.run.measure(pairs, stopwatch, time.time() + 100)
    where = {"case": "n", "peer": "eager", "tier": 3}
    assert before == where | {"reason": bench.run.CUT}
    assert bad == where | {"reason": "MemoryError: too much"}
    assert cut == where | {"peer": "autocast", "reason": bench.run.CUT}
    assert good["peer"] == "autocast" and good["us"] >= 0
    assert not list(bench.run.measure(pairs, stopwatch, 0.0))


@pytest.fixture
def plan(bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is measured: one case, by three peers, the second of which fails."""
    case = case_of(bench, eager=works, autocast=fails, fp32=works)
    monkeypatch.setattr(bench.run, "all_cases", lambda toy: [case])
    return bench.run.Plan(tmp_path, toy=True)


def read(bench: SimpleNamespace, plan: Any) -> dict[str, str]:
    """Return by peer "us", or the reason why there is none."""
    return {
        line["peer"]: "us" if "us" in line else line["reason"]
        for line in bench.jsonl.read(plan.file)
        if "case" in line
    }


def test_a_second_run_goes_on(bench: SimpleNamespace, plan: Any) -> None:
    bench.run.measure_here("torch", 3, plan, 100.0)
    assert read(bench, plan) == {"eager": "us", "autocast": "MemoryError: too much", "fp32": "us"}
    assert not plan.waiting("torch", 3) and not plan.waiting("torch", 1)
    size = plan.file.stat().st_size
    bench.run.measure_here("torch", 3, plan, 100.0)
    assert plan.file.stat().st_size == size


def test_behind_a_row_that_ends_its_process_a_new_one_goes_on(
    bench: SimpleNamespace, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def start(process: str, tier: int, plan: Any, seconds: float) -> str | None:
        """Do as a process that dies at the first failing row would."""
        starts.append(process)
        before = len(starts)

        def dies(device: torch.device) -> None:
            raise KeyboardInterrupt  # is no Exception, as a crash is none

        (case,) = bench.run.all_cases(True)
        case.peers["autocast"] = dies
        try:
            bench.run.measure_here(process, tier, plan, seconds)
        except KeyboardInterrupt:
            return f"exit status {before}"
        return None

    bench.run.run_processes(100.0, plan, start)
    assert starts == ["torch", "torch"]
    assert read(bench, plan) == {"eager": "us", "autocast": bench.run.CUT, "fp32": "us"}


def test_a_process_that_measures_nothing_is_not_started_again(
    bench: SimpleNamespace, plan: Any
) -> None:
    bench.run.run_processes(100.0, plan, lambda *args: "exit status 1")
    lines = [line for line in bench.jsonl.read(plan.file) if line["peer"] == "torch"]
    found = [(line["tier"], line["reason"]) for line in lines]
    assert found == [(3, "its process ended early: exit status 1")]


def test_a_row_for_which_the_time_was_up_is_no_failure(bench: SimpleNamespace, plan: Any) -> None:
    def start(process: str, tier: int, plan: Any, seconds: float) -> str:
        where = {"case": "n", "peer": "eager", "tier": 3, "reason": bench.run.CUT}
        bench.jsonl.append(plan.file, where)
        return bench.jsonl.OUT_OF_TIME

    bench.run.run_processes(100.0, plan, start)
    assert read(bench, plan) == {"eager": bench.jsonl.OUT_OF_TIME}


def test_a_later_run_tries_failures_and_other_commits_again(
    bench: SimpleNamespace, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.run.measure_here("torch", 3, plan, 100.0)
    assert not plan.waiting("torch", 3)
    later = plan._replace(since=len(bench.jsonl.read(plan.file)))
    assert [peer for _, peer in later.waiting("torch", 3)] == ["autocast"]
    monkeypatch.setattr(bench.run, "commit", lambda: "a later one")
    assert len(later.waiting("torch", 3)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_run_writes_nothing_without_a_gpu(
    bench: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench.run, "RESULTS", tmp_path)
    assert bench.run.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_processes_share_the_time_by_their_rows(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, shares = [0.0], {}
    rows = {"tritonamp": 30, "torch": 60, "compile": 10}

    def start(process: str, tier: int, plan: Any, seconds: float) -> None:
        shares[process] = seconds
        now[0] += bench.run.START + (seconds if process != "tritonamp" else 0.0)

    def waiting(plan: Any, process: str, tier: int) -> list[None]:
        return [None] * rows.get(process, 0)

    monkeypatch.setattr(bench.run.Plan, "waiting", waiting)
    monkeypatch.setattr(bench.run.time, "time", lambda: now[0])
    bench.run.run_processes(600, bench.run.Plan(tmp_path, (1,)), start)
    whole = 600 - bench.run.RESERVE - 3 * bench.run.START
    assert shares == pytest.approx(
        {"tritonamp": whole * 0.3, "torch": whole * 60 / 70, "compile": whole * 10 / 70}
    )
    assert list(shares) == ["tritonamp", "torch", "compile"]  # which compiles, and can wait


def test_where_time_is_short_the_first_process_gets_it(bench: SimpleNamespace) -> None:
    start = bench.run.START
    assert bench.run.first_share([30, 30], 6 * start) == 2 * start
    assert bench.run.first_share([30, 30], 3 * start) == 2 * start  # the second waits
    assert bench.run.first_share([30, 30, 1], 4 * start) == start


def test_what_is_waiting_is_what_is_installed(bench: SimpleNamespace, tmp_path: Path) -> None:
    plan = bench.run.Plan(tmp_path)
    ours = {tier: plan.waiting("tritonamp", tier) for tier in bench.run.TIERS}
    assert all(peer.startswith("tritonamp") for pairs in ours.values() for _, peer in pairs)
    everything = sum(
        peer.startswith("tritonamp") for c in bench.matrix.all_cases() for peer in c.peers
    )
    assert sum(map(len, ours.values())) == everything
    first = [case.name for case, _ in ours[1]]
    assert first[0].startswith("GPT-2 small") and "full step GPT-2 124M" in first
    assert plan.waiting("apex", 3) == [] or bench.peers.missing("apex") is None


def test_imports_do_not_count(
    bench: SimpleNamespace, stopwatch: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def slow_start(*args: Any) -> Any:
        now[0] += 60.0
        return stopwatch

    monkeypatch.setattr(bench.run.Plan, "stopwatch", slow_start)
    monkeypatch.setattr(bench.run.time, "time", lambda: now[0])
    bench.run.measure_here("torch", 3, plan, 5.0)
    assert read(bench, plan)["eager"] == "us"


def test_host_time_is_put_beside_torchs(bench: SimpleNamespace) -> None:
    found = bench.host_ratios.measure_all(repeats=1)
    assert found.keys() >= {"step_148", "step_465_groups", "enable_3000"}
    assert found.keys() >= {f"{op}_autograd" for op in ("softmax", "sum", "layer_norm")}
    assert found["forward_empty"]["ratio"] > 1
    assert all(row["us"] > 0 and row["ratio"] > 0 for row in found.values())
    assert hardware._answers.get(CPU) is not True


def test_host_cost_runs(bench: SimpleNamespace) -> None:
    found = bench.host.measure(repeats=1)
    assert 0 < found["launches of that step"] <= 8
    assert hardware._answers.get(CPU) is not True


def calls_of_a_step(bench: Any, tensors: int) -> int:
    """Return the calls of functions, Python's and C's, in a step that is like those before it."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with bench.host_stubs.stub_launches():
        work = bench.host_ratios.our_step(bench.steps.tiny(tensors), False)
        (step,) = work.calls
        for _ in range(40):  # the next is none of those after which weights are measured
            step()
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(None)
            work.close()
    return calls


def test_the_host_does_no_more_for_more_tensors(bench: Any, plans: None) -> None:
    """All that a like step asks of tensors one by one is asked in C++."""
    few = calls_of_a_step(bench, 12)
    if _facts._native is _facts._InPython:
        pytest.skip("no C++ compiler")
    assert calls_of_a_step(bench, 120) == few
    # 618 with Python 3.11 and torch 2.14: some 0.35 us each
    assert few <= 650


def calls_of_a_forward(bench: Any, level: str) -> int:
    """Return the fewest calls of functions, Python's and C's, in some equal, empty forwards.

    More are those of the garbage collector, which ends earlier models.
    """
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    model, x = bench.host_ratios.Nothing(), torch.zeros(2, 2, requires_grad=True)
    found = []
    with tritonamp.enable(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level):
        for _ in range(5):  # the first ones take other ways
            model(x)
        for _ in range(5):
            calls = 0
            sys.setprofile(count)
            try:
                model(x)
            finally:
                sys.setprofile(None)
            found.append(calls)
    return min(found)


def test_an_empty_forward_costs_hardly_more_at_o2_than_at_o1(bench: Any) -> None:
    """Inputs are not looked at. O2 asks whether masters were written to."""
    _facts.use_native()  # as after the first step
    with ThreadPoolExecutor(1) as thread:  # which no other test has left in a policy
        calls, at_o1 = thread.map(calls_of_a_forward, [bench, bench], ["O2", "O1"])
    few = 9 if _facts._native is _facts._InPython else 4
    assert calls <= at_o1 + few
    # with Python 3.11 and torch 2.14: 36, and 71 without a C++ compiler
    assert calls <= (80 if _facts._native is _facts._InPython else 45)


# Report


def test_report_shows_where_we_lose(bench: SimpleNamespace, results: Path) -> None:
    text = bench.report.speed(bench.report.load(results), "bench/results")
    assert "2.00x" in text
    assert "Where we lose" in text and "| **0.50x** |" in text
    assert "apex is not installed" in text
    assert "NVIDIA Test" in text and "abc" in text


def test_pictures(bench: SimpleNamespace, results: Path) -> None:
    rows = bench.report.load(results)["nvidia-test"]["rows"]
    written = bench.pictures.draw(rows, results, "x")
    assert {path.name for path in written} == set(bench.pictures.names("x", rows).values())
    assert len(written) == 3 and all(path.stat().st_size > 10_000 for path in written)
    assert not bench.pictures.draw([], results, "y")


def test_no_legend_hides_a_bar(bench: SimpleNamespace, results: Path) -> None:
    from matplotlib.figure import Figure

    rows = bench.report.load(results)["nvidia-test"]["rows"]
    for _, has, picture in bench.pictures.PICTURES.values():
        figure = Figure(figsize=(12, 5.5), layout="constrained")
        picture(figure.subplots(1, 2), [row for row in rows if has(row)])
        figure.draw_without_rendering()
        legends = [(ax.get_legend(), ax) for ax in figure.axes if ax.get_legend() is not None]
        assert legends
        for legend, ax in legends:
            assert not legend.get_window_extent().overlaps(ax.get_window_extent())


def test_report_without_measurements(bench: SimpleNamespace, tmp_path: Path) -> None:
    text = bench.report.speed(bench.report.load(tmp_path), "bench/results")
    assert text.startswith("Not measured yet.") and "bench/first_gpu.sh" in text
    for study in bench.convergence.STUDIES:
        told = bench.report.training_results(tmp_path, study)
        assert told == f"Not measured yet: `python bench/convergence.py {study}`"


def test_what_a_cut_has_left_is_shown(
    bench: SimpleNamespace, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Some rows, the last of them torn; the others count as out of time."""
    write(bench, tmp_path / "cut", rows[:7])
    file = tmp_path / "cut" / bench.jsonl.ROWS
    with file.open("a") as torn:
        torn.write('{"case": "sof')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / bench.jsonl.ROWS).write_text(json.dumps(NO_PEER) + "\n")
    records = bench.report.load(tmp_path)
    assert list(records) == ["cut"]
    text = bench.report.speed(records, "results")
    assert rows[0]["case"] in text and "out of time" in text
    every = sum(len(case.peers) for case in bench.matrix.all_cases(toy=True))
    absent = [line for line in records["cut"]["not_measured"] if line["reason"] == "out of time"]
    apex = sum("apex" in case.peers for case in bench.matrix.all_cases(toy=True))
    assert len(absent) == every - 7 - apex
    assert bench.report.load(tmp_path / "cut").keys() == {"cut"}  # the folder itself


def test_marks(bench: SimpleNamespace) -> None:
    text = "a\n<!-- bench:speed, by report.py -->\nold\n<!-- /bench:speed -->\nb"
    assert bench.report.filled(text, "speed", r"new \1") == text.replace("old", r"new \1")
    with pytest.raises(ValueError, match="bench:other"):
        bench.report.filled(text, "other", "new")


def test_readme_is_what_the_report_writes(bench: SimpleNamespace) -> None:
    text = bench.report.README.read_text()
    assert bench.report.README.parent / bench.report.LINK == bench.report.RESULTS
    speed = bench.report.speed(bench.report.load(bench.report.RESULTS), bench.report.LINK)
    found = {
        study: bench.report.training_results(bench.report.RESULTS, study)
        for study in bench.convergence.STUDIES
    }
    found["speed"] = speed
    found["bytes"] = bench.report.step_bytes.page()
    found["short"] = bench.report.peer_tables.short(bench.report.peer_tables.load())
    found["counts"] = bench.report.peer_tables.page(bench.report.peer_tables.load())
    found["models"] = bench.report.model_tables.page(bench.report.model_tables.load())
    for name, body in found.items():
        assert text == bench.report.filled(text, name, body)
    front = bench.report.FRONT_PAGE.read_text()
    records = bench.report.load(bench.report.RESULTS)
    summary = bench.report.summary(records, bench.report.FRONT_LINK)
    assert front == bench.report.filled(front, "summary", summary)
    page = bench.report.RL_PAGE.read_text()
    assert page == bench.report.filled(page, "rl", bench.rl.results())
    page = bench.report.HARDWARE_PAGE.read_text()
    assert page == bench.report.filled(page, "bitflips", bench.bitflips.results())


def test_bytes_of_small_state_are_those_that_are_counted(bench: SimpleNamespace) -> None:
    """With two moments, and with one moment in brackets."""
    ours = bench.report.step_bytes.Ours
    forms = [(state, packed) for state in STATES for packed in (False, True)]
    forms.remove(("8bit", False))
    due = []
    for form in forms:
        two, one = ours("Adam", "adamw", 2, *form), ours("Lion", "lion", 1, *form)
        pairs = (two.kept, one.kept), (two.moved, one.moved)
        due.append([f"{round(a, 2):g} ({round(b, 2):g})" for a, b in pairs])
    page = bench.report.ROOT / "tritonamp" / "step" / "memory.md"
    rows = [r.strip("|").split("|") for r in page.read_text().splitlines() if "| `state=" in r]
    assert [[cell.strip() for cell in row[-2:]] for row in rows] == due


def test_a_result_reaches_both_pages(
    bench: SimpleNamespace, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a copy of the pages, from a made-up file: table and picture are under the costs."""
    report, folder = bench.report, tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    (results / "nvidia-test").rename(folder / "nvidia-test")
    for name in ("FRONT_PAGE", "README", "RL_PAGE", "HARDWARE_PAGE"):
        page = tmp_path / getattr(report, name).relative_to(report.ROOT)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(getattr(report, name).read_text())
        monkeypatch.setattr(report, name, page)
    monkeypatch.setattr(report, "RESULTS", folder)
    assert report.main(["--write"]) == 0
    front = report.FRONT_PAGE.read_text()
    costs = front[front.index("## What it costs") : front.index("## Limits")]
    assert report.NO_GPU not in front and "NVIDIA Test" in costs
    assert "| full step GPT-2 124M | 50.0 us |" in costs
    assert "torch.amp 2.00x" in costs
    for page in (report.FRONT_PAGE, report.README):
        pictures = re.findall(r"!\[[^]]*\]\((\S*bench/\S+|results/\S+)\)", page.read_text())
        assert pictures and all((page.parent / picture).is_file() for picture in pictures)
    assert len(costs.splitlines()) < 50
    assert report.main(["--write"]) == 0 and report.FRONT_PAGE.read_text() == front


def made_up_of_rl(name: str, seed: int, k3: float, worst: float, **more: float) -> dict[str, Any]:
    return {"format": name, "seed": seed, "k3": k3, "outside": 0.5, "worst_ratio": worst, **more}


def test_table_of_a_trainer_and_a_sampler(bench: SimpleNamespace) -> None:
    """Medians of the seeds, the ratio of all that is furthest from 1, and no cell without steps."""
    rates = {f"changed {rate:g}": 0.05 for rate in bench.rl.RATES}
    rates |= {f"cosine {rate:g}": 0.1 for rate in bench.rl.RATES}
    runs = [
        made_up_of_rl("float16 O2", 0, 1e-6, 1.1, **rates),
        made_up_of_rl("float16 O2", 1, 2e-6, 0.8, **rates),
        made_up_of_rl("float16 O2", 2, 9e-6, 1.2, **rates),
        made_up_of_rl("the same", 0, 0.0, 1.0),
    ]
    assert bench.rl.table(runs).splitlines()[2:] == [
        "| float16 O2 | 2.0e-06 | 50 % | 0.800 | 5 % (0.10) | 5 % (0.10) | 5 % (0.10) |",
        "| the same | 0 | 50 % | 1.000 |  |  |  |",
    ]


def test_a_trainer_and_a_sampler_in_every_format(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the kinds of rows one each, at a tiny size."""
    rl, every = bench.rl, bench.rl.formats()
    shown = ["FP32, bfloat16 sampler", "float16 O2, FP32 head", "float16 O2, samples itself"]
    monkeypatch.setattr(rl, "formats", lambda: {name: every[name] for name in shown})
    runs = {run["format"]: run for run in rl.measure(rl.QUICK, 0)}
    assert list(runs) == shown
    plain, head, itself = runs.values()
    assert plain["k3"] > head["k3"] > itself["k3"] >= 0.0
    assert plain["changed 1e-05"] <= head["changed 1e-05"] < 1
    assert "changed 1e-05" not in itself


@pytest.mark.parametrize("half", HALF_DTYPES, ids=str)
def test_a_step_is_seen_as_amp_counts_it(bench: SimpleNamespace, half: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with tritonamp.enable(model, optimizer, level="O2", dtype=half, track_changes=True) as amp:
        before = bench.rl.exact_weights(model)
        amp.backward(model(torch.randn(8, 64)).square().mean())
        optimizer.step()
        share, cosine = bench.rl.seen(before, bench.rl.exact_weights(model), half)
        ((positions, _),) = amp.changes().values()
    assert 0 < share == len(positions) / 64**2 < 1
    assert 0 < cosine < 1
    assert bench.rl.seen(before, before + 1, torch.float32)[1] == pytest.approx(1)


SAMPLE = [
    ("O0", "gradient", 30),
    ("O0", "exp_avg_sq", 26),
    ("O2 float16", "weight", 14),
    ("O2 float16", "exp_avg_sq", 30),
    ("O2 bfloat16", "master", 30),
    ("O2 bfloat16", "backward", 1),
]


@pytest.mark.parametrize(("form", "name", "bit"), SAMPLE)
def test_flips_do_what_the_table_says(
    bench: SimpleNamespace, form: str, name: str, bit: int
) -> None:
    flips = bench.bitflips
    record = json.loads(flips.PATH.read_text())["runs"]
    known = {(run["form"], run["target"], run["bit"]): run for run in record}
    assert len(known) == sum(target.bits for target in flips.targets())
    assert {flips.harm(run) for run in record if flips.seen(run) is None} - {""}
    (target,) = [t for t in flips.targets() if (t.form, t.target) == (form, name)]
    run, due = flips.trained(form), known[form, name, bit]
    try:
        found = flips.outcome(run, flips.fault_of(target, bit, run))
    finally:
        run.amp.disable()
    exact = "cause", "after", "skipped", "named"
    assert [found[key] for key in exact] == [due[key] for key in exact]
    assert (found["loss"] is None) is (due["loss"] is None)


@pytest.mark.parametrize(("name", "bit"), [("backward", 0), ("gradient", 14)])
def test_an_audit_finds_flips_as_the_table_says(
    bench: SimpleNamespace, name: str, bit: int
) -> None:
    flips = bench.bitflips
    target = flips.Target("O2 bfloat16", name, 16)
    run = flips.trained(target.form)
    try:
        assert flips.audited(run, flips.fault_of(target, bit, run)) is (name == "backward")
    finally:
        run.amp.disable()
    record = json.loads(flips.PATH.read_text())["runs"]
    in_table = [(r["form"], r["target"], r["bit"]) for r in record if r["audit"]]
    assert ((target.form, name, bit) in in_table) is (name == "backward")


def made_up_flip(bit: int, **fields: Any) -> dict[str, Any]:
    usual = {"cause": None, "skipped": 0, "named": False, "loss": 1.0, "moved": 1.0}
    of = {
        "form": "O0",
        "target": "weight",
        "bit": bit,
        "with skip_outliers": None,
        "audit": bit < 2,
    }
    return of | usual | fields


def test_table_of_flips(bench: SimpleNamespace) -> None:
    """Each bit is in one column, and bits with one outcome are together."""
    runs = [
        made_up_flip(0),
        made_up_flip(1, loss=1.0099),
        made_up_flip(2, loss=0.98),
        made_up_flip(3, moved=0.09, named=True),
        made_up_flip(4, **{"with skip_outliers": "outlier"}),
        made_up_flip(5, cause="divergence", skipped=2, loss=None),
        made_up_flip(6, cause="huge gradient", skipped=39),
        made_up_flip(7),
    ]
    (row,) = bench.bitflips.table(runs).splitlines()[2:]
    assert row == (
        "| weight, as the forward reads it | O0 | 32 | 0 to 1, 7 | 2: loss -2 %; 3: frozen, which "
        "`explain()` names | 4: outlier, with `skip_outliers`; 5: divergence; 6: huge gradient, at "
        "every later step, too | 0 to 1 |"
    )


def made_up(mode: str, seed: int, loss: float, score: float) -> dict[str, Any]:
    return {"task": "digits", "mode": mode, "seed": seed, "loss": loss, "score": score}


def test_table_of_final_losses(bench: SimpleNamespace) -> None:
    """A distance is one of equal seeds, and bold only beyond the range of O0's seeds."""
    runs = [made_up("O0", 0, 1.0, 97.0), made_up("O0", 1, 2.0, 98.0)]
    runs += [made_up("O2", 0, 1.125, 99.0), made_up("O2", 1, 2.125, 99.0)]
    lines = bench.convergence.table(runs).splitlines()
    assert lines[-2].endswith("| 97.500 (97.000 to 98.000) |  |  |")
    assert lines[-1] == (
        "| digits | O2 | 1.6250 (1.1250 to 2.1250) | 99.000 (99.000 to 99.000) "
        "| 0.1250 (0.12) | **2.000 (2.00)** |"
    )


def test_table_of_one_seed_claims_nothing(bench: SimpleNamespace) -> None:
    runs = [made_up("O0", 0, 1.0, 97.0), made_up("O2", 0, 1.5, 99.0)]
    assert bench.convergence.table(runs).endswith("| 0.5000 | 2.000 |")


def test_table_of_losses_along_a_run(bench: SimpleNamespace) -> None:
    runs = [
        made_up(mode, 0, 1.0, score) | {"losses": [[200, 2.0], [400, loss]]}
        for mode, loss, score in (("O0", 1.5, 1.25), ("8bit", 1.25, 1.5))
    ]
    assert bench.convergence.text(runs).splitlines() == [
        "| step | O0 | 8bit |",
        "| --- | --- | --- |",
        "| 200 | 2.0000 | 2.0000 |",
        "| 400 | 1.5000 | 1.2500 |",
        "| test | 1.250 | 1.500 |",
    ]


@pytest.mark.long
def test_runs_train_as_their_mode_says(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    convergence, modes = bench.convergence, bench.convergence.STUDIES["state"].modes
    enable, policies = convergence.tritonamp.enable, []

    def watched(*args: Any, **options: Any) -> Any:
        amp = enable(*args, **options)
        policies.append(amp.policy)
        return amp

    monkeypatch.setattr(convergence.tritonamp, "enable", watched)
    digits = convergence.tasks()["digits"]
    for name in ("O0", "O2 float16 bf16", "O2 bfloat16 8bit"):
        run = convergence.train(digits, modes[name], 0, steps=4, device=CPU, every=2)
        assert [step for step, _ in run["losses"]] == [2, 4]
        assert run["losses"][-1][1] == run["loss"] < run["losses"][0][1]
    fp32, *small = policies
    assert not fp32.master_weights and fp32.state == "fp32"
    assert [(p.dtype, p.state) for p in small] == [
        (torch.float16, "bf16"),
        (torch.bfloat16, "8bit"),
    ]


def test_studies_compare_equal_seeds_with_fp32(bench: SimpleNamespace) -> None:
    names = bench.convergence.tasks().keys()
    for study in bench.convergence.STUDIES.values():
        assert study.modes["O0"].level == "O0" and study.steps.keys() <= names
    formats = {
        (mode.dtype, mode.state) for mode in bench.convergence.STUDIES["state"].modes.values()
    }
    assert formats == {(dtype, state) for dtype in HALF_DTYPES for state in STATES}

"""The emulator on PTX written by hand: its arithmetic, what it finds, what it counts."""

import math
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpuless.ptx import arithmetic
from gpuless.ptx.arithmetic import TYPES, Array
from gpuless.ptx.counters import Counters
from gpuless.ptx.emulated import Emulator
from gpuless.ptx.findings import Findings
from gpuless.ptx.machine import Options, Program
from gpuless.ptx.memory import GlobalMemory, Region
from gpuless.ptx.parsing import Unsupported
from gpuless.ptx.regions import TrackedMemory

THREADS = 64
KERNEL = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd1, %rd1, %rd3;
	add.s64 	%rd2, %rd2, %rd3;
{body}
	ret;
}}
"""
"""In %r1 the thread, in %rd1 and %rd2 its four bytes of two arrays."""
BARRIER = "	bar.sync 	0;"
EXCHANGE = f"""
	shl.b32 	%r2, %r1, 2;
	mov.b32 	%r3, global_smem;
	add.s32 	%r4, %r3, %r2;
	ld.global.b32 	%r5, [%rd1];
	st.shared.b32 	[%r4], %r5;
{BARRIER}
	xor.b32 	%r6, %r4, 128;
	ld.shared.b32 	%r7, [%r6];
	st.global.b32 	[%rd2], %r7;
"""
"""The two warps exchange what they have read."""


class Run:
    """One run of a kernel.

    Attributes:
        out: the second array, int32.
        counters: counts of the run.
        kinds: kinds of the findings.
        findings: text of the findings.
    """

    def __init__(
        self,
        body: str,
        given: Array | None = None,
        *,
        threads: int = THREADS,
        programs: int = 1,
        offset: int = 0,
        written: Array | None = None,
        options: Options | None = None,
    ) -> None:
        given = np.arange(threads, dtype=np.int32) if given is None else given.view(np.int32)
        memory = np.zeros(2 * threads + 8, np.int32)
        first = -memory.ctypes.data % 16 // 4
        source, self.out = memory[first:][:threads], memory[first + threads :][:threads]
        source[:] = given
        findings, begin = Findings(), source.ctypes.data
        regions = [
            Region(begin, source.nbytes, begin, "source", written),
            Region(self.out.ctypes.data, self.out.nbytes, self.out.ctypes.data, "out"),
        ]
        space = GlobalMemory(regions, findings)
        self.counters: Counters = Program(KERNEL.format(body=body, threads=threads)).run(
            (programs, 1, 1), [begin + offset, self.out.ctypes.data], space, 4 * threads, options
        )
        self.kinds, self.findings = findings.kinds(), "\n".join(map(str, findings.values()))


def computed(instruction: str, *given: Any, to: str = "b32") -> Any:
    """What an instruction makes of 32-bit operands, by their bits."""
    numbers = [f"0x{int(np.asarray(x).view(np.uint32)):x}" for x in given]
    run = Run(f"{instruction} %r2, {', '.join(numbers)};\nst.global.b32 [%rd2], %r2;", threads=32)
    assert not run.findings
    return run.out.view(TYPES[to])[0]


def single(x: float) -> np.float32:
    return np.float32(x)


# Arithmetic


@pytest.mark.parametrize(
    ("instruction", "given", "expected"),
    [
        ("add.s32", (0x7FFFFFFF, 1), 0x80000000),
        ("sub.s32", (0, 1), 0xFFFFFFFF),
        ("mul.lo.s32", (0xFFFFFFFF, 7), 0xFFFFFFF9),
        ("mul.hi.u32", (0xFFFFFFFF, 7), 6),
        ("mul.hi.s32", (0xFFFFFFFF, 7), 0xFFFFFFFF),
        ("div.s32", (0xFFFFFFF9, 2), 0xFFFFFFFD),  # towards zero
        ("rem.s32", (0xFFFFFFF9, 2), 0xFFFFFFFF),
        ("div.u32", (7, 0), 0xFFFFFFFF),
        ("mad.lo.s32", (3, 5, 7), 22),
        ("shl.b32", (1, 32), 0),
        ("shr.u32", (0x80000000, 31), 1),
        ("shr.s32", (0x80000000, 99), 0xFFFFFFFF),
        ("shf.l.wrap.b32", (0x80000001, 0x12345678, 4), 0x23456788),
        ("shf.r.wrap.b32", (0x80000001, 0x12345678, 4), 0x88000000),
        ("bfe.u32", (0xABCD1234, 8, 8), 0x12),
        ("bfe.s32", (0xABCD1234, 24, 8), 0xFFFFFFAB),
        ("prmt.b32", (0x33221100, 0x77665544, 0x5410), 0x55441100),
        ("prmt.b32", (0x33221180, 0, 0x8888), 0xFFFFFFFF),  # signs
        ("not.b32", (0x0F0F0F0F,), 0xF0F0F0F0),
        ("popc.b32", (0xF0F0F0F1,), 17),
        ("max.s32", (0xFFFFFFFF, 1), 1),
        ("max.u32", (0xFFFFFFFF, 1), 0xFFFFFFFF),
        ("max.u16x2", (0x0001FFFF, 0x00020001), 0x0002FFFF),
        ("neg.bf16x2", (0x3F803F80,), 0xBF80BF80),
        ("abs.f32", (0x80000001,), 1),
        ("abs.ftz.f32", (0x80000001,), 0),
        ("abs.ftz.f32", (0xC0000000,), 0x40000000),
        ("add.f16x2", (0x3C007BFF, 0x3C017BFF), 0x40007C00),  # ties to even; infinite
        ("mul.bf16x2", (0x3F814000, 0x3F814000), 0x3F824080),
        ("max.f32", (0x80000000, 0x00000000), 0x00000000),  # -0 and +0
        ("min.f32", (0x80000000, 0x00000000), 0x80000000),
        ("max.f32", (0x7FC00000, 0x3F800000), 0x3F800000),
        ("max.NaN.f32", (0x7FC00000, 0x3F800000), 0x7FFFFFFF),
        ("max.f32", (0x3F800000, 0x40000000, 0x40400000), 0x40400000),
        ("mul.f32", (0x00800000, 0x3F000000), 0x00400000),  # a subnormal
        ("mul.ftz.f32", (0x00800000, 0xBF000000), 0x80000000),
        ("cvt.rn.f16x2.f32", (0x3F800000, 0x477FF000), 0x3C007C00),  # 65520 is infinite
        ("cvt.rn.bf16x2.f32", (0x3F808000, 0x3F818000), 0x3F803F82),  # ties to even
        ("cvt.rzi.s32.f32", (0xC02CCCCD,), 0xFFFFFFFE),  # -2.7
        ("cvt.rzi.u32.f32", (0xBF800000,), 0),  # saturates
        ("cvt.sat.f32.f32", (0x7FC00000,), 0),  # NaN
        ("cvt.sat.f32.f32", (0x7F800000,), 0x3F800000),
        ("cvt.sat.f32.f32", (0x00000001,), 0x00000001),
        ("cvt.ftz.sat.f32.f32", (0x00000001,), 0),
        ("cvt.ftz.sat.f32.f32", (0x3F000000,), 0x3F000000),
        ("cvt.rmi.f32.f32", (0xC02CCCCD,), 0xC0400000),  # -2.7 becomes -3
        ("cvt.rmi.f32.f32", (0x80000001,), 0xBF800000),
        ("cvt.rmi.ftz.f32.f32", (0x80000001,), 0x80000000),
        ("ex2.approx.f32", (0xC2FC0000,), 0x00800000),  # 2**-126
        ("ex2.approx.ftz.f32", (0xC2FE0000,), 0),  # 2**-127 is flushed
        ("rcp.approx.ftz.f32", (0x40000000,), 0x3F000000),
        ("sqrt.rn.f32", (0x40800000,), 0x40000000),
        ("add.f32", (0x7F800000, 0xFF800000), 0x7FFFFFFF),  # the one NaN there is
        ("fma.rn.f32", (0xFFC00001, 0, 0), 0x7FFFFFFF),
    ],
)
def test_instructions(instruction: str, given: Sequence[int], expected: int) -> None:
    assert computed(instruction, *map(np.uint32, given), to="u32") == expected


def exact(a: Fraction) -> np.float32:
    """A fraction rounded to FP32, to nearest, ties to even."""
    if not a:
        return single(0)
    near = single(float(a))
    around = (np.nextafter(near, single(-math.inf)), near, np.nextafter(near, single(math.inf)))
    return min(around, key=lambda x: (abs(Fraction(float(x)) - a), int(x.view(np.uint32)) & 1))


def test_fused_multiply_add_rounds_once() -> None:
    """Also where the sum, rounded to FP64, lies half-way between two numbers of FP32."""
    random = np.random.default_rng(0)
    a = random.normal(size=2000).astype(np.float32)
    b = random.normal(size=2000).astype(np.float32)
    c = (random.normal(size=2000) * 2.0 ** random.integers(-40, 40, 2000)).astype(np.float32)
    a[:2], b[:2] = 1 + 2.0**-12, 1 + 2.0**-12  # 1 + 2**-11 + 2**-24: half-way
    c[:2] = 2.0**-80, -(2.0**-80)
    expected = [
        exact(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert np.array_equal(arithmetic.fma32(a, b, c), np.array(expected))
    assert expected[0] != expected[1]


def test_multiply_add_towards_minus_infinity() -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.normal(size=2000).astype(np.float32) for _ in range(3))
    c *= np.float32(2) ** random.integers(-60, 30, 2000).astype(np.float32)
    found = arithmetic.fma32_down(a, b, c)
    above = np.nextafter(found, single(math.inf))
    for x, y, z, low, high in zip(a, b, c, found, above, strict=True):
        exactly = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert Fraction(float(low)) <= exactly < Fraction(float(high))
    assert computed("fma.rm.f32", single(1), single(1), single(-1), to="u32") == 0x80000000


def test_the_grid_is_known_to_its_programs() -> None:
    assert set(Run("mov.u32 %r2, %nctaid.x;\nst.global.b32 [%rd2], %r2;", programs=3).out) == {3}


def test_atomics_of_halves_are_refused() -> None:
    """Their bits would be added as integers."""
    with pytest.raises(Unsupported, match="f16x2"):
        Run("red.global.gpu.relaxed.add.noftz.f16x2 [%rd2], %r1;")


def test_atomics_of_floats() -> None:
    first = "ld.param.b64 %rd4, [kernel_param_1];\nld.global.b32 %r2, [%rd1];\n"
    body = first + "red.global.gpu.relaxed.add.f32 [%rd4], %r2;"
    run = Run(body, np.full(THREADS, 0.5, np.float32), programs=2)
    assert run.out.view(np.float32)[0] == THREADS and not run.findings


@pytest.mark.parametrize(
    ("relation", "expected"),
    [("lt", [1, 0, 0]), ("ltu", [1, 0, 1]), ("num", [1, 1, 0]), ("nan", [0, 0, 1])],
)
def test_comparisons_with_nan(relation: str, expected: list[int]) -> None:
    x, y = np.array([1, 2, np.nan], np.float32), np.array([2, 1, 1], np.float32)
    assert arithmetic.compared(x, y, relation, "f32").astype(int).tolist() == expected


def test_comparisons_of_pairs() -> None:
    """The first predicate is that of the lower halves. 1 and 2 as float16, and NaN."""
    body = """
	mov.b32 	%r2, 0x3C004000;
	mov.b32 	%r3, 0x7E003C00;
	setp.neu.f16x2 	%p1|%p2, %r2, %r3;
	setp.gt.f16x2 	%p3|%p4, %r2, %r3;
	selp.b32 	%r4, 1, 0, %p1;
	selp.b32 	%r5, 2, 0, %p2;
	selp.b32 	%r6, 4, 0, %p3;
	selp.b32 	%r7, 8, 0, %p4;
	add.s32 	%r4, %r4, %r5;
	add.s32 	%r4, %r4, %r6;
	add.s32 	%r4, %r4, %r7;
	st.global.b32 	[%rd2], %r4;
"""
    run = Run(body)
    assert set(run.out.tolist()) == {1 + 2 + 4}
    assert not run.findings


def test_vectors_shuffles_and_divergence() -> None:
    """Odd lanes add 100 to what their neighbour has, the others keep their own."""
    body = """
	ld.global.b32 	%r2, [%rd1];
	shfl.sync.bfly.b32 	%r3, %r2, 1, 31, -1;
	and.b32 	%r4, %r1, 1;
	setp.eq.b32 	%p1, %r4, 0;
	@%p1 bra 	$L__BB0_2;
	add.s32 	%r2, %r3, 100;
$L__BB0_2:
	mov.b64 	%rd5, {%r2, %r2};
	mov.b64 	{_, %r6}, %rd5;
	st.global.b32 	[%rd2], %r6;
"""
    run = Run(body)
    assert run.out.tolist() == [i if i % 2 == 0 else i - 1 + 100 for i in range(THREADS)]
    assert not run.findings


def test_programs_have_numbers_and_shared_memory_of_their_own() -> None:
    body = """
	mov.u32 	%r2, %ctaid.x;
	mov.b32 	%r3, global_smem;
	shl.b32 	%r4, %r1, 2;
	add.s32 	%r3, %r3, %r4;
	st.shared.b32 	[%r3], %r2;
	bar.sync 	0;
	ld.shared.b32 	%r5, [%r3];
	setp.ne.b32 	%p1, %r1, %r2;
	@%p1 bra 	$L__BB0_1;
	st.global.b32 	[%rd2], %r5;
$L__BB0_1:
"""
    run = Run(body, programs=3)
    assert run.out[:4].tolist() == [0, 1, 2, 0]
    assert not run.findings


def test_jitter_is_of_approximate_instructions_alone() -> None:
    x = np.full(THREADS, 0.3, np.float32)
    body = "ld.global.b32 %r2, [%rd1];\n{} %r3, %r2{};\nst.global.b32 [%rd2], %r3;"
    plain, off = Options(), Options(jitter=2)
    for opcode, more in ("ex2.approx.f32", ""), ("add.f32", ", %r2"):
        text = body.format(opcode, more)
        moved = Run(text, x, options=off).out - Run(text, x, options=plain).out
        assert set(moved.tolist()) == ({-2, -1, 0, 1, 2} if "ex2" in opcode else {0})


def test_unknown_instructions_are_named() -> None:
    for statement in ("tanh.approx.f32 %r2, %r1", "add.rz.f32 %r2, %r1, %r1"):
        with pytest.raises(Unsupported, match=statement.split()[0]):
            Run(f"{statement};")


@pytest.mark.parametrize(("kind", "expected"), [("s32", -1), ("u32", 0), ("b32", 0)])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_a_wider_register_takes_the_sign(space: str, kind: str, expected: int) -> None:
    body = f"""
	mov.b32 	%r3, global_smem;
	st.shared.b32 	[%r3], -2;
	st.global.b32 	[%rd2], -2;
	ld.{space}.{kind} 	%rd4, [{"%rd2" if space == "global" else "%r3"}];
	mov.b64 	{{_, %r4}}, %rd4;
	st.global.b32 	[%rd2], %r4;
"""
    run = Run(body, threads=32)
    assert set(run.out.tolist()) == {expected}


# What is found

COPY = "ld.global.b32 %r2, [%rd1];\nst.global.b32 [%rd2], %r2;"


def test_a_good_kernel_is_clean() -> None:
    for schedule in ("lockstep", "up", "down", "random"):
        run = Run(EXCHANGE, options=Options(schedule=schedule))
        assert run.out.tolist() == [*range(32, 64), *range(32)]
        assert not run.findings


def test_out_of_bounds() -> None:
    run = Run(COPY.replace("[%rd2]", "[%rd2 + 4]"))
    assert run.kinds == {"out of bounds"}
    assert "4 B at +256 of out (256 B), 1 lanes; program 0, thread 63 (1 times)" in run.findings


def test_misaligned() -> None:
    body = """
	shl.b32 	%r2, %r1, 2;
	cvt.u64.u32 	%rd4, %r2;
	sub.s64 	%rd5, %rd1, %rd4;
	ld.global.v4.b32 	{%r3, %r4, %r5, %r6}, [%rd5 + 4];
"""
    assert Run(body).kinds == {"misaligned"}


def test_memory_that_nobody_wrote() -> None:
    written = np.ones(4 * THREADS, np.bool_)
    assert not Run(COPY, written=written).findings
    written[17] = False
    run = Run(COPY, written=written)
    assert run.kinds == {"read of global memory that nobody wrote"}
    assert "source at +16, 1 lanes; program 0, thread 4" in run.findings


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64, torch.complex128])
def test_what_torch_writes_counts_as_written(dtype: torch.dtype) -> None:
    memory = TrackedMemory()
    with memory.in_force():
        x = torch.zeros(4, dtype=dtype).new_empty(4)
        assert memory.unwritten(x) == 4 * x.element_size()
        x[:3] = 1
    assert memory.unwritten(x) == x.element_size()


def test_an_address_may_hold_the_bits_of_half_memory_that_nobody_wrote() -> None:
    memory = TrackedMemory()
    with memory.in_force():
        table = torch.zeros(2, dtype=torch.int64).new_empty(2)
        table.copy_(torch.tensor([0x7F85_FFAD_5040, 0x7FAD_0000_FFAD]))
    assert memory.unwritten(table) == 0


def test_shared_memory_that_nobody_wrote() -> None:
    body = "mov.b32 %r3, global_smem;\nld.shared.b32 %r2, [%r3 + 8];"
    assert Run(body).kinds == {"read of shared memory that nobody wrote"}
    assert "out of bounds" in Run(body.replace("8]", "4096]")).findings


def test_a_register_that_nobody_wrote() -> None:
    run = Run("st.global.b32 [%rd2], %r99;")
    assert run.kinds == {"read of a register that nobody wrote"}


@pytest.mark.parametrize("schedule", ["lockstep", "up", "down"])
def test_a_register_that_another_warp_wrote(schedule: str) -> None:
    """The last lanes of a reduction are the first warp's; the others pass nothing on."""
    body = """
	setp.lt.u32 	%p1, %r1, 2;
	@%p1 ld.global.b32 	%r2, [%rd1];
	shfl.sync.bfly.b32 	%r3, %r2, 1, 31, -1;
	@%p1 st.global.b32 	[%rd2], %r3;
"""
    run = Run(body, options=Options(schedule=schedule))
    assert run.out[:3].tolist() == [1, 0, 0]
    assert not run.findings


@pytest.mark.parametrize("schedule", ["lockstep", "up", "down", "random"])
def test_a_missing_barrier_is_a_race_in_every_order(schedule: str) -> None:
    """And its results are wrong in those in which warps run by themselves."""
    run = Run(EXCHANGE.replace(BARRIER, ""), options=Options(schedule=schedule))
    assert "shared read-after-write race of warps" in run.kinds
    expected = [*range(32, 64), *range(32)]
    assert (run.out.tolist() == expected) == (schedule == "lockstep")


def test_races_in_global_memory() -> None:
    first = "ld.param.b64 %rd4, [kernel_param_1];\n"
    everybody = Run(first + "st.global.b32 [%rd4], %r1;")
    assert everybody.kinds == {"global write-write race in one instruction of warps"}
    programs = Run(first + "mov.u32 %r2, %ctaid.x;\nst.global.b32 [%rd4], %r2;", programs=2)
    assert programs.kinds == {"global write-write race in one instruction of programs"}
    assert not Run(first + "red.global.gpu.relaxed.add.u32 [%rd4], 1;", programs=2).findings
    later = Run(first + "ld.global.b32 %r2, [%rd4];\nst.global.b32 [%rd2], %r1;")
    assert later.kinds == {"global write-after-read race, same values of warps"}


def test_stores_of_one_value_by_all_threads_are_no_race_among_themselves() -> None:
    first = "ld.param.b64 %rd4, [kernel_param_1];\nmov.b32 %r2, 7;\n"
    assert not Run(first + "st.global.b32 [%rd4], %r2;").findings
    again = Run(first + "st.global.b32 [%rd4], %r2;\nst.global.b32 [%rd4], %r2;")
    assert again.kinds == {"global write-write race, same values of warps"}


def test_a_barrier_that_some_threads_do_not_reach() -> None:
    body = f"""
	setp.gt.u32 	%p1, %r1, 31;
	@%p1 ret;
{BARRIER}
"""
    assert Run(body).kinds == {"barrier that exited threads do not reach"}


def test_threads_at_different_barriers() -> None:
    body = f"""
	setp.gt.u32 	%p1, %r1, 31;
	@%p1 bra 	$L__BB0_2;
{BARRIER}
	bra.uni 	$L__BB0_3;
$L__BB0_2:
{BARRIER}
$L__BB0_3:
"""
    assert Run(body).kinds == {"threads wait at different barriers"}


def test_a_shuffle_among_diverged_lanes() -> None:
    body = """
	setp.gt.u32 	%p1, %r1, 7;
	@%p1 bra 	$L__BB0_2;
	shfl.sync.bfly.b32 	%r2, %r1, 1, 31, -1;
$L__BB0_2:
"""
    assert Run(body).kinds == {"diverged warp"}


def test_a_loop_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuless.ptx.machine.MAX_BLOCKS", 1000)
    assert Run("$L__BB0_1:\nbra.uni $L__BB0_1;").kinds == {"hang"}


# What is counted


def test_instructions_are_counted_for_each_warp_that_runs_them() -> None:
    body = """
	setp.gt.u32 	%p1, %r1, 31;
	@%p1 bra 	$L__BB0_2;
	add.s32 	%r2, %r1, 1;
$L__BB0_2:
	sub.s32 	%r3, %r1, 1;
"""
    counted = Run(body, programs=5).counters.instructions
    assert (counted["add.s32"], counted["sub.s32"], counted["bra"]) == (5, 10, 10)


@pytest.mark.parametrize(("shift", "sectors"), [(0, 8), (1, 9)])
def test_sectors_of_global_memory(shift: int, sectors: int) -> None:
    """64 lanes of 4 B are 8 sectors of 32 B where they begin at one."""
    body = f"""
	ld.param.b64 	%rd4, [kernel_param_0];
	and.b64 	%rd5, %rd4, 31;
	sub.s64 	%rd6, %rd1, %rd5;
	ld.global.b32 	%r2, [%rd6 + {32 + 4 * shift}];
"""
    counters = Run(body, options=Options(accesses=True)).counters
    assert counters.requests["ld"] == 2
    assert counters.sectors["ld"] == sectors + shift


@pytest.mark.parametrize(("stride", "passes"), [(4, 1), (8, 2), (128, 32), (0, 1)])
def test_bank_conflicts(stride: int, passes: int) -> None:
    body = f"""
	mul.lo.s32 	%r2, %r1, {stride};
	st.shared.b32 	[%r2], %r1;
"""
    counters = Run(body, threads=32, options=Options(accesses=True)).counters
    assert (counters.waves, counters.ideal) == (passes, 1)


@pytest.mark.parametrize(("share", "expected"), [(1.0, 32), (0.5, 64), (0.01, 8 * 32)])
def test_distinct_bytes_count_a_sector_once_and_no_region_for_more_than_its_size(
    share: float, expected: int
) -> None:
    """Both warps read the first eight numbers twice; 64 numbers are 8 sectors."""
    body = """
	and.b64 	%rd4, %rd1, -32;
	ld.param.b64 	%rd5, [kernel_param_0];
	add.s64 	%rd5, %rd5, 31;
	and.b64 	%rd5, %rd5, -32;
	ld.global.b32 	%r2, [%rd5];
	ld.global.b32 	%r3, [%rd5 + 4];
"""
    counters = Run(body, options=Options(accesses=True)).counters
    assert counters.sectors["ld"] == 4
    region = Region(0, 1 << 62, 0, "everything")
    assert counters.distinct_bytes([region]) == {"ld": 32}
    [sector] = np.unique(np.concatenate(counters._touched["ld"]))
    eight = Region(int(sector) * 32, 8 * 32, 0, "eight sectors")
    assert counters.distinct_bytes([eight], share) == {"ld": expected}


def test_some_programs_of_a_grid() -> None:
    body = "mov.u32 %r2, %ctaid.x;\nred.global.gpu.relaxed.add.u32 [%rd2], 1;"
    some = Options(programs=lambda total: np.array([0, total - 1]))
    assert set(Run(body, programs=7, options=some).out) == {2}
    assert set(Run(body, programs=7).out) == {7}


@pytest.mark.parametrize("opcode", ["fma.rn.f16", "fma.rn.f16x2"])
def test_half_multiply_add_rounds_once(opcode: str) -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.normal(size=500).astype(np.float16) for _ in range(3))
    got = arithmetic.fma16(*(x.view(np.uint16) for x in (a, b, c))).view(np.float16)
    for x, y, z, found in zip(a, b, c, got, strict=True):
        exactly = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        around = [np.nextafter(found, np.float16(end)) for end in (-np.inf, np.inf)]
        distance = abs(Fraction(float(found)) - exactly)
        assert all(distance <= abs(Fraction(float(other)) - exactly) for other in around)
    one = 0x3C013C01  # 1 + 2**-10, twice
    low = 0xFFFFFFFF if "x2" in opcode else 0xFFFF
    bits = computed(opcode, *(np.uint32(x) for x in (one, one, 0x90009000)), to="u32")
    assert bits & low == 0x3C023C02 & low  # 1 + 2**-9 + 2**-20 - 2**-11: above half-way


def test_bfloat16_multiply_add_rounds_once() -> None:
    random = np.random.default_rng(0)
    given = [random.normal(size=1000).astype(np.float32).view(np.uint32) >> 16 for _ in range(3)]
    a, b, c = (x.astype(np.uint16) for x in given)
    c[:200] = arithmetic.bf16_bits(2.0 ** random.integers(-40, 40, 200).astype(np.float32))
    got = arithmetic.fma_bf16(a, b, c)
    wide = [arithmetic.widened(x, "bf16") for x in (a, b, c)]
    for x, y, z, found in zip(*wide, got, strict=True):
        exactly = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [np.array([int(found) + k], np.uint16) for k in (-1, 0, 1)]
        below, mine, above = (float(arithmetic.widened(v, "bf16")[0]) for v in near)
        distance = abs(Fraction(mine) - exactly)
        assert all(distance <= abs(Fraction(other) - exactly) for other in (below, above))
    # 7 * 37 lies half-way between 258 and 260: to even, but down where 2**-40 is missing
    for third, expected in (0, 0x4382), (0xAB80, 0x4381):
        given = (np.uint32(x) for x in (0x40E0, 0x4214, third))
        assert computed("fma.rn.bf16", *given, to="u32") & 0xFFFF == expected


@pytest.mark.parametrize("opcode", ["mul.bf16x2", "add.f16x2", "fma.rn.f16x2", "fma.rn.bf16x2"])
def test_pairs_of_halves_beside_what_all_lanes_share(opcode: str) -> None:
    """Such an operand is an array of one element, and two numbers."""
    alone = {"mul.bf16x2": "0x3f803f80", "add.f16x2": "0", "fma.rn.f16x2": "0x3c003c00"}
    one, more = alone.get(opcode, "0x3f803f80"), ", 0" if opcode.startswith("fma") else ""
    body = (
        f"ld.global.b32 %r2, [%rd1];\n{opcode} %r3, %r2, {one}{more};\nst.global.b32 [%rd2], %r3;"
    )
    given = np.arange(THREADS, dtype=np.int32) * 0x00010001 + 0x10001000
    assert Run(body, given).out.tolist() == given.tolist()


def test_constants_at_the_end_of_a_launch_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton's launcher has it; anything else that is missing is told."""
    names = {"x_ptr": "*fp16", "n": "i32", "BLOCK": "constexpr"}
    source = SimpleNamespace(fn=SimpleNamespace(arg_names=list(names)), signature=names)
    launched: list[Any] = []
    known = SimpleNamespace(launch=lambda *given: launched.append(given[2]))
    monkeypatch.setattr("gpuless.ptx.emulated._current", [known])
    launch = Emulator.launcher_cls(source, SimpleNamespace(shared=0))
    before = 1, 1, 1, 0, None, None, None, None, None  # grid, stream, program, metadata, hooks
    launch(*before, "x", 5)
    launch(*before, "x", 5, 64)
    assert [list(given.values()) for given in launched] == [["x", 5, None], ["x", 5, 64]]
    for few_or_many in (("x",), ("x", 5, 64, 1)):
        with pytest.raises(TypeError, match="arguments for a kernel that takes"):
            launch(*before, *few_or_many)

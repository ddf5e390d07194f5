"""bench/static.py: its gates on rows made by hand, its reading of the tools' output, and some real
builds.
"""

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fresh_python import run_compiled

pytest.importorskip("triton")

import amd_code
import builds
import gates
import machine_code
import snapshots
import static

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "static.py"
SOME = (
    r"\bsoftmax float16 (n=1024|n=1001$|n=50257|split inner)|log_softmax float16 n=1024|"
    r"float16 float16$|(grad_stats|cast) float16$|decide$"
)
USAGE = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function softmax_kernel:
  REG:40 STACK:16 SHARED:1024 LOCAL:24 CONSTANT[0]:576 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
	code for sm_90a
		Function : softmax_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
                                                                   /* 0x000fe20000000800 */
        /*0010*/                   S2R R12, SR_TID.X ;             /* 0x00000000000c7919 */
        /*0220*/               @P1 LDG.E.128 R8, desc[UR4][R20.64] ;/* 0x0000000414081981 */
        /*0230*/              @!P1 LDG.E.EL.U16 R16, desc[UR4][R20.64+0x2] ;/* 0x0000000414081981 */
        /*0240*/                   HADD2.F32 R14, -RZ, R11.reuse.H0_H0 ;/* 0x2000000bff0e7230 */
        /*0250*/              @UP0 LDG.E.64 R4, desc[UR4][R20.64] ;/* 0x0000000414081981 */
        /*0260*/                   MUFU.EX2 R20, R20 ;             /* 0x0000001400147308 */
        /*0270*/                   FADD R16, R16, R5 ;             /* 0x0000001400147308 */
        /*0280*/                   STG.E.128 desc[UR4][R20.64], R8 ;/* 0x0000000414081981 */
        /*0290*/                   EXIT ;                          /* 0x000000000000794d */
        /*02a0*/                   BRA 0x2a0;                      /* 0xfffffffc00fc7947 */
        /*02b0*/                   NOP;                            /* 0x0000000000007918 */
"""
PTX = """
	shfl.sync.bfly.b32 	%r70, %r69, 8, 31, -1;
	@%p3 shfl.sync.bfly.b32 	%r71|%p2, %r57, 16, 31, -1;
	mov.b32 	%f1, %r71;
	mov.u32 	%r1, %tid.x;
	@%p1 bra 	$L__BB0_2;
	fma.rn.f32 	%r72, %r41, %r49, %r70;
	fma.rn.f32 	%f2, %f3, 0f3FB8AA3B, %f1;
	fma.rn.f32 	%r73, %r70, %r71, %r41;
	add.f32 	%r74, %r72, %r70;
	ret;
"""
TTIR = """
%x_17 = tt.load %x_16, %x, %cst evictionPolicy = evict_last : tensor<16x256x!tt.ptr<f16>> loc(#loc9)
    %parts = tt.load %parts_3, %mask, %cst_0 : tensor<1x64x!tt.ptr<f32>> loc(#loc17)
    %n = tt.load %n_ptr : !tt.ptr<i32> loc(#loc18)
    tt.store %2, %3, %mask_5 : tensor<16x256x!tt.ptr<bf16>> loc(#loc37)
    tt.store %4, %5 : tensor<16x256x!tt.ptr<f32>> loc(#loc38)
"""

AMDGCN = """
	s_load_b64 s[2:3], s[0:1], 0x8
	global_load_b128 v[2:5], v[0:1], off
	buffer_load_dwordx2 v[6:7], v8, s[4:7], 0 offen
	global_load_ushort v9, v[0:1], off               ; a comment
	v_dual_mov_b32 v10, 0 :: v_dual_fmac_f32 v11, v2, v3
	v_mov_b32_dpp v12, v11 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
	v_fma_mix_f32 v13, v9, 1.0, v12 op_sel_hi:[1,1,0]
	v_fma_f32 v13, v2, v3, v12
	v_mov_b32_e32 v14, v12
	v_fmac_f32_e32 v14, v2, v3
	v_fmac_f32_e32 v14, v2, v3
	ds_bpermute_b32 v17, v0, v14
	v_pk_fma_f32 v[18:19], v[2:3], v[4:5], v[16:17]
	v_pk_fma_f32 v[18:19], v[2:3], v[4:5], v[16:17] op_sel_hi:[1,1,0]
	v_fma_f32 v17, v2, v17, v3
	v_fma_f32 v17, v2, v3, v17
	global_atomic_smax v[0:1], v17, off
	global_store_b128 v[0:1], v[2:5], off
	global_store_short v[0:1], v9, off
	s_endpgm
    .private_segment_fixed_size: 8
    .sgpr_spill_count: 3
    .vgpr_count:     80
    .vgpr_spill_count: 2
"""


@pytest.fixture
def good() -> Any:
    """A row that passes every gate; half of them want an aligned tile of one line, on sm_90."""
    build = builds.Build(
        arch=90,
        call="softmax float16 n=1024",
        kernel="softmax_kernel",
        function=("tritonamp.kernels.softmax", "softmax_kernel"),
        signature={"x_ptr": "*fp16", "y_ptr": "*fp16", "n": "i32"},
        constants={"ROW_MAJOR": True, "ALIGN": 1024, "VEC": 8, "ROWS": 1, "BLOCK": 1024},
        n=1024,
        warps=1,
        maxnreg=None,
        max_registers=64,
        max_instructions=12,
        exp2=1,
        max_shared=None,
    )
    return machine_code.Row(
        build,
        registers=64,
        stack=0,
        local=0,
        shared=0,
        occupancy=0.25,
        tile_loads={16: 64},
        tile_stores={16: 64},
        loads={4: 2, 16: 4},
        stores={4: 1, 16: 4},
        in_flight=32 << 10,
        spills=0,
        atomics=["RED.E.MAX.S32.STRONG.GPU", "ATOMS.POPC.INC.32"],
        instructions=12.0,
        ex2=1.03,
    )


def changed(row: Any, **values: Any) -> Any:
    """The row with other values of its own, of its build's or of its build's constants."""
    constants = row.build.constants | {
        name: values.pop(name) for name in list(values) if name.isupper()
    }
    build = {name: values.pop(name) for name in list(values) if name in row.build._fields}
    return row._replace(build=row.build._replace(constants=constants, **build), **values)


def test_good_row_passes(good: Any) -> None:
    assert gates.faults(good) == gates.exp2_faults([good]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stack": 8}, "8 B of stack, 0 B of local memory, 0 spills: allowed are 0"),
        ({"local": 8}, "0 B of stack, 8 B of local memory, 0 spills: allowed are 0"),
        ({"spills": 1}, "0 B of stack, 0 B of local memory, 1 spills: allowed are 0"),
        ({"registers": 65}, "65 registers, allowed are 64"),
        ({"registers": 256, "VEC": 1}, "256 registers, allowed are 255"),
        ({"occupancy": 0.24}, "occupancy 0.24, allowed is 0.25 and more"),
        ({"occupancy": 0, "VEC": 1}, "a multiprocessor cannot hold it"),
        ({"in_flight": 32767}, "32767 B in flight, allowed is 32768 and more"),
        ({"loads": {8: 8}}, "0 of a tile's 64 B in loads of 16 B, allowed is all of it ({8: 8})"),
        ({"loads": {8: 2, 16: 3}}, "48 of a tile's 64 B in loads of 16 B, allowed is all of it"),
        ({"stores": {4: 16}}, "0 of a tile's 64 B in stores of 16 B, allowed is all of it"),
        (
            {"tile_loads": {8: 64}},
            "0 of a tile's 64 B in loads of 8 B, allowed is all of it ({4: 2, 16: 4})",
        ),
        (
            {"shared": 8, "max_shared": 0},
            "8 B of shared memory, allowed are 0: a layout is converted",
        ),
        ({"registers": 97, "arch": 70}, "97 registers, allowed are 96"),
        ({"loads": {2: 1, 16: 4}}, "1 loads of 2 B or less, allowed are none"),
        (
            {"atomics": ["RED.E.ADD.F32.FTZ.RN"]},
            "RED.E.ADD.F32.FTZ.RN: atomics on floating-point numbers",
        ),
        ({"atomics": ["ATOMG.E.ADD.F16x2.RN"]}, "ATOMG.E.ADD.F16x2.RN: atomics on"),
        ({"atomics": ["REDG.E.ADD.BF16_V2"]}, "REDG.E.ADD.BF16_V2: atomics on"),
        ({"atomics": ["ATOM.E.CAS.STRONG.GPU"]}, "ATOM.E.CAS.STRONG.GPU: atomics on"),
        ({"instructions": 12.1}, "12.10 instructions for each element, allowed are 12"),
        ({"instructions": None}, "cuobjdump printed no instructions"),
        (
            {"absorbed": 2},
            "2 products absorbed by sums across lanes, allowed are none: lanes disagree",
        ),
    ],
)
def test_each_gate_fails(good: Any, values: dict[str, Any], message: str) -> None:
    [failed] = gates.faults(changed(good, **values))
    assert failed.startswith(
        f"sm_{values.get('arch', 90)} softmax float16 n=1024: softmax_kernel: {message}"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stack": 8}, "8 B of stack, 0 B of local memory, 0 spills: allowed are 0"),
        ({"spills": 1}, "0 B of stack, 0 B of local memory, 1 spills: allowed are 0"),
        ({"scalar_spills": 1}, "1 spills of scalar registers, allowed are none"),
        ({"registers": 169}, "169 registers, allowed are 168"),
        ({"occupancy": 0.24}, "occupancy 0.24, allowed is 0.25 and more"),
        ({"shared": 8, "max_shared": 0}, "8 B of shared memory, allowed are 0"),
        ({"loads": {8: 8}}, "0 of a tile's 64 B in loads of 16 B, allowed is all of it"),
        ({"atomics": ["global_atomic_add_f32"]}, "global_atomic_add_f32: atomics on"),
        ({"atomics": ["global_atomic_pk_add_bf16"]}, "global_atomic_pk_add_bf16: atomics on"),
        ({"atomics": ["buffer_atomic_fmax_x2"]}, "buffer_atomic_fmax_x2: atomics on"),
        ({"absorbed": 1}, "1 products absorbed by sums across lanes"),
    ],
)
def test_each_gate_on_amd_fails(good: Any, values: dict[str, Any], message: str) -> None:
    [failed] = gates.faults(changed(good, arch="gfx942", **values))
    assert failed.startswith(f"gfx942 softmax float16 n=1024: softmax_kernel: {message}")


def test_packed_state_on_amd_may_use_lanes(good: Any) -> None:
    packed = changed(good, arch="gfx942", call="lion float16 float16 8bit", scalar_spills=40)
    assert gates.faults(packed) == []
    [failed] = gates.faults(packed._replace(scalar_spills=41))
    assert failed.endswith("41 spills of scalar registers, allowed are 40")


def test_one_program_on_amd_may_take_more_registers(good: Any) -> None:
    row = changed(good, arch="gfx942", registers=255)
    one = row._replace(build=row.build._replace(constants={}, n=0))
    assert gates.faults(one) == []
    [failed] = gates.faults(one._replace(registers=256))
    assert failed.endswith("256 registers, allowed are 255")


def test_gates_on_amd_that_do_not_apply(good: Any) -> None:
    """exp2 and what is in flight are not read; of integers gfx1100 takes the maximum by cmpswap."""
    integers = ["global_atomic_smax", "global_atomic_cmpswap_b32", "global_atomic_add_u64"]
    row = changed(good, arch="gfx1100", registers=168, atomics=integers, instructions=99)
    row = row._replace(ex2=None, in_flight=None)
    assert gates.faults(row) == gates.exp2_faults([row]) == []
    few = changed(row, scalar_spills=20)._replace(build=row.build._replace(constants={}, n=0))
    assert gates.faults(few) == []
    assert static.line(row).startswith("gfx1100 softmax float16 n=1024: softmax_kernel")


@pytest.mark.parametrize(
    "values",
    [
        {"registers": 255, "occupancy": 0.01, "VEC": 2},
        {"loads": {2: 1, 16: 4}, "ALIGN": 1},
        {"loads": {2: 32}, "stores": {2: 32}, "in_flight": 1, "VEC": 1},
        {"shared": 8, "max_shared": 8},
        {"in_flight": 1, "arch": 80},
        {
            "instructions": None,
            "loads": None,
            "stores": None,
            "spills": None,
            "atomics": None,
            "arch": 70,
        },
        {"instructions": 99, "max_instructions": None},
        {"instructions": 99, "ALIGN": 8},
        {"instructions": 99, "ROW_MAJOR": False},
        {"instructions": 99, "ROWS": 2},
        {"instructions": 99, "n": 2048},
        {"instructions": 99, "BLOCK": 512, "ALIGN": 512, "n": 512},
    ],
)
def test_gates_that_do_not_apply(good: Any, values: dict[str, Any]) -> None:
    assert gates.faults(changed(good, **values)) == []


def test_kernels_for_a_few_numbers_are_held_to_registers_and_spills(good: Any) -> None:
    plain = good._replace(
        build=good.build._replace(constants={}, n=0), in_flight=1, loads={2: 1}, occupancy=0.1
    )
    assert gates.faults(plain) == []
    assert len(gates.faults(plain._replace(registers=65, spills=1))) == 2


def test_kernels_for_a_few_numbers_are_built_once() -> None:
    built = [build.kernel for build in builds.all_builds(["adamw"], [90], "")]
    assert built.count("count_steps_kernel") == 1 < built.count("update_kernel")
    others = {build.kernel for build in builds.all_builds(["lion"], [90], "")}
    assert others == {"update_kernel"}  # the snapshot has the other by the name of adamw


def test_exp2_is_counted_over_all_launches_of_a_call(good: Any) -> None:
    part, rest = (
        changed(good, kernel=kernel, exp2=2)
        for kernel in ("softmax_part_kernel", "softmax_rest_kernel")
    )
    assert gates.exp2_faults([part, rest, good._replace(ex2=0.9)]) == []
    assert gates.exp2_faults([part]) == [
        "sm_90 softmax float16 n=1024: 1.03 MUFU.EX2 for each element, allowed are 2"
    ]
    assert gates.exp2_faults([changed(part, ROW_MAJOR=False), part._replace(ex2=None)]) == []


def test_each_thread_computes_one_place_of_the_edges(good: Any) -> None:
    """Each of 256 threads holds 32 elements of a tile; of 16 more places a line would pay 0.5."""
    ragged = changed(good, ALIGN=1, BLOCK=8192, warps=8, exp2=2)
    assert gates.exp2_faults([ragged._replace(ex2=2 + 4 / 32)]) == []
    assert len(gates.exp2_faults([ragged._replace(ex2=2 + (16 + 2) / 32)])) == 1


def snapshot_of(*rows: Any) -> str:
    return snapshots.snapshot_text(map(gates.numbers, rows))


def growth_faults(row: Any, snapshot: str) -> list[str]:
    return snapshots.growth_faults(gates.numbers(row), json.loads(snapshot), "triton-0.0.json")


@pytest.mark.parametrize("key", ["registers", "instructions"])
def test_growth(good: Any, key: str) -> None:
    before = good._replace(registers=40, instructions=10.0)
    snapshot = snapshot_of(before, changed(before, arch=70, instructions=None))
    assert growth_faults(before._replace(**{key: getattr(before, key) * 1.15}), snapshot) == []
    [failed] = growth_faults(before._replace(**{key: getattr(before, key) * 1.16}), snapshot)
    assert f"{getattr(before, key) * 1.16:g} {key}" in failed
    assert "allowed is 1.15 times as many" in failed
    assert growth_faults(changed(before, arch=70, instructions=None), snapshot) == []


def test_builds_missing_in_the_snapshot(good: Any) -> None:
    for row in changed(good, arch=80), changed(good, call="softmax float16 n=2048"):
        [failed] = growth_faults(row, snapshot_of(good))
        assert failed.endswith("write that with --snapshot")


def test_snapshot_has_a_line_for_each_build(good: Any) -> None:
    rows = [changed(good, call=call, arch=arch) for call in ("b", "a") for arch in (80, 90)]
    assert snapshot_of(*rows).splitlines() == [
        "{",
        '"a: softmax_kernel": {"80": [64, 12.0], "90": [64, 12.0]},',
        '"b: softmax_kernel": {"80": [64, 12.0], "90": [64, 12.0]}',
        "}",
    ]


def test_resources() -> None:
    assert machine_code.resources(USAGE) == (40, 16, 24)


def test_instructions() -> None:
    code = machine_code.instructions(SASS)
    assert [opcode for opcode, _ in code] == (
        "LDC S2R LDG.E.128 LDG.E.EL.U16 HADD2.F32 LDG.E.64 MUFU.EX2 FADD STG.E.128 EXIT BRA".split()
    )
    opcodes = [opcode for opcode, _ in code]
    assert machine_code.widths(opcodes, "LDG") == {2: 1, 8: 1, 16: 1}
    assert machine_code.widths(opcodes, "STG") == {16: 1}
    assert machine_code.instructions("\n\tcode for sm_70\n") == []


@pytest.mark.parametrize(("sass", "times"), [(SASS, 1), ("", 2)])
def test_what_was_disassembled_is_kept(
    sass: str, times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Instructions, that is: none may mean that the tool was killed."""
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command[1])
        return SimpleNamespace(stdout=USAGE if command[1] == "-res-usage" else sass)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_code.subprocess, "run", run)
    first, again = (machine_code.disassembled(b"cubin") for _ in range(2))
    assert asked == ["-res-usage", "-sass"] * times
    assert first == again and first[0] == USAGE
    assert machine_code.instructions(first[1]) == machine_code.instructions(sass)
    machine_code.disassembled(b"another")
    assert len(asked) == 2 * times + 2


def test_bytes_outstanding() -> None:
    # 16 and 2; then R11 is read: 2 and three of the four registers before; then 8 more
    assert machine_code.outstanding(machine_code.instructions(SASS)) == 12 + 2 + 8


def test_amds_assembly() -> None:
    code = amd_code.instructions(AMDGCN)
    opcodes = [opcode for opcode, _ in code]
    assert len(code) == 21  # two of them in one
    assert opcodes[:5] == (
        "s_load_b64 global_load_b128 buffer_load_dwordx2 global_load_ushort v_dual_mov_b32".split()
    )
    assert amd_code.widths(opcodes, "load") == {2: 1, 8: 1, 16: 1}
    assert amd_code.widths(opcodes, "store") == {2: 1, 16: 1}
    names = "vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"
    assert amd_code.noted(AMDGCN, *names) == [80, 2, 3, 8]


def test_products_that_sums_across_lanes_absorb_on_amd() -> None:
    """v12 to v_fma and, moved, to v_fmac; v17 to v_pk_fma, unless it takes v16 twice. Not a product
    with one, not what was written over.
    """
    assert amd_code.absorbed(amd_code.instructions(AMDGCN)) == 3
    assert amd_code.absorbed(amd_code.instructions(AMDGCN.replace("_dpp", "_e32"))) == 1


@pytest.mark.parametrize(
    ("arch", "waves", "registers", "shared", "expected"),
    [
        ("gfx942", 4, 64, 0, 1.0),
        ("gfx942", 4, 65, 0, 7 / 8),  # 72 of 512
        ("gfx942", 1, 256, 0, 2 / 8),
        ("gfx942", 16, 129, 0, 0.0),
        ("gfx90a", 4, 64, 33 << 10, 1 / 8),
        ("gfx1100", 8, 96, 0, 1.0),
        ("gfx1201", 8, 97, 0, 12 / 16),  # 120 of 1536
    ],
)
def test_occupancy_on_amd(
    arch: str, waves: int, registers: int, shared: int, expected: float
) -> None:
    assert amd_code.occupancy(arch, waves, registers, shared) == expected


def test_only_whole_tiles_count() -> None:
    assert machine_code.tile_bytes(TTIR, "load", 4096, 128, 8) == {16: 32 * 2}
    assert machine_code.tile_bytes(TTIR, "store", 4096, 128, 8) == {16: 32 * (2 + 4)}
    assert machine_code.tile_bytes(TTIR, "store", 4096, 128, 4) == {8: 32 * 2, 16: 32 * 4}
    assert machine_code.tile_bytes(TTIR, "store", 4096, 1024, 8) == {8: 8, 16: 16}


def test_a_masked_tail_of_whole_blocks_is_no_second_tile(good: Any) -> None:
    """Loop and tail have the same accesses, and those of the tail may be narrow."""
    row, built = changed(good, BLOCK=4096, VEC=8, warps=4), SimpleNamespace(asm={"ttir": TTIR})
    loads, stores = machine_code.moved_by_threads(row.build, built)
    assert (loads, stores) == ({16: 32 * 2}, {16: 32 * (2 + 4)})
    loads, stores = machine_code.moved_by_threads(changed(row, BLOCKS=32).build, built)
    assert (loads, stores) == ({16: 32}, {16: 16 * (2 + 4)})


def test_products_that_sums_across_lanes_absorb() -> None:
    assert machine_code.absorbed(PTX) == 2
    assert machine_code.absorbed(PTX.replace("fma", "mad")) == 0


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "resident"),
    [
        (90, 4, 32, 0, 64),
        (90, 4, 33, 0, 48),  # 40 registers each
        (90, 1, 16, 0, 32),  # 32 programs
        (75, 1, 16, 0, 16),
        (90, 32, 64, 128, 32),
        (90, 32, 72, 128, 0),
        (90, 8, 32, 56 << 10, 32),  # 57 KiB with the system's own: four
        (75, 4, 32, 32 << 10, 8),  # none of its own
        (86, 16, 32, 0, 48),
    ],
)
def test_resident_warps(arch: int, warps: int, registers: int, shared: int, resident: int) -> None:
    assert machine_code.resident_warps(arch, warps, registers, shared) == resident


@pytest.mark.parametrize("values", [{}, {"max_registers": 1}, {"exp2": 2}])
def test_exit_status(
    good: Any,
    values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(static, "SNAPSHOT", tmp_path / "triton-0.0.json")
    monkeypatch.setattr(static, "measured", lambda todo: [changed(good, **values)])
    assert static.main([]) == bool(values)
    out, err = capsys.readouterr()
    assert out.splitlines() == [static.line(good)]
    assert (
        err.splitlines()[0]
        == "no triton-0.0.json: growth is not checked for this version of Triton"
    )
    assert len(err.splitlines()) == 1 + bool(values)
    static.main(["--snapshot"])
    assert "growth" not in capsys.readouterr().err
    monkeypatch.setattr(
        static, "measured", lambda todo: [changed(good, registers=32), changed(good, arch=80)]
    )
    assert static.main([]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "sm_80 softmax float16 n=1024: softmax_kernel: "
        "not in triton-0.0.json, write that with --snapshot"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--snapshot", "--arch", "80"],
            "--snapshot takes everything: leave out --arch, --op and --only",
        ),
        (
            ["--op", "soft"],
            "nothing to build: no kernel module has that name and ships such a call",
        ),
    ],
)
def test_misuse(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        static.main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


def test_every_architecture_has_its_turn() -> None:
    days = [datetime.date(2026, 12, 30) + datetime.timedelta(days) for days in range(4)]
    turns = [arch for day in days for arch in static.of_today("4", day)]
    assert sorted(turns, key=str) == sorted(builds.ARCHITECTURES, key=str)


def test_whose_turn_it_is_is_built_in_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked: list[builds.Arch] = []
    monkeypatch.setattr(static, "measured", lambda todo: [])
    monkeypatch.setattr(static, "all_builds", lambda op, archs, only: asked.extend(archs))
    with pytest.raises(SystemExit):  # nothing was built
        static.main(["--arch", "90", "80", "--turns", "2"])
    assert asked == list(dict.fromkeys([90, 80, *static.of_today("2")]))


def test_interpreter_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        static.main([])
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.static
def test_shipped_kernels_pass() -> None:
    """One size of each regime; all of them take minutes: ``python bench/static.py``."""
    options = "--json", "--arch", "90", "--only", SOME
    result = run_compiled(str(SCRIPT), *options, cwd=SCRIPT.parent)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    calls = {(row["build"]["call"], row["build"]["kernel"]): row for row in rows}
    row = calls["softmax float16 n=1024", "softmax_kernel"]
    assert row["tile_loads"] == row["tile_stores"] == {"16": 64}  # 1024 elements, one warp
    assert row["loads"] == row["stores"] == {"16": 4}
    assert 16 <= row["registers"] <= 64
    assert 4 < row["instructions"] <= 12
    assert row["ex2"] == 1
    assert calls["softmax float16 n=1001", "softmax_kernel"]["loads"] == {"2": 32}
    # lines that begin between vectors, but for their edges
    row = calls["softmax float16 n=50257", "softmax_long_kernel"]
    assert row["tile_loads"]["16"] // 16 <= row["loads"]["16"]
    assert row["loads"]["2"] == 2 and row["stores"]["2"] == 1
    # FP32 beside half: 16 and 8 bytes, no gaps between threads
    row = calls["log_softmax float16 n=1024 backward", "softmax_backward_kernel"]
    assert (row["loads"], row["stores"]) == ({"16": 16}, {"8": 8})
    row = calls["cast float16", "cast_kernel"]
    assert (row["tile_loads"], row["tile_stores"]) == ({"16": 16}, {"8": 8})
    row = calls["adamw float32 float16 float16", "update_kernel"]
    assert (
        row["tile_loads"] == row["tile_stores"] == {"8": 8, "16": 48}
    )  # four elements: half, and three times FP32
    assert row["shared"] == row["spills"] == 0
    assert 40 <= row["registers"] <= 64

"""adamw_8bit against ``adamw`` on what its codes hold; it and lion_8bit against their twins, skips,
bytes; adamw, lion and sgd on bfloat16 moments.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import same
from torch import Tensor

from tests.kernels.conftest import Traffic, numpy_warns, unaligned
from tests.kernels.test_adamw import RULE
from tritonamp.kernels import _device_tables
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._small_state import (
    BLOCK,
    SIGNED,
    UNSIGNED,
    decode,
    encode,
    in_memory_of,
    in_order_of_memory,
    join_master,
    moments_size,
    padded,
    split_master,
    split_moments,
)
from tritonamp.kernels._tables import stored
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.adamw import AdamRule, adamw
from tritonamp.kernels.adamw_8bit import adamw_8bit
from tritonamp.kernels.lion import LionRule, lion
from tritonamp.kernels.lion_8bit import lion_8bit
from tritonamp.kernels.sgd import SGDRule, sgd

pytestmark = numpy_warns

HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")
SHAPES = [(0,), (), (127,), (128,), (129,), (1023,), (1025,), (4095,), (4097,), (5, 7)]
SMALL = [(3,), (5, 7), (130,)]
L2 = RULE._replace(decoupled_weight_decay=False, maximize=True, lr=0.05)

each_half = pytest.mark.parametrize("half", [HALF, BF16, None], ids=str)


class State:
    """Parameters of one shape after another for each rule, the last one transposed; masters and
    moments are what the codes hold, all in (0.1, 1.1).
    """

    step_once: Any = staticmethod(adamw_8bit)
    rule: Any = RULE
    kinds = SIGNED, UNSIGNED

    def __init__(
        self,
        device: torch.device,
        half: torch.dtype | None,
        rules: Sequence[Any] = (),
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        grad: torch.dtype | None = None,
        steps: float = 3.0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        rules = rules or [self.rule]

        def random(shape: tuple[int, ...]) -> Tensor:
            return torch.rand(shape, generator=generator) + 0.1

        masters = [random(shape) for _ in rules for shape in shapes]
        masters += [random((7, 5)).t() for _ in rules]
        self.rules = list(rules)
        self.groups = [g for g in range(len(rules)) for _ in shapes] + [*range(len(rules))]
        self.params, self.remainders, self.moments = [], [], []
        for master in masters:
            n, size = master.numel(), padded(master.numel())
            memory = torch.zeros(moments_size(n, len(self.kinds)), dtype=torch.uint8)
            parts = zip(split_moments(memory, size, len(self.kinds)), self.kinds, strict=True)
            for (codes, exponents), kind in parts:
                values = torch.nn.functional.pad(random((n,)), (0, size - n))
                for target, value in zip(
                    (codes, exponents), encode(values, None, kind), strict=True
                ):
                    target.copy_(value)
            self.moments.append(memory.to(device))
            if half is None:
                self.params.append(master.to(device))
                continue
            upper, lower = split_master(in_order_of_memory(master), half)
            rest = torch.zeros(size, dtype=torch.int16)
            rest[:n] = lower
            self.params.append(in_memory_of(master, upper).to(device))
            self.remainders.append(rest.to(device))
        self.remainders = self.remainders or self.params
        grad = grad or half or WIDE
        self.grads = [random(tuple(p.shape)).to(device, grad) for p in masters]
        self.steps = [torch.full((), steps, device=device) for _ in masters]

    def clone(self) -> "State":
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        for name in ("params", "remainders", "moments", "steps"):
            setattr(other, name, [t.clone() for t in getattr(self, name)])
        if self.remainders is self.params:
            other.remainders = other.params
        return other

    def lists(self, memory: Memory | None = None, lost: bool = False) -> UpdateLists:
        tensors = TensorLists(
            memory=memory,
            may_repeat=("remainders",),
            scalars=("steps",),
            coded=("remainders", "moments"),
            params=self.params,
            grads=self.grads,
            remainders=self.remainders,
            moments=self.moments,
            steps=self.steps,
        )
        return UpdateLists(tensors, self.rules, self.groups, lost, "8bit")

    def step(self, backend: str, *scalars: Tensor | None, **how: Any) -> UpdateLists:
        lists = self.lists(**how)
        self.step_once(lists, *(scalars or (None, None)), backend)
        return lists

    def masters(self) -> list[Tensor]:
        if self.remainders is self.params:
            return [in_order_of_memory(p).clone() for p in self.params]
        rows = zip(self.params, self.remainders, strict=True)
        return [join_master(in_order_of_memory(p), r[: p.numel()]) for p, r in rows]

    def decoded(self) -> list[list[Tensor]]:
        found = []
        for p, memory in zip(self.params, self.moments, strict=True):
            parts = split_moments(memory, padded(p.numel()), len(self.kinds))
            rows = zip(parts, self.kinds, strict=True)
            found.append([decode(*part, kind)[: p.numel()] for part, kind in rows])
        return found

    def bits(self) -> list[Tensor]:
        lists = self.params, self.remainders, self.moments, self.steps
        return [t.detach().clone().contiguous().view(torch.uint8) if t.dim() else t.clone()
                for t in itertools.chain(*lists)]  # fmt: skip


class LionState(State):
    """Of Lion."""

    step_once = staticmethod(lion_8bit)
    rule = LionRule(0.125, 0.9, 0.99, 0.01, False)
    kinds = (SIGNED,)


each_op = pytest.mark.parametrize("kept", [State, LionState], ids=["adamw", "lion"])


@each_half
@pytest.mark.parametrize("rules", [[RULE], [RULE, L2]], ids=["one rule", "two rules"])
def test_a_step_is_adamws_on_what_the_codes_hold(
    device: torch.device, backend: str, half: torch.dtype | None, rules: list[AdamRule]
) -> None:
    """The arithmetic of ``adamw`` in FP32, to two ulps of values below 2; float16 masters keep 26
    bits. Codes are within a code of its moments, an eighth.
    """
    shapes = SHAPES if len(rules) == 1 else SMALL
    state = State(device, half, rules, shapes)
    masters = [m.clone() for m in state.masters()]
    moments = [[t.clone() for t in pair] for pair in state.decoded()]
    grads = [
        in_order_of_memory(g, like=p).clone()
        for g, p in zip(state.grads, state.params, strict=True)
    ]
    scale = torch.tensor(0.5, device=device)
    tensors = TensorLists(
        may_repeat=("copies", "max_exp_avg_sqs"),
        scalars=("steps",),
        params=masters,
        grads=grads,
        exp_avgs=[m for m, _ in moments],
        exp_avg_sqs=[v for _, v in moments],
        max_exp_avg_sqs=masters,
        copies=masters,
        steps=[s.clone() for s in state.steps],
    )
    adamw(UpdateLists(tensors, rules, state.groups), scale, None, "eager")
    before = [m.clone() for m in state.masters()]
    state.step(backend, scale, None)
    assert all(s.item() == 4.0 for s in state.steps)
    moved = 0
    rows = zip(state.masters(), masters, before, state.decoded(), moments, strict=True)
    for got, right, old, (m, v), (m_right, v_right) in rows:
        torch.testing.assert_close(got, right, rtol=0, atol=2**-22)
        moved += int((got != old).sum())
        for coded, exact in ((m, m_right), (v, v_right)):
            assert ((coded - exact).abs() <= exact.abs() / 8).all()
    assert moved > 100
    if half is not None:
        for param, master in zip(state.params, state.masters(), strict=True):
            rounded = split_master(master, half)[0]
            assert torch.equal(in_order_of_memory(param), rounded)


@each_half
@each_op
def test_kernel_and_twin_leave_the_same_codes(
    triton_device: torch.device, half: torch.dtype | None, kept: type[State]
) -> None:
    """A moment that is off by an FP32 ulp is rounded the other way once in 2^20."""
    kernel = kept(triton_device, half)
    twin = kernel.clone()
    codes = different = 0
    for _ in range(2):
        kernel.step("triton")
        twin.step("eager")
        for a, b in zip(kernel.masters(), twin.masters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2**-20)
        for a, b in zip(kernel.moments, twin.moments, strict=True):
            codes += a.numel()
            different += int((a != b).sum())
    assert codes > 20_000 * len(kernel.kinds) and different <= 4
    assert all(map(torch.equal, kernel.steps, twin.steps))


@each_op
def test_many_tensors_half_and_fp32_of_different_ages(
    triton_device: torch.device, kept: type[State]
) -> None:
    """More than a warp counts steps for, in two tables, half ones between FP32 ones; a part of the
    lists: each has its own count, and the random bits of its own number.
    """
    shapes, places = [(130 + i,) for i in range(46)], range(7, 47)
    halves, wide = (kept(triton_device, half, shapes=shapes) for half in (HALF, None))
    kernel = halves.clone()
    kernel.remainders = list(halves.remainders)
    for i in range(1, len(kernel.params), 2):
        kernel.params[i], kernel.remainders[i] = (wide.params[i],) * 2
    for age, steps in enumerate(kernel.steps):
        steps.fill_(float(age))
    twin = kernel.clone()
    for i in range(1, len(twin.params), 2):
        twin.remainders[i] = twin.params[i]
    for state, backend in ((kernel, "triton"), (twin, "eager")):
        lists = state.lists()
        part = lists.tensors.part(places, {})
        stepped = UpdateLists(part, state.rules, state.groups, False, "8bit")
        state.step_once(stepped, None, None, backend)
    assert [s.item() for s in kernel.steps] == [age + float(age in places) for age in range(47)]
    assert all(map(torch.equal, kernel.steps, twin.steps))
    for a, b in zip(kernel.params, twin.params, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-11)
    pairs = zip(kernel.moments, twin.moments, strict=True)
    assert sum(int((a != b).sum()) for a, b in pairs) <= 4  # see above


@pytest.mark.parametrize("programs", [_device_tables.PROGRAMS, 1])
@pytest.mark.parametrize("half", [HALF, None], ids=str)
@each_op
def test_memory_that_is_not_aligned(
    device: torch.device,
    backend: str,
    kept: type[State],
    half: torch.dtype | None,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And large chunks: the same bits; nothing is written behind the ends."""
    shapes = [(), (1,), (127,), (129,), (4099,)]
    aligned = kept(device, half, shapes=shapes)
    moved = aligned.clone()
    aligned.step(backend)
    monkeypatch.setattr(_device_tables, "PROGRAMS", programs)
    names = ["params", "grads", "moments"] + ["remainders"] * (half is not None)
    for name in names:
        setattr(moved, name, list(map(unaligned, getattr(moved, name))))
    if half is None:
        moved.remainders = moved.params
    moved.step(backend)
    assert same(aligned.bits(), moved.bits())
    for name in names:
        for tensor in getattr(moved, name):
            memory = torch.as_strided(tensor, (tensor.numel() + 16,), (1,), 0)
            assert memory[0] == 7 and (memory[1 + tensor.numel() :] == 7).all(), name


@each_op
def test_memory_with_gaps(device: torch.device, backend: str, kept: type[State]) -> None:
    """Gradients of slices, or that lie the other way round; parameters that are columns."""
    state = kept(device, HALF, shapes=[(5, 7), (8, 3)])
    expected = state.clone()
    expected.step(backend)
    state.grads = [torch.stack([g, g], -1)[..., 0] for g in state.grads]
    state.params[0] = torch.cat([state.params[0]] * 2, 1)[:, :7]
    state.step(backend)
    assert same(state.bits(), expected.bits())
    state.grads[1] = state.grads[1].t().contiguous().t()
    for run in (state, expected):
        run.step(backend)
    assert same(state.bits(), expected.bits())


@pytest.mark.parametrize("found_inf", [1.0, -1.0, INF, NAN])
@each_half
@each_op
def test_any_found_inf_leaves_every_bit(
    device: torch.device,
    backend: str,
    kept: type[State],
    half: torch.dtype | None,
    found_inf: float,
) -> None:
    state = kept(device, half, shapes=SMALL)
    for grad, bad in zip(state.grads, itertools.cycle([INF, NAN, 65504.0]), strict=False):
        grad.fill_(bad)
    before = state.bits()
    flag = torch.tensor(found_inf, device=device)
    lists = state.step(backend, torch.tensor(0.5, device=device), flag)
    assert same(state.bits(), before)
    assert lists.overflow(device).tolist() == [0] * len(state.params)
    state.step(backend, None, torch.tensor(0.0, device=device))
    assert not same(state.bits(), before)


@pytest.mark.parametrize("half", [HALF, BF16], ids=str)
@each_op
def test_a_power_of_two_scale_cancels_exactly(
    device: torch.device, backend: str, kept: type[State], half: torch.dtype
) -> None:
    plain = kept(device, half, [RULE, L2] if kept is State else (), SMALL)
    scaled = plain.clone()
    scaled.grads = [g * 8 for g in plain.grads]
    plain.step(backend)
    scaled.step(backend, torch.tensor(0.125, device=device), None)
    assert same(plain.bits(), scaled.bits())


def test_a_tensor_as_learning_rate(device: torch.device, backend: str) -> None:
    """FP32 holds 0.125: the same masters; by one plan, the rate may change."""
    number = State(device, HALF, [RULE._replace(lr=0.125)], SMALL)
    tensor = number.clone()
    lr, memory = torch.tensor(0.125, device=device), Memory()
    tensor.rules = [RULE._replace(lr=lr)]
    for now in (0.125, 0.5):
        number.rules = [RULE._replace(lr=now)]
        lr.fill_(now)
        number.step(backend)
        tensor.step(backend, None, None, memory=memory)
        for a, b in zip(number.masters(), tensor.masters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2**-21)


@each_op
def test_masters_beyond_half_are_noted(
    device: torch.device, backend: str, kept: type[State]
) -> None:
    """In a whole tile, in a tail; a parameter that is inf or NaN itself is no overflow."""
    state = kept(device, HALF, [kept.rule._replace(lr=1e8, weight_decay=0.0)], [(4099,)] * 4)
    for i, grad in enumerate(state.grads):
        grad.zero_()
        codes, _ = split_moments(state.moments[i], padded(grad.numel()), len(kept.kinds))[0]
        codes.zero_()
    state.grads[0][5] = state.grads[1][4098] = 1.0
    state.params[2][7], state.params[3][8] = INF, NAN
    lists = state.step(backend)
    assert lists.overflow(device).tolist() == [1, 1, 0, 0, 0]
    assert state.params[0][5].isinf() and state.params[1][4098].isinf()


@each_op
def test_a_gradient_that_is_not_finite_marks_its_block_alone(
    device: torch.device, backend: str, kept: type[State]
) -> None:
    state = kept(device, HALF, shapes=[(1000,)])
    state.grads[0][300] = NAN
    state.step(backend)
    for moment in state.decoded()[0]:
        bad = moment.isnan().nonzero().flatten()
        assert bad.tolist() == list(range(2 * BLOCK, 3 * BLOCK))
    # the sign of NaN is 0
    isnan = state.params[0].isnan().nonzero().flatten().tolist()
    assert isnan == ([300] if kept is State else [])


@pytest.mark.parametrize("half", [HALF, BF16], ids=str)
def test_half_values_that_stay_are_counted(
    device: torch.device, backend: str, half: torch.dtype
) -> None:
    """From 1, half an ulp of which is 2**-12 (float16) or 2**-9 downwards, by lr. The masters move,
    whatever their half values do. A gradient of zero moves nothing.
    """
    ulp = torch.finfo(half).eps / 2
    for lr, stay in ((ulp / 4, 5000), (ulp, 0)):
        rule = AdamRule(lr, 0.9, 0.999, 1e-12, 0.0, True, False, False)
        state = State(device, half, [rule], [(5003,)], steps=0.0)
        for name in ("params", "remainders", "moments", "steps", "grads"):
            setattr(state, name, getattr(state, name)[:1])
        state.groups = [0]
        state.params[0].fill_(1.0), state.remainders[0].zero_(), state.moments[0].zero_()
        state.grads[0].fill_(1.0)
        state.grads[0][:3] = 0.0
        lists = state.step(backend, lost=True)
        (lost,) = lists.tensors.memory.all_kept("lost", 1)
        assert lost.tolist() == [[stay, 5000]]
        assert (state.masters()[0][3:] < 1.0).all() and (state.masters()[0][:3] == 1.0).all()
        adamw_8bit(lists, None, torch.ones((), device=device), backend)
        assert lost.tolist() == [[stay, 5000]], "a skip leaves it"


def test_weight_decay_alone_moves_masters(device: torch.device, backend: str) -> None:
    rule = AdamRule(2.0**-14, 0.9, 0.999, 1e-12, 1.0, True, False, False)
    state = State(device, HALF, [rule], [(1003,)], steps=0.0)
    for name in ("params", "remainders", "moments", "steps", "grads"):
        setattr(state, name, getattr(state, name)[:1])
    state.groups = [0]
    state.params[0].fill_(1.0), state.remainders[0].zero_(), state.moments[0].zero_()
    state.grads[0].zero_()
    lists = state.step(backend, lost=True)
    (lost,) = lists.tensors.memory.all_kept("lost", 1)
    assert lost.tolist() == [[1003, 1003]]
    assert (state.masters()[0] == 1.0 - 2.0**-14).all()


def test_half_values_add_up_steps_that_they_cannot_hold(device: torch.device, backend: str) -> None:
    """20 steps of 2^-14, a quarter of float16's ulp below 1."""
    rule = AdamRule(2.0**-14, 0.9, 0.999, 1e-12, 0.0, True, False, False)
    state = State(device, HALF, [rule], [(200,)], steps=0.0)
    for param, rest, moments in zip(state.params, state.remainders, state.moments, strict=True):
        param.fill_(1.0), rest.zero_(), moments.zero_()
    state.grads = [torch.full_like(g, 0.5) for g in state.grads]
    memory = Memory()
    for _ in range(20):
        state.step(backend, None, None, memory=memory)
    for master, param in zip(state.masters(), state.params, strict=True):
        # codes of a constant gradient's moments are off by an eighth each
        assert ((1 - master) * 2.0**14 - 20).abs().max() < 20 / 4
        assert torch.equal(in_order_of_memory(param), master.half())


BYTES = {  # half dtype, gradient: bytes read and written for an element, without moments
    "float16": (HALF, HALF, 2 + 2 + 2, 2 + 2),
    "float16, float32 gradient": (HALF, WIDE, 2 + 4 + 2, 2 + 2),
    "float32": (None, HALF, 4 + 2, 4),
}


@each_op
@pytest.mark.parametrize("name", BYTES)
def test_bytes(triton_device: torch.device, traffic: Traffic, kept: type[State], name: str) -> None:
    """14 for each half parameter (Lion: 12) and 2 / 128 of exponents for each moment; a program
    reads, in addition, flag, number and row, three or four pointers, size and chunk, and rates or
    rule. A skip writes nothing.
    """
    half, grad, reads, writes = BYTES[name]
    n = 1 << 14
    state = kept(triton_device, half, shapes=[(n,)], grad=grad)
    for list_name in ("params", "remainders", "moments", "steps", "grads"):
        setattr(state, list_name, getattr(state, list_name)[:1])
    if half is None:
        state.remainders = state.params
    state.groups = [0]
    state.step("triton")
    of_moments = len(kept.kinds) * (n + n // BLOCK)
    reads, writes = reads * n + of_moments, writes * n + of_moments
    assert reads <= traffic.read <= 1.02 * reads
    assert writes <= traffic.written <= writes + 4 * 11
    traffic.read = traffic.written = 0
    state.step("triton", None, torch.ones((), device=triton_device))
    assert traffic.written == 0 and traffic.read < 0.01 * reads


# moments in bfloat16


OPS: dict[str, tuple[Any, Any, list[str]]] = {  # operation, rule, moments
    "adamw": (adamw, RULE._replace(beta2=0.999), ["exp_avgs", "exp_avg_sqs"]),
    "amsgrad": (
        adamw,
        RULE._replace(amsgrad=True),
        ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"],
    ),
    "lion": (lion, LionRule(0.125, 0.9, 0.99, 0.01, False), ["exp_avgs"]),
    "sgd": (sgd, SGDRule(0.1, 0.9, 0.0, 0.01, True, False), ["momentum_buffers"]),
}
each_op = pytest.mark.parametrize("name", OPS)


class Bf16:
    """One operation on bfloat16 moments (``dtype``: or others), FP32 masters and float16 copies."""

    def __init__(
        self, name: str, device: torch.device, shapes: Any = SMALL, dtype: torch.dtype = BF16
    ) -> None:
        self.operation, self.rule, moments = OPS[name]
        generator = torch.Generator().manual_seed(0)

        def made(dtype: torch.dtype) -> list[Tensor]:
            given = [torch.rand(s, generator=generator) + 0.1 for s in shapes]
            given.append((torch.rand((7, 5), generator=generator) + 0.1).t())
            return [t.to(device, dtype) for t in given]

        self.params = made(WIDE)
        self.moments = {key: [t.to(dtype) for t in made(BF16)] for key in moments}
        self.copies = [p.half() for p in self.params]
        self.grads = made(HALF)
        self.steps = [torch.full((), 3.0, device=device) for _ in self.params]
        self.device = device

    def step(self, backend: str, found_inf: Tensor | None = None) -> None:
        counts = self.operation is adamw
        state: dict[str, Any] = dict(self.moments)
        if counts:
            state = {"max_exp_avg_sqs": self.params} | state | {"steps": self.steps}
        tensors = TensorLists(
            may_repeat=("copies", "max_exp_avg_sqs", "momentum_buffers"),
            scalars=("steps",) if counts else (),
            params=self.params,
            grads=self.grads,
            copies=self.copies,
            **state,
        )
        lists = UpdateLists(tensors, [self.rule], [0] * len(self.params), state="bf16")
        self.operation(lists, None, found_inf, backend)

    def everything(self) -> list[Tensor]:
        lists = self.params, self.copies, self.steps, *self.moments.values()
        return [t.clone() for t in itertools.chain(*lists)]


@each_op
def test_bfloat16_moments_step_in_fp32(device: torch.device, backend: str, name: str) -> None:
    """Parameters to two ulps of values below 4 as with FP32 moments of the same values; moments are
    one of the two neighbours in bfloat16 of theirs (Lion, SGD: the nearest).
    """
    run, wide = Bf16(name, device), Bf16(name, device, dtype=WIDE)
    run.step(backend)
    wide.step("eager")
    for a, b in zip(run.params, wide.params, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-21)
    for key, moments in run.moments.items():
        for m, exact in zip(moments, wide.moments[key], strict=True):
            assert m.dtype is BF16
            unit = 1 if run.operation is adamw else 0.5
            assert ((m.float() - exact).abs() <= unit * 1.01 * 2**-7 * exact.abs()).all()


@each_op
def test_bfloat16_moments_are_the_twins(triton_device: torch.device, name: str) -> None:
    kernel, twin = (Bf16(name, triton_device, [(3,), (1029,), (5, 7)]) for _ in range(2))
    for _ in range(3):
        kernel.step("triton")
        twin.step("eager")
    for a, b in zip(kernel.params, twin.params, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-12)
    different = sum(
        int((a != b).sum())
        for key in kernel.moments
        for a, b in zip(kernel.moments[key], twin.moments[key], strict=True)
    )
    assert different <= 4, "an ulp of FP32 is rounded the other way once in 2^16"


@each_op
def test_a_skip_leaves_bfloat16_moments(device: torch.device, backend: str, name: str) -> None:
    run = Bf16(name, device)
    before = run.everything()
    run.step(backend, torch.tensor(NAN, device=device))
    assert all(map(torch.equal, run.everything(), before))


def test_a_second_moment_decays_in_bfloat16(device: torch.device, backend: str) -> None:
    """By a thousandth a step, which is a fourth of bfloat16's distance below 1, and half of it
    above; rounded to the nearest it stays for ever. 6 deviations of the mean of 3000.
    """
    nearest, steps = torch.ones((), dtype=BF16), 12

    def decayed() -> Tensor:
        run = Bf16("adamw", device, [(3000,)])
        for moments in run.moments.values():
            moments[0].fill_(1.0)
        run.grads[0].zero_()
        for _ in range(steps):
            run.step(backend)
        return run.moments["exp_avg_sqs"][0].float()

    for _ in range(steps):
        nearest = (nearest.float() * 0.999).bfloat16()
    assert nearest == 1.0
    v = decayed()
    # each step adds p (1 - p) of a distance of 2^-8, p below one: at most a fourth
    deviation = (steps / 4) ** 0.5 * 2**-8 / 3000**0.5
    assert 6 * deviation < 0.1 * (1 - 0.999**steps), "a bound that can fail"
    assert abs(v.mean().item() - 0.999**steps) <= 6 * deviation
    assert 1 < len(v.unique()) <= 4, "successive roundings spread evenly"
    assert torch.equal(decayed(), v)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_bad_numbers_are_not_rounded_away(device: torch.device, backend: str, bad: float) -> None:
    run = Bf16("adamw", device, [(300,)])
    run.grads[0][7] = bad
    run.step(backend)
    for key, moments in run.moments.items():
        assert (~moments[0].isfinite()).nonzero().flatten().tolist() == [7], key


@each_op
def test_bytes_of_bfloat16_moments(
    triton_device: torch.device, traffic: Traffic, name: str
) -> None:
    """4 a moment less than FP32. The interpreter's bfloat16 is FP32: there it is counted as such,
    and moments of the real size are float16.
    """
    run = Bf16(name, triton_device, [(1 << 16,)], dtype=HALF if stored(BF16) is WIDE else BF16)
    for list_name in ("params", "copies", "steps", "grads"):
        setattr(run, list_name, getattr(run, list_name)[:1])
    run.moments = {key: moments[:1] for key, moments in run.moments.items()}
    run.step("triton")
    n, moments = 1 << 16, len(run.moments)
    reads, writes = n * (4 + 2 + 2 * moments), n * (4 + 2 + 2 * moments)
    assert reads <= traffic.read <= 1.01 * reads
    assert writes <= traffic.written <= 1.01 * writes

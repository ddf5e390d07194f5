"""One step of Muon over lists of matrices: momentum, Newton-Schulz by shape, and the last write.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), in the form
and the order of operations of ``torch.optim.Muon``. Two kernels read and write 28 B/param with FP32
masters and half copies. The matrix products between them are torch's.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._muon_lists import MuonLists, MuonRule, orthogonalize_
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import LEVELS, WIDE, Shipped, build_name, shipped_lists
from tritonamp.kernels._tables import chunk_bounds, element_pointer, tail_offsets
from tritonamp.kernels._transfer import in_main_memory
from tritonamp.kernels._update import Update
from tritonamp.kernels._update_lists import PendingWrites, UpdateLists, unscaled
from tritonamp.kernels.device import tl, triton

_NUMBERS = 4  # numbers of a rule
_VEC = 4  # elements that a thread holds, as in adamw


@triton.jit
def _lerp(a, b, weight):
    # both forms of torch.lerp, which starts from the end that is nearer
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1.0 - weight))


@triton.jit
def _prepare(offs, mask, grads, momentum_buffers, updates, factor, momentum, weight, nesterov):
    before = tl.load(momentum_buffers + offs, mask=mask, other=0.0)
    # unscale and clip
    grad = tl.load(grads + offs, mask=mask, other=0.0).to(tl.float32) * factor
    # momentum
    buffer = _lerp(before, grad, weight)
    # nesterov is a number instead of a constant, so that one build serves all groups
    update = tl.where(nesterov != 0.0, _lerp(grad, buffer, momentum), buffer)

    tl.store(momentum_buffers + offs, buffer, mask=mask)
    tl.store(updates + offs, update, mask=mask)


@triton.jit(do_not_specialize=("chunk",))
def muon_prepare_kernel(
    grads_ptr, momentum_buffers_ptr, updates_ptr, numel_ptr, first_ptr, number_ptr, rows_ptr,
    groups_ptr, rules_ptr, grad_scale_ptr, found_inf_ptr, chunk,
    GRAD: tl.constexpr, NUMBERS: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk of the momentum, and of the matrix that is to be made orthogonal."""
    # On a skip the momentum keeps its bits: an inf in it would stay for ever.
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.load(rows_ptr + tl.program_id(0))
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, row, tl.program_id(0), chunk, VEC)
    grads = element_pointer(grads_ptr, row, GRAD, VEC)
    momentum_buffers = element_pointer(momentum_buffers_ptr, row, tl.float32, VEC)
    updates = element_pointer(updates_ptr, row, tl.float32, VEC)
    # loaded once, because the compiler cannot know that the stores leave these numbers unchanged
    rule_ptr = rules_ptr + NUMBERS * tl.load(groups_ptr + tl.load(number_ptr + row))
    momentum = tl.load(rule_ptr + 2)
    # the difference in FP64, because FP32 would lose digits of 1 - momentum
    weight = (1.0 - momentum).to(tl.float32)
    momentum = momentum.to(tl.float32)
    nesterov = tl.load(rule_ptr + 3).to(tl.float32)
    factor = tl.load(grad_scale_ptr)
    j = tl.arange(0, BLOCK)
    for at in range(begin, whole, BLOCK):
        _prepare(
            at + j, at + j < whole, grads, momentum_buffers, updates,
            factor, momentum, weight, nesterov,
        )  # fmt: skip
    # a tail of its own, because a mask that ends inside a vector splits every load of the loop
    if whole < end:
        offs = tail_offsets(whole, VEC)
        _prepare(
            offs, offs < end, grads, momentum_buffers, updates, factor, momentum, weight, nesterov
        )


@triton.jit
def load_rule(rule_ptr, grad_scale_ptr):
    """Return a factor of 1, because updates are unscaled, and the multipliers of a step."""
    lr = tl.load(rule_ptr)
    return 1.0, (lr.to(tl.float32), (1.0 - lr * tl.load(rule_ptr + 1)).to(tl.float32))


@triton.jit
def apply(p, update, a, b, c, rule, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """Return the parameter after weight decay and an orthogonal update."""
    lr, decay = rule
    # weight decay
    p *= decay
    # update
    return p - lr * update, a, b, c


def apply_twin(p: Tensor, update: Tensor, rule: Any, step: Tensor | None) -> tuple[Tensor]:
    """Return the parameter that ``apply`` returns."""
    # weight decay
    p = p * (1 - rule.lr * rule.weight_decay)
    # update
    return (p - update * rule.lr,)


def muon_triton(lists: MuonLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    with lists.tensors.launches(("momentum_buffers", "updates")) as plan:
        lists.launch(plan, _prepare_launches, grad_scale, found_inf)
    # On a skip the products work on stale memory. The host cannot know, and nothing reads them.
    for matrices, rule in lists.stacks:
        orthogonalize_(matrices, rule)
    APPLY.launch(lists, None, found_inf)


def _prepare_launches(lists: UpdateLists, plan: Plan) -> Iterator[Launch]:
    for t in plan.tables:
        # without the overflow flags, the last operand, because nothing is rounded here
        operands = lists.numbers_and_flags(t.device)[:-1]
        names = "grads", "momentum_buffers", "updates"
        constants = t.type("grads"), _NUMBERS
        yield t.launch_of(muon_prepare_kernel, names, operands, constants, _VEC)


def muon_torch(lists: MuonLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    results = PendingWrites(found_inf)
    names = "grads", "momentum_buffers", "updates"
    for (grad, momentum_buffer, update), rule, _ in lists.rows(names):
        # unscale and clip
        grad = unscaled(grad, grad_scale, False, update.dtype)
        # momentum
        # the buffer is only planned, so that a skip leaves it;
        # updates are memory of this step alone
        buffer = torch.lerp(momentum_buffer.to(grad), grad, 1 - rule.momentum)
        update.copy_(torch.lerp(grad, buffer, rule.momentum) if rule.nesterov else buffer)
        results.put(momentum_buffer, buffer)
    for matrices, rule in lists.stacks:
        orthogonalize_(matrices, rule)
    APPLY.put_results(results, lists, None)
    results.write()


def _muon_on_cpu(lists: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    # the flag is known here, so the selection in each write is saved
    if not in_main_memory(found_inf):
        muon_torch(lists, grad_scale, None)


def muon(
    lists: MuonLists, grad_scale: Tensor | None, found_inf: Tensor | None, backend: str = "auto"
) -> None:
    """Update matrices, momentum buffers and half copies in place.

    Parameters have two dimensions. The state is "momentum_buffers", in FP32 (FP64 for FP64
    parameters). Steps are not counted.

    Args:
        lists: lists of n parameters with their hyperparameters, as for ``adamw``, with
            "momentum_buffers" as state and memory for updates.
        grad_scale: 0-d factor on the gradients (1/scale times the clip coefficient), or None for 1.
        found_inf: 0-d flag; any value other than 0 leaves every bit unchanged. None: always step.
        backend: "auto", "triton" or "eager".
    """
    lists.run(MUON, _muon_on_cpu, backend, grad_scale, found_inf)


def _sample(masters: bool) -> ListSample:
    def args(tensors: list[Tensor], half: torch.dtype) -> tuple[Any, ...]:
        wide = [t if t.dim() == 2 else t.reshape(1, -1) for t in tensors]
        params = wide if masters else [t.to(half) for t in wide]
        tensors_of_step = TensorLists(
            params=params,
            grads=[t.to(half) for t in wide],
            momentum_buffers=[t / 2 for t in wide],
            copies=[torch.zeros_like(p, dtype=half) for p in params] if masters else params,
        )
        lists = UpdateLists(tensors_of_step, [_RULE], [0] * len(params))
        first = tensors[0]
        return MuonLists(lists), first.new_full((), 0.5), first.new_zeros(())

    def results(args: tuple[Any, ...], _: None) -> list[Tensor]:
        tensors = args[0].tensors
        return [t for name in ("params", "copies", "momentum_buffers") for t in tensors[name]]

    return ListSample(args, results, variant="" if masters else "of half parameters")


_RULE = MuonRule(
    0.01, 0.1, 0.95, True, (3.4445, -4.7750, 2.0315), 1e-7, 5, None, compute=torch.float32
)
APPLY = Update("muon_apply", MuonRule, {}, load_rule, apply, apply_twin, rules=(), grads="updates")
MUON = Implementations(muon_triton, muon_torch, [_sample(True), _sample(False)])


def shipped() -> Iterator[Shipped]:
    """Yield calls for all levels."""
    for (param, grad, copy), aligned in itertools.product(LEVELS, (True, False)):
        dtypes: dict[str, Any] = {"params": param, "grads": grad, "momentum_buffers": WIDE}
        rows = shipped_lists(aligned, **dtypes, copies=copy or "params")
        square: dict[str, Any] = {n: [rows[n][0].view(64, 64)] for n in (*dtypes, "copies")}
        if copy is None:
            square["copies"] = square["params"]
        lists = MuonLists(UpdateLists(TensorLists(**square), [_RULE], [0]))
        name = build_name("muon", param, grad, copy, not aligned and "unaligned")
        yield Shipped(name, muon_triton, (lists, None, None), max_shared=0)

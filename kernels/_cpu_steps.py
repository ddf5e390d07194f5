"""Updates of optimizers in main memory, with the bits of the eager twins at memory speed.

A twin is the specification, and creates a tensor for each result. The updates here work in place,
in blocks that stay in the cache, and reuse memory for intermediate results.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._blocks import Scratch, block_size, cut, may_overflow, overflows, reused
from tritonamp.kernels._transfer import all_in_main_memory, in_main_memory
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.device import wide_dtype

_MOST_WAITING = 1 << 20  # bytes of results that wait in memory of their own


class CpuUpdate:
    """An update of tensors in main memory.

    Large tensors are updated in place, block by block, because results that wait would leave the
    cache. Results of small tensors are collected and written whenever they reach 1 MiB. An error
    before that leaves all tensors unchanged.

    Args:
        lists: lists of the step.
        grad_scale: 0-d factor on the gradients, or None.

    Attributes:
        waiting: tensors and their new values, which are written together.
    """

    def __init__(self, lists: UpdateLists, grad_scale: Tensor | None) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self._lists = lists
        # a factor of 1 is known without a wait here, and saves a pass over the gradients
        self._grad_scale = None if in_main_memory(grad_scale) == 1.0 else grad_scale
        self._bytes = 0  # of the results that wait
        self._rounded: list[tuple[Tensor, Tensor, int]] = []  # copy, FP32 value, number
        self._overflows: list[tuple[Tensor, Tensor]] = []
        self._size = block_size()
        self._in_place = False  # whether the present blocks are updated in place
        self._scratch = Scratch()

    def blocks(self, tensors: tuple[Tensor, ...]) -> Sequence[tuple[Tensor, ...]]:
        """Return blocks of tensors of one shape; each is stored before the next one is loaded."""
        blocks = cut(tensors, self._size)
        self._in_place = blocks is not None
        return blocks or [tensors]

    def load(self, dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
        """Return the values of tensors in ``dtype``, which the caller may change and store."""
        # in place, the caller changes the tensor itself if the dtype is the same
        return [tensor.to(dtype, copy=not self._in_place) for tensor in tensors]

    def scratch(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return reusable memory for an intermediate result; None: the caller allocates."""
        return reused(self._scratch, name, like, dtype) if self._in_place else None

    def gradient(self, grad: Tensor, dtype: torch.dtype, maximize: bool) -> Tensor:
        """Return the gradient to descend along, unscaled and clipped; it may be ``grad`` itself."""
        memory = self.scratch("gradient", grad, dtype)
        if grad.dtype != dtype:
            grad = grad.to(dtype) if memory is None else memory.copy_(grad)
        if self._grad_scale is not None:
            grad = torch.mul(grad, self._grad_scale.to(grad.device), out=memory)
        return torch.neg(grad, out=memory) if maximize else grad

    def store(self, number: int, copy: Tensor, *results: tuple[Tensor, Tensor]) -> None:
        """Store the results of one parameter, rounded to their dtypes: now if in place, else later.

        Args:
            number: number of the parameter.
            copy: half copy of the parameter, or the parameter itself.
            results: tensors and their new values, first of the parameter.
        """
        param, value = results[0]
        if copy is not param:
            results = *results, (copy, value)
            self._rounded.append((copy, value, number))
        if not self._in_place:
            self.waiting += results
            self._bytes += len(results) * value.nbytes
            if self._bytes > _MOST_WAITING:
                self.write()
            return
        self._note_overflows()
        for target, value in results:
            if value is not target:  # else the caller has changed the target itself
                target.copy_(value)

    def write(self) -> None:
        """Write the waiting results. Nothing allocates after the first write."""
        self._note_overflows()
        for target, result in self.waiting:
            target.copy_(result)
        for overflow, found in self._overflows:
            overflow.logical_or_(found)
        self.waiting.clear()
        self._overflows.clear()
        self._bytes = 0

    def _note_overflows(self) -> None:
        """Note the flags of copies in which a finite element became inf."""
        rounded, self._rounded = self._rounded, []
        halves = {copy.dtype for copy, _, _ in rounded}
        # one look at all small tensors, because nearly always no copy overflows
        if not may_overflow([value for _, value, _ in rounded], halves):
            return
        for copy, value, number in rounded:
            found = overflows(value, copy.dtype)
            if found is not None:
                self._overflows.append((self._lists.overflow(copy.device)[number], found))


def adamw_on_cpu(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Run the update of the twin of ``adamw``, with the same bits."""
    # A flag on the CPU is read without a wait, so that a skip costs nothing.
    if in_main_memory(found_inf):
        return
    updates = CpuUpdate(lists, grad_scale)
    names = "params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "copies"
    for (row, rule, number), counted in zip(lists.rows(names), _counted(lists), strict=True):
        lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, amsgrad, maximize = rule
        compute, steps, step, rate, root2 = counted
        updates.waiting.append((steps, step))
        for param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, copy in updates.blocks(row):
            p, m, v = updates.load(compute, param, exp_avg, exp_avg_sq)
            grad = updates.gradient(grad, compute, maximize)
            # weight decay
            if weight_decay != 0:
                if decoupled_weight_decay:
                    p.mul_(1 - lr * weight_decay)
                else:
                    # not in place: the gradient may be the user's own tensor
                    grad = grad + weight_decay * p
            # moments
            m.lerp_(grad, (1 - beta1).to(m) if isinstance(beta1, Tensor) else 1 - beta1)
            memory = updates.scratch("square, then denominator", v, compute)
            # the product of gradients is rounded before the sum, as in the twin
            v.mul_(beta2).add_(torch.mul(grad, 1 - beta2, out=memory).mul_(grad))
            v_max = torch.maximum(max_exp_avg_sq, v) if amsgrad else v
            # update
            denom = torch.sqrt(v_max, out=memory).div_(root2).add_(eps)
            _add_quotient(p, m, denom, rate)

            largest = [(max_exp_avg_sq, v_max)] if amsgrad else []
            updates.store(number, copy, (param, p), (exp_avg, m), (exp_avg_sq, v), *largest)
    updates.write()


def _counted(lists: UpdateLists) -> list[tuple[Any, ...]]:
    """Return for each place of AdamW's lists what depends on the step count.

    Returns:
        dtype of the arithmetic, the present count, the count after the step, and the results of
        ``corrected_rates``, of which the first is a number if the host knows it.
    """
    corrected: dict[Any, tuple[float | Tensor, Tensor]] = {}  # most tensors share a step count
    tensors, found = lists.tensors, []
    # a number of its own for each count that the host does not know
    counts = all_in_main_memory(tensors["steps"]) or range(len(tensors))
    rows = zip(tensors.numbers, tensors["params"], tensors["steps"], counts, strict=True)
    for number, param, steps, count in rows:
        # complex tensors are updated as real ones
        compute = torch.promote_types(param.dtype.to_real(), torch.float32)
        group, step = lists.groups[number], steps + 1
        key = group, compute, count
        if key not in corrected:
            rate, root2 = corrected_rates(lists.rules[group], step, compute)
            known = in_main_memory(rate)
            corrected[key] = rate if known is None else known, root2
        found.append((compute, steps, step, *corrected[key]))
    return found


def corrected_rates(rule: Any, step: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the corrected -lr and the root of the second correction, rounded once from FP64.

    On a device without float64 they are a few roundings of FP32 away.
    """
    bias_correction1 = _bias_correction(rule.beta1, step)
    bias_correction2 = _bias_correction(rule.beta2, step)
    return (-(rule.lr / bias_correction1)).to(dtype), bias_correction2.sqrt().to(dtype)


def _bias_correction(beta: float | Tensor, step: Tensor) -> Tensor:
    """Return ``1 - beta ** step``."""
    if wide_dtype(step.device) is torch.float64:
        return 1 - beta ** step.double()
    # in FP32 the difference would lose ten bits of the first corrections for beta2 = 0.999
    if isinstance(beta, Tensor):
        return -torch.expm1(step * beta.log())
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _add_quotient(to: Tensor, a: Tensor, b: Tensor, factor: float | Tensor) -> None:
    """Add ``factor * a / b``, in one pass if the factor is a number. The bits are the same."""
    if isinstance(factor, Tensor):
        to.add_((factor * a).div_(b))
    else:
        to.addcdiv_(a, b, value=factor)


def sgd_on_cpu(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Run the update of the twin of ``sgd``, with the same bits."""
    if in_main_memory(found_inf):
        return
    updates = CpuUpdate(lists, grad_scale)
    for row, rule, number in lists.rows(("params", "grads", "momentum_buffers", "copies")):
        lr, momentum, dampening, weight_decay, nesterov, maximize = rule
        compute = torch.promote_types(row[0].dtype, torch.float32)
        for param, grad, momentum_buffer, copy in updates.blocks(row):
            states = [momentum_buffer] if momentum != 0 else []
            p, *moments = updates.load(compute, param, *states)
            grad = updates.gradient(grad, compute, maximize)
            memory = updates.scratch("direction", grad, compute)
            # weight decay
            if weight_decay != 0:
                # into scratch memory, because the gradient may be the user's own tensor
                grad = torch.add(grad, p, alpha=weight_decay, out=memory)
            # momentum
            for buffer in moments:
                buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
                grad = torch.add(grad, buffer, alpha=momentum, out=memory) if nesterov else buffer
            # update
            if isinstance(lr, Tensor) and lr.device.type != "cpu":  # the host must not wait for it
                p.sub_(lr.to(p) * grad)
            else:
                p.add_(grad, alpha=-float(lr))

            updates.store(number, copy, (param, p), *zip(states, moments, strict=True))
    updates.write()


def lion_on_cpu(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Run the update of the twin of ``lion``, with the same bits."""
    if in_main_memory(found_inf):
        return
    updates = CpuUpdate(lists, grad_scale)
    for row, rule, number in lists.rows(("params", "grads", "exp_avgs", "copies")):
        lr, beta1, beta2, weight_decay, maximize = rule
        compute = torch.promote_types(row[0].dtype, torch.float32)
        for param, grad, exp_avg, copy in updates.blocks(row):
            p, m = updates.load(compute, param, exp_avg)
            grad = updates.gradient(grad, compute, maximize)
            part = updates.scratch("part of the gradient", grad, compute)
            memory = updates.scratch("update", grad, compute)
            # weight decay
            p.mul_(1 - lr * weight_decay)
            # update
            update = torch.mul(m, beta1, out=memory).add_(torch.mul(grad, 1 - beta1, out=part))
            p.sub_(update.sign_().mul_(lr))
            # moment
            m.mul_(beta2).add_(torch.mul(grad, 1 - beta2, out=part))

            updates.store(number, copy, (param, p), (exp_avg, m))
    updates.write()

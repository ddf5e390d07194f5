"""Updates of optimizers in main memory, with the bits of the eager twins at memory speed.

A twin is the specification, and creates a tensor for each result. The updates here work in place,
in blocks that stay in the cache, and reuse memory for intermediate results.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._blocks import Scratch, cut, overflows
from tritonamp.kernels._transfer import in_main_memory
from tritonamp.kernels._update_lists import UpdateLists

_MOST_WAITING = 1 << 20  # bytes of results that wait in memory of their own


class CpuUpdate:
    """An update of tensors in main memory.

    Large tensors are updated in place, block by block, because results that wait would leave the
    cache. Results of small tensors are collected and written whenever they reach 1 MiB. An error
    before that leaves all tensors unchanged.

    Args:
        lists: lists of the step.
        grad_scale: 0-d factor on the gradients, or None.
    """

    def __init__(self, lists: UpdateLists, grad_scale: Tensor | None) -> None:
        self._lists = lists
        # a factor of 1 is known without a wait here, and saves a pass over the gradients
        self._grad_scale = None if in_main_memory(grad_scale) == 1.0 else grad_scale
        self._results: list[tuple[Tensor, Tensor]] = []
        self._waiting = 0  # bytes of the results that wait
        self._overflows: list[tuple[Tensor, Tensor]] = []
        self._in_place = False  # whether the present block is updated in place
        self._scratch = Scratch()

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield blocks of tensors of one shape; each is updated before the next one is yielded."""
        parts = cut(*tensors)
        self._in_place = parts is not None
        yield from parts or (tensors,)
        self._in_place = False

    def load(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of ``target`` in ``dtype``, which the caller may change and store."""
        # in place, the caller changes the target itself if the dtype is the same
        return target.to(dtype, copy=not self._in_place)

    def scratch(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return reusable memory for an intermediate result; None: the caller allocates."""
        return self._scratch(name, like, dtype) if self._in_place else None

    def gradient(self, grad: Tensor, dtype: torch.dtype, maximize: bool) -> Tensor:
        """Return the gradient to descend along, unscaled and clipped; it may be ``grad`` itself."""
        memory = self.scratch("gradient", grad, dtype)
        if grad.dtype != dtype:
            grad = grad.to(dtype) if memory is None else memory.copy_(grad)
        if self._grad_scale is not None:
            grad = torch.mul(grad, self._grad_scale.to(grad.device), out=memory)
        return torch.neg(grad, out=memory) if maximize else grad

    def store(self, target: Tensor, value: Tensor) -> None:
        """Store ``value``, rounded to the dtype of ``target``: now if in place, else later."""
        if self._in_place:
            if value is not target:  # else the caller has changed the target itself
                target.copy_(value)
            return
        self._results.append((target, value))
        self._waiting += value.nbytes
        if self._waiting > _MOST_WAITING:
            self._write_waiting()

    def store_param(self, param: Tensor, copy: Tensor, value: Tensor, number: int) -> None:
        """Store a parameter and its copy; set the flag if a finite element became inf there."""
        self.store(param, value)
        if copy is param:
            return
        self.store(copy, value)
        found = overflows(value, copy.dtype)
        if found is not None:
            self._overflows.append((self._lists.overflow(copy.device)[number], found))

    def write_results(self) -> None:
        """Write the waiting results. Nothing here allocates, so nothing can fail half-way."""
        self._write_waiting()
        for overflow, found in self._overflows:
            overflow.logical_or_(found)

    def _write_waiting(self) -> None:
        for target, result in self._results:
            target.copy_(result)
        self._results.clear()
        self._waiting = 0


def adamw_on_cpu(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Run the update of the twin of ``adamw``, with the same bits."""
    # A flag on the CPU is read without a wait, so that a skip costs nothing.
    if in_main_memory(found_inf):
        return
    updates = CpuUpdate(lists, grad_scale)
    corrected: dict[Any, tuple[Tensor, Tensor]] = {}  # by step count, which most tensors share
    names = "params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "copies"
    rows = zip(lists.rows(names), lists.tensors["steps"], strict=True)
    for (row, rule, number), steps in rows:
        lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, amsgrad, maximize = rule
        compute = torch.promote_types(row[0].dtype, torch.float32)
        step = steps + 1
        key = lists.groups[number], compute, in_main_memory(steps)
        if key[-1] is None or key not in corrected:  # None: the host does not know the count
            corrected[key] = corrected_rates(rule, step, compute)
        rate, root2 = corrected[key]
        updates.store(steps, step)
        for param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, copy in updates.blocks(*row):
            p, m, v = (updates.load(x, compute) for x in (param, exp_avg, exp_avg_sq))
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

            updates.store(exp_avg, m)
            updates.store(exp_avg_sq, v)
            if amsgrad:
                updates.store(max_exp_avg_sq, v_max)
            updates.store_param(param, copy, p, number)
    updates.write_results()


def corrected_rates(rule: Any, step: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the corrected -lr and the root of the second correction, computed in FP64."""
    bias_correction1 = 1 - rule.beta1 ** step.double()
    bias_correction2 = 1 - rule.beta2 ** step.double()
    return (-(rule.lr / bias_correction1)).to(dtype), bias_correction2.sqrt().to(dtype)


def _add_quotient(to: Tensor, a: Tensor, b: Tensor, factor: Tensor) -> None:
    """Add ``factor * a / b``, in one pass if the host knows the factor. The bits are the same."""
    value = in_main_memory(factor)
    if value is None:
        to.add_((factor * a).div_(b))
    else:
        to.addcdiv_(a, b, value=value)


def sgd_on_cpu(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Run the update of the twin of ``sgd``, with the same bits."""
    if in_main_memory(found_inf):
        return
    updates = CpuUpdate(lists, grad_scale)
    for row, rule, number in lists.rows(("params", "grads", "momentum_buffers", "copies")):
        lr, momentum, dampening, weight_decay, nesterov, maximize = rule
        compute = torch.promote_types(row[0].dtype, torch.float32)
        for param, grad, momentum_buffer, copy in updates.blocks(*row):
            p, grad = updates.load(param, compute), updates.gradient(grad, compute, maximize)
            memory = updates.scratch("direction", grad, compute)
            # weight decay
            if weight_decay != 0:
                # into scratch memory, because the gradient may be the user's own tensor
                grad = torch.add(grad, p, alpha=weight_decay, out=memory)
            # momentum
            if momentum != 0:
                buffer = updates.load(momentum_buffer, compute)
                buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
                updates.store(momentum_buffer, buffer)
                grad = torch.add(grad, buffer, alpha=momentum, out=memory) if nesterov else buffer
            # update
            if isinstance(lr, Tensor) and lr.device.type != "cpu":  # the host must not wait for it
                p.sub_(lr.to(p) * grad)
            else:
                p.add_(grad, alpha=-float(lr))

            updates.store_param(param, copy, p, number)
    updates.write_results()


def lion_on_cpu(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Run the update of the twin of ``lion``, with the same bits."""
    if in_main_memory(found_inf):
        return
    updates = CpuUpdate(lists, grad_scale)
    for row, rule, number in lists.rows(("params", "grads", "exp_avgs", "copies")):
        lr, beta1, beta2, weight_decay, maximize = rule
        compute = torch.promote_types(row[0].dtype, torch.float32)
        for param, grad, exp_avg, copy in updates.blocks(*row):
            p, m = updates.load(param, compute), updates.load(exp_avg, compute)
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

            updates.store(exp_avg, m)
            updates.store_param(param, copy, p, number)
    updates.write_results()

"""DistributedDataParallel, Reducer, and ``flat_dist_call``, which reduces lists."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritonamp.apex.apex_C import flatten, unflatten

__all__ = ["DistributedDataParallel", "Reducer", "flat_dist_call"]

_PARAMETERS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_LOCAL_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in _PARAMETERS
    else "broadcast_buffers": False  # renamed in torch
}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """``torch.nn.parallel.DistributedDataParallel`` with apex's arguments.

    Wrap after ``amp.initialize``. Buffers stay each rank's own, as in apex.

    Args:
        message_size: number of elements in a bucket.
        delay_allreduce: whether parameters without gradients are allowed
            (``find_unused_parameters``).
        allreduce_always_fp32: whether half gradients are reduced in FP32.
        gradient_average: whether gradients are averaged over the processes; False sums them.
        gradient_predivide_factor: divisor of gradients before the reduction; an average multiplies
            by it afterwards.
        allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams,
            allreduce_communicators, prof: accepted and ignored, because torch overlaps by itself.

    Raises:
        ValueError: ``shared_param``, or ``delay_allreduce`` with arguments that it excludes.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: list[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise ValueError(
                "shared_param is not an option any more: parameters may be shared; drop it"
            )
        if delay_allreduce and (allreduce_trigger_params is not None or num_allreduce_streams > 1):
            raise ValueError(
                "delay_allreduce=True leaves nothing to allreduce_trigger_params and "
                "num_allreduce_streams: drop one"
            )
        super().__init__(
            module,
            **_LOCAL_BUFFERS,
            bucket_cap_mb=max(1, message_size * 4 // 2**20),
            find_unused_parameters=delay_allreduce,
        )
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            rate = gradient_predivide_factor / dist.get_world_size() if gradient_average else 1.0
            self.register_comm_hook(
                (allreduce_always_fp32, gradient_predivide_factor, rate), _reduce_bucket
            )

    def enable_allreduce(self) -> None:
        """Reduce gradients in the next backward."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Do not reduce gradients in the next backward, for accumulation."""
        self.require_backward_grad_sync = False


def _reduce_bucket(
    options: tuple[bool, float, float],
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch looks at the annotation
) -> torch.futures.Future[Tensor]:
    """Sum a bucket over all processes, with the factors before and after."""
    in_fp32, divisor, rate = options
    buffer = bucket.buffer()
    values = (buffer.float() if in_fp32 else buffer).div_(divisor)
    work = dist.all_reduce(values, async_op=True)
    assert work is not None

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(future.value()[0].mul_(rate))

    return work.get_future().then(finish)


class Reducer:
    """Averages gradients over all processes when ``reduce`` is called.

    Args:
        module_or_grads_list: a module, whose parameters are set to those of rank 0; or gradients,
            nested in any way.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            for param in module_or_grads_list.parameters():
                dist.broadcast(param.detach(), 0)
        else:
            self.grads = list(_tensors(module_or_grads_list))

    def reduce(self) -> None:
        """Average the gradients in place, by one reduction per dtype."""
        grads = self.grads
        if self.module is not None:
            grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Iterable[Any] | None = None
) -> None:
    """Run a collective on all tensors in place, flattened into one tensor per dtype and device.

    Args:
        tensors: dense tensors.
        call: a collective such as ``dist.broadcast``; ``dist.all_reduce`` averages.
        extra_args: further arguments of ``call``.
    """
    buckets: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        buckets[tensor.dtype, tensor.device].append(tensor.detach())
    for bucket in buckets.values():
        flat = flatten(bucket)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        for tensor, values in zip(bucket, unflatten(flat, bucket), strict=True):
            tensor.copy_(values)


def _tensors(nested: Any) -> Iterable[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Iterable):
        for item in nested:
            yield from _tensors(item)

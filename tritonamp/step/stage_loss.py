"""The loss function of a pipeline's schedule, whose backwards carry the loss scale."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tritonamp.distributed.pipeline import Work, pipeline_work
from tritonamp.kernels._transfer import transfer
from tritonamp.policy import HALF_DTYPES


def stage_loss(
    loss_fn: Callable[..., Tensor],
    check_loss: Callable[[Tensor], None],
    begin_backward: Callable[[Tensor], Tensor],
) -> Callable[..., Tensor]:
    """Return a loss function; a backward of its result has the gradients of the scaled loss.

    The schedule runs the backward itself and hands the losses to the user. Therefore losses keep
    their value, and the scale goes into their gradient. Half losses become FP32.

    Args:
        loss_fn: function of a micro-batch's output and target.
        check_loss: function that is called with each loss that has a backward.
        begin_backward: function that is called with each loss as its backward begins, and returns
            the scale, 0-d.
    """

    def scale_gradient(loss: Tensor, grad: Tensor) -> Tensor:
        return grad * transfer(begin_backward(loss), grad.device)

    def scaled_loss(*args: Any, **kwargs: Any) -> Tensor:
        loss = loss_fn(*args, **kwargs)
        # An evaluation, or a stage that infers shapes, has no backward to scale.
        if not loss.requires_grad or pipeline_work() is Work.SHAPES:
            return loss
        check_loss(loss)
        # The scale multiplies the gradient of the FP32 loss. In half, 65536 would be inf.
        wide = loss.float() if loss.dtype in HALF_DTYPES else loss
        # The detached loss: with the loss itself the hook would hold the graph that holds the hook.
        wide.register_hook(partial(scale_gradient, wide.detach()))
        return wide

    return scaled_loss

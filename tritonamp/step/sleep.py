"""Sleep: tensors of one ``Amp`` leave the device between phases of training, and come back."""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.nested import leaves
from tritonamp.step.changes import Changes
from tritonamp.step.ema import EMA
from tritonamp.step.host_memory import HostMemory
from tritonamp.step.interrupts import Uninterrupted
from tritonamp.step.stepper import Stepper


class Sleep:
    """Moves tensors that only training needs to host memory, and back with the same bits.

    ::

        FP32 masters, optimizer.state, gradients, averages   move
        the model's parameters and buffers                   move if ``weights`` is True
        plans of steps                                       are forgotten, and built again
        loss scales, decisions, records, outcomes            stay: a few bytes

    Args:
        models: enabled models.
        stepper: stepper of the ``Amp``.
    """

    def __init__(self, models: Sequence[nn.Module], stepper: Stepper) -> None:
        self._models = models
        self._stepper = stepper
        # Weak: an average that the user drops is gone with its memory.
        self._averages: weakref.WeakSet[EMA] = weakref.WeakSet()
        self._host: HostMemory | None = None

    def add_average(self, average: EMA) -> EMA:
        """Return ``average``, which sleeps with the rest from now on."""
        self._averages.add(average)
        return average

    def fall_asleep(self, weights: bool) -> int:
        """Move tensors to host memory, and return the number of bytes that were moved.

        Args:
            weights: also move the model's parameters and buffers.

        Raises:
            RuntimeError: the call is inside ``with scale_loss``; a CUDA graph has captured a step;
                or there is not enough host memory. Nothing was changed then.
        """
        self._refuse_backward()
        self._refuse_graphs()
        moving = [*self._training_tensors(), *(self._model_tensors() if weights else ())]
        plain = (t for given in moving for t in _plain_tensors(given) if _is_on_device(t))
        if self._stepper.offload is not None:
            # their content is in host memory, and the next step makes them again
            self._stepper.offload.give_up_buffers()
        # ``wake_up`` may be called outside of inference mode, and could not write to tensors that
        # were made inside of it. Ctrl-C waits, so that all tensors have moved or none.
        with Uninterrupted(), torch.inference_mode(False):
            for changes in self._changes():
                changes.fall_asleep()
            self._host = HostMemory(plain)
            asleep = self._stepper.asleep
            asleep.training, asleep.weights = True, weights
        return self._host.nbytes

    def wake_up(self) -> None:
        """Move the tensors back to the device.

        Raises:
            RuntimeError: nothing is asleep.
            torch.OutOfMemoryError: the device has no room; everything is still asleep then.
        """
        if self._host is None:
            raise RuntimeError("amp.wake(): expected a call after amp.sleep(), got one while awake")
        with Uninterrupted(), torch.inference_mode(False):
            self._host.put_back()
            self._host = None
            asleep = self._stepper.asleep
            for changes in self._changes() if asleep.weights else ():
                changes.wake_up()
            asleep.training = asleep.weights = False

    def _changes(self) -> Iterator[Changes]:
        found = (w.masters.changes for w in self._stepper.weights.values())
        yield from (changes for changes in found if changes is not None)

    def _refuse_backward(self) -> None:
        if self._stepper.pending.is_in_backward:
            raise RuntimeError(
                "amp.sleep() inside of `with amp.scale_loss(...)`: expected a call after the "
                "block, whose backward writes gradients"
            )

    def _refuse_graphs(self) -> None:
        captured = {
            "optimizer.step()": any(o.captured for o in self._stepper.outcomes.values()),
            "amp.scaler.scale(loss)": self._stepper.scaler.is_replayed,
            "ema.update()": any(average.captured for average in self._averages),
        }
        found = [what for what, is_so in captured.items() if is_so]
        if found:
            raise RuntimeError(
                f"amp.sleep(): expected no CUDA graph, got one that has captured {found[0]}: its "
                "replays would use memory that is gone. Enable again, and train without graphs"
            )

    def _training_tensors(self) -> Iterator[Tensor]:
        for optimizer, w in self._stepper.weights.items():
            yield from w.owned()
            yield from (x for x in leaves(dict(optimizer.state)) if isinstance(x, Tensor))
        for average in self._averages:
            yield from average.memory()
        for model in self._models:
            # gradients of parameters that no optimizer steps on
            yield from (p.grad for p in model.parameters() if p.grad is not None)

    def _model_tensors(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors inside a wrapper (a DTensor, a quantised weight)."""
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        # since torch 2.14 a DTensor names its mesh among the parts, which is no tensor
        for part in parts:
            yield from _plain_tensors(part) if isinstance(part, Tensor) else ()
    else:
        yield tensor


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.layout is torch.strided

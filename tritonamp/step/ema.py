"""Exponential moving averages of a model in training, in FP32 and without skipped steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.distributed.ddp import unwrapped
from tritonamp.distributed.sharding import full_tensor
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._dynamo import between_graphs
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.device import is_capturing, refuse_capture
from tritonamp.kernels.ema import ema
from tritonamp.names import prefixes
from tritonamp.step.copied_buffers import CopiedBuffers, fp32_of
from tritonamp.step.master_weights import MasterWeights
from tritonamp.step.stepper import Stepper


class EMA:
    """Moving averages of the FP32 values that optimizers step on; ``Amp.ema`` makes one.

    ::

        average = decay * average + (1 - decay) * value    at each update, unless the last step of
                                                           the parameter's optimizer was skipped

    The value of a parameter is its FP32 master, or the parameter itself if there is no master.
    Buffers are copied. A parameter that is frozen, or that no optimizer steps on, has no average;
    ``copy_to`` copies the model's value.

    Args:
        decay: share of an average that an update keeps, in [0, 1).
        models: averaged models.
        stepper: stepper of the ``Amp``.
        fp32_values: FP32 values of the models' half tensors.
        backend: "auto", "triton" or "eager".
        check_trains: function that raises if the models are not in training.

    Attributes:
        captured: whether a CUDA graph has captured ``update``.
    """

    def __init__(
        self,
        decay: float,
        models: Sequence[nn.Module],
        stepper: Stepper,
        fp32_values: Fp32Values,
        backend: str,
        check_trains: Callable[[], None],
    ) -> None:
        self.decay = decay
        self.captured = False
        self._models = models
        self._stepper = stepper
        self._fp32_values = fp32_values
        self._backend = backend
        self._check_trains = check_trains
        self._averages: dict[Tensor, Tensor] = {}  # by parameter of the model
        self._memories = {optimizer: Memory() for optimizer in stepper.weights}
        # A tensor that is made in inference mode could not be written to outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._buffers = CopiedBuffers(models, fp32_values)
            for w in stepper.weights.values():
                self._averages_of(self._values_to_average(w))

    @property
    def decay(self) -> float:
        """Share of an average that an update keeps, in [0, 1)."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            got = repr(decay) if isinstance(decay, (int, float, str)) else type(decay).__name__
            raise ValueError(
                f"decay: expected a number in [0, 1), got {got}: amp.ema(0.999) averages all that "
                "the optimizers step on"
            )
        self._decay = float(decay)

    @between_graphs
    def update(self) -> None:
        """Move the averages towards the present values, unless the last step was skipped.

        Call it once after each ``optimizer.step()``; each call moves the averages. The device
        decides about skips, and the host does not wait.

        Raises:
            RuntimeError: the model was disabled, or has no optimizer.
        """
        self._check_trains()
        with torch.inference_mode(False), torch.no_grad():
            for optimizer, w in self._stepper.weights.items():
                # a checkpoint may have been loaded since the step
                w.refresh()
                values = self._values_to_average(w)
                averages = self._averages_of(values)
                if averages and is_capturing(averages[0].device):
                    self.captured = True
                lists = TensorLists(
                    memory=self._memories[optimizer],
                    averages=averages,
                    params=list(values.values()),
                )
                found_inf = self._stepper.outcomes[optimizer].found_inf
                ema(lists, self._decay, found_inf, self._backend)
            # A buffer belongs to no optimizer, so its copy waits for all of them.
            self._buffers.update(self._any_found_inf())

    def _values_to_average(self, w: MasterWeights) -> dict[Tensor, Tensor]:
        """Return parameter to FP32 value, for parameters that train or have an average."""
        values = dict(w.fp32_values(lends=False))
        return {p: values[p] for p in w.parameters() if p.requires_grad or p in self._averages}

    def _averages_of(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the averages of ``params`` in this order; a new average begins at the value."""
        averages = []
        for param in params:
            average = self._averages.get(param)
            if average is None:
                # each replay would begin the average again at the value of that moment
                refuse_capture(param.device, "the average of a parameter")
                average = self._averages[param] = fp32_of(param, self._fp32_values).clone()
            averages.append(average)
        return averages

    def _any_found_inf(self) -> Tensor | None:
        """Return a 0-d flag, not 0 if any optimizer's last step was a skip; None: no step yet."""
        outcomes = self._stepper.outcomes.values()
        flags = [o.found_inf for o in outcomes if o.found_inf is not None]
        if len(flags) < 2:
            return flags[0] if flags else None
        return torch.stack([transfer(flag, flags[0].device) for flag in flags]).amax()

    def memory(self) -> Iterator[Tensor]:
        """Yield averages, buffers, and tensors that kernels keep between updates; forget plans."""
        yield from self._averages.values()
        yield from self._buffers.tensors.values()
        for memory in self._memories.values():
            yield from memory.forget_plans()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages in FP32 and the buffers, by the model's names.

        The tensors are the ones that ``update`` moves, not copies. If every parameter is trained,
        the plain model can load this state. The names of several models begin with the model's
        number.
        """
        self._fp32_values.asleep.check_training()
        averages = {
            name: self._averages[param]
            for name, param in self._named_parameters()
            if param in self._averages
        }
        return averages | self._buffers.tensors

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load a result of ``state_dict``, in place.

        Raises:
            ValueError: other names or shapes, listed; nothing was changed.
        """
        own = self.state_dict()
        _check_same_tensors("ema.load_state_dict", state_dict, own)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state_dict[name])

    def copy_to(self, model: nn.Module | Iterable[nn.Module]) -> None:
        """Write the averages, and the model's values of all other tensors, into another model.

        Averages of a sharded model go into a plain model if all ranks call this.

        Args:
            model: a plain or enabled model of any dtype and of the same architecture as the model
                in training, or that model itself; a list if several were given to ``enable``.

        Raises:
            ValueError: other names or shapes, listed; nothing was changed.
        """
        given: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
        if len(given) != len(self._models):
            raise ValueError(f"model: expected {len(self._models)} model(s), got {len(given)}")
        values = self.state_dict()
        values |= {
            name: fp32_of(param, self._fp32_values)
            for name, param in self._named_parameters()
            if param not in self._averages
        }
        # All models are checked before one is written, so that an error changes nothing. Sharded
        # averages are gathered here, too, in the same order on all ranks.
        targets = [
            (target, _state_for(target, prefix, values))
            for prefix, target in zip(prefixes(self._models), map(unwrapped, given), strict=True)
        ]
        for target, state in targets:
            # not strict, because results of ``get_extra_state`` are in a model's state, but not
            # averaged
            target.load_state_dict(state, strict=False)

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        # a tied parameter under each of its names, as in ``state_dict``
        for prefix, model in zip(prefixes(self._models), self._models, strict=True):
            for name, param in model.named_parameters(remove_duplicate=False):
                yield prefix + name, param


def _state_for(target: nn.Module, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names have the prefix, checked and gathered for ``target``."""
    own = target.state_dict()
    state = {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }
    _check_same_tensors("ema.copy_to", state, own)
    if any(isinstance(x, Tensor) and x.is_meta for x in own.values()):
        raise ValueError(
            "model: expected one with values, got one on the meta device: call "
            "model.to_empty(device=...) before ema.copy_to"
        )
    for name, value in state.items():
        if is_sharded(value) and not is_sharded(own[name]):
            state[name] = full_tensor(value)
    return state


def _check_same_tensors(call: str, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError unless the tensors of both states have the same names and shapes."""
    shapes = {name: tuple(x.shape) for name, x in own.items() if isinstance(x, Tensor)}
    got = {name: tuple(x.shape) for name, x in state.items() if isinstance(x, Tensor)}
    faults = {
        "missing": sorted(shapes.keys() - got.keys()),
        "unknown": sorted(got.keys() - shapes.keys()),
        "of other shapes": [
            f"{name} (expected {shapes[name]}, got {got[name]})"
            for name in shapes.keys() & got.keys()
            if shapes[name] != got[name]
        ],
    }
    if found := [f"{what}: {', '.join(names[:10])}" for what, names in faults.items() if names]:
        raise ValueError(f"{call}: expected the same architecture, got {'; '.join(found)}")

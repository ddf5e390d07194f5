"""What one ``amp.initialize`` sets up: a ``tritonamp.Amp`` over some models and optimizers."""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import tritonamp
from tritonamp.apex.amp._amp_state import _amp_state, master_params, maybe_print
from tritonamp.apex.amp.scaler import LossScaler
from tritonamp.apex.amp.stash import put_stash, take_stash
from tritonamp.kernels.device import is_capturing
from tritonamp.readback import Readback

_AHEAD = 16  # so many steps may the host be ahead of the device, and all skips are still printed


class AmpRun:
    """One ``Amp``, kept alive by its models and optimizers.

    It is their ``_amp_run``; copies of them have none.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        policy: tritonamp.Policy,
        bounds: tuple[float | None, float] = (None, 2.0**24),
        num_losses: int = 1,
    ) -> None:
        self._models = list(models)
        self._optimizers = list(optimizers)
        to_enable = self._models or [_ParametersOf(optimizers)]
        params = (p for model in to_enable for p in model.parameters())
        device = self._device = next((p.device for p in params), torch.device("cpu"))
        self.scalers = [LossScaler(policy.loss_scale, *bounds, device) for _ in range(num_losses)]
        self._amp = tritonamp.enable(
            to_enable,
            self._optimizers,
            policy=policy,
            scaler=self.scalers[0].scaler if policy.loss_scale == "dynamic" else None,
            around_step=self._around_step,
        )
        log = self._amp._parts.log
        log.tells_first = False  # ``Skips`` prints it
        log.terms = log.terms._replace(
            handle="tritonamp.handle(model)",  # ``amp`` is apex's module
            takes_modules=False,  # ``amp.initialize`` has no fp32_modules
            arguments={
                'level="O0"': 'opt_level="O0"',
                "dtype=torch.bfloat16": _in_bfloat16(policy),
            },
        )
        self._skips = Skips(self._amp)
        self._fed = set[Optimizer]()
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        for owner in self._owners():
            owner._amp_run = self
        for optimizer in self._optimizers:
            put_stash(optimizer, self._models)

    def casts_functions(self) -> None:
        """Note that apex's casts around functions apply to what the models compute."""
        self._amp._parts.healing.decides = False

    def _owners(self) -> list[Any]:
        return [*self._models, *self._optimizers]

    def __reduce__(self) -> Any:
        return type(None), ()

    @contextlib.contextmanager
    def scale_loss(
        self,
        loss: Tensor,
        optimizers: Sequence[Optimizer],
        scalers: Sequence[LossScaler],
        loss_id: int,
        delay_unscale: bool = False,
    ) -> Iterator[Tensor]:
        """Yield the scaled loss, for its backward inside the block.

        Unless delayed, the gradients are true ones afterwards, and judged.
        """
        if loss_id not in range(len(scalers)):
            raise IndexError(
                f"loss_id: expected 0 to {len(scalers) - 1}, as amp.initialize was called with "
                f"num_losses={len(scalers)}, got {loss_id}"
            )
        self._fed |= set(optimizers)
        try:
            with self._amp.scale_loss(loss, optimizers, scaler=scalers[loss_id].scaler) as scaled:
                yield scaled
            if not delay_unscale:
                with _amp_state.handle._disable_casts():
                    found_inf = self._amp.unscale_(optimizers)
                if found_inf:
                    self._skips.judged(loss_id, scalers[loss_id], found_inf[0])
        finally:
            _amp_state.handle._clear_cache()

    @contextlib.contextmanager
    def _around_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Make the gradients of a plain ``loss.backward()`` true ones, for the step in the block.

        That is needed where the parameters are their own masters.
        """
        with _amp_state.handle._disable_casts():
            is_plain = optimizer not in self._fed and not self._amp.policy.master_weights
            if is_plain and any(p.grad is not None for p in master_params(optimizer)):
                one = LossScaler(1.0, None, 1.0, self._device).scaler
                loss = torch.ones((), device=self._device)
                with self._amp.scale_loss(loss, optimizer, scaler=one):
                    pass  # the backward has been
            yield
        self._fed.discard(optimizer)

    def end_for(self, models: Sequence[nn.Module]) -> None:
        """Put everything back as it was before, for another ``initialize`` of ``models``.

        Raises:
            RuntimeError: ``models`` are not all models of this call of ``initialize``.
        """
        others = [type(model).__name__ for model in self._models if model not in models]
        if others:
            raise RuntimeError(
                "amp.initialize: a model was initialized before, together with "
                f"{', '.join(others)}: initialize all of them again, or call amp.initialize only "
                "once"
            )
        for hook in self.hooks:
            hook.remove()
        self._amp.disable()
        for owner in self._owners():
            del owner._amp_run
        for optimizer in self._optimizers:
            take_stash(optimizer)


def _in_bfloat16(policy: tritonamp.Policy) -> str:
    """Return the argument of ``initialize`` that makes O2 or O3 train in bfloat16."""
    return 'opt_level="O5"' if policy.master_weights else "cast_model_type=torch.bfloat16"


class _ParametersOf(nn.Module):
    """The parameters of optimizers whose model was not passed, for ``enable``."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__()
        self._optimizers = optimizers

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Also of those that are plain tensors, which no module could register."""
        params = dict.fromkeys(p for o in self._optimizers for p in master_params(o))
        return ((f"parameter {i}", p) for i, p in enumerate(params))


class _Warned(logging.Filter):
    """Remembers the last warnings of a log, and lets everything pass."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: deque[str] = deque(maxlen=8)

    def filter(self, record: logging.LogRecord) -> bool:
        """Note the text of a warning."""
        if record.levelno >= logging.WARNING:
            self.texts.append(record.getMessage())
        return True


_warned = _Warned()
logging.getLogger("tritonamp").addFilter(_warned)


class Skips:
    """Print a line for each skipped step, and once for each cause an explanation.

    A line comes as soon as the flag has arrived on the host, which does not wait for the device.
    """

    def __init__(self, amp: tritonamp.Amp) -> None:
        self._amp = amp
        self._readbacks: dict[torch.device, Readback] = {}
        self._said = set[str | None]()  # causes

    def judged(self, loss_id: int, scaler: LossScaler, found_inf: Tensor) -> None:
        """Start copying the flag of a loss, and print lines for the flags that have arrived."""
        device = found_inf.device
        if _amp_state.verbosity <= 0 or is_capturing(device):
            return
        flag = found_inf.float().reshape(1)
        if device not in self._readbacks:
            self._readbacks[device] = Readback(flag, most=_AHEAD)
        self._readbacks[device].start(flag, (loss_id, scaler))
        for (skipped,), attached in self._readbacks[device].ready():
            if skipped:
                self._print(*attached)

    def _print(self, loss_id: int, scaler: LossScaler) -> None:
        scale = scaler.loss_scale()
        moves = f"reducing loss scale to {scale}" if scaler.dynamic else f"loss scale stays {scale}"
        maybe_print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} {moves}")
        skips = [record for record in self._amp.history if record.cause is not None]
        if not skips:  # the log was further behind the device than this
            return
        last = skips[-1]
        reason = last.detail.partition("): ")[2]  # behind the numbers of steps
        if last.cause not in self._said and not any(reason in text for text in _warned.texts):
            maybe_print(f"    {last.detail}")
        self._said.add(last.cause)

"""The loss scale: ``torch.amp.GradScaler`` without waits for the device or a fall to zero."""

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from tritonamp.kernels._decision import OUTLYING, Evidence, new_verdicts, nonfinite_flag
from tritonamp.kernels._dynamo import between_graphs
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.kernels._loss_scale import ScaleRule, ScaleState
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._optimizers import IN_OPTIM
from tritonamp.kernels._squares import NO_SQUARES, squares_of
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.decide import decide
from tritonamp.kernels.device import is_capturing, refuse_capture, world_size
from tritonamp.kernels.grad_stats import grad_stats
from tritonamp.policy import HALF_DTYPES

MODES = ("interval", "headroom")
HEADROOM = 2.0**12  # of float16's 65504
FAULT_FLOOR = 1.0
_MOST_USERS = 8  # of a scale, those that are gone included, before these are left out


class ScaleUser(Protocol):
    """A user of the scale between the forward of a loss and the decision on its gradients."""

    def keep_scale(self) -> None:
        """Copy the scale, which is about to move, if it will be needed."""


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaling on the device.

    ::

        scaled loss = loss.float() * scale
        gradients non-finite, loss finite  -> the scale is too high: skip, back off,
                                              never below min_scale
        loss itself non-finite             -> a fault of the forward: skip, the scale stays;
                                              but see ``has_gradient_in_loss``
        squares of gradients beyond FP32   -> skip if the optimizer squares, the scale stays
        growth_interval steps in a row     -> grow, never above max_scale

    Use and ``state_dict`` are those of ``torch.amp.GradScaler``. There are three differences. The
    step does not read the device if the optimizer can skip on the device (those of
    ``tritonamp.optim``, torch's with ``fused=True``); others cost one read per step. Half
    parameters of ``tritonamp.optim`` have FP32 gradients from ``unscale_`` to the step. A step
    without gradients is a no-op, not an error.

    Args:
        device: "cuda", "cpu", ...; None: "cuda" if CUDA is available, else "cpu".
        init_scale: first scale.
        growth_factor: factor of the scale when it grows.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: number of clean steps in a row until the scale grows.
        enabled: False: every method works without a scale, as in torch.
        min_scale: lower bound of the scale; positive.
        max_scale: upper bound of the scale.
        hysteresis: number of overflows, without a clean step between them, until the scale backs
            off.
        mode: "interval", or "headroom": the scale also grows step by step as long as the largest
            scaled gradient is at least a factor of 16 below float16's maximum. So it is back soon
            after a burst of overflows. All factors and bounds must be powers of two then.
        backoff_on_fault: a non-finite loss lowers the scale as an overflow does, as in torch and
            apex; but (in a single process) not below 1, because half gradients would begin to
            vanish there.
        process_group: group of the ranks that train one model together, as for
            ``DistributedDataParallel``. The ranks agree by one all-reduce of two numbers per
            optimizer. None: with several processes, skips and scale follow the gradients alone,
            which DDP has reduced. Losses, which differ from rank to rank, are ignored. Has no
            effect under ``tritonamp.enable``, which knows the ranks. Pickles and deep copies lack
            the group.

    Attributes:
        has_gradient_in_loss: whether a loss scaled since the last ``update`` contains the gradient
            of a scaled tensor, as scripts for torch.amp write a gradient penalty. It may be inf or
            NaN because of the scale, so it counts as finite, and its gradients decide.
        is_replayed: whether a CUDA graph has captured ``scale`` without ``update``. Its replays
            scale losses unseen by the host.

    Raises:
        ValueError: bounds contradict one another, or a number is given as device.
    """

    on_loss: Callable[[Tensor, "GradScaler"], None] | None = None  # gets each unscaled loss
    before_backward: Callable[[Tensor], None] | None = None  # gets it after ``on_loss``
    has_gradient_in_loss = False
    _made_graph = False  # has autograd made a graph of a scaled gradient since the last loss?
    _rule: ScaleRule | None = None  # the last result of ``rule``
    _rule_settings: tuple[Any, ...] = ()  # settings that can change, as they were then

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
        mode: str = "interval",
        backoff_on_fault: bool = False,
        process_group: Any = None,
    ) -> None:
        if isinstance(device, Real):  # NumPy's scalars, too
            raise ValueError(
                f"device: expected the name of a device, such as 'cuda', got {device!r}: write "
                f"init_scale={device!r}"
            )
        if not (0 < min_scale <= init_scale <= max_scale and math.isfinite(max_scale)):
            raise ValueError(
                "expected 0 < min_scale <= init_scale <= max_scale < inf, got "
                f"min_scale={min_scale}, init_scale={init_scale}, max_scale={max_scale}"
            )
        if hysteresis < 1 or growth_interval < 1:
            raise ValueError(
                "expected hysteresis and growth_interval of 1 or more, got "
                f"hysteresis={hysteresis}, growth_interval={growth_interval}"
            )
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
        powers = (init_scale, growth_factor, backoff_factor, min_scale, max_scale)
        if mode == "headroom" and any(math.frexp(x)[0] != 0.5 for x in powers):
            raise ValueError(
                f"mode='headroom': expected powers of two, got init_scale={init_scale}, "
                f"growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
                f"min_scale={min_scale}, max_scale={max_scale}"
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        settings = (device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        super().__init__(*settings)
        self._settings = functools.partial(
            GradScaler,
            *settings,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
            mode=mode,
            backoff_on_fault=backoff_on_fault,
        )
        self._process_group = process_group
        self.mode = mode
        self.backoff_on_fault = backoff_on_fault
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._hysteresis = hysteresis
        self._memory: Tensor | None = None  # of ``scale_state``
        self._scale_state: ScaleState | None = None
        self._largest: Tensor | None = None  # unscaled gradient seen since the last update()
        self._loss_nonfinite: Tensor | None = None  # of the losses scaled since the last update()
        self._scaled = False  # was any loss?
        self.is_replayed = False
        self._memories = _memories_of_gradients()
        self._users: list[weakref.ref[ScaleUser]] = []
        self._init_hysteresis_tracker = hysteresis
        self._init_ceiling = max_scale

    def clone(self) -> "GradScaler":
        """Return a scaler of the same settings at its initial scale."""
        scaler = self._settings()
        scaler._process_group = self._process_group
        return scaler

    @property
    def rule(self) -> ScaleRule:
        """The rule by which the scale moves."""
        settings = self._growth_factor, self._backoff_factor, self._growth_interval, self.mode
        # Comparing is cheaper than making a rule in each step. The other fields never change.
        if self._rule is None or self._rule_settings != settings:
            limits = self._hysteresis, self._min_scale, self._max_scale
            headroom = HEADROOM if self.mode == "headroom" else 0.0
            self._rule = ScaleRule(*settings[:3], *limits, headroom)
            self._rule_settings = settings
        return self._rule

    @between_graphs
    def scale(self, outputs: Any) -> Any:
        """Return ``outputs.float() * scale``, and note whether the outputs are finite.

        Args:
            outputs: a tensor or an iterable of tensors.

        Raises:
            ValueError: ``outputs`` is neither.
        """
        if not self._enabled:
            return outputs
        if not isinstance(outputs, Tensor):
            if not isinstance(outputs, Iterable):
                raise ValueError(
                    "outputs: expected a Tensor or an iterable of Tensors, got "
                    f"{type(outputs).__name__}"
                )
            items = [self.scale(item) for item in outputs]
            return type(outputs)(items) if isinstance(outputs, (list, tuple)) else items
        if self.on_loss is not None:
            self.on_loss(outputs, self)
        if self.before_backward is not None:
            self.before_backward(outputs)
        scale = self.scale_tensor(outputs.device)
        scaled = widened(outputs) * transfer(scale, outputs.device)
        nonfinite = transfer(nonfinite_flag(outputs.detach()), scale.device)
        assert self._loss_nonfinite is not None
        if self.take_graph():
            self.has_gradient_in_loss = True
        else:
            # in place: replays of a CUDA graph do it again
            torch.maximum(self._loss_nonfinite, nonfinite, out=self._loss_nonfinite)
        if scaled.grad_fn is not None and self._max_scale > 1.0:  # no loss depends on a scale of 1
            # weak, because a node keeps its hooks
            scaled.grad_fn.register_prehook(functools.partial(_note_graph, weakref.ref(self)))
        self._scaled = True
        self.is_replayed |= is_capturing(nonfinite.device)
        return scaled

    def take_graph(self) -> bool:
        """Return whether the loss at hand contains the gradient of a scaled tensor.

        That is so if autograd has made a graph of such a gradient since the loss before it.
        """
        made, self._made_graph = self._made_graph, False
        return made

    def scale_tensor(self, device: torch.device) -> Tensor:
        """Return the current scale, 0-d float32; the first call makes it on ``device``."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    def lend_scale(self, user: ScaleUser) -> Tensor:
        """Return an alias of the scale. Whatever moves the scale tells ``user`` first.

        The alias has its own count of writes: autograd may save it, though the scale moves.

        Args:
            user: user of the alias; only a weak reference is kept.
        """
        assert self._scale is not None  # ``scale_tensor`` came first
        if len(self._users) > _MOST_USERS:
            self._users = [known for known in self._users if known() is not None]
        self._users.append(weakref.ref(user))
        return self._scale.data

    def before_move(self, by: ScaleUser | None = None) -> None:
        """Have the users of the scale, but ``by``, copy it, because it is about to move."""
        for known in self._users:
            user = known()
            if user is not None and user is not by:
                user.keep_scale()

    # Private. GradScaler of torch 2.11 to 2.15 calls it where it first needs the scale. Our other
    # tensors on the device are made together with the scale.
    @leaves_inference_mode
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        refuse_capture(torch.device(dev), "the loss scale")
        super()._lazy_init_scale_growth_tracker(dev)
        assert self._scale is not None and self._growth_tracker is not None
        scale, growth_tracker = self._scale, self._growth_tracker
        # one piece of memory, of which one launch makes a copy; each at a multiple of 16 bytes
        self._memory = torch.zeros(4, 4, dtype=torch.float32, device=dev)
        floats, integers = self._memory[:, 0], self._memory.view(torch.int32)[:, 0]
        self._scale_state = ScaleState(floats[0], integers[2], integers[3], floats[1])
        self._scale, self._growth_tracker, hysteresis_tracker, ceiling = self._scale_state
        self._scale.copy_(scale)
        self._growth_tracker.copy_(growth_tracker)
        hysteresis_tracker.fill_(self._init_hysteresis_tracker)
        ceiling.fill_(self._init_ceiling)
        self._loss_nonfinite = torch.zeros((), dtype=torch.float32, device=dev)

    @property
    def loss_nonfinite(self) -> Tensor | None:
        """Whether a loss scaled since the last ``update`` was non-finite.

        A 0-d float32 tensor, 1 or 0; None: no loss was scaled. It is never None once a CUDA graph
        has captured ``scale`` without ``update``, because replays are not seen.
        """
        return self._loss_nonfinite if self._scaled else None

    def take_loss_nonfinite(self) -> Tensor:
        """Return the flag of the losses scaled since the last update, and reset it.

        The flag is 1 if one of the losses was non-finite, else 0, also if none was scaled.
        """
        assert self._loss_nonfinite is not None
        flag = self._loss_nonfinite.clone()
        if is_capturing(flag.device):
            self.is_replayed = False  # each replay resets its own losses
        self._reset_losses()
        return flag

    def note_flag(self, flag: Tensor) -> None:
        """Note the flag of a decision that was made elsewhere, for the next ``update``.

        Args:
            flag: 0-d, as ``Evidence.loss_nonfinite``.
        """
        assert self._loss_nonfinite is not None
        torch.maximum(self._loss_nonfinite, flag, out=self._loss_nonfinite)

    def _reset_losses(self) -> None:
        if self._loss_nonfinite is not None:
            self._loss_nonfinite.zero_()
        self._scaled = self.is_replayed
        self.has_gradient_in_loss = self._made_graph = False

    @property
    def scale_state(self) -> ScaleState:
        """The tensors that move after each decision; they exist once a loss was scaled."""
        assert self._scale_state is not None
        return self._scale_state

    @property
    def scale_memory(self) -> Tensor:
        """The memory of ``scale_state``; it exists once a loss was scaled."""
        assert self._memory is not None
        return self._memory

    def record_decision(self, optimizer: Optimizer, found_inf: Tensor, amax: Tensor) -> None:
        """Note a decision that was made elsewhere, for the next ``update``.

        Args:
            optimizer: optimizer that has stepped or skipped.
            found_inf: 0-d flag, not 0 if the decision was a skip.
            amax: largest magnitudes of the optimizer's scaled gradients.
        """
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {
            found_inf.device: found_inf
        }
        self.note_amax(amax)

    def note_amax(self, amax: Tensor) -> None:
        """Note magnitudes of the scaled gradients for the next ``move_scale``."""
        if self.mode == "headroom" and len(amax):
            assert self._scale is not None
            largest = amax.max() / self._scale
            self._largest = (
                largest if self._largest is None else torch.maximum(self._largest, largest)
            )

    @between_graphs
    @leaves_inference_mode
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, once between two updates.

        Half parameters of an optimizer of ``tritonamp.optim`` get exact FP32 gradients, which may
        be clipped and read as any others. They are half again after ``step``, ``update`` or
        ``optimizer.zero_grad()``.

        Raises:
            ValueError: float16 gradients of an optimizer that keeps no FP32 masters.
            RuntimeError: called twice since the last update, or after ``step``.
        """
        # an enabled optimizer, which has masters
        if self._enabled and hasattr(optimizer, "_amp_unscale_"):
            optimizer._amp_unscale_(self)
        elif not (self._enabled and self._scale is None and self._is_without_gradients(optimizer)):
            super().unscale_(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the optimizer's gradients, and return a flag per device: is one non-finite?

        Private: GradScaler of torch 2.11 to 2.15 calls it from ``unscale_`` and, to check only,
        with ``allow_fp16``, from ``step``.
        """
        if not allow_fp16 and keeps_masters(optimizer):
            optimizer._widen_gradients()  # type: ignore[attr-defined]
        grads = _grads(optimizer)
        if not allow_fp16 and any(g.dtype is torch.float16 for g in grads):
            others = [name for name in IN_OPTIM if name != "AdamW"]
            raise ValueError(
                "Attempting to unscale FP16 gradients: the optimizer holds float16 parameters. "
                'tritonamp.enable(model, optimizer, level="O2") keeps FP32 masters of them and '
                f"unscales into those; tritonamp.optim.AdamW ({', '.join(others)}) instead of "
                "this optimizer keeps them without enable"
            )
        groups = self._groups(grads)
        if not (grads or groups):
            return {}
        assert self._scale is not None
        memory = self._memories.setdefault(optimizer, Memory())
        lists = TensorLists(memory=memory, grads=grads)
        amax, square_sum = grad_stats(lists, self._scale.device)
        assert self._loss_nonfinite is not None
        flag = self._loss_nonfinite
        if groups:
            amax, flag = _of_all_ranks(amax, flag, groups)
        elif world_size() > 1:  # no rank may act on a flag of its own
            flag = torch.zeros_like(flag)
        self._loss_nonfinite.copy_(flag)
        verdict = new_verdicts(1, self._scale.device)[0]
        evidence = Evidence(amax, square_sum, flag, flag)
        how = None, None, self.rule, squares_of([optimizer]), None, verdict
        decide(evidence, self._scale, *how)
        self.note_amax(amax)
        found_inf, grad_scale = verdict.found_inf, verdict.grad_scale
        self.note_flag(verdict.flag)
        if not allow_fp16:
            with torch.no_grad():
                for grad in grads:
                    grad.mul_(transfer(grad_scale, grad.device))
        return {found_inf.device: found_inf}

    def _groups(self, grads: Sequence[Any]) -> list[Any]:
        """Return the process groups to agree with.

        Under FSDP2 these are the groups of the mesh, because each rank has seen only its part.
        """
        if grads and hasattr(grads[0], "device_mesh"):
            groups: list[Any] = grads[0].device_mesh.get_all_groups()
            return groups
        return [] if self._process_group is None else [self._process_group]

    @between_graphs
    @leaves_inference_mode
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run ``optimizer.step()`` on true gradients, or skip if a gradient or loss is not finite.

        Without gradients it is a no-op, which ``update`` does not count.

        Args:
            optimizer: optimizer whose gradients come from the backward of a scaled loss.
            *args: arguments of ``optimizer.step``.
            **kwargs: keyword arguments of ``optimizer.step``.

        Raises:
            RuntimeError: a closure was passed, or ``step`` was called twice since the last update.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled: a skipped step "
                "cannot run it again"
            )
        if hasattr(optimizer, "_amp_unscale_"):
            return optimizer._amp_step(self)  # type: ignore[attr-defined]
        kwargs.pop("closure", None)
        args = args[1:]
        if self._is_without_gradients(optimizer):
            return optimizer.step(*args, **kwargs)  # nothing to decide, nothing for ``update``
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED and not state["found_inf_per_device"]:
            self._check_inf_per_device(optimizer)  # of gradients that came after ``unscale_``
        ours = _steps_on_device(optimizer)
        by_itself = ours or getattr(optimizer, "_step_supports_amp_scaling", False)
        watched = by_itself and is_watched(optimizer)
        if ours or watched:
            found_inf = self._found_inf(optimizer)
            if watched and bool(found_inf):  # its watcher would not see a skip of its own
                self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
                return None
            if ours:
                return self._step_on_device(optimizer, found_inf, *args, **kwargs)
        return super().step(optimizer, *args, **kwargs)

    def _is_without_gradients(self, optimizer: Optimizer) -> bool:
        """Tell whether there is nothing to step on; never so if ranks agree by a group."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return self._process_group is None and all(param.grad is None for param in params)

    def _found_inf(self, optimizer: Optimizer) -> Tensor:
        """Return whether to skip, 0-d; check the gradients unless ``unscale_`` has.

        Raises:
            RuntimeError: called after ``step``.
        """
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        (found_inf,) = state["found_inf_per_device"].values()
        return found_inf

    def _step_on_device(self, optimizer: Any, found_inf: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer that unscales and skips on the device.

        The contract is that of torch's own scaler and ``_step_supports_amp_scaling``. The optimizer
        has ``grad_scale`` (times one that the user has set) and ``found_inf`` during the step.
        """
        state = self._per_optimizer_states[id(optimizer)]
        grad_scale = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            assert self._scale is not None
            grad_scale = self._scale if grad_scale is None else self._scale * grad_scale
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        state["stage"] = OptState.STEPPED
        return result

    @between_graphs
    @leaves_inference_mode
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale after the steps of this iteration, or set it to ``new_scale``."""
        if not self._enabled:
            return
        for optimizer in filter(keeps_masters, self._memories):
            optimizer._narrow_gradients()  # type: ignore[attr-defined]  # where nothing has stepped
        self.before_move()
        if new_scale is not None:
            super().update(new_scale)
            self._largest = None
            self._reset_losses()
            return
        if self._scale is None and not self._per_optimizer_states:
            return  # nothing was scaled, nothing has stepped
        scale, _ = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        flags = [
            transfer(f, scale.device) for s in states for f in s["found_inf_per_device"].values()
        ]
        loss_nonfinite = self.take_loss_nonfinite()
        if flags:
            self.move_scale(torch.stack(flags).amax(), loss_nonfinite)
        self._per_optimizer_states.clear()

    def move_scale(self, found_inf: Tensor, loss_nonfinite: Tensor) -> None:
        """Move the scale after one decision.

        Args:
            found_inf: 0-d float32, not 0 if the decision was a skip.
            loss_nonfinite: 0-d float32, not 0 if the loss caused the skip; or OUTLYING, EXCEEDING,
                or VETOED.
        """
        largest, self._largest = self._largest, None
        rule, nothing, floor = self.rule, found_inf.new_zeros(0), None
        if largest is None:  # unknown: no room
            rule = rule._replace(headroom=0.0)
        if self.backoff_on_fault:
            scale, *_ = self.scale_state
            floor = torch.where(loss_nonfinite != 0, scale.clamp(max=FAULT_FLOOR), 0.0)
            loss_nonfinite = torch.where(loss_nonfinite >= OUTLYING, loss_nonfinite, 0.0)
        amax = nothing if largest is None else largest.reshape(1)
        evidence = Evidence(amax, nothing, loss_nonfinite, found_inf)
        unscaled, (verdict,) = torch.ones_like(found_inf), new_verdicts(1, found_inf.device)
        decide(evidence, unscaled, None, self.scale_state, rule, NO_SQUARES, None, verdict)
        # other ranks see the gradients of this loss, and not the loss: their scale knows no floor
        if floor is not None and world_size() == 1:
            scale.copy_(torch.maximum(scale, floor))

    def state_dict(self) -> dict[str, Any]:
        """Return the state under torch's keys. Reads the device.

        A ``hysteresis`` above 1 and mode "headroom" have keys of their own.
        """
        state = super().state_dict()
        tracker, ceiling = self._hysteresis_and_ceiling()
        if self._enabled and self._hysteresis > 1:
            state["_hysteresis_tracker"] = tracker
        if self._enabled and self.mode == "headroom":
            state["_ceiling"] = ceiling
        return state

    def _hysteresis_and_ceiling(self) -> tuple[int, float]:
        """Return the numbers that torch's scaler does not have. Reads the device."""
        if self._scale_state is None:
            return self._init_hysteresis_tracker, self._init_ceiling
        _, _, tracker, ceiling = self._scale_state
        return int(tracker), float(ceiling)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_init_hysteresis_tracker"], state["_init_ceiling"] = self._hysteresis_and_ceiling()
        scale = "_scale_state", "_largest", "_loss_nonfinite", "_rule"
        of_this_process = "_memory", "_memories", "_process_group", "_users"
        listeners = "on_loss", "before_backward"
        return {**state, **dict.fromkeys(scale + of_this_process + listeners)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._scaled = self.is_replayed = self.has_gradient_in_loss = self._made_graph = False
        self._memories = _memories_of_gradients()
        self._users = []

    @leaves_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of ``torch.amp.GradScaler``.

        A scale beyond a bound becomes the bound.
        """
        self.before_move()
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self._largest = None  # of losses that the state knows nothing of, as these
        self._reset_losses()
        self._init_scale = min(max(self._init_scale, self._min_scale), self._max_scale)
        self._init_hysteresis_tracker = state_dict.get("_hysteresis_tracker", self._hysteresis)
        self._init_ceiling = state_dict.get("_ceiling", self._max_scale)
        if self._scale_state is not None:
            scale, _, tracker, ceiling = self._scale_state
            scale.fill_(self._init_scale)
            tracker.fill_(self._init_hysteresis_tracker)
            ceiling.fill_(self._init_ceiling)


def _note_graph(scaler: "weakref.ref[GradScaler]", _: Any) -> None:
    """Note a backward of a scaled tensor if autograd makes a graph of it."""
    known = scaler()
    if known is not None and torch.is_grad_enabled():  # by ``create_graph``
        known._made_graph = True


def _memories_of_gradients() -> "weakref.WeakKeyDictionary[Optimizer, Memory]":
    """Return a mapping of optimizer to its memory of earlier unscalings."""
    return weakref.WeakKeyDictionary()


def keeps_masters(optimizer: Any) -> bool:
    """Tell whether the optimizer keeps FP32 masters of half parameters, as ``optim``'s do.

    Half gradients can become FP32 gradients then.
    """
    return hasattr(optimizer, "_widen_gradients")


def _steps_on_device(optimizer: Any) -> bool:
    """Return whether the step unscales and skips on the device.

    A class that derives from one of ours, or that forwards attributes (apex's LARC), may have
    another step.
    """
    if not hasattr(getattr(type(optimizer), "step", None), "by_fused_rule"):
        return False
    return not optimizer.defaults.get("differentiable", False)


def is_watched(optimizer: Any) -> bool:
    """Return whether a ``step`` on the instance watches for calls, as Accelerate's does.

    Such a ``step`` must not be called for a skip, which costs one host read per step. LR schedulers
    put a ``step`` there, too, marked by the private ``_wrapped_by_lr_sched`` (torch 2.11 to 2.15).
    Theirs only notes that there was a call, skip or not.
    """
    step = vars(optimizer).get("step")
    return not (
        step is None
        or hasattr(step, "_wrapped_by_lr_sched")
        or getattr(step, "__self__", None) is optimizer
    )


def widened(loss: Tensor) -> Tensor:
    """Return a half loss in FP32, because 65536 times a half loss would be inf."""
    return loss.float() if loss.dtype in HALF_DTYPES else loss


def _of_all_ranks(amax: Tensor, flag: Tensor, groups: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return this rank's magnitudes followed by the largest of any rank, and the largest flag."""
    largest = amax.max() if len(amax) else torch.zeros_like(flag)
    both = torch.stack([largest, flag]).nan_to_num(nan=math.inf, posinf=math.inf)
    for group in groups:
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    return torch.cat([amax, both[:1]]), both[1]


def _grads(optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's gradients; a sparse gradient is coalesced in place, for its values."""
    grads = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                param.grad = param.grad.coalesce()
                grads.append(param.grad._values())
            else:
                grads.append(param.grad)
    return grads

"""What happens between a loss and its step: opening decisions, making them, carrying them out."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.class_swap import base_class
from tritonamp.diagnosis.batches import Forwards
from tritonamp.diagnosis.log import NonFiniteError, SkipLog
from tritonamp.distributed.fsdp import full_tensor
from tritonamp.distributed.ranks import Ranks
from tritonamp.optim import Adam, AdamSteps, refuse_sparse
from tritonamp.policy import Policy
from tritonamp.scaler import GradScaler, scale_loss
from tritonamp.step.decision import Decision
from tritonamp.step.masters import MasterWeights
from tritonamp.step.state_loading import load_state


class Stepper:
    """The pending decisions of one ``Amp``, and the optimizers they feed.

    Args:
        policy: of the Amp. ``backend``: "auto", "triton" or "eager".
        scaler: the one that the user may drive himself, in a ``torch.amp`` loop.
        weights: optimizer to its master weights.
        log: hears of every decision.
        forwards: knows what led to it.
        ranks: take part in every decision.
        respond: told of every decision whether it was a skip, where the policy wants more than
            skipping.
        around_step: gives a context manager for each step of an optimizer.
    """

    def __init__(
        self,
        policy: Policy,
        backend: str,
        scaler: GradScaler,
        weights: dict[Optimizer, MasterWeights],
        log: SkipLog,
        forwards: Forwards,
        ranks: Ranks,
        respond: Callable[[bool], None],
        around_step: Callable[[Optimizer], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.around_step = around_step
        self._policy, self._backend, self._scaler = policy, backend, scaler
        self._weights, self._log, self._forwards, self._respond = weights, log, forwards, respond
        self._ranks = ranks
        self._adam: dict[Optimizer, AdamSteps] = {}
        self._decisions: list[Decision] = []
        self._had_backward = False

    # before the backward

    @contextlib.contextmanager
    def open(
        self, scaler: GradScaler, loss: Tensor, feeds: Iterable[Optimizer]
    ) -> Iterator[Tensor]:
        """Yields the scaled loss; inside the block its backward runs.

        A loss joins the decision of an earlier one with the same scaler that feeds one of the same
        optimizers and is not made yet (micro-batches); otherwise it begins its own.
        """
        self._had_backward = True
        weights = [self._weights[o] for o in feeds]
        self._drop_zeroed(weights)
        open_ones = (
            d for d in self._decisions if d.scaler is scaler and not d.made and not d.unmade
        )
        decision = next((d for d in open_ones if set(d.feeds) & set(weights)), None)
        new = decision is None
        if decision is None:
            scale = scaler.scale_tensor(loss.device).clone()
            decision = Decision(scaler, scale, torch.zeros_like(scale), [], True, self._backend)
            self._decisions.append(decision)
        for w in weights:
            if w not in decision.feeds:
                decision.feeds.append(w)
            if w.scaled_by is not decision:
                if w.scaled_by is not None:
                    w.scaled_by.unscale_early(w)
                w.begin(decision)
        scaled, nonfinite = scale_loss(loss, decision.scale)
        before, decision.loss_nonfinite = (
            decision.loss_nonfinite,
            torch.maximum(decision.loss_nonfinite, nonfinite),
        )
        decision.blocks += 1
        try:
            yield scaled
        except BaseException:  # the backward failed: this loss never was
            decision.loss_nonfinite = before
            if new:
                for w in weights:
                    w.take_back()
                    self._remove(w, [decision])
            raise
        finally:
            decision.blocks -= 1

    def _drop_zeroed(self, weights: list[MasterWeights]) -> None:
        """Ends decisions whose gradients the user has cleared, by the optimizer or by the model."""
        for decision in [d for d in self._decisions if d.blocks == 0]:
            for w in weights:
                # FSDP2 keeps those of micro-batches without synchronisation to itself
                cleared = w in decision.zeroed or not (self._ranks.sharded or w.has_gradients())
                if w in decision.feeds and cleared:
                    self._leave(w, [decision])

    def zeroed(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """The user clears the gradients: the model's half ones too. A pending decision ends at the
        next backward.
        """
        w = self._weights[optimizer]
        w.zero_grad(set_to_none)
        for decision in [d for d in self._decisions if w in d.feeds]:
            if decision.automatic:
                decision.zeroed.add(w)  # its backward may still come
            else:
                self._leave(w, [decision])

    # between backward and step

    def pending(self) -> list[Optimizer]:
        """The optimizers that a loss since their last step feeds."""
        by_hand = self._scaler.loss_nonfinite is not None
        return [
            o
            for o, w in self._weights.items()
            if any(w in d.feeds for d in self._decisions) or (by_hand and w.with_gradient() > 0)
        ]

    def unscale_(self, optimizer: Optimizer) -> Tensor | None:
        """Puts the true gradients of one optimizer into ``.grad`` of its params.

        Returns:
            0-d, not 0 where the loss that has just been unscaled, or its gradients, are not finite.
        """
        w = self._weights[optimizer]
        found_inf = None
        if w.unscaled:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since its last step()"
            )
        for decision in self._decisions_of(optimizer):
            self._make(decision)
            if w.scaled_by is decision:
                w.unscale_(decision.grad_scale)
                w.show_true_gradients()
                found_inf = decision.found_inf
        return found_inf

    def clip_grad_norm_(self, optimizers: list[Optimizer], max_norm: float) -> Tensor:
        """Clips the gradients of ``optimizers`` together; returns their norm before."""
        decisions = list(dict.fromkeys(d for o in optimizers for d in self._decisions_of(o)))
        all_scaled = all(self._weights[o].scaled_by in decisions for o in optimizers)
        if len(decisions) == 1 and not decisions[0].made and all_scaled:
            self._make(
                decisions[0], max_norm
            )  # the step multiplies by the clip coefficient, at no extra pass
            return decisions[0].norm
        for decision in decisions:
            self._make(decision)
        norms = []
        for o in optimizers:
            if not self._weights[o].unscaled:
                self.unscale_(o)
            grads = [g.float() for g in self._weights[o].gradients()]
            norm = nn.utils.get_total_norm(grads) if grads else torch.zeros(())
            norm = full_tensor(norm)
            bad = [d.found_inf for d in self._decisions_of(o) if d.made]
            norms.append(_or_zero(norm, bad))  # what is skipped does not count
        total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        nn.utils.clip_grads_with_norm_(
            [p for o in optimizers for g in o.param_groups for p in g["params"]], max_norm, total
        )
        return total

    def check_scaler(self, scaler: Any) -> None:
        """Refuses a GradScaler that the backward of an enabled model did not use."""
        if scaler is not self._scaler:
            raise RuntimeError(
                "this optimizer was enabled with another GradScaler: use amp.scaler, or "
                "tritonamp.enable(..., scaler=scaler) with a tritonamp.GradScaler"
            )

    # the step

    def step(self, optimizer: Optimizer, by_scaler: bool = False) -> Tensor | None:
        """Makes the decisions that concern ``optimizer``, then steps or skips.

        Args:
            by_scaler: called by ``GradScaler.step``, so that an ``update`` will follow.

        Returns:
            0-d, not 0 where it was a skip; None where there was nothing to decide.

        Raises:
            RuntimeError: there was no backward of a scaled loss.
            NonFiniteError: a skip, under ``on_nonfinite="raise"``.
        """
        w = self._weights[optimizer]
        decisions = self._decisions_of(optimizer, automatic=not by_scaler)
        if not decisions:
            w.forget_lists()
            return None
        made = [d for d in decisions if not d.made]  # by this step, if it comes to it
        step = self._fused_step if _takes_fused_step(optimizer) else self._own_step
        try:
            step(optimizer, w, decisions)
        except BaseException:  # as if this call had never been: it can be repeated
            if w in decisions[0].feeds:
                w.forget_lists()
                for decision in reversed(made):
                    decision.unmake(self._log)
            raise
        if self._policy.on_nonfinite != "skip":
            for decision in decisions:
                if not decision.reported:
                    decision.reported = True
                    self._answer(decision, by_scaler)
        return (
            decisions[0].found_inf
            if len(decisions) == 1
            else torch.stack([d.found_inf for d in decisions]).amax()
        )

    def _answer(self, decision: Decision, by_scaler: bool) -> None:
        try:
            self._respond(bool(decision.found_inf))
        except NonFiniteError:
            if by_scaler:  # whose ``update`` the error keeps from being called
                decision.scaler.update()
            raise

    def _fused_step(
        self, optimizer: Optimizer, w: MasterWeights, decisions: list[Decision]
    ) -> None:
        steps = self._adam.get(optimizer)
        if steps is None:
            steps = self._adam[optimizer] = AdamSteps(
                optimizer, self._backend, self._policy.track_lost_updates
            )

        @Optimizer.profile_hook_step
        def step(optimizer: Optimizer) -> None:
            grad_scale, found_inf = self._decide(
                w, decisions
            )  # also on what the user's hooks have left
            with torch.no_grad():
                lists = w.lists()
                if w.sparse:
                    refuse_sparse()
                steps.take(lists, w.listed, grad_scale, found_inf)
                w.written()  # before the user's hooks, which may write to masters
            self._leave(w, decisions)

        step(optimizer)

    def _own_step(self, optimizer: Optimizer, w: MasterWeights, decisions: list[Decision]) -> None:
        """The step of an optimizer that cannot skip on the device: one host read."""
        grad_scale, found_inf = self._decide(w, decisions, undoable=True)
        if bool(found_inf):
            self._leave(w, decisions)
            return
        if grad_scale is not None:
            w.unscale_(grad_scale)
        before = _versions(optimizer)
        try:
            base_class(type(optimizer)).step(optimizer)  # type: ignore[attr-defined]
        except BaseException:
            if _versions(optimizer) != before:  # the part that it has done stays, as in torch
                w.write_back(self._backend)
                self._leave(w, decisions)
            raise
        stepped = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        torch.autograd.graph.increment_version(
            stepped
        )  # torch's fused steps and writes to ``.data`` do not
        w.write_back(self._backend)
        self._leave(w, decisions)

    def _decide(
        self, w: MasterWeights, decisions: list[Decision], undoable: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """What to multiply the gradients by (None: they are true ones), and whether to skip."""
        w.refresh()
        for decision in decisions:
            self._make(decision, undoable=undoable)
        if len(decisions) == 1:
            found_inf = decisions[0].found_inf
        else:
            found_inf = torch.stack([d.found_inf for d in decisions]).amax()
            if not w.unscaled:
                assert w.scaled_by is not None
                w.unscale_(w.scaled_by.grad_scale)
        return None if w.unscaled else decisions[0].grad_scale, found_inf

    def check_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Refuses parameters that the optimizer has already (torch sees only their masters)."""
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        group["params"] = params  # it may have been a generator
        known = set(self._weights[optimizer].parameters())
        if any(isinstance(p, Tensor) and p in known for p in params):
            raise ValueError("some parameters appear in more than one parameter group")

    def adopt(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """A parameter group was added."""
        self._weights[optimizer].adopt(group)

    def load_state(
        self,
        optimizer: Optimizer,
        load: Callable[[dict[str, Any]], None],
        state_dict: dict[str, Any],
    ) -> None:
        """Loads the optimizer's state by ``load``, which is its own ``load_state_dict``."""
        load_state(optimizer, load, state_dict, adam=_takes_fused_step(optimizer))
        self._weights[optimizer].take_masters()

    def _make(
        self, decision: Decision, max_norm: float | None = None, undoable: bool = False
    ) -> None:
        if not decision.made:
            decision.make(self._log, self._forwards.take(), self._ranks, max_norm, undoable)

    def _decisions_of(self, optimizer: Optimizer, automatic: bool = False) -> list[Decision]:
        """The pending decisions that feed ``optimizer``; one is opened for gradients that came
        another way.
        """
        w = self._weights[optimizer]
        found = [d for d in self._decisions if w in d.feeds]
        if found or w.unscaled:
            return found
        with_grad = w.with_gradient()
        by_hand = self._scaler.loss_nonfinite
        if by_hand is None and self._policy.scales_loss and (with_grad or not self._had_backward):
            raise RuntimeError(_no_backward(with_grad))
        if by_hand is None and not with_grad:
            return []  # no loss fed this optimizer: as in torch, there is nothing to do
        # the user called scaler.scale(loss).backward(), or a plain loss.backward() where there is
        # no scale
        device = next((p.device for p in w.parameters()), torch.device("cpu"))
        scale = self._scaler.scale_tensor(device)
        flag, feeds = torch.zeros_like(scale) if by_hand is None else by_hand, [w]
        if by_hand is not None and automatic:  # scaled by hand, but nobody will call update()
            flag = self._scaler.take_loss_nonfinite()
            taken = [fed for d in self._decisions for fed in d.feeds]
            feeds += [
                o
                for o in self._weights.values()
                if o is not w and o not in taken and o.with_gradient()
            ]
        decision = Decision(
            self._scaler, scale.clone(), flag, feeds, automatic or by_hand is None, self._backend
        )
        self._decisions.append(decision)
        for fed in feeds:
            fed.begin(decision)
        return [decision]

    def _leave(self, w: MasterWeights, decisions: list[Decision]) -> None:
        """``w`` is done with ``decisions``; those that feed nobody else are over."""
        w.finish()
        self._remove(w, decisions)

    def _remove(self, w: MasterWeights, decisions: list[Decision]) -> None:
        for decision in decisions:
            decision.zeroed.discard(w)
            if w in decision.feeds:
                decision.feeds.remove(w)
            if not decision.feeds and decision in self._decisions:
                self._decisions.remove(decision)


def _or_zero(norm: Tensor, found_inf: list[Tensor]) -> Tensor:
    """``norm``, or 0 where one of the flags is set."""
    for flag in found_inf:
        norm = torch.where(flag.to(norm.device) != 0, torch.zeros_like(norm), norm)
    return norm


def _versions(optimizer: Optimizer) -> list[int]:
    return [param._version for group in optimizer.param_groups for param in group["params"]]


def _no_backward(with_grad: int) -> str:
    if with_grad == 0:
        return "optimizer.step() before any backward: call amp.backward(loss) first"
    return (
        f"optimizer.step(): {with_grad} parameter(s) have gradients, but no amp.backward(loss) fed this optimizer "
        "since its last step. This level scales the loss, so gradients of a plain loss.backward() are wrong: call "
        "amp.backward(loss), or scaled.backward() in `with amp.scale_loss(loss, optimizer) as scaled:`, or "
        "amp.scaler.scale(loss).backward(); call step() once per backward"
    )


def _takes_fused_step(optimizer: Optimizer) -> bool:
    """Adam and AdamW themselves, not optimizers derived from them that step in their own way."""
    step = inspect.unwrap(base_class(type(optimizer)).step)  # type: ignore[attr-defined]
    return step in (
        inspect.unwrap(torch.optim.Adam.step),
        inspect.unwrap(Adam.step),
    ) and not optimizer.defaults.get("differentiable", False)

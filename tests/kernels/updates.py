"""Parameters of one group on which an update kernel steps, and checks of its steps."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.kernels.conftest import Traffic, made
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._update_lists import UpdateLists

SHAPES = [(5,), (3, 7), (64, 65), (), (4100,)]


class Updates:
    """Parameters, their states and rounded copies, and the operation that steps on them.

    Args:
        operation: a function of the lists, the gradients' scale, the flag of a skip, and a backend.
        states: the name of each state; an FP32 tensor of zeros for each parameter.
        device: the device of all tensors.
        rule: the rule of the one group.
        copy: the dtype of the rounded copies; None: there are no copies.
        dtype: the dtype of the parameters.
        shapes: shapes of the parameters, to which ``made`` adds one.
        may_repeat: names of the lists that may repeat "params".
    """

    def __init__(
        self,
        operation: Callable[..., Any],
        states: Sequence[str],
        device: torch.device,
        rule: Any,
        copy: torch.dtype | None = None,
        dtype: torch.dtype = torch.float32,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        may_repeat: Sequence[str] = (),
    ) -> None:
        self.operation, self.may_repeat = operation, may_repeat
        self.params = made(shapes, device, dtype, 0)
        self.states = {
            name: [torch.zeros_like(p, dtype=torch.float32) for p in self.params] for name in states
        }
        self.copies = [torch.full_like(p, 9.0, dtype=copy) if copy else p for p in self.params]
        self.memory = Memory()
        self.rules, self.groups = [rule], [0] * len(self.params)

    def step(
        self,
        grads: Sequence[Tensor],
        backend: str,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        tensors = TensorLists(
            memory=self.memory,
            may_repeat=self.may_repeat,
            params=self.params,
            grads=grads,
            **self.states,
            copies=self.copies,
        )
        self.lists = UpdateLists(tensors, self.rules, self.groups)
        self.operation(self.lists, grad_scale, found_inf, backend)

    def everything(self) -> list[Tensor]:
        """Return copies of all that a step writes."""
        states = [t for name in self.states for t in self.states[name]]
        return [t.clone() for t in (*self.params, *states, *self.copies)]

    def share(self, rules: Sequence[Any], groups: Sequence[int]) -> None:
        """Put each parameter into the group that ``groups`` names, with a rule of its own."""
        self.rules, self.groups = list(rules), list(groups)


def check_bytes(
    run: Updates, traffic: Traffic, grad: torch.dtype, reads: int, writes: int, *shape: int
) -> None:
    """Assert that a step on one FP32 parameter with a float16 copy moves these bytes an element.

    A skipped step writes none.
    """
    device, size = run.params[0].device, torch.Size(shape).numel()
    stateless = any(tensors is run.params for tensors in run.states.values())
    run.params = [torch.zeros(shape, device=device)]
    for name in run.states:
        run.states[name] = run.params if stateless else [torch.zeros(shape, device=device)]
    run.copies = [torch.zeros(shape, dtype=torch.float16, device=device)]
    run.groups = [0]
    grads = [torch.ones(shape, dtype=grad, device=device)]
    run.step(grads, "triton")
    assert reads * size <= traffic.read <= 1.01 * reads * size
    assert writes * size <= traffic.written <= 1.01 * writes * size
    traffic.written = 0
    run.step(grads, "triton", None, torch.ones((), device=device))
    assert traffic.written == 0


def check_skip(run: Updates, found_inf: float, backend: str) -> None:
    """Assert that a skipped step on gradients of NaN changes no bit."""
    before, device = run.everything(), run.params[0].device
    bad = [torch.full_like(p, float("nan"), dtype=torch.float16) for p in run.params]
    run.step(bad, backend, None, torch.tensor(found_inf, device=device))
    assert all(map(torch.equal, run.everything(), before))


def resumed(
    make: Callable[..., torch.optim.Optimizer], model: torch.nn.Module, stops: bool
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Take four steps on random gradients; ``stops``: with a new optimizer after two of them.

    The new one starts with another learning rate and loads the state.
    """
    optimizer = make(model, 1e-2)
    for seed in range(4):
        if stops and seed == 2:
            state = copy.deepcopy(optimizer.state_dict())
            model = copy.deepcopy(model)
            optimizer = make(model, 1.0)
            optimizer.load_state_dict(state)
        for k, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * seed + k)
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], optimizer

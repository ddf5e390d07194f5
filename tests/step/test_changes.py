"""``amp.changes``, compared with the differences of copies of all weights."""

import hashlib
import io
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import more
from gpuless.real_cuda import AnyCuda
from gpuless.steps import OnGpu
from helpers import Net
from runs import OPTIMIZERS, Training, started, started_on_cpu
from torch import Tensor, nn

import tritonamp
from tritonamp.step import parameter_bits

OWN = ["Adagrad", "RAdam", "Adadelta"]
"""Optimizers without a rule."""
PACKED = [{"masters": "packed", "state": state} for state in ("fp32", "bf16")]
FUSED = ["AdamW", "amsgrad", "SGD", "SGD momentum", "Lion", "RMSprop", "our AdamW"]
"""Optimizers whose kernel writes the bits."""
NAMES = [
    *("turned", "conv.weight", "conv.bias", "norm.weight", "norm.bias"),
    *("first.weight", "first.bias", "unused.weight", "unused.bias"),
]
FP32 = "norm.weight", "norm.bias"
UNUSED = "unused.weight", "unused.bias"


class Mixed(nn.Module):
    """Weights in three orders of memory, a norm, tied, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, (2, 3)).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.first = nn.Linear(5, 30)
        self.tied = nn.Linear(5, 30, bias=False)
        self.turned = nn.Parameter(torch.randn(30, 4).t())
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(11, 12)
        self.tie()

    def tie(self) -> None:
        self.tied.weight = self.first.weight

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        self.tie()  # a move to a GPU in software unties them
        return self

    def forward(self, x: Tensor) -> Tensor:
        image = (x[:, :3, None, None] * x[:, None, 3:, None]).expand(-1, -1, -1, 3)
        y = self.norm(self.conv(image)).mean(2).flatten(1)
        return self.frozen(nn.functional.linear(self.first(y).relu() + self.tied(y), self.turned))


def unlike(a: Tensor, b: Tensor) -> Tensor:
    """Tell where two tensors have other bits, in the order of ``flatten``."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.flatten().view(kind) != b.flatten().view(kind)


OWN_FIELDS = "model", "lr", "enable"


class Tracked(Training):
    """A run that finds its changes from copies, and a sampler that is sent them."""

    def __init__(
        self, optimizer: Any = "Adagrad", level: str = "O2", device: Any = "cpu", **fields: Any
    ) -> None:
        fields = {"track_changes": True, "loss_scale": "dynamic", "init_scale": 8.0, **fields}
        fields = {"model": Mixed, **fields}
        self.replaced: list[Tensor] = []
        super().__init__(optimizer=optimizer, level=level, device=device, **fields)
        self.fields = {"level": level, **{k: v for k, v in fields.items() if k not in OWN_FIELDS}}
        self.sampler, self.before = self.values(), self.values()
        self.masks = {name: torch.zeros(v.numel()).bool() for name, v in self.before.items()}

    def values(self) -> dict[str, Tensor]:
        """Return copies of the trained parameters as the model stores them."""
        named = self.model.named_parameters()
        return {name: p.detach().clone() for name, p in named if p.requires_grad}

    def note(self) -> None:
        """Add the present differences to those that are expected."""
        now = self.values()
        for name, value in now.items():
            self.masks[name] |= unlike(self.before[name], value).cpu()
        self.before = now

    def finish(self, max_norm: float | None = None, by_scaler: bool = False) -> None:
        super().finish(max_norm, by_scaler)
        self.note()

    def assert_exact(self, **arguments: Any) -> None:
        """Assert that the changes are those of the copies, in names, positions, values, dtypes."""
        found, now = self.amp.changes(**arguments), self.values()
        assert list(found) == list(now)
        for name, (positions, values) in found.items():
            assert positions.dtype is torch.int32 and values.dtype is now[name].dtype
            assert torch.equal(positions.cpu().long(), self.masks[name].nonzero().squeeze(1)), name
            assert not unlike(values, now[name].flatten()[positions.long()]).any()
            if arguments.get("clear", True):
                self.masks[name].zero_()
        self.receive(found)

    def receive(self, found: dict[str, tuple[Tensor | None, Tensor]]) -> None:
        """Write changes into the sampler's copies."""
        for name, (positions, values) in found.items():
            if positions is None:
                self.sampler[name] = values
            else:
                flat = self.sampler[name].flatten().to(values.dtype)
                flat[positions.long()] = values
                self.sampler[name] = flat.view(self.sampler[name].shape)

    def send(self, **arguments: Any) -> None:
        """Send the changes to the sampler, and assert that it has the model's bits."""
        self.receive(self.amp.changes(**arguments))
        for name, value in self.values().items():
            assert value.dtype is self.sampler[name].dtype, name
            assert not unlike(self.sampler[name], value).any(), name

    def count(self, **arguments: Any) -> dict[str, int]:
        """Return how many elements of each parameter have changed; all for a whole parameter."""
        return {name: len(v.flatten()) for name, (_, v) in self.amp.changes(**arguments).items()}


runs = started(Tracked)
runs_on_cpu = started_on_cpu(Tracked)
Runs = Callable[..., Tracked]


def total(run: Tracked, **arguments: Any) -> int:
    return sum(run.count(**arguments).values())


# steps


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("optimizer", OWN + FUSED)
def test_exact(runs: Runs, optimizer: str, level: str, dtype: torch.dtype, backend: str) -> None:
    """Small steps, of which some elements change, a skip, and none since."""
    run = runs(optimizer, level, lr=1e-3, dtype=dtype, backend=backend)
    run.assert_exact()
    for step in range(4):
        run.step(bad=step == 1, max_norm=0.1)
    changed = {name: int(mask.sum()) for name, mask in run.masks.items()}
    if optimizer in ("Adadelta", "SGD"):
        assert 0 < changed["first.weight"] < 150, "some"
    run.assert_exact(clear=False)
    run.assert_exact()
    assert total(run) == 0
    run.step(max_norm=0.1)
    run.assert_exact()


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("with_adamw", [False, True])
def test_exact_with_muon(runs: Runs, with_adamw: bool, backend: str) -> None:
    """Matrices and the parameters of AdamW are steps of their own."""

    def muon(params: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
        matrices = [p for p in params if p.dim() == 2]
        rest = [p for p in params if p.dim() != 2]
        if with_adamw:
            groups = [{"params": rest, "lr": lr}]
            return [tritonamp.optim.Muon(matrices, lr=lr, adamw_params=groups)]
        return [torch.optim.Muon(matrices, lr=lr), torch.optim.SGD(rest, lr=lr)]

    run = runs(muon, lr=1e-4, backend=backend)
    for step in range(3):
        run.step(bad=step == 1)
    assert 0 < run.masks["turned"].sum() < 120
    run.assert_exact()


@pytest.mark.parametrize("fields", [{"state": "bf16"}, {"state": "8bit"}, *PACKED], ids=repr)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_exact_with_small_state(runs: Runs, fields: dict[str, Any], backend: str) -> None:
    run = runs("AdamW", lr=1e-4, backend=backend, **fields)
    for step in range(3):
        run.step(bad=step == 1)
    assert 0 < run.masks["first.weight"].sum() < 150
    run.assert_exact()
    run.model.to(memory_format=torch.contiguous_format)  # other orders of memory
    run.model.tie()
    run.send()
    run.step()
    run.send()


def test_names_and_positions(runs_on_cpu: Runs) -> None:
    """The frozen layer is absent, the tied weight has one name; positions are those of flatten."""
    run = runs_on_cpu()
    assert list(run.amp.changes()) == NAMES
    with torch.no_grad():
        run.model.conv.weight[1, 2, 0, 1] += 1
        run.model.turned[2, 5] = 9.0
    found = run.amp.changes()
    assert found["conv.weight"][0].tolist() == [(1 * 3 + 2) * 6 + 1]
    assert found["turned"][0].tolist() == [2 * 30 + 5] and found["turned"][1].tolist() == [9.0]


def test_a_skip_leaves_none(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu()
    for _ in range(2):
        run.step(bad=True)
    assert run.amp.stats()["skipped"] == 2 and total(run) == 0


def test_signs_of_zero_count_and_nans_that_stay_do_not(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu(lambda params, lr: Rewrites(params))
    with torch.no_grad():
        run.model.unused.weight[0, :2] = torch.tensor([0.0, float("nan")])
    run.amp.changes()
    run.step()
    assert run.amp.changes()["unused.weight"][0].tolist() == [0]


@pytest.mark.parametrize("fields", [{}, {"masters": "packed"}], ids=repr)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_written_zero_of_another_sign(
    runs_on_cpu: Runs, optimizer: str, fields: dict[str, Any]
) -> None:
    """The next step leaves it, or counts that it has put the master's sign back."""
    run = runs_on_cpu(optimizer, lr=0.0, **fields)
    with torch.no_grad():
        dict(run.amp.named_master_params())["first.weight"][0, :2] = torch.tensor([1e-12, -1e-12])
    run.step()
    run.send()
    with torch.no_grad():
        run.model.first.weight[0, :2] = torch.tensor([-0.0, 0.0])
    run.send()
    run.step()
    run.send()


class Rewrites(torch.optim.Optimizer):
    """An optimizer that turns the sign of zeros and writes all else as it was."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(torch.where(p == 0, -p, p))


class Breaks(torch.optim.Optimizer):
    """Gradient descent that raises half-way, while ``fails``."""

    def __init__(self, params: Any, lr: float, by_data: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.fails, self.by_data = False, by_data

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for i, p in enumerate(self.param_groups[0]["params"]):
            if self.fails and i == 4:  # within the norm
                raise ArithmeticError("half-way")
            if p.grad is not None:
                (p.data if self.by_data else p).sub_(self.param_groups[0]["lr"] * p.grad)


@pytest.mark.parametrize("ask", [False, True])
@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_step_that_raises_half_way(
    runs_on_cpu: Runs, level: str, by_data: bool, ask: bool
) -> None:
    run = runs_on_cpu(lambda params, lr: Breaks(params, lr, by_data), level, lr=1e-2)
    run.step()
    run.assert_exact()
    run.backward()
    run.optimizer.fails = True
    with pytest.raises(ArithmeticError):
        run.optimizer.step()
    run.note()
    if ask:
        run.assert_exact()
    run.optimizer.fails = False
    run.optimizer.zero_grad()
    groups(run)[0]["lr"] = 0.0  # so that all changes are those of the first step
    run.step()
    run.assert_exact()


def test_two_optimizers(runs_on_cpu: Runs) -> None:
    def two(params: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adagrad(params[:3], lr=lr), torch.optim.RAdam(params[3:], lr=lr)]

    run = runs_on_cpu(two, lr=1e-3)
    for _ in range(2):
        run.step()
    run.assert_exact()


def test_several_models_have_numbers(runs_on_cpu: Runs) -> None:
    models = [nn.Linear(2, 3), nn.Linear(3, 2, bias=False)]
    params = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.Adagrad(params)
    with tritonamp.enable(models, optimizer, level="O2", track_changes=True) as amp:
        assert list(amp.changes()) == ["0.weight", "0.bias", "1.weight"]


def test_sparse_gradients_step_by_torch() -> None:
    model = nn.Embedding(40, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tritonamp.enable(model, optimizer, level="O3", track_changes=True) as amp:
        amp.backward(model(torch.tensor([3, 17, 3])).float().sum())
        optimizer.step()
        positions, _ = amp.changes()["weight"]
        assert positions.tolist() == [*range(12, 16), *range(68, 72)]


def test_parameters_that_join_count(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu("RAdam")
    run.note = lambda: None  # type: ignore[method-assign]
    weight = run.model.frozen.weight.requires_grad_(True)
    run.optimizer.add_param_group({"params": [weight]})
    assert run.count()["frozen.weight"] == 16
    assert total(run) == 0
    run.step()
    found = run.amp.changes()
    assert len(found["frozen.weight"][0]) and "frozen.bias" not in found


# writes by other code


def written(run: Tracked) -> None:
    with torch.no_grad():
        run.model.first.weight[3, 2:4] += 1


def replaced(run: Tracked) -> None:
    values = run.model.first.weight.detach().clone()
    values[3, 2:4] += 1
    # kept: a second replacement in its memory would look as if nothing had been replaced
    run.replaced.append(run.model.first.weight.data)
    run.model.first.weight.data = values


def written_master(run: Tracked) -> None:
    masters = dict(run.amp.named_master_params())
    with torch.no_grad():
        masters["first.weight"][3, 2:4] += 1
        masters["first.weight"][4] *= 1 + 2**-20  # the half values stay


def same_again(run: Tracked) -> None:
    with torch.no_grad():
        run.model.first.weight.copy_(run.model.first.weight.clone())


def loaded(run: Tracked) -> None:
    state = run.model.state_dict()
    state["first.weight"] = state["first.weight"].clone()
    state["first.weight"][3, 2:4] += 1
    run.model.load_state_dict(state)


WRITES = [written, replaced, written_master, same_again]


@pytest.mark.parametrize("first_step", [False, True])
@pytest.mark.parametrize("then_step", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("optimizer", ["Adagrad", "AdamW"])
def test_a_write_is_compared_with_the_master(
    runs_on_cpu: Runs,
    write: Callable[[Tracked], None],
    first_step: bool,
    then_step: bool,
    optimizer: str,
) -> None:
    """Exact before and after a step, whatever the step does to the same elements."""
    run = runs_on_cpu(optimizer, lr=1e-3)
    if first_step:
        run.step()
        run.assert_exact()
    write(run)
    if then_step:
        run.note()
        run.backward()
        run.note()
        run.finish()
    else:
        run.loss()  # the forward rounds the written master
        run.note()
    expected = {name: int(mask.sum()) for name, mask in run.masks.items()}
    if not then_step:
        assert sum(expected.values()) == expected["first.weight"] == 2 * (write is not same_again)
    run.assert_exact()
    assert total(run) == 0


@pytest.mark.parametrize(
    ("level", "name", "fields"),
    [("O3", "first.weight", {}), ("O2", "norm.weight", {})],
)
def test_a_write_counts_whole_without_a_master(
    runs_on_cpu: Runs, level: str, name: str, fields: dict[str, Any]
) -> None:
    run = runs_on_cpu(level=level, **fields)
    run.step()
    run.send()
    param = run.model.get_parameter(name)
    with torch.no_grad():
        param[0] += 1
    assert run.count(clear=False) == {n: param.numel() * (n == name) for n in NAMES}
    run.send()
    with torch.no_grad():
        param[0] += 1
    run.step()  # a step after the write does not hide it
    assert run.count(clear=False)[name] == param.numel()
    run.send()


@pytest.mark.parametrize("optimizer", [lambda params, lr: Rewrites(params), "SGD", "AdamW"])
def test_a_master_written_before_the_step_is_seen(runs_on_cpu: Runs, optimizer: Any) -> None:
    """No forward has rounded the master, and the step does not change it."""
    run = runs_on_cpu(optimizer, lr=0.0)
    run.backward()
    written_master(run)
    run.finish()
    run.send()
    assert total(run) == 0


@pytest.mark.parametrize("optimizer", ["Adagrad", "SGD", "our AdamW"])
def test_a_half_copy_written_through_data(runs_on_cpu: Runs, optimizer: str) -> None:
    """The step rounds the master again: to the reader, who has not seen the write, no change."""
    run = runs_on_cpu(optimizer, lr=0.0)
    run.model.first.weight.data[3] += 1
    run.step()
    run.send()


def test_a_write_through_data_alone_is_not_seen(runs_on_cpu: Runs) -> None:
    """The limit that the FP32 values have as well."""
    run = runs_on_cpu()
    run.model.first.weight.data[3] += 1
    assert total(run) == 0


@pytest.mark.parametrize("forward", [False, True])
def test_both_sides_written_count_whole(runs_on_cpu: Runs, forward: bool) -> None:
    run = runs_on_cpu()
    written_master(run)
    written(run)
    if forward:
        run.loss()  # rounds the master into the half values that were written
    run.send(clear=False)
    assert run.count()["first.weight"] == 150
    written(run)
    written_master(run)  # reads the half values before it writes
    assert run.count()["first.weight"] == 2


def test_loading_the_model(runs_on_cpu: Runs) -> None:
    """Checkpoints hold FP32 values, which masters take before they are rounded: whole tensors."""
    run, other = runs_on_cpu(), runs_on_cpu()
    for _ in range(3):
        other.step()
    run.send()
    run.model.load_state_dict(other.model.state_dict())
    assert run.count(clear=False) == {name: run.before[name].numel() for name in NAMES}
    run.send()


def test_loading_the_optimizer_alone_changes_nothing(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu()
    run.step()
    run.amp.changes()
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert total(run) == 0


def test_masters_of_a_loaded_optimizer() -> None:
    """tritonamp.optim keeps the bits that half parameters lack: values may move by a tie."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16).bfloat16()
    optimizer = tritonamp.optim.AdamW(model.parameters(), lr=1e-3, state="8bit")
    for _ in range(3):
        model(torch.randn(4, 16).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state, weights = optimizer.state_dict(), model.state_dict()
    with tritonamp.enable(
        model, optimizer, level="O2", dtype=torch.bfloat16, track_changes=True
    ) as amp:
        sampler = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for name, (positions, values) in amp.changes().items():
            sampler[name].view(-1)[positions.long()] = values
        for name, p in model.named_parameters():
            assert torch.equal(sampler[name], p)


def test_an_average_that_is_copied_into_the_model(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu()
    average = run.amp.ema(0.5)
    for _ in range(2):
        run.step()
        average.update()
    run.send()
    average.copy_to(run.model)
    run.send()
    run.step()
    run.send()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_healing(runs_on_cpu: Runs, level: str) -> None:
    """A healed module's parameters are FP32, and are sent as such; back again, as half ones."""
    run = runs_on_cpu(level=level)
    run.step()
    run.send()
    run.note = lambda: None
    run.amp.heal("conv")
    assert run.count(clear=False)["conv.weight"] == 90
    assert run.amp.changes(clear=False)["conv.weight"][1].dtype is torch.float32
    run.send()
    run.step()
    run.send()
    run.amp.unheal("conv")
    run.send()
    run.step()
    run.send()


def test_moved_to_another_order_of_memory(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu(level="O3")
    run.step()
    run.model.to(memory_format=torch.contiguous_format)
    run.model.tie()
    run.send()
    run.note()
    run.masks["conv.weight"].zero_()
    for name in NAMES:
        run.masks[name].zero_()
    run.step()
    run.assert_exact()


# results of a call


def test_dense_above(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu(lr=0.0)
    with torch.no_grad():
        run.model.first.weight[0] += 1  # 5 of 150
        run.model.turned[:2] += 1  # 60 of 120
    found = run.amp.changes(clear=False, dense_above=0.25)
    assert len(found["first.weight"][0]) == 5
    positions, values = found["turned"]
    assert positions is None and torch.equal(values, run.model.turned)
    values.zero_()
    assert run.model.turned.any(), "a copy"
    at = run.amp.changes(clear=False, dense_above=0.5)["turned"][0]
    assert len(at) == 60, "the share itself is not above it"
    found = run.amp.changes(dense_above=0)
    assert found["first.weight"][0] is None and len(found["first.bias"][0]) == 0


@pytest.mark.parametrize("dense_above", [None, 0.3])
@pytest.mark.parametrize("half", [False, True])
def test_changes_are_applied_as_the_pages_say(
    runs_on_cpu: Runs, half: bool, dense_above: float | None
) -> None:
    """To parameters in any order of memory; ``half``: a sampler that is all half, as of vLLM."""
    run = runs_on_cpu("AdamW", lr=1e-4)
    run.note = lambda: None
    sampler = {n: v.half() if half else v for n, v in run.values().items()}
    assert not all(v.is_contiguous() for v in sampler.values())
    for turn in range(4):
        run.step()
        if turn == 2 and half:  # values are FP32 from then on
            run.amp.heal("conv")
        for name, (positions, values) in run.amp.changes(dense_above=dense_above).items():
            if positions is None:
                sampler[name].copy_(values)
            else:
                sampler[name].put_(positions.long(), values.to(sampler[name].dtype))
    for name, value in run.values().items():
        assert torch.equal(sampler[name], value.to(sampler[name].dtype)), name


PAGE = Path(tritonamp.__file__).parent / "integrations" / "rl.md"
SAMPLER = """
import hashlib, io, sys
import torch
from torch import nn

exec(sys.argv[1])
model = nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Linear(40, 5))
read = sys.stdin.buffer.read
message = lambda: io.BytesIO(read(int.from_bytes(read(8), "little")))
model.load_state_dict(torch.load(message(), weights_only=True), assign=True)
for _ in range(int(sys.argv[2])):
    receive(message(), model)
    bits = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    print(hashlib.sha256(bits).hexdigest(), flush=True)
"""
"""A process that receives by the function of the page, and tells a hash of its bits after each."""


def test_a_sampler_in_another_process() -> None:
    """It begins with a whole copy and has the model's bits after each of 50 steps."""
    block = next(
        b for b in re.findall("```python\n(.*?)```", PAGE.read_text(), re.S) if "put_" in b
    )
    layers = nn.Linear(6, 40), nn.LayerNorm(40), nn.Linear(40, 5)
    run = Training(nn.Sequential(*layers), lr=1e-5, track_changes=True, init_scale=8.0)
    command = [sys.executable, "-W", "error", "-c", SAMPLER, block, "50"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    sizes, forms = list[int](), set[str]()
    with subprocess.Popen(command, **pipes) as sampler:  # type: ignore[call-overload]
        assert sampler.stdin and sampler.stdout

        def send(message: Any) -> None:
            torch.save(message, sent := io.BytesIO())
            sampler.stdin.write(len(sent.getvalue()).to_bytes(8, "little") + sent.getvalue())
            sampler.stdin.flush()

        send({name: p.detach() for name, p in run.model.named_parameters()})
        for step in range(50):
            run.step(bad=step in (7, 30), max_norm=0.1)
            changes = run.amp.changes(dense_above=0.3)
            forms |= {"whole" if at is None else "some" for at, v in changes.values() if len(v)}
            sizes.append(sum(len(v.flatten()) for _, v in changes.values()))
            send(changes)
            params = [p.detach().view(torch.uint8) for p in run.model.parameters()]
            bits = b"".join(p.numpy().tobytes() for p in params)
            assert sampler.stdout.readline().decode().strip() == hashlib.sha256(bits).hexdigest()
        sampler.stdin.close()
    run.amp.disable()
    assert sampler.returncode == 0
    assert sizes[7] == sizes[30] == 0 < min(sizes[:7])
    assert forms == {"whole", "some"}


def test_more_elements_than_int32_counts(
    runs_on_cpu: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs_on_cpu()
    written(run)
    monkeypatch.setattr(parameter_bits, "LARGEST", 149)
    with pytest.raises(ValueError, match=r"up to 149 elements, .* got 150 in first\.weight"):
        run.amp.changes()
    found = run.amp.changes(clear=False, dense_above=1.0)
    assert found["first.weight"][0] is None and len(found["turned"][0]) == 0
    positions = {n: at for n, (at, _) in run.amp.changes(global_positions=True).items()}
    assert positions["first.weight"].dtype is torch.int64 and len(positions["first.weight"]) == 2
    assert positions["turned"].dtype is torch.int32
    written(run)
    run.amp.changes(dense_above=1.0)
    assert len(run.amp.changes(dense_above=1.0)["first.weight"][0]) == 0, "nothing has changed"


def test_results_are_no_views(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu()
    written(run)
    _, values = run.amp.changes()["first.weight"]
    values.fill_(7)
    assert not (run.model.first.weight == 7).any()


def test_in_inference_mode(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu(level="O3")
    run.step()
    with torch.inference_mode():
        run.amp.changes(clear=False)
        run.optimizer.add_param_group({"params": run.model.frozen.weight})
    run.sampler["frozen.weight"] = torch.zeros(4, 4).half()
    run.note = lambda: None  # type: ignore[method-assign]
    run.step()
    run.send(clear=False)


# stats


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("optimizer", [*OWN[:2], *FUSED[:3]])
def test_the_share_that_a_step_leaves(
    runs_on_cpu: Runs, optimizer: str, both: bool, level: str
) -> None:
    """A group's half values count, also those without a gradient; a skip keeps the share."""

    def grouped(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        half, norm, unused = params[:3] + params[5:7], params[3:5], params[7:]
        # FP32 norms that stay as they were: they are no half values
        groups = [{"params": half}, {"params": norm, "lr": 0.0}, {"params": unused}]
        return OPTIMIZERS[optimizer](groups, lr=lr)

    run = runs_on_cpu(grouped, level, lr=1e-3, track_changes=both, track_lost_updates=True)
    assert run.amp.stats()["lost_updates"] == [0.0, 0.0, 0.0], "before the first step"
    run.step()
    share = expected_share(run)
    found = run.amp.stats()["lost_updates"]
    assert found == [pytest.approx(share[0]), pytest.approx(share[1]), 1.0]
    assert 0 < share[0] < 1
    run.step(bad=True)
    assert run.amp.stats()["lost_updates"] == found
    run.assert_exact()
    assert run.amp.stats()["lost_updates"] == found, "a reader leaves it"
    run.step()
    assert run.amp.stats()["lost_updates"][0] == pytest.approx(expected_share(run)[0])


def expected_share(run: Tracked) -> list[float]:
    """Return the shares of half values that have not changed: of those with a gradient, norms."""
    half = run.model.first.weight.dtype
    shares = []
    for names in ([n for n in NAMES if n not in FP32 + UNUSED], FP32):
        masks = [run.masks[n] for n in names if run.before[n].dtype is half]
        n, changed = sum(map(len, masks)), sum(int(m.sum()) for m in masks)
        shares.append(1 - changed / n if n else 0.0)
    return shares


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_share_of_a_parameter_without_a_gradient(runs_on_cpu: Runs, backend: str) -> None:
    """The parameter counts as unchanged by a step, but not by a skip, which is no step."""

    def two(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=lr)

    run = runs_on_cpu(two, backend=backend, track_lost_updates=True)
    run.step()
    share = run.amp.stats()["lost_updates"]
    assert share[0] < 0.5
    for bad in (True, False):
        run.backward(run.loss() * (float("inf") if bad else 1))
        run.model.turned.grad = None
        run.finish()
        found = run.amp.stats()["lost_updates"]
        assert found == share if bad else found[0] == 1.0 > found[1]


@pytest.mark.parametrize("track_changes", [False, True])
def test_the_share_without_tracking(runs_on_cpu: Runs, track_changes: bool) -> None:
    run = runs_on_cpu(track_changes=track_changes)
    run.step()
    assert run.amp.stats()["lost_updates"] == [0.0]


# files, sleep, graphs


def test_a_resumed_run_counts_everything(runs_on_cpu: Runs, tmp_path: Path) -> None:
    """The reader's copy is of another time: even equal values count."""
    run = runs_on_cpu()
    run.step()
    run.amp.changes()
    tritonamp.save(tmp_path / "run.pt", **run.objects())
    everything = {name: value.numel() for name, value in run.before.items()}
    tritonamp.load(tmp_path / "run.pt", **run.objects())
    assert run.count() == everything
    resumed = runs_on_cpu()
    assert total(resumed) == 0
    tritonamp.load(tmp_path / "run.pt", **resumed.objects())
    assert resumed.count() == everything and total(resumed) == 0
    resumed.amp.load_state_dict(resumed.amp.state_dict())
    assert resumed.count() == everything, "whatever else is loaded, and when"


def test_sleep(cuda: torch.device) -> None:
    """Bits leave the device and come back; asleep they cannot be read."""
    fields = [{}, {"track_changes": False}, {"track_lost_updates": True}]
    run, other, both = (Tracked(device=cuda, lr=1e-3, **each) for each in fields)
    for each in (run, other, both):
        each.step()
    sizes = [-(-p.numel() // 128) * 128 for p in run.values().values()]
    moved = run.amp.sleep()
    assert moved - other.amp.sleep() == sum(sizes) // 8, "one bit for each element"
    assert both.amp.sleep() - moved == sum(sizes) // 8, "another one"
    for each in (other, both):
        each.amp.wake()
        each.amp.disable()
    with pytest.raises(RuntimeError, match=r"Call amp.wake\(\) first"):
        run.amp.changes()
    run.amp.wake()
    run.assert_exact(clear=False)
    run.amp.sleep(weights=True)
    run.amp.wake()
    run.send()
    run.amp.disable()


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "level", "fields"),
    [
        *[(name, "O2", {}) for name in ("Adagrad", "AdamW")],
        ("SGD", "O3", {}),
        ("AdamW", "O2", {"state": "8bit"}),
    ],
    ids=repr,
)
def test_asleep_between_phases(
    device: torch.device, optimizer: str, level: str, fields: dict[str, Any], weights: bool
) -> None:
    """Changes of before count once after ``wake``, with those that a sampler has read, or not."""
    run = Tracked(optimizer, level, device, lr=1e-3, **fields)
    for step in range(6):
        run.step(bad=step == 2)
        if step == 1:
            run.assert_exact(clear=False)  # then read again below
        elif step == 3:
            run.assert_exact()
        run.amp.sleep(weights=weights)
        with pytest.raises(RuntimeError, match=r"asleep since .*Call amp.wake\(\) first"):
            run.amp.changes()
        others = [torch.full((150,), 7.0, device=device) for _ in range(9)]
        run.amp.wake()
        del others
        if step == 3:
            assert total(run, clear=False) == 0, "asleep nothing changes"
        if step in (1, 4):
            run.assert_exact()
    run.assert_exact()
    assert total(run) == 0
    run.amp.disable()


@pytest.mark.parametrize("write", [written, replaced], ids=lambda write: write.__name__)
@pytest.mark.parametrize("fields", [{}, {"state": "8bit"}, {"masters": "packed"}], ids=repr)
def test_weights_written_while_asleep(
    device: torch.device, write: Callable[[Tracked], None], fields: dict[str, Any]
) -> None:
    """A sampler's phase writes to the model, which stays on the device: the write counts, too."""
    run = Tracked("AdamW", "O2", device, lr=1e-3, **fields)
    run.step()
    pending = {name: int(mask.sum()) for name, mask in run.masks.items()}
    run.amp.sleep()
    write(run)
    run.amp.wake()
    found = run.count(clear=False)
    assert {**found, "first.weight": 0} == {**pending, "first.weight": 0}
    assert found["first.weight"] >= 2
    run.send()
    run.step()
    run.send()
    run.amp.disable()


def test_a_replaced_weight_that_wakes_at_its_old_address(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a replaced weight has left is free, so that ``wake`` may get it again."""
    from tritonamp.step import changes

    place = bytes(8)
    monkeypatch.setattr(changes, "addresses", lambda tensors: place * len(tensors))
    run = Tracked("SGD", "O3", cuda, lr=1e-3)
    run.step()
    run.amp.changes()
    place = b"replaced"
    run.amp.sleep(weights=True)
    place = bytes(8)
    run.amp.wake()
    assert total(run) == sum(p.numel() for p in run.values().values())
    run.amp.disable()


def test_a_capture_cannot_read(gpu: AnyCuda) -> None:
    run = OnGpu("O2", track_changes=True)
    run.step()
    message = r"amp.changes\(\): expected a call outside of a CUDA graph's capture, got one inside"
    with gpu.capture(), pytest.raises(RuntimeError, match=message):
        run.amp.changes()
    run.amp.disable()


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_replays_write_bits(gpu: AnyCuda, level: str, optimizer: str) -> None:
    run = OnGpu(level, optimizer, lr=1e-4, track_changes=True)
    for _ in range(2):
        run.step()
    with gpu.capture() as graph:
        run.step()
    run.amp.changes()
    before, masks = run.weights(), None
    for _ in range(3):
        graph.replay()
        now = run.weights()
        found = [unlike(a, b) for a, b in zip(before, now, strict=True)]
        masks = found if masks is None else [a | b for a, b in zip(masks, found, strict=True)]
        before = now
    assert masks is not None and any(mask.any() for mask in masks)
    found = [at.cpu().tolist() for at, _ in run.amp.changes().values()]
    assert found == [mask.nonzero().flatten().tolist() for mask in masks]
    run.amp.disable()


def test_offloaded_masters(cuda: torch.device) -> None:
    run = Tracked("AdamW", device=cuda, lr=1e-3, offload="state", backend="eager")
    for step in range(3):
        run.step(bad=step == 1)
    run.assert_exact(clear=False)
    written(run)
    run.send()
    run.model.to(memory_format=torch.contiguous_format)  # masters stay in the order they had
    run.model.tie()
    run.send()
    run.before = run.values()
    for mask in run.masks.values():
        mask.zero_()
    run.step()
    run.assert_exact()
    run.amp.disable()


# bad input


@pytest.mark.parametrize("flag", ["track_changes", "track_lost_updates"])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_levels_without_half_weights(level: str, flag: str) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=rf"Policy: {flag}=True needs half weights, cast_model"):
        tritonamp.enable(model, optimizer, level=level, **{flag: True})
    assert type(model) is Net and all(p.dtype is torch.float32 for p in model.parameters())


def test_half_parameters_have_half_weights() -> None:
    model = Net().half()
    fields = {"half_parameters": True, "master_weights": True, "track_changes": True}
    optimizer = torch.optim.Adagrad(model.parameters())
    with tritonamp.enable(model, optimizer, level="O1", **fields) as amp:
        amp.backward(model(torch.randn(8, 6)).float().square().mean())
        optimizer.step()
        assert len(amp.changes()["first.weight"][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clear": 0.3}, r"clear: expected True or False, got 0.3: .*changes\(dense_above=0.3\)"),
        ({"dense_above": True}, "dense_above: expected None or a share .* got True"),
        ({"dense_above": 1.5}, r"a number in \[0, 1\], got 1.5"),
        ({"dense_above": -0.1}, r"a number in \[0, 1\], got -0.1"),
        ({"dense_above": float("nan")}, r"a number in \[0, 1\], got nan"),
        ({"global_positions": 1}, "global_positions: expected True or False, got 1"),
        ({"dense_above": "0.5"}, r"a number in \[0, 1\], got '0.5'"),
    ],
)
def test_bad_arguments(runs_on_cpu: Runs, arguments: dict[str, Any], message: str) -> None:
    run = runs_on_cpu()
    written(run)
    with pytest.raises(ValueError, match=message):
        run.amp.changes(**arguments)
    assert run.count()["first.weight"] == 2, "nothing was cleared"


def test_calls_at_the_wrong_time(runs_on_cpu: Runs) -> None:
    run = runs_on_cpu(track_changes=False)
    with pytest.raises(RuntimeError, match=re.escape("expected a policy that tracks changes")):
        run.amp.changes()
    run.amp.disable()
    with pytest.raises(RuntimeError, match="this model was disabled"):
        run.amp.changes()
    # as the first message says
    with tritonamp.enable(run.model, run.optimizer, level="O2", track_changes=True) as amp:
        assert amp.changes().keys() == run.values().keys()
    with (
        tritonamp.enable(Net(), level="O2", track_changes=True) as amp,
        pytest.raises(RuntimeError, match="enabled without an optimizer"),
    ):
        amp.changes()


# any use


ACTIONS: dict[str, Callable[[Tracked], object]] = {
    "step": lambda run: run.step(),
    "skip": lambda run: run.step(bad=True),
    "clipped step": lambda run: run.step(max_norm=0.01),
    "micro-batches": lambda run: (run.backward(), run.backward(), run.finish()),
    "write": written,
    "replace": replaced,
    "write master": written_master,
    "load": loaded,
    "write norm": lambda run: run.model.norm.weight.detach().mul_(2),
    "heal": lambda run: run.amp.heal("conv") if not run.amp.stats()["healed"] else None,
    "unheal": lambda run: run.amp.unheal("conv") if run.amp.stats()["healed"] else None,
    "send": lambda run: run.send(),
    "send some whole": lambda run: run.send(dense_above=0.1),
    "ask": lambda run: run.amp.changes(clear=False),
    "save and load": lambda run: run.load(run.states()),
    "rates": lambda run: [g.update(lr=random.choice([1e-4, 1e-2])) for g in groups(run)],
}


def groups(run: Tracked) -> list[dict[str, Any]]:
    return [group for optimizer in run.optimizers for group in optimizer.param_groups]


SAMPLED = [
    *[(name, level, {}) for name in ("Adagrad", "AdamW") for level in ("O2", "O3")],
    ("AdamW", "O2", {"state": "8bit"}),
    *more([(name, "O3", {}) for name in ("Adadelta", "Lion", "SGD momentum")]),
    *more([("AdamW", "O2", fields) for fields in PACKED]),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("optimizer", "level", "fields"), SAMPLED, ids=repr)
def test_a_sampler_has_the_models_bits(
    runs_on_cpu: Runs, optimizer: str, level: str, fields: dict[str, Any], seed: int
) -> None:
    dtype = [torch.float16, torch.bfloat16][seed % 2]
    run = runs_on_cpu(optimizer, level, dtype=dtype, **fields)
    run.note = lambda: None  # type: ignore[method-assign]
    random.seed(seed)
    for name in random.choices(list(ACTIONS), k=25):
        ACTIONS[name](run)
    run.send()
    assert total(run) == 0


# any use, exactly


def vetoed(run: Tracked) -> None:
    run.backward()
    run.amp.veto(True)
    run.finish()


def averaged(run: Tracked) -> None:
    average = run.amp.ema(0.5)
    run.step()
    average.update()
    average.copy_to(run.model)


def slept(run: Tracked, weights: bool = False) -> None:
    run.amp.sleep(weights=weights)
    others = [torch.full((150,), 7.0, device=run.x.device) for _ in range(5)]
    run.amp.wake()
    del others


def enabled_again(run: Tracked) -> None:
    """Another sampler begins with the half weights."""
    run.amp.disable()
    run.amp = tritonamp.enable(run.model, run.optimizers, **run.fields)
    run.sampler, run.before = run.values(), run.values()
    for mask in run.masks.values():
        mask.zero_()


def reordered(run: Tracked) -> None:
    now = run.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    to = torch.contiguous_format if now else torch.channels_last
    run.model.conv.to(memory_format=to)


def joined(run: Tracked) -> None:
    weight = run.model.frozen.weight
    if not weight.requires_grad:
        run.optimizers[-1].add_param_group({"params": [weight.requires_grad_(True)]})
        run.sampler["frozen.weight"] = torch.zeros_like(weight)
        run.before["frozen.weight"] = run.values()["frozen.weight"]
        run.masks["frozen.weight"] = torch.zeros(weight.numel()).bool()


ALL = None
"""Every parameter may count as a whole."""
EXACTLY: dict[str, tuple[Callable[[Tracked], object], tuple[str, ...] | None]] = {
    "step": (lambda run: run.step(), ()),
    "skip": (lambda run: run.step(bad=True), ()),
    "clipped step": (lambda run: run.step(max_norm=0.01), ()),
    "micro-batches": (ACTIONS["micro-batches"], ()),
    "scaler's loop": (lambda run: run.step(by_scaler=True), ()),
    "veto": (vetoed, ()),
    "rates": (ACTIONS["rates"], ()),
    "asleep": (slept, ()),
    "all asleep": (lambda run: slept(run, weights=True), ()),
    "stats": (lambda run: run.amp.stats(), ()),
    "load optimizers": (
        lambda run: [o.load_state_dict(o.state_dict()) for o in run.optimizers],
        (),
    ),
    "write": (written, ("first.weight",)),
    "replace": (replaced, ("first.weight",)),
    "write master": (written_master, ("first.weight",)),
    "write norm": (ACTIONS["write norm"], ("norm.weight",)),
    "heal": (ACTIONS["heal"], ("conv.weight", "conv.bias")),
    "unheal": (ACTIONS["unheal"], ("conv.weight", "conv.bias")),
    "another order of memory": (reordered, ("conv.weight", "conv.bias")),
    "join": (joined, ("frozen.weight",)),
    "average": (averaged, ALL),
    "load": (loaded, ALL),
    "save and load": (ACTIONS["save and load"], ALL),
    "enable again": (enabled_again, ()),
}


class Exact(Tracked):
    """Notes after each action which parameters may count as a whole."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.whole = set[str]()
        super().__init__(*args, **fields)

    def note(self) -> None:
        for name, value in self.values().items():
            if self.before[name].dtype is not value.dtype:  # healed, or again half
                self.whole.add(name)
                self.before[name] = value
        super().note()

    def act(self, name: str) -> None:
        action, inexact = EXACTLY[name]
        action(self)
        self.note()
        if name == "enable again":
            self.whole.clear()
        self.whole.update(self.before if inexact is ALL else inexact)

    def assert_sent(self, **arguments: Any) -> None:
        """Send, and compare positions with those of the copies."""
        found = self.amp.changes(**arguments)
        self.note()  # a written master is rounded by the call
        assert found.keys() == self.before.keys()
        for name, (positions, values) in found.items():
            n = self.before[name].numel()
            at = range(n) if positions is None else positions.tolist()
            expected = {*self.masks[name].nonzero().flatten().tolist()}
            if name in self.whole or positions is None:
                assert expected <= {*at} and len(at) <= n, name
            else:
                assert {*at} == expected, name
            assert len(values.flatten()) == len(at)
        self.receive(found)
        for name, value in self.values().items():
            assert value.dtype is self.sampler[name].dtype, name
            assert not unlike(self.sampler[name], value).any(), name
        if arguments.get("clear", True):
            self.whole.clear()
            for mask in self.masks.values():
                mask.zero_()


# no Adagrad: that of torch 2.11 has no state for parameters that join later
FUSED_OR_OWN = [*FUSED, "RMSprop momentum"]
USES = [
    *[("AdamW", level, {}) for level in ("O2", "O3")],
    ("AdamW", "O2", {"state": "8bit"}),
    ("AdamW", "O2", {"masters": "packed", "backend": "triton"}),
    ("Adadelta", "O2", {"track_lost_updates": True}),
    ("SGD momentum", "O2", {"on_nonfinite": "heal"}),
    *more([(name, level, {}) for name in FUSED_OR_OWN for level in ("O2", "O3")]),
    *more([(name, "O2", {}) for name in ("RAdam", "Adadelta")]),
    *more([(name, "O2", form) for name in FUSED for form in (*PACKED, {"state": "bf16"})]),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("optimizer", "level", "fields"), USES, ids=repr)
def test_any_use_is_exact(
    device: torch.device, optimizer: str, level: str, fields: dict[str, Any], seed: int
) -> None:
    """Positions are those of the copies wherever the page says so."""
    dtype = [torch.float16, torch.bfloat16][seed % 2]
    run = Exact(optimizer, level, device, lr=1e-3, dtype=dtype, **fields)
    chosen = random.Random(f"{seed} {optimizer}")
    random.seed(seed)
    for _ in range(8):
        for name in chosen.choices(list(EXACTLY), k=4):
            run.act(name)
        run.assert_sent(clear=chosen.random() < 0.7, dense_above=chosen.choice([None, None, 0.3]))
    run.assert_sent()
    assert total(run) == 0
    run.amp.disable()

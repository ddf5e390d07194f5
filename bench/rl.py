"""How far a trainer's log-probabilities are from a sampler's, and what a sampler sees of a step.

    python bench/rl.py            # three seeds, minutes on a CPU; writes bench/results/rl-cpu.json
    python bench/rl.py --quick    # one seed, tiny sizes; prints, writes nothing

A transformer learns CPython's documentation, character by character, in FP32. Each format then
continues it as a policy that is rewarded for vowels. The sampler is another model, as in a separate
engine: plain torch with half weights, one character at a time, in smaller batches than those of the
trainer.
"""

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import markdown
import provenance
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp
from tritonamp import functional
from tritonamp.demo import data
from tritonamp.names import short

RESULTS = Path(__file__).parent / "results"
PATH = RESULTS / "rl-cpu.json"
RATES = 1e-6, 3e-6, 1e-5
NOT_MEASURED = "Not measured yet: `python bench/rl.py`"
CPU = torch.device("cpu")
FP16, BF16 = torch.float16, torch.bfloat16

Run = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """The precision of a trainer, and the kind of its sampler.

    Attributes:
        half: dtype of the sampler.
        level: level of tritonamp, or None for plain torch in FP32.
        head: True: logits and their linear layer are FP32, in both.
        same: True: the sampler calls the enabled model, there is no other model.
        options: further keywords of ``tritonamp.enable``.
    """

    half: torch.dtype
    level: str | None
    head: bool = False
    same: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def enable(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        if self.level is None:
            return None
        modules = ("head",) if self.head else ()
        return tritonamp.enable(
            model,
            optimizer,
            level=self.level,
            dtype=self.half,
            fp32_modules=modules,
            **self.options,
        )


class Sizes(NamedTuple):
    """Sizes of the model, of its training in FP32, of the policy's steps and of the comparison."""

    width: int = 64
    layers: int = 3
    pretraining: int = 400
    prompts: int = 8
    group: int = 4
    answer: int = 24
    steps: int = 16
    compared: int = 256


QUICK = Sizes(width=32, layers=1, pretraining=4, prompts=2, group=2, answer=4, steps=2, compared=8)
PROMPT = 16
SAMPLED = 24
"""Answers that a sampler draws at a time."""
REUSED = 8
"""Steps of the policy on the same answers."""


def formats() -> dict[str, Format]:
    """Return the rows of the table by name."""
    found = {f"FP32, {short(half)} sampler": Format(half, None) for half in (FP16, BF16)}
    for half in (FP16, BF16):
        name = short(half)
        found[f"{name} O1"] = Format(half, "O1")
        found[f"{name} O2"] = two = Format(half, "O2")
        found[f"{name} O2, FP32 head"] = replace(two, head=True)
        found[f"{name} O2, samples itself"] = own = replace(two, same=True)
        found[f"{name} O2, samples itself, batch_invariant"] = replace(
            own, options={"batch_invariant": True}
        )
    return found


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Logits (rows, length, words) of the next character, or of the last one alone."""

    def __init__(self, words: int, sizes: Sizes) -> None:
        super().__init__()
        length = max(PROMPT + sizes.answer, data.CONTEXT)
        self.words = nn.Embedding(words, sizes.width)
        self.places = nn.Embedding(length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, words, bias=False)

    def forward(self, tokens: Tensor, last: bool = False) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x[:, -1:] if last else x)
        return self.head(x.to(self.head.weight.dtype))


def trained(sizes: Sizes, seed: int) -> tuple[Transformer, data.Split]:
    """Return a model that has learned the characters in FP32, and the characters."""
    torch.manual_seed(seed)
    split, words = data.characters()
    model = Transformer(words, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in data.batches(split, 32, sizes.pretraining, seed, CPU):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    return model, split


def sampler_of(model: Transformer, chosen: Format) -> Transformer:
    """Return a plain model with the weights of ``model`` in half; an FP32 head stays FP32."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    width, length = weights["words.weight"].shape[1], weights["places.weight"].shape[0]
    sizes = Sizes(width, len(model.blocks), answer=length - PROMPT)
    sampler = Transformer(weights["words.weight"].shape[0], sizes)
    sampler.load_state_dict(weights)
    sampler.to(chosen.half)
    if chosen.head:
        sampler.head.float().load_state_dict({"weight": weights["head.weight"]})
    return sampler


@torch.no_grad()
def sample(sampler: nn.Module, prompts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return prompts with drawn answers, and log-probabilities (rows, length) of the answers."""
    tokens, found = [], []
    for part in prompts.split(SAMPLED):
        log_probs = []
        for _ in range(length):
            scores = F.log_softmax(sampler(part, last=True)[:, 0].float(), -1)
            drawn = torch.multinomial(scores.exp(), 1)
            part = torch.cat([part, drawn], 1)
            log_probs.append(scores.gather(1, drawn))
        tokens.append(part)
        found.append(torch.cat(log_probs, 1))
    return torch.cat(tokens), torch.cat(found)


def log_probs_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of the answers in one forward of all of them."""
    scores = F.log_softmax(model(tokens[:, :-1]).float(), -1)
    return scores.gather(2, tokens[:, 1:, None]).squeeze(2)[:, PROMPT - 1 :]


def compare(model: Transformer, chosen: Format, prompts: Tensor, length: int) -> Run:
    """Return the numbers of ``functional.mismatch`` on answers that the sampler draws."""
    sampler = model if chosen.same else sampler_of(model, chosen)
    tokens, drawn = sample(sampler, prompts, length)
    with torch.no_grad():
        found = functional.mismatch(log_probs_of(model, tokens), drawn)
    return {name: value.item() for name, value in found._asdict().items()}


def changes(
    model: Transformer, chosen: Format, split: data.Split, sizes: Sizes, rate: float
) -> tuple[float, float]:
    """Train the policy, and return two means over the second half of its steps.

    Returns:
        share of the half weights that a step changes; cosine of the angle between the step of the
        FP32 weights and what becomes of it in half.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    amp = chosen.enable(model, optimizer)
    vowels = torch.tensor(vowel_codes())
    generator = torch.Generator().manual_seed(0)
    shares, cosines = [], []
    for step in range(sizes.steps):
        if step % REUSED == 0:
            rows = torch.randint(len(split.x), (sizes.prompts,), generator=generator)
            prompts = split.x[rows, :PROMPT].repeat_interleave(sizes.group, 0)
            tokens, drawn = sample(sampler_of(model, chosen), prompts, sizes.answer)
            rewards = torch.isin(tokens[:, PROMPT:], vowels).float().mean(1).view(-1, sizes.group)
            centred = rewards - rewards.mean(1, keepdim=True)
            advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        ratio = (log_probs_of(model, tokens) - drawn).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        before = exact_weights(model)
        optimizer.zero_grad()
        if amp is None:
            (-gain.mean()).backward()
        else:
            amp.backward(-gain.mean())
        optimizer.step()
        if step >= sizes.steps // 2:
            share, cosine = seen(before, exact_weights(model), chosen.half)
            shares.append(share)
            cosines.append(cosine)
    if amp is not None:
        amp.disable()
    return sum(shares) / len(shares), sum(cosines) / len(cosines)


def exact_weights(model: nn.Module) -> Tensor:
    """Return all FP32 weights as one vector."""
    return torch.cat([value.flatten().float() for value in model.state_dict().values()])


def seen(before: Tensor, after: Tensor, half: torch.dtype) -> tuple[float, float]:
    """Return the share of half weights that differ, and the cosine of both changes."""
    old, new = before.to(half), after.to(half)
    step, half_step = (after - before).double(), new.double() - old.double()
    cosine = F.cosine_similarity(step, half_step, 0).item()
    return (old != new).double().mean().item(), cosine


def vowel_codes() -> list[int]:
    alphabet = sorted(set(data.python_documentation()))
    return [alphabet.index(character) for character in "aeiou"]


def measure(sizes: Sizes, seed: int) -> Iterator[Run]:
    """Yield the numbers of each format, from one trained model."""
    model, split = trained(sizes, seed)
    prompts = split.test_x[torch.arange(sizes.compared) % len(split.test_x), :PROMPT]
    for name, chosen in formats().items():
        torch.manual_seed(seed)
        run: Run = {"format": name, "seed": seed}
        policy = copy.deepcopy(model)
        amp = chosen.enable(policy, torch.optim.AdamW(policy.parameters()))
        run |= compare(policy, chosen, prompts, sizes.answer)
        if amp is not None:
            amp.disable()
        if not chosen.same:
            for rate in RATES:
                torch.manual_seed(seed)
                share, cosine = changes(copy.deepcopy(model), chosen, split, sizes, rate)
                run |= {f"changed {rate:g}": share, f"cosine {rate:g}": cosine}
        yield run


def table(runs: list[Run]) -> str:
    """Return a row for each format: medians of the seeds, and the worst ratio of all."""
    rates = (f"{rate:g}".replace("e-0", "e-") for rate in RATES)
    head = "trainer", "k3", "outside", "worst ratio", *(f"changed at {rate}" for rate in rates)
    rows = []
    for name in dict.fromkeys(run["format"] for run in runs):
        own = [run for run in runs if run["format"] == name]
        k3 = _median(own, "k3")
        cells = [f"{k3:.1e}" if k3 else "0", _percent(_median(own, "outside"))]
        cells += [f"{_worst(own):.3f}", *(_changed(own, f"{rate:g}") for rate in RATES)]
        rows.append((name, *cells))
    return markdown.table(head, rows)


def results(path: Path = PATH) -> str:
    """Return the Markdown of the measured runs."""
    if not path.exists():
        return NOT_MEASURED
    record = json.loads(path.read_text())
    seeds = len({run["seed"] for run in record["runs"]})
    about = (
        f"`{record['command']}` on {record['cores']} CPU cores, torch {record['torch']}, commit "
        f"{record['commit']}: medians of {seeds} seeds, and the worst ratio of all."
    )
    return f"{table(record['runs'])}\n\n{markdown.paragraph(about)}"


def _median(runs: list[Run], key: str) -> float:
    return median(run[key] for run in runs)


def _changed(runs: list[Run], rate: str) -> str:
    if f"changed {rate}" not in runs[0]:
        return ""
    share, cosine = (_median(runs, f"{key} {rate}") for key in ("changed", "cosine"))
    return f"{_percent(share)} ({cosine:.2f})"


def _worst(runs: list[Run]) -> float:
    return max((run["worst_ratio"] for run in runs), key=lambda ratio: max(ratio, 1 / ratio))


def _percent(share: float) -> str:
    if share == 0:
        return "0"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A trainer's and a sampler's log-probabilities.")
    parser.add_argument("--quick", action="store_true", help="one seed, tiny sizes; writes nothing")
    args = parser.parse_args(arguments)
    record = provenance.machine(CPU)
    start, runs = time.perf_counter(), []
    for seed in range(1 if args.quick else 3):
        for run in measure(QUICK if args.quick else Sizes(), seed):
            runs.append(run)
            print(run, flush=True)
    print(table(runs))
    if not args.quick:
        record |= {
            "command": "python bench/rl.py",
            "cores": os.cpu_count(),
            "seconds": round(time.perf_counter() - start),
        }
        provenance.write_record(PATH, record | {"runs": runs})
        print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())

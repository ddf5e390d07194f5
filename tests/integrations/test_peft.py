"""PEFT's adapters on a half model: the base stays as it is, the adapters train with FP32 values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, storage_bytes
from runs import Training
from tiny_models import (
    loaded_gpt2,
    losses_of,
    param_dtypes,
    peft,
    rows_of,
    stored,
    tokens,
    trainer_of,
    transformers,
    with_lora,
)
from torch import nn

from tritonamp.integrations.transformers import enable

load_file = pytest.importorskip("safetensors.torch").load_file

pytestmark = [
    pytest.mark.clients,
    # of PEFT to transformers
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
STEPS = 12
TARGETS = ["c_attn", "c_fc"]
SAVED = "adapter_model.safetensors"
# the adapters in FP32, as PEFT has it, or in the dtype of the base
KINDS = pytest.mark.parametrize("fp32_adapters", [True, False], ids=["FP32", "half"])
HALVES = pytest.mark.parametrize("half", [FP16, BF16], ids=str)
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def adapted(folder: Path, half: torch.dtype, fp32_adapters: bool, width: int = 32) -> Any:
    base = loaded_gpt2(folder / "base", half, width)
    return with_lora(base, TARGETS, autocast_adapter_dtype=fp32_adapters)


class OnTokens(Training):
    """A training of the adapters on one batch of tokens; level None trains without a handle."""

    def __init__(self, model: nn.Module, level: str | None = None) -> None:
        super().__init__(model, level=level)

    def loss(self, x: Any = None) -> torch.Tensor:
        return self.model(input_ids=tokens(), labels=tokens()).loss  # type: ignore[no-any-return]

    def go_on(self) -> list[float]:
        return [float(self.step()) for _ in range(STEPS)]


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in model.state_dict().items() if "lora" in n}


@KINDS
@HALVES
@LEVELS
def test_adapters_train_as_in_fp32(
    level: str, half: torch.dtype, fp32_adapters: bool, tmp_path: Path
) -> None:
    exact = adapted(tmp_path, half, fp32_adapters).float()
    expected = OnTokens(exact).go_on()
    model = adapted(tmp_path, half, fp32_adapters)
    base = stored(model, trains=False)
    run = OnTokens(model, level)
    amp = run.amp
    assert amp.policy.dtype is half
    assert param_dtypes(model, trains=True) == {FP32 if level == "O1" else half}
    losses = run.go_on()
    assert amp.stats()["skipped"] == 0
    assert stored(model, trains=False) == base and {d for d, _ in base.values()} == {half}
    assert {value.dtype for value in adapters(model).values()} == {FP32}
    # rounding logits moves the loss by twice their half ulp; as much again for what comes before
    logits = exact(input_ids=tokens()).logits
    rounding = 2 * torch.finfo(half).eps * logits.abs().max().item()
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < rounding
    assert expected[0] - expected[-1] > 10 * rounding
    amp.disable()
    assert param_dtypes(model, trains=True) == {FP32 if fp32_adapters else half}
    assert stored(model, trains=False) == base


@KINDS
@LEVELS
def test_nothing_of_the_size_of_the_base_is_added(
    level: str, fp32_adapters: bool, tmp_path: Path
) -> None:
    model = adapted(tmp_path, FP16, fp32_adapters, width=256)
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    before = storage_bytes()
    run = OnTokens(model, level)
    run.go_on()
    model.save_pretrained(tmp_path / "saved")
    # half copy, master, two moments, gradients of two kinds
    assert storage_bytes() - before < trained * (2 + 4 + 4 + 4 + 2 + 4) + 20_000 < base / 8
    run.end()


@KINDS
@HALVES
@LEVELS
def test_saved_adapters_load_without_us(
    level: str, half: torch.dtype, fp32_adapters: bool, tmp_path: Path
) -> None:
    model = adapted(tmp_path, half, fp32_adapters)
    run = OnTokens(model, level)
    run.go_on()
    trained = adapters(model)
    model.save_pretrained(tmp_path / "enabled")
    run.end()
    model.save_pretrained(tmp_path / "disabled")
    files = [load_file(tmp_path / name / SAVED) for name in ("enabled", "disabled")]
    assert_same(*files)
    assert {v.dtype for v in files[0].values()} == {FP32 if fp32_adapters else half}
    assert same_values(files[0], trained)

    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(
        plain, tmp_path / "enabled", autocast_adapter_dtype=fp32_adapters
    )
    assert_same(adapters(loaded), adapters(model))
    merged = model.merge_and_unload()
    assert_same(merged.state_dict(), loaded.merge_and_unload().state_dict())
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert param_dtypes(again, trains=True) == {half}
    assert_same(again.state_dict(), merged.state_dict())


def same_values(files: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]) -> bool:
    """Whether files hold what a state does, rounded to the dtype that they have."""
    of_state = {name.replace(".default.", "."): value for name, value in trained.items()}
    return files.keys() == of_state.keys() and all(
        torch.equal(value, of_state[name].to(value.dtype)) for name, value in files.items()
    )


@KINDS
@LEVELS
def test_adapters_are_loaded_into_the_parameters_that_train(
    level: str, fp32_adapters: bool, tmp_path: Path
) -> None:
    """PEFT replaces half parameters by new FP32 ones, which are in no optimizer."""
    other = adapted(tmp_path, FP16, True)
    OnTokens(other).go_on()
    other.save_pretrained(tmp_path / "other")
    model = adapted(tmp_path, FP16, fp32_adapters)
    run = OnTokens(model, level)
    params = list(model.parameters())
    model.load_adapter(tmp_path / "other", "default", is_trainable=True)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert_same(adapters(model), adapters(other))
    run.go_on()
    assert not same_values(load_file(tmp_path / "other" / SAVED), adapters(model))
    run.end()


# under Trainer


def trainer_on_tokens(folder: Path, model: nn.Module, **arguments: Any) -> Any:
    data = rows_of(tokens())
    return trainer_of(
        folder,
        model,
        data,
        more={"eval_dataset": data},
        max_steps=STEPS,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=STEPS // 2,
        **arguments,
    )


@KINDS
@HALVES
@LEVELS
def test_trainer(level: str, half: torch.dtype, fp32_adapters: bool, tmp_path: Path) -> None:
    best = dict(eval_strategy="steps", eval_steps=STEPS // 2, load_best_model_at_end=True)
    trainer = trainer_on_tokens(tmp_path / "run", adapted(tmp_path, half, fp32_adapters), **best)
    base = stored(trainer.model, trains=False)
    enable(trainer, level=level)
    trainer.train()
    losses = losses_of(trainer)
    assert losses[-1] < losses[0] - 10 * torch.finfo(half).eps
    assert stored(trainer.model, trains=False) == base

    checkpoints = [load_file(tmp_path / f"run/checkpoint-{s}" / SAVED) for s in (STEPS // 2, STEPS)]
    assert {v.dtype for file in checkpoints for v in file.values()} == {FP32}
    assert same_values(checkpoints[1], adapters(trainer.model))  # the best, loaded
    trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / SAVED)
    assert {v.dtype for v in saved.values()} == {FP32 if fp32_adapters else half}
    assert same_values(saved, adapters(trainer.model))

    resumed = trainer_on_tokens(
        tmp_path / "resumed", adapted(tmp_path, half, fp32_adapters), **best
    )
    enable(resumed, level=level)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"run/checkpoint-{STEPS // 2}"))
    assert_same(adapters(resumed.model), adapters(trainer.model))
    for each in (trainer, resumed):
        each.accelerator.free_memory()
        assert param_dtypes(each.model, trains=True) == {FP32 if fp32_adapters else half}


# quantised bases


def llama(folder: Path, half: torch.dtype, **arguments: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
    )
    transformers.LlamaForCausalLM(config).to(half).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments)


def in_8_bits_by_torchao(folder: Path, half: torch.dtype) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return llama(folder, half, quantization_config=config)


def by_bitsandbytes(folder: Path, half: torch.dtype, bits: int) -> Any:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    codes = torch.full((1, 64), 127, dtype=torch.int8)
    with torch.autocast("cpu", torch.float16):
        sums = bitsandbytes.functional.int8_linear_matmul(codes, codes)
    if bits == 8 and sums.item() != 64 * 127**2:
        pytest.skip(
            "bitsandbytes adds up 8 bits in a matmul here, which torch.autocast has in half"
        )
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_compute_dtype=half,
        bnb_4bit_quant_type="nf4",
    )
    model = llama(folder, half, quantization_config=config, device_map="cpu")
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


BASES = {
    "torchao, 8 bits": in_8_bits_by_torchao,
    "bitsandbytes, 4 bits": lambda folder, half: by_bitsandbytes(folder, half, 4),
    "bitsandbytes, 8 bits": lambda folder, half: by_bitsandbytes(folder, half, 8),
}


@pytest.mark.parametrize("kind", BASES)
@HALVES
@LEVELS
def test_adapters_train_on_a_quantised_base(
    level: str, half: torch.dtype, kind: str, tmp_path: Path
) -> None:
    model = with_lora(BASES[kind](tmp_path, half), ["q_proj", "v_proj"])
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and is_quantised(m)]
    assert len(weights) >= 7
    states = [(type(w), w.dtype, address(w)) for w in weights]
    run = OnTokens(model, level)
    amp = run.amp
    assert states == [(type(w), w.dtype, address(w)) for w in weights]
    # that one does not say what it computes in
    assert amp.policy.dtype is (FP16 if kind == "bitsandbytes, 8 bits" else half)
    losses = run.go_on()
    assert losses[-1] < losses[0] - 0.05
    model.save_pretrained(tmp_path / "saved")
    assert {v.dtype for v in load_file(tmp_path / "saved" / SAVED).values()} == {FP32}
    amp.disable()
    assert [kind for kind, *_ in states] == [type(w) for w in weights]


def is_quantised(module: nn.Linear) -> bool:
    weight = module.weight
    return weight.dtype in (torch.int8, torch.uint8) or hasattr(weight, "__tensor_flatten__")


def address(weight: Any) -> int:
    return (weight.qdata if hasattr(weight, "qdata") else weight).data_ptr()

"""A diffusion model fine-tuned as DreamBooth does it, under Accelerate, from half weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same
from tiny_models import param_dtypes, peft, stored
from torch import nn

import tritonamp

pytest.importorskip("accelerate")

from accelerate import Accelerator

from tritonamp.integrations.accelerate import enable

diffusers = pytest.importorskip("diffusers")
load_file = pytest.importorskip("safetensors.torch").load_file

pytestmark = pytest.mark.clients

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
STEPS, TIMES = 12, 3
HALVES = pytest.mark.parametrize("half", [FP16, BF16], ids=str)
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def loaded_unet(folder: Path, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    ).save_pretrained(folder)
    return diffusers.UNet2DConditionModel.from_pretrained(folder, torch_dtype=dtype)


def add_lora(unet: Any) -> None:
    unet.requires_grad_(False)
    torch.manual_seed(1)
    targets = ["to_k", "to_q", "to_v", "to_out.0", "conv1"]
    unet.add_adapter(
        peft.LoraConfig(r=2, lora_alpha=16, init_lora_weights="gaussian", target_modules=targets)
    )


def fine_tune(
    accelerator: Accelerator, unet: Any, dtype: torch.dtype = FP32
) -> tuple[Any, list[float]]:
    """Return the prepared model, and the losses of each step; ``dtype`` is that of inputs."""
    trained = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    unet, optimizer, scheduler = accelerator.prepare(unet, optimizer, scheduler)
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)
    latents, words = random(0, 4, 4, 8, 8), random(1, 4, 3, 8)
    losses = []
    for step in range(STEPS):
        noise = random(2 + step % TIMES, *latents.shape)
        times = torch.arange(4) * 20 + step % TIMES
        noisy = noise_scheduler.add_noise(latents, noise, times)
        with accelerator.accumulate(unet):
            predicted = unet(noisy.to(dtype), times, words.to(dtype), return_dict=False)[0]
            loss = nn.functional.mse_loss(predicted.float(), noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return unet, losses


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "all weights"])
@HALVES
@LEVELS
def test_fine_tuning(level: str, half: torch.dtype, lora: bool, tmp_path: Path) -> None:
    exact, unet = (loaded_unet(tmp_path / "base", half) for _ in range(2))
    if lora:
        add_lora(exact)
        add_lora(unet)
    _, expected = fine_tune(Accelerator(cpu=True), exact.float())
    base = stored(unet, trains=False)
    accelerator = Accelerator(cpu=True)
    # overflows nowhere
    enable(accelerator, level=level, scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10))
    unet, losses = fine_tune(accelerator, unet, half)
    amp: Any = accelerator.amp  # type: ignore[attr-defined]
    assert amp.policy.dtype is half and amp.stats()["skipped"] == 0
    assert stored(unet, trains=False) == base and {d for d, _ in base.values()} <= {half}
    # a mean of squares of which each is rounded relatively, by its half ulp and by what comes
    # before it in about as many layers
    rounding = 2 * torch.finfo(half).eps * max(expected)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < rounding
    fell = sum(expected[:TIMES]) - sum(expected[-TIMES:])
    assert fell > 4 * rounding

    trained = {n: v.clone() for n, v in unet.state_dict().items()}
    plain = accelerator.unwrap_model(unet)
    save = "save_lora_adapter" if lora else "save_pretrained"
    getattr(plain, save)(tmp_path / "enabled")
    accelerator.free_memory()
    assert param_dtypes(unet, trains=True) == {half}
    getattr(plain, save)(tmp_path / "disabled")
    name = "pytorch_lora_weights" if lora else "diffusion_pytorch_model"
    files = [load_file(tmp_path / f / f"{name}.safetensors") for f in ("enabled", "disabled")]
    assert_same(*files)
    assert {value.dtype for value in files[0].values()} == {half}
    assert {v.dtype for n, v in trained.items() if "lora" in n or not lora} == {FP32}
    if not lora:
        again = diffusers.UNet2DConditionModel.from_pretrained(
            tmp_path / "enabled", torch_dtype=half
        )
        assert_same(again.state_dict(), {n: v.to(half) for n, v in trained.items()})


@pytest.mark.parametrize("mixed_precision", ["fp16", "bf16"])
@LEVELS
def test_scripts_that_ask_for_mixed_precision(
    level: str, mixed_precision: str, tmp_path: Path
) -> None:
    """They hold the base in that dtype and the adapters in FP32."""
    half = {"fp16": FP16, "bf16": BF16}[mixed_precision]
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    enable(accelerator, level=level)
    unet = loaded_unet(tmp_path / "base", half)
    add_lora(unet)
    diffusers.training_utils.cast_training_params(unet, dtype=FP32)
    base = stored(unet, trains=False)
    unet, losses = fine_tune(accelerator, unet, half)
    assert accelerator.amp.policy.dtype is half  # type: ignore[attr-defined]
    assert sum(losses[-TIMES:]) < sum(losses[:TIMES])
    assert stored(unet, trains=False) == base
    accelerator.unwrap_model(unet).save_lora_adapter(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "pytorch_lora_weights.safetensors")
    assert {value.dtype for value in saved.values()} == {FP32}
    accelerator.free_memory()
    assert param_dtypes(unet, trains=True) == {FP32}

"""Tiny pipelines that generate in bfloat16, and whose transformer overflows in float16."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

TOO_LARGE = 3e5
"""Factor of a block's last weights, whose products then leave the range of float16."""


class Block(nn.Module):
    """A block of a diffusion transformer, with norms that the time modulates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, gate = self.modulation(time)[:, None].chunk(2, -1)
        hidden = self.norm(x) * (1 + scale)
        return x + gate * 1e-3 * self.down(nn.functional.gelu(self.up(hidden)))


class Transformer(nn.Module):
    """A diffusion transformer over latents and the embeddings of a prompt."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, width), nn.ModuleList(map(Block, 2 * [width]))
        self.norm, self.out = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 4)
        self.dtype = torch.bfloat16
        with torch.no_grad():
            self.blocks[0].down.weight.mul_(TOO_LARGE)  # type: ignore[operator,union-attr]

    def forward(self, hidden_states: Tensor, prompt_embeds: Tensor, timestep: Tensor) -> Tensor:
        x = torch.cat([prompt_embeds, self.embed(hidden_states)], 1)
        time = timestep[:, None].expand(-1, x.shape[-1]).cos()
        for block in self.blocks:
            x = block(x, time.to(x.dtype))
        return self.out(self.norm(x))[:, prompt_embeds.shape[1] :]


class StandIn:
    """A pipeline with the names of those of diffusers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.transformer = Transformer().to(torch.bfloat16).eval()
        self.decoder = nn.Linear(4, 3, dtype=torch.bfloat16)

    @torch.no_grad()
    def __call__(self, prompt: str, num_inference_steps: int = 2) -> SimpleNamespace:
        numbers = torch.Generator().manual_seed(0)
        latents = torch.randn(1, 8, 4, generator=numbers).bfloat16()
        prompt_embeds = torch.randn(1, 3, 16, generator=numbers).bfloat16()
        for step in range(num_inference_steps):
            time = torch.tensor([1 - step / num_inference_steps]).bfloat16()
            velocity = self.transformer(
                hidden_states=latents, prompt_embeds=prompt_embeds, timestep=time
            )
            latents = latents - velocity / num_inference_steps
        return SimpleNamespace(images=[self.decoder(latents)])


def tiny_flux() -> Any:
    """Return a FluxPipeline of diffusers without text encoders, with random weights."""
    import diffusers

    class Flux(diffusers.FluxPipeline):  # type: ignore[misc,name-defined]
        """Embeds every prompt alike, and makes small images."""

        def __call__(self, prompt: str, num_inference_steps: int = 2) -> Any:
            return super().__call__(
                prompt,
                height=16,
                width=16,
                num_inference_steps=num_inference_steps,
                generator=torch.Generator().manual_seed(0),
                output_type="pt",
            )

        def encode_prompt(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
            numbers = torch.Generator().manual_seed(0)
            embeds = torch.randn(1, 3, 32, generator=numbers).bfloat16()
            return embeds, embeds.mean(1), torch.zeros(3, 3).bfloat16()

    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    with torch.no_grad():
        transformer.transformer_blocks[0].ff.net[2].weight.mul_(TOO_LARGE)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,), latent_channels=1, norm_num_groups=2, shift_factor=0.0
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = Flux(scheduler, vae, None, None, None, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(torch.bfloat16)

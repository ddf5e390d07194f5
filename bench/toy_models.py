"""Models of known libraries at toy size, for ``counts.py --models``: a few layers, small widths."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 1024, 128, 4, 2, 64, 2
SIZE, CLASSES = 32, 10  # of images

Batch = dict[str, Tensor]


class Toy(NamedTuple):
    """A model that can be built.

    Attributes:
        package: package that it comes from, or None.
        build: returns the model and the arguments of its forward. The forward returns the loss, or
            an object with the attribute ``loss``.
    """

    package: str | None
    build: Callable[[], tuple[nn.Module, Batch]]


def tokens(batch: int = BATCH, length: int = LENGTH) -> Batch:
    ids = torch.randint(WORDS, (batch, length))
    return {"input_ids": ids, "labels": ids}


def of_transformers(name: str, own: Callable[[], Batch] = tokens, **config: Any) -> Toy:
    """Return a model of transformers.

    Args:
        name: class of the model.
        own: function that returns a batch.
        config: arguments of the class of its configuration.
    """

    def build() -> tuple[nn.Module, Batch]:
        model_class = getattr(importlib.import_module("transformers"), name)
        return model_class(model_class.config_class(**config)), own()

    return Toy("transformers", build)


def gpt2(**config: Any) -> Toy:
    return of_transformers(
        "GPT2LMHeadModel", n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=WORDS,
        n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0, **config,
    )  # fmt: skip


def llama(name: str = "LlamaForCausalLM", **config: Any) -> Toy:
    return of_transformers(
        name, num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, vocab_size=WORDS, max_position_embeddings=LENGTH, **config,
    )  # fmt: skip


ENCODER: dict[str, Any] = dict(
    num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
    intermediate_size=4 * WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def images() -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, SIZE, SIZE),
        "labels": torch.randint(CLASSES, (BATCH,)),
    }


class Classifier(nn.Module):
    """The loss of a network's logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(pixel_values), labels)


class Denoiser(nn.Module):
    """The loss of a U-Net of diffusers that predicts the noise of an image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.network(noisy, time).sample.float(), noise)


def unet() -> tuple[nn.Module, Batch]:
    diffusers: Any = importlib.import_module("diffusers")
    network = diffusers.UNet2DModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(32, 64), norm_num_groups=8, attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    noisy, noise = torch.randn(2, BATCH, 4, 16, 16)
    return Denoiser(network), {"noisy": noisy, "time": torch.tensor([3, 700]), "noise": noise}


MODELS = {
    "GPT-2": gpt2(),
    "GPT-2, eager attention": gpt2(attn_implementation="eager"),
    "BERT": of_transformers(
        "BertForMaskedLM", vocab_size=WORDS, max_position_embeddings=LENGTH, **ENCODER
    ),
    "Llama": llama(intermediate_size=352),
    "Llama, eager attention": llama(intermediate_size=352, attn_implementation="eager"),
    "ViT": of_transformers(
        "ViTForImageClassification", images, image_size=SIZE, patch_size=4, num_labels=CLASSES,
        **ENCODER,
    ),
    "U-Net": Toy("diffusers", unet),
    "ResNet-50": Toy(None, lambda: (Classifier(models.ResNet(width=8)), images())),
    "Mamba": of_transformers(
        "MambaForCausalLM", lambda: tokens(1, 16), num_hidden_layers=LAYERS, hidden_size=64,
        state_size=8, vocab_size=WORDS,
    ),
    "T5": of_transformers(
        "T5ForConditionalGeneration", num_layers=LAYERS, d_model=WIDTH, num_heads=HEADS,
        d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, vocab_size=WORDS, dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "Mixtral": llama(
        "MixtralForCausalLM", intermediate_size=256, num_local_experts=4, num_experts_per_tok=2
    ),
}  # fmt: skip

"""Small random models of the architectures the tests measure, with an input for each."""

from collections.abc import Callable
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

WIDTH, DEPTH, HEADS, VOCABULARY = 32, 3, 4, 50


def neox(attention: str = "sdpa", **options: Any) -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=32,
        attn_implementation=attention,
        **options,
    )
    return GPTNeoXForCausalLM(config)


def llama(attention: str = "sdpa") -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=3 * WIDTH,
        max_position_embeddings=32,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_positions=32))


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=32,
        )
    )


def timm_vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, num_classes=5
    )


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=DEPTH, num_heads=HEADS, hidden_dim=WIDTH, mlp_dim=4 * WIDTH
    )


class Encoder(nn.Module):
    """A plain nn.TransformerEncoder behind an embedding, as people write it."""

    def __init__(self, batch_first: bool = True, norm_first: bool = True, causal: bool = True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, batch_first=batch_first, norm_first=norm_first, dropout=0.1
        )
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.batch_first, self.causal = batch_first, causal

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype) if self.causal else None
        return self.encoder(x, mask=mask, is_causal=self.causal)


def tokens(samples: int = 2, length: int = 7) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1))


def images(samples: int = 2) -> Tensor:
    return torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt_neox": (neox, tokens),
    "gpt_neox-sequential": (lambda: neox(use_parallel_residual=False), tokens),
    "gpt_neox-eager": (lambda: neox("eager"), tokens),
    "llama-grouped-keys": (llama, tokens),
    "llama-eager": (lambda: llama("eager"), tokens),
    "gpt2": (gpt2, tokens),
    "bert": (bert, tokens),
    "timm-vit": (timm_vit, images),
    "torchvision-vit": (torchvision_vit, images),
    "encoder-prenorm": (Encoder, tokens),
    "encoder-postnorm": (lambda: Encoder(norm_first=False, causal=False), tokens),
    "encoder-sequence-first": (lambda: Encoder(batch_first=False), tokens),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """The model, its norms and biases away from their neutral start, and its input."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, inputs()

"""Small random models of every tested architecture, with an input for each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

from tests.support.draws import integers, normal, perturbed

WIDTH, DEPTH, HEADS, VOCABULARY = 32, 3, 4, 50


@dataclass(frozen=True)
class Size:
    """The size of a model; `tokens` counts tokens of text, and about as many patches of an image."""

    width: int = WIDTH
    depth: int = DEPTH
    tokens: int = 7

    def common(self) -> dict[str, Any]:
        """Return the size under the names that most transformers configs use."""
        return {
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": HEADS,
            "intermediate_size": 2 * self.width,
            "max_position_embeddings": max(32, self.tokens + 8),
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    @property
    def pixels(self) -> int:
        """The side of an image of about `tokens` patches of 8 x 8."""
        return 8 * max(2, int(self.tokens**0.5))


def language(name: str, **options: Any) -> Callable[[Size], nn.Module]:
    """Return a constructor of a transformers language model; options override the size, None removes an entry."""

    def make(size: Size) -> nn.Module:
        cls = getattr(transformers, name)
        settings = {**size.common(), **options}
        if settings.get("head_dim") is not None:
            settings["head_dim"] = size.width // HEADS
        return cls(
            cls.config_class(**{key: value for key, value in settings.items() if value is not None})
        )

    return make


def named(name: str, **names: str | Any) -> Callable[[Size], nn.Module]:
    """Return a constructor of a transformers model; `names` maps its config entries to width, layers, heads, positions."""

    def make(size: Size) -> nn.Module:
        cls = getattr(transformers, name)
        values = {
            "width": size.width,
            "layers": size.depth,
            "heads": HEADS,
            "positions": max(32, size.tokens + 8),
        }
        values |= {"inner": 2 * size.width}
        settings = {
            key: values.get(value, value) if isinstance(value, str) else value
            for key, value in names.items()
        }
        return cls(
            cls.config_class(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **settings)
        )

    return make


def gpt_neo(attention: str, **options: Any) -> Callable[[Size], nn.Module]:
    """Return a constructor of a GPT-Neo with one type of attention in every layer."""
    return named(
        "GPTNeoForCausalLM",
        hidden_size="width",
        num_layers="layers",
        num_heads="heads",
        max_position_embeddings="positions",
        attention_types=[[[attention], DEPTH]],
        **options,
    )


def neox(attention: str = "sdpa", size: Size | None = None, **options: Any) -> nn.Module:
    return language("GPTNeoXForCausalLM", attn_implementation=attention, **options)(size or Size())


def silence(model: nn.Module, layers: Iterable[int]):
    """Let some blocks of a GPT-NeoX add nothing."""
    for l in layers:
        for part in (
            model.gpt_neox.layers[l].attention.dense,
            model.gpt_neox.layers[l].mlp.dense_4h_to_h,
        ):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)


def vision(name: str, **options: Any) -> Callable[[Size], nn.Module]:
    def make(size: Size) -> nn.Module:
        cls = getattr(transformers, name)
        settings = {
            k: v
            for k, v in size.common().items()
            if k in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        }
        config = cls.config_class(
            **settings,
            intermediate_size=2 * size.width,
            image_size=size.pixels,
            patch_size=8,
            **options,
        )
        return cls(config)

    return make


def of_timm(name: str) -> Callable[[Size], nn.Module]:
    def make(size: Size) -> nn.Module:
        return timm.create_model(
            name,
            img_size=size.pixels,
            patch_size=8,
            embed_dim=size.width,
            depth=size.depth,
            num_heads=HEADS,
            num_classes=5,
        )

    return make


def timm_vit() -> nn.Module:
    return of_timm("vit_tiny_patch16_224")(Size())


def torchvision_vit(size: Size | None = None) -> nn.Module:
    size = size or Size()
    return torchvision.models.VisionTransformer(
        image_size=size.pixels,
        patch_size=8,
        num_layers=size.depth,
        num_heads=HEADS,
        hidden_dim=size.width,
        mlp_dim=2 * size.width,
    )


class Encoder(nn.Module):
    """An embedding followed by nn.TransformerEncoder."""

    def __init__(
        self,
        batch_first: bool = True,
        norm_first: bool = True,
        causal: bool = True,
        size: Size | None = None,
    ):
        super().__init__()
        size = size or Size()
        layer = nn.TransformerEncoderLayer(
            size.width,
            HEADS,
            2 * size.width,
            batch_first=batch_first,
            norm_first=norm_first,
            dropout=0.1,
        )
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.encoder = nn.TransformerEncoder(
            layer, size.depth, norm=nn.LayerNorm(size.width), enable_nested_tensor=False
        )
        self.batch_first, self.causal = batch_first, causal

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        mask = (
            nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
            if self.causal
            else None
        )
        return self.encoder(x, mask=mask, is_causal=self.causal)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in float64."""
    return normal(*shape, seed=seed, dtype=torch.float64)


def tokens(samples: int = 2, length: int = 7) -> Tensor:
    return integers(3, VOCABULARY, samples, length)


def tokenizer(prompt: str, return_tensors: str) -> dict[str, Tensor]:
    """Read a text of token ids."""
    return {"input_ids": torch.tensor([[int(word) for word in prompt.split()]])}


def padded(*lengths: int) -> dict[str, Tensor]:
    """Return prompts of these lengths, padded on the right, and their mask."""
    ids = tokens(len(lengths), max(lengths))
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long(),
    }


class Letters:
    """A tokenizer that returns one token for each letter.

    Args:
        decode: the text of a list of ids; None: it has none.
    """

    def __init__(self, decode: Callable[[list[int]], str] | None = None):
        if decode is not None:
            self.decode = decode

    def __call__(self, text: str, return_tensors: str) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) % VOCABULARY for letter in text]])}


def images(samples: int = 2, pixels: int = 16) -> Tensor:
    return normal(samples, 3, pixels, pixels)


@dataclass(frozen=True)
class Family:
    """A constructor of a model, its input, and why its Jacobians are evaluated over the full sequence, if they are."""

    make: Callable[[Size], nn.Module]
    sees: str = "text"  # or "images"
    full: str = ""


GROUPED = {"num_key_value_heads": 2}
# Entries of configurations for `named`.
GPT = {"n_embd": "width", "n_layer": "layers", "n_head": "heads", "n_positions": "positions"}
USUAL = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
# Windows of 4 with sequences of 7: sliding attention differs from full attention.
FAMILIES = {
    "gpt_neox": Family(language("GPTNeoXForCausalLM")),
    "gpt_neox, sequential residual": Family(
        language("GPTNeoXForCausalLM", use_parallel_residual=False)
    ),
    "gpt_neox, eager": Family(language("GPTNeoXForCausalLM", attn_implementation="eager")),
    "llama, grouped keys": Family(language("LlamaForCausalLM", **GROUPED)),
    "llama, eager": Family(language("LlamaForCausalLM", **GROUPED, attn_implementation="eager")),
    "mistral, sliding window": Family(language("MistralForCausalLM", **GROUPED, sliding_window=4)),
    "mixtral": Family(
        language("MixtralForCausalLM", **GROUPED, num_local_experts=4, num_experts_per_tok=2)
    ),
    "gpt_oss, sinks": Family(
        language(
            "GptOssForCausalLM",
            **GROUPED,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
        )
    ),
    "qwen2": Family(language("Qwen2ForCausalLM", **GROUPED)),
    "qwen3, q/k norms": Family(language("Qwen3ForCausalLM", **GROUPED, head_dim=8)),
    "gemma, one key head": Family(language("GemmaForCausalLM", num_key_value_heads=1, head_dim=8)),
    "gemma2, soft cap": Family(
        language("Gemma2ForCausalLM", **GROUPED, head_dim=8, sliding_window=4)
    ),
    "gemma3, local and global": Family(
        language(
            "Gemma3ForCausalLM",
            **GROUPED,
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        )
    ),
    "phi, parallel": Family(language("PhiForCausalLM")),
    "phi3": Family(language("Phi3ForCausalLM", **GROUPED)),
    "olmo": Family(language("OlmoForCausalLM")),
    "olmo2, post-norm": Family(language("Olmo2ForCausalLM")),
    "stablelm": Family(language("StableLmForCausalLM", num_key_value_heads=HEADS)),
    "cohere": Family(language("CohereForCausalLM", **GROUPED)),
    "granite": Family(language("GraniteForCausalLM", **GROUPED)),
    "smollm3": Family(language("SmolLM3ForCausalLM", **GROUPED)),
    "gpt2": Family(named("GPT2LMHeadModel", **GPT)),
    "gptj": Family(named("GPTJForCausalLM", **GPT, rotary_dim=4)),
    "gpt_neo": Family(gpt_neo("global")),
    "gpt_neo, local": Family(
        gpt_neo("local", window_size=4),
        full="its attention derives the window from the number of keys",
    ),
    "falcon": Family(named("FalconForCausalLM", **USUAL)),
    "falcon, ALiBi": Family(
        named("FalconForCausalLM", **USUAL, alibi=True),
        full="ALiBi reaches its attention as an argument of the block",
    ),
    "mpt": Family(
        named(
            "MptForCausalLM",
            d_model="width",
            n_layers="layers",
            n_heads="heads",
            max_seq_len="positions",
        ),
        full="its attention is part of a larger function",
    ),
    "bloom": Family(
        named("BloomForCausalLM", hidden_size="width", n_layer="layers", n_head="heads"),
        full="its attention is part of a larger function",
    ),
    "opt": Family(
        named(
            "OPTForCausalLM",
            **USUAL,
            ffn_dim="inner",
            max_position_embeddings="positions",
            word_embed_proj_dim="width",
        )
    ),
    "bert": Family(language("BertForMaskedLM")),
    "roberta": Family(language("RobertaForMaskedLM", max_position_embeddings=72)),
    "modernbert": Family(language("ModernBertForMaskedLM")),
    "vit": Family(vision("ViTForImageClassification"), "images"),
    "deit": Family(vision("DeiTForImageClassification"), "images"),
    "dinov2": Family(vision("Dinov2Model"), "images"),
    "timm vit": Family(of_timm("vit_tiny_patch16_224"), "images"),
    "timm deit, distilled": Family(of_timm("deit_tiny_distilled_patch16_224"), "images"),
    "timm eva02": Family(
        of_timm("eva02_tiny_patch14_224"),
        "images",
        full="its rotary embedding finds prefix tokens by their position",
    ),
    "torchvision vit": Family(torchvision_vit, "images"),
    "nn.TransformerEncoder, pre-norm": Family(lambda size: Encoder(size=size)),
    "nn.TransformerEncoder, post-norm, bidirectional": Family(
        lambda size: Encoder(norm_first=False, causal=False, size=size)
    ),
    "nn.TransformerEncoder, sequence first, pre-norm": Family(
        lambda size: Encoder(batch_first=False, size=size)
    ),
    "nn.TransformerEncoder, sequence first, post-norm": Family(
        lambda size: Encoder(False, norm_first=False, size=size)
    ),
}


def build(name: str, size: Size | None = None, samples: int = 2) -> tuple[nn.Module, Tensor]:
    """Return a model and its input. The weights are perturbed, so that norms and biases are not the identity."""
    size, family = size or Size(), FAMILIES[name]
    torch.manual_seed(0)
    model = perturbed(family.make(size), seed=2)
    if family.sees == "images":
        return model, images(samples, size.pixels)
    return model, tokens(samples, size.tokens)

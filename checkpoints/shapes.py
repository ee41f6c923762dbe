"""Shapes of GPT-NeoX models: their configuration, parameters and bytes. Those of Pythia ship with the package."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GPTNeoXConfig

PYTHIA = Path(__file__).parent / "data" / "pythia.toml"


@dataclass(frozen=True)
class Shape:
    """A GPT-NeoX model of Pythia's kind: rotary embedding of a quarter of each head, parallel residual, untied unembedding."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int

    @property
    def parameters(self) -> int:
        """The number of parameters: embedding and unembedding, and in each block two norms, attention and MLP."""
        d = self.width
        return 2 * self.vocabulary * d + self.layers * (12 * d**2 + 13 * d) + 2 * d

    @property
    def file_bytes(self) -> int:
        """The bytes of a published checkpoint's weights: parameters in float16, and a causal mask per block, a byte per entry.

        `model.safetensors` of EleutherAI/pythia-70m-deduped has 166,029,852 bytes (its commit e93a9fa); this is 166,019,072.
        """
        return 2 * self.parameters + self.layers * self.context**2

    def config(self, **options: Any) -> "GPTNeoXConfig":
        """Return the configuration for transformers."""
        from transformers import GPTNeoXConfig

        return GPTNeoXConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            use_parallel_residual=True,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
            **options,
        )


@cache
def pythia_shapes() -> Mapping[str, Shape]:
    """Return the shape of each size of Pythia."""
    data = tomllib.loads(PYTHIA.read_text(encoding="utf-8"))
    return {size: Shape(context=data["context"], **shape) for size, shape in data["sizes"].items()}

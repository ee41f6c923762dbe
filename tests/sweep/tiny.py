"""A tiny configuration for any transformers class: its default one, with sizes cut by the names of their entries.

Text towers have 4 layers, other towers 6: a search for the deepest tower finds the wrong one.
"""

import copy
from typing import Any

import torch

from tests.support.draws import normal
from tests.sweep.special import SPECIAL

WIDTH, HEADS, KEY_HEADS, VOCABULARY, DEPTH, OTHER_DEPTH = 32, 4, 2, 64, 4, 6
POSITIONS, PIXELS, PATCH, WINDOW = 128, 32, 8, 4

# Entries by name. A callable takes the depth of the tower.
WIDTHS = """hidden_size n_embd d_model embed_dim embedding_size word_embed_proj_dim projection_dim emb_dim hidden_dim
    dim_model input_embedding_size output_embedding_size out_hidden_size text_hidden_size encoder_hidden_size
    decoder_hidden_size lru_width embedding_dim encoder_hidden_dim feature_size attention_hidden_size backbone_hidden_size
    pooler_output_size pooler_hidden_size true_hidden_size output_hidden_size vision_output_dim output_dim
    cross_attention_hidden_size d_latents pronunciation_embed_dim shape_embed_dim projector_hidden_size
    text_embed_dim image_text_hidden_size""".split()
INNER = """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff mlp_dim d_inner dff dim_ff
    ffn_hidden_size feed_forward_size shared_intermediate_size inner_size decoder_intermediate_size mlp_hidden_size
    intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size adapter_size
    projection_intermediate_size""".split()
EXPERT_INNER = """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
    shared_experts_intermediate_size moe_shared_expert_intermediate_size""".split()
HEAD_COUNTS = """num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads
    attention_heads num_encoder_attention_heads num_decoder_attention_heads num_self_attention_heads
    encoder_num_attention_heads decoder_num_attention_heads swa_num_attention_heads index_n_heads linear_num_heads
    num_attention_heads_per_layer linear_num_value_heads""".split()
KEY_HEAD_COUNTS = "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups linear_num_key_heads".split()
HEAD_DIMS = """head_dim attention_head_dim d_head d_kv kv_channels v_head_dim attention_head_size linear_head_dim
    dim_head swa_head_dim swa_v_head_dim linear_key_head_dim linear_value_head_dim index_head_dim global_head_dim
    mamba_head_dim mamba_d_head mamba_headdim decoder_head_dim key_value_proj_dim""".split()
DEPTHS = """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
    num_decoder_layers depth layers num_blocks decoder_num_hidden_layers""".split()
POSITION_COUNTS = """max_position_embeddings n_positions n_ctx max_seq_len context_length max_sequence_length
    max_source_positions max_target_positions seq_length rel_extent""".split()
EXPERTS = (
    "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts".split()
)
CHOSEN_EXPERTS = "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts num_selected_experts".split()
WINDOWS = """sliding_window sliding_window_size attention_window_size local_attention window_size attention_chunk_size
    chunk_size mamba_chunk_size mamba_chunk attention_window""".split()
VOCABULARIES = (
    "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size".split()
)
IMAGE_TOKENS = "num_patches num_image_tokens image_seq_length".split()
SIXTEEN = "q_lora_rank kv_lora_rank o_lora_rank moe_latent_size".split()
EIGHT = """qk_head_dim index_topk state_size mamba_d_state ssm_state_size d_rel mamba_n_heads n_mamba_heads
    mamba_num_heads""".split()
FOUR = """qk_rope_head_dim qk_nope_head_dim rotary_dim time_step_rank mamba_dt_rank gated_norm_rank laurel_rank
    adapter_rank hidden_size_per_layer_input router_hidden_size altup_num_inputs""".split()
ONE = """n_group num_expert_group topk_group n_groups mamba_n_groups mamba_ngroups first_k_dense_replace
    num_dense_layers""".split()
NONE = "num_nextn_predict_layers num_mtp_layers".split()

NAMED = {
    **dict.fromkeys(WIDTHS, WIDTH),
    **dict.fromkeys(INNER, 2 * WIDTH),
    **dict.fromkeys(EXPERT_INNER, WIDTH),
    **dict.fromkeys(HEAD_COUNTS, HEADS),
    **dict.fromkeys(KEY_HEAD_COUNTS, KEY_HEADS),
    **dict.fromkeys(HEAD_DIMS, WIDTH // HEADS),
    **dict.fromkeys(POSITION_COUNTS, POSITIONS),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(CHOSEN_EXPERTS, 2),
    **dict.fromkeys(WINDOWS, WINDOW),
    **dict.fromkeys(VOCABULARIES, VOCABULARY),
    **dict.fromkeys(IMAGE_TOKENS, (PIXELS // PATCH) ** 2),
    **dict.fromkeys(SIXTEEN, 16),
    **dict.fromkeys(EIGHT, 8),
    **dict.fromkeys(FOUR, 4),
    **dict.fromkeys(ONE, 1),
    **dict.fromkeys(NONE, 0),
    "query_pre_attn_scalar": WIDTH // HEADS,
    "image_size": PIXELS,
    "patch_size": PATCH,
    "num_labels": 5,
    "mamba_d_ssm": 2 * WIDTH,
    "original_max_position_embeddings": POSITIONS // 2,
    "rescale_every": 2,
    "classifier_proj_size": WIDTH,
    "max_window_layers": 2,
    "hc_mult": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Whose positions are of three parts
SECTIONED = "VL Glm4v GlmOcr GlmImage Qwen2_5Omni PaddleOCR Cosmos3Edge".split()
TEXT = "text_config llm_config decoder decoder_config language_config thinker_config".split()


def tiny(cls: type, depth: int = DEPTH) -> Any:
    """A tiny instance of a configuration class."""
    return cls(**(overrides(cls(), depth) | SPECIAL.get(cls.__name__, {})))


def overrides(default: Any, depth: int) -> dict[str, Any]:
    """What to change of a default configuration."""
    parts = _parts(default)
    known = {k: v for k, v in default.to_dict().items() if k not in parts}
    aliases = {v: k for k, v in (getattr(default, "attribute_map", None) or {}).items()}
    changed = {}
    for name, value in known.items():
        if name in DEPTHS and isinstance(value, int) and not isinstance(value, bool):
            changed[name] = OTHER_DEPTH if _of_encoder(name, known) else depth
        elif name in NAMED and value is not None and type(value) in (int, float):
            changed[name] = NAMED[name]
        elif aliases.get(name) in NAMED and type(value) is int:
            changed[name] = NAMED[aliases[name]]
        elif (
            name.endswith(("token_id", "token_index"))
            and type(value) is int
            and value >= VOCABULARY - 8
        ):
            changed[name] = VOCABULARY - 1 - sum(map(ord, name)) % 8
    if isinstance(known.get("sliding_window", 0), type(None)) or not known.get("sliding_window", 1):
        changed.pop("sliding_window", None)
    if "qk_rope_head_dim" in known and "kv_lora_rank" in known:  # latent attention
        changed |= {name: HEADS for name in KEY_HEAD_COUNTS[:1] if name in known}
        changed |= {
            name: 4 for name in ("head_dim",) if known.get(name) == known["qk_rope_head_dim"]
        }
    changed |= _per_layer(known, default, depth)
    changed |= _per_stage(known)
    if any(
        isinstance(known.get(name), (list, tuple))
        for name in ("depths", "hidden_sizes", "embed_dims", "blocks_per_stage")
    ):
        changed.pop("patch_size", None)
        changed |= {
            name: value
            for name, value in {"image_size": 64, "window_size": 2}.items()
            if type(known.get(name)) is int
        }
    rope = known.get("rope_parameters")
    of_images = any(word in type(default).__name__ for word in SECTIONED)
    if isinstance(rope, dict) and (
        "mrope_section" in rope or (of_images and "rope_theta" in rope)
    ):  # three parts of half a head's rotated width
        half = int(WIDTH // HEADS // 2 * rope.get("partial_rotary_factor", 1))
        changed["rope_parameters"] = {
            **rope,
            "mrope_section": [half - half // 2, half // 2 - half // 4, half // 4],
        }
    for name, part in parts.items():
        changed[name] = tiny(type(part), DEPTH if name in TEXT else OTHER_DEPTH)
    return changed


def _of_encoder(name: str, known: dict[str, Any]) -> bool:
    """Whether an entry is the depth of an encoder that stands beside a decoder."""
    beside = {"encoder_layers": "decoder_layers", "num_encoder_layers": "num_decoder_layers"}
    return beside.get(name) in known or (name == "num_layers" and "num_decoder_layers" in known)


def _parts(default: Any) -> dict[str, Any]:
    found = vars(default)
    return {
        name: part
        for name, part in found.items()
        if hasattr(part, "to_dict") and hasattr(part, "model_type")
    }


def _per_stage(known: dict[str, Any]) -> dict[str, Any]:
    """Lists of one entry per stage: two layers in each, the first of them 16 wide, the others as many times as wide."""
    cut = {}
    for name, value in known.items():
        if (
            not isinstance(value, (list, tuple))
            or not value
            or not all(type(entry) is int for entry in value)
        ):
            continue
        if name in ("depths", "depth", "stage_repeats", "blocks_per_stage"):
            cut[name] = [min(2, entry) for entry in value]
        elif name in ("hidden_sizes", "embed_dims", "embed_dim_per_stage") and value[0] > 16:
            cut[name] = [16 * entry // value[0] for entry in value]
        elif name == "num_heads" and type(known.get("embed_dim")) is int:
            cut["embed_dim"] = 8 * value[0]
    return cut


def _per_layer(known: dict[str, Any], default: Any, depth: int) -> dict[str, Any]:
    """Lists of one entry per layer, cut alike so that each kind of layer stays, in the order of the original."""
    full = next((known[name] for name in DEPTHS if type(known.get(name)) is int), None)
    full = full if full is not None else getattr(default, "num_hidden_layers", None)
    lists = {
        name: value
        for name, value in known.items()
        if isinstance(value, list) and len(value) == full
    }
    if not lists or full is None or full <= depth:
        return {}
    kinds = list(zip(*(map(str, value) for value in lists.values()), strict=True))
    first = sorted({kinds.index(kind) for kind in kinds})[:depth]
    rest = [i for i in range(full) if i not in first]
    chosen = sorted([*first, *rest[: depth - len(first)]])
    cut = {name: [copy.copy(value[i]) for i in chosen] for name, value in lists.items()}
    for name, value in cut.items():
        if name in NAMED and all(type(entry) is int for entry in value):
            cut[name] = [NAMED[name]] * depth
    return cut


def for_class(name: str, config: Any) -> Any:
    """A configuration as one class of several that share it needs it."""
    if name.endswith(("ForCausalLM", "LMHeadModel", "GenerationDecoder", "WithLMHead")) and hasattr(
        config, "is_decoder"
    ):
        config.is_decoder = True
    return config


def further_inputs(known: Any, config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What a forward with these parameters needs besides token ids or pixels."""
    extra = {}
    side = PIXELS // PATCH
    # Patches of both images, one after the other
    if "grid_thw" in known and "input_ids" not in known:
        first = "pixel_values" if "pixel_values" in known else "hidden_states"
        size = getattr(config, "patch_size", PATCH)
        width = (
            getattr(config, "in_channels", 3)
            * getattr(config, "temporal_patch_size", 1)
            * size
            * size
        )
        extra[first] = normal(2 * side * side, width)
        extra["grid_thw"] = torch.tensor([[1, side, side]] * 2)
    if "spatial_shapes" in known:
        extra["pixel_values"] = normal(2, side * side, 3 * PATCH**2)
        extra["spatial_shapes"] = torch.tensor([[side, side]] * 2)
        extra["pixel_attention_mask"] = torch.ones(2, side * side, dtype=torch.long)
    if "aspect_ratio_mask" in known and "input_ids" not in known:
        shape = (2, 1, config.max_num_tiles, 3, config.image_size, config.image_size)
        extra["pixel_values"] = normal(*shape)
        extra["aspect_ratio_ids"] = torch.ones(2, 1, dtype=torch.long)
        extra["aspect_ratio_mask"] = torch.ones(2, 1, config.max_num_tiles, dtype=torch.long)
    if "pixel_values_videos" in known and "input_ids" not in known and "pixel_values" not in known:
        frames = getattr(config, "num_frames", 4)
        extra["pixel_values_videos"] = torch.randn(2, frames, 3, PIXELS, PIXELS)
    if type(config).__name__ == "ImageGPTConfig":
        extra["input_ids"] = torch.arange(18).reshape(2, 9)
    if "bbox" in known and "input_ids" in given:
        extra["bbox"] = torch.tensor([1, 2, 5, 7]).expand(*given["input_ids"].shape, 4).contiguous()
    return extra

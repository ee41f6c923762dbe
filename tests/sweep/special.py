"""What the names of its entries do not say of a configuration, by its class."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

AXIAL = {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 8], "local_attn_chunk_length": 4}

SPECIAL = {
    "BambaConfig": {"attn_layer_indices": [1, 3]},
    "BltConfig": {
        "encoder_hash_byte_group_vocab": 64,
        "vocab_size": 260,
        "local_attention_window_len": 64,
    },
    "CohereCompassTextConfig": {"rope_parameters": {FULL: ROPE, SLIDING: ROPE}},
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 8,
        "swa_qk_nope_head_dim": 4,
        "swa_v_head_dim": 8,
    },
    "Gemma3nTextConfig": {
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "Gemma4TextConfig": {
        "global_head_dim": 16,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
    },
    "Gemma4UnifiedTextConfig": {
        "global_head_dim": 16,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
    },
    "GraniteMoeHybridConfig": {
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
    },
    "HunYuanDenseV1Config": {"head_dim": 8},
    "EsmConfig": {"vocab_size": 64, "pad_token_id": 0, "mask_token_id": 3},
    "EsmcConfig": {"num_key_value_heads": 4},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "HunYuanVLTextConfig": {"head_dim": 8},
    "LayoutLMv3Config": {"coordinate_size": 4, "shape_size": 8, "visual_embed": False},
    "LiltConfig": {"hidden_size": 48},
    "LukeConfig": {"entity_vocab_size": 64},
    "MobileBertConfig": {"intra_bottleneck_size": 32},
    "ReformerConfig": AXIAL | {"lsh_attn_chunk_length": 4, "num_buckets": 2, "hash_seed": 0},
    "T5GemmaConfig": {"is_encoder_decoder": False},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", FULL, "conv", FULL]},
    "Mamba2Config": {"num_heads": 8},
    "MinistralConfig": {"head_dim": 8},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "NemotronConfig": {"num_key_value_heads": 2},
    "Phi4MultimodalAudioConfig": {
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 32,
        "num_blocks": 2,
    },
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
    },
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_query_groups": 4,
        "num_key_value_heads": 4,
    },
    "ZambaConfig": {
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
        "num_key_value_heads": 4,
    },
    "ZayaConfig": {"num_experts_per_tok": 1},
    "xLSTMConfig": {"chunk_size": 16, "qk_dim_factor": 1.0},
}

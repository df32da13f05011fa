"""Tiny Phi-3, Granite, OLMo 2 and 3 and SmolLM3 models of Transformers, and Qwen's with YaRN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from golden_models import WINDOW, Case
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

PHI3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}
GRANITE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.31,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}
YARN = {
    # Pair i of 8 turns 64 * 0.56^i times in the trained context: the ramp goes from pair 4 to pair 12, which is not
    # there, and from 4.4 to 11.2 where ends are not taken whole.
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 5.0,
    "beta_slow": 0.1,
    "original_max_position_embeddings": 400,
}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def phi3(**changes: Any) -> Case:
    return Case(Phi3ForCausalLM, Phi3Config, PHI3 | {"pad_token_id": 0} | changes)


def granite(**changes: Any) -> Case:
    return Case(GraniteForCausalLM, GraniteConfig, GRANITE | changes)


def olmo2(**changes: Any) -> Case:
    return Case(Olmo2ForCausalLM, Olmo2Config, {"rope_parameters": DEFAULT} | changes)


def olmo3(**changes: Any) -> Case:
    ropes = {"full_attention": YARN, "sliding_attention": DEFAULT}
    usual = {"rope_parameters": ropes, "sliding_window": WINDOW, "layer_types": LAYERS, "num_hidden_layers": 3}
    return Case(Olmo3ForCausalLM, Olmo3Config, usual | changes)


def smollm3(**changes: Any) -> Case:
    usual = {"num_hidden_layers": 5, "rope_parameters": DEFAULT, "pad_token_id": 0}
    return Case(SmolLM3ForCausalLM, SmolLM3Config, usual | changes)


CASES = {
    "phi3": phi3(),
    "phi3-mha-window-bf16": replace(phi3(num_key_value_heads=4, sliding_window=WINDOW), dtype=torch.bfloat16),
    "phi3-partial": phi3(rope_parameters=PHI3["rope_parameters"] | {"partial_rotary_factor": 0.75}),
    "phi3-long-tied": phi3(rope_parameters=LONGROPE, original_max_position_embeddings=32, tie_word_embeddings=True),
    "phi3-short": phi3(
        rope_parameters=LONGROPE | {"factor": 4.0}, original_max_position_embeddings=64, max_position_embeddings=64
    ),
    "phi3-long-own-factor": phi3(
        rope_parameters=LONGROPE | {"attention_factor": 1.7}, original_max_position_embeddings=32
    ),
    "granite": granite(),
    "granite-tied-bias": granite(tie_word_embeddings=True, attention_bias=True, num_key_value_heads=4),
    "granite-bf16": replace(granite(head_dim=32), dtype=torch.bfloat16),
    "olmo2": olmo2(),
    "olmo2-bias-mha": olmo2(attention_bias=True, num_key_value_heads=4, num_hidden_layers=3),
    "olmo3": olmo3(),
    "olmo3-period": olmo3(layer_types=None, num_hidden_layers=5, rope_parameters={"full_attention": DEFAULT}),
    "smollm3": smollm3(),
    "smollm3-layers": smollm3(no_rope_layers=[0, 1, 1, 0, 1], tie_word_embeddings=False, attention_bias=True),
    "smollm3-interval": smollm3(no_rope_layer_interval=2, rope_parameters=YARN),
    "smollm3-window": smollm3(use_sliding_window=True, sliding_window=WINDOW),
    "qwen3-yarn": Case(Qwen3ForCausalLM, Qwen3Config, {"rope_parameters": YARN}),
    "qwen2-yarn-mscale": Case(
        Qwen2ForCausalLM,
        Qwen2Config,
        {"rope_parameters": YARN | {"mscale": 4.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
}

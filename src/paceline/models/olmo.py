"""OLMo 2 and OLMo 3: norms after each block and none before, and one norm over all queries, another over all keys.

Source: the OLMo 2 (2501.00656) and OLMo 3 (2512.13961) reports; Transformers, modeling_olmo2.py and modeling_olmo3.py;
llama.cpp, its converter and its loader of "olmo2", which is the name of both. OLMo 3 has a sliding window in three of
four layers, and scales its rotation in the others only.

Checked by: tests/golden/test_transformers_dense.py, tests/golden/test_gguf_dense.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.config import ModelConfig, RopeConfig
from paceline.models import gguf_keys, huggingface_keys, llama
from paceline.models.family import BLOCK_NAMES, Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import FULL, WINDOW, HuggingFaceKeys
from paceline.models.layer_patterns import all_but_every
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph, Value

PERIOD = 4
"""Every so many layers of OLMo 3 one sees everything."""


def build(config: ModelConfig) -> Graph:
    """The graph of a step, from tokens to logits."""
    g, eps = GraphBuilder(), config.rms_norm_eps
    x = llama.embeddings(g, config)
    for layer in range(config.num_layers):
        p = f"blk.{layer}"
        x = g.add(x, g.rms_norm(_attention(g, x, config, layer), f"{p}.post_attention_norm.weight", eps=eps))
        x = g.add(x, g.rms_norm(llama.feed_forward(g, x, config, layer), f"{p}.post_ffw_norm.weight", eps=eps))
    return llama.finish(g, x, config)


def _attention(g: GraphBuilder, x: Value, config: ModelConfig, layer: int) -> Value:
    p, eps = f"blk.{layer}", config.rms_norm_eps
    q, k, v = llama.heads(g, x, config, layer)
    q = g.rms_norm(q, f"{p}.attn_q_norm.weight", eps=eps, rope_heads=config.num_heads)
    k = g.rms_norm(k, f"{p}.attn_k_norm.weight", eps=eps, rope_heads=config.num_kv_heads)
    q = g.rope_write(q, k, v, layer=layer, rope=config.rope_of(layer), scale=config.query_scale)
    return llama.attend(g, q, config, layer)


def _olmo2_config(keys: HuggingFaceKeys) -> ModelConfig:
    return _config(keys.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5))


def _olmo3_config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=500000.0, sliding_window=4096)
    num_layers, num_heads = keys.num_layers(), keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", max(keys.integer("hidden_size") // num_heads, 1))
    usual = {"rope_theta": keys.get("rope_theta")}
    return _config(
        keys,
        sliding_window=keys.integer("sliding_window"),
        windowed_layers=huggingface_keys.windowed_layers(keys, all_but_every(PERIOD, num_layers)),
        rope=huggingface_keys.rope_of_kind(keys, FULL, head_dim, usual),
        local_rope=huggingface_keys.rope_of_kind(keys, WINDOW, head_dim, usual),
    )


def _config(keys: HuggingFaceKeys, **changes: Any) -> ModelConfig:
    has_bias = keys.flag("attention_bias")
    return huggingface_keys.dense_config(keys, "olmo2", attention_bias=has_bias, output_bias=has_bias, **changes)


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    config = gguf_keys.dense_config(fields, output_bias="blk.0.attn_output.bias" in fields.shapes)
    if config.sliding_window is None:
        return config
    local_rope = RopeConfig(fields.number("rope.freq_base_swa", config.rope.theta), config.rope.dim)
    return replace(config, windowed_layers=gguf_keys.windowed_layers(fields, PERIOD), local_rope=local_rope)


FAMILY = Family(
    "olmo2",
    build,
    {"Olmo2ForCausalLM": _olmo2_config, "Olmo3ForCausalLM": _olmo3_config},
    _gguf_config,
    block_names={
        **BLOCK_NAMES,
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)

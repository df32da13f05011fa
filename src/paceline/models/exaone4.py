"""EXAONE 4: norms after each block and on each query and key head; where some layers have a window, the others do not
rotate.

Source: LG AI Research 2025, EXAONE 4.0 (2507.11407); Transformers, modeling_exaone4.py; llama.cpp, its converter and
its loader of "exaone4".

Checked by: tests/golden/test_transformers_exaone4.py.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.config import ModelConfig
from paceline.errors import UnsupportedError
from paceline.models import gguf_keys, huggingface_keys, llama
from paceline.models.family import BLOCK_NAMES, Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys
from paceline.models.layer_patterns import all_but_every
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph, Value

PERIOD = 4
"""Every so many layers one sees everything."""


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
    q, k, v = llama.heads(g, x, config, layer)
    q = g.rope_write(
        q,
        k,
        v,
        layer=layer,
        rope=config.rope_of(layer),
        scale=config.query_scale,
        q_norm=g.head_norm_weight(f"blk.{layer}.attn_q_norm.weight", config.head_dim),
        k_norm=g.head_norm_weight(f"blk.{layer}.attn_k_norm.weight", config.head_dim),
        eps=config.rms_norm_eps,
    )
    return llama.attend(g, q, config, layer)


def _config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(
        num_key_value_heads=32, max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096
    )
    config = huggingface_keys.dense_config(keys, "exaone4", qk_norm=True)
    if keys.get("sliding_window") is None:
        return config
    pattern, is_listed = keys.get("sliding_window_pattern"), bool(huggingface_keys.layer_types(keys))
    if isinstance(pattern, str) and not is_listed:
        raise UnsupportedError(f"{keys.path}: sliding_window_pattern {pattern!r} without layer_types")
    period = PERIOD if is_listed else keys.integer("sliding_window_pattern", PERIOD)
    windowed = huggingface_keys.windowed_layers(keys, all_but_every(period, keys.num_layers()))
    return _with_window(config, keys.integer("sliding_window"), windowed)


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    config = gguf_keys.dense_config(fields, qk_norm=True)
    if config.sliding_window is None:
        return config
    return _with_window(config, config.sliding_window, gguf_keys.windowed_layers(fields, PERIOD))


def _with_window(config: ModelConfig, window: int, windowed: tuple[bool, ...]) -> ModelConfig:
    """Layers that see everything do not rotate."""
    unrotated = tuple(layer for layer, has_window in enumerate(windowed) if not has_window)
    return replace(config, sliding_window=window, windowed_layers=windowed, unrotated_layers=unrotated)


FAMILY = Family(
    "exaone4",
    build,
    {"Exaone4ForCausalLM": _config},
    _gguf_config,
    block_names={
        **BLOCK_NAMES,
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)

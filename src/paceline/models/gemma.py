"""Gemma 2 and Gemma 3: a norm before and after each block, layers with a sliding window between layers that see all.

Source: the Gemma 2 (2408.00118) and Gemma 3 (2503.19786) reports; Transformers, modeling_gemma2.py and
modeling_gemma3.py; llama.cpp, convert_hf_to_gguf.py and its loaders of "gemma2" and "gemma3", for what GGUF files leave
to the reader: the period of the windows, Gemma 3's base of local rotations, how the largest models scale queries.

Gemma 2 caps scores and logits; Gemma 3 norms each query and key head instead, and rotates local and global layers with
two bases, the global one perhaps scaled. In safetensors norms are stored less one. Embeddings are multiplied with the
square root of their width: in f32, as llama.cpp does; Transformers rounds it to the type of the model.

Checked by: tests/golden/test_transformers_gemma.py, tests/unit/test_gemma_config.py, tests/golden/test_gemma3.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.config import ModelConfig, RopeConfig
from paceline.errors import CheckpointError, UnsupportedError
from paceline.models import gguf_keys, huggingface_keys, llama
from paceline.models.family import BLOCK_NAMES, Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import FULL, WINDOW, HuggingFaceKeys
from paceline.models.layer_patterns import all_but_every
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph

GEMMA_BLOCK_NAMES = BLOCK_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2_DEFAULTS = {"vocab_size": 256_000, "max_position_embeddings": 8192}
GEMMA3_DEFAULTS = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
GEMMA2_PERIOD, GEMMA3_PERIOD = 2, 6
"""Every so many layers one sees everything."""

LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose queries are scaled by the width of hidden states a head, not by that of heads."""

OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.")


def build(config: ModelConfig) -> Graph:
    """The graph of a step, from tokens to logits."""
    g, eps = GraphBuilder(), config.rms_norm_eps
    x = llama.embeddings(g, config)
    for layer in range(config.num_layers):
        p = f"blk.{layer}"
        x = g.add(x, g.rms_norm(llama.attention_block(g, x, config, layer), f"{p}.post_attention_norm.weight", eps=eps))
        x = g.add(x, g.rms_norm(llama.feed_forward_block(g, x, config, layer), f"{p}.post_ffw_norm.weight", eps=eps))
    return llama.finish(g, x, config)


# ---- config.json ----


def _gemma2_config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(**COMMON_DEFAULTS, **GEMMA2_DEFAULTS, **GEMMA2_CAPS)
    return _config(
        keys,
        "gemma2",
        period=GEMMA2_PERIOD,
        attention_softcap=_optional_number(keys, "attn_logit_softcapping"),
    )


def _gemma3_config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(**COMMON_DEFAULTS, **GEMMA3_DEFAULTS)
    if keys.get("attn_logit_softcapping") is not None:
        raise UnsupportedError(f"{keys.path}: attn_logit_softcapping: Gemma 3 does not cap attention scores")
    head_dim, theta = keys.integer("head_dim"), keys.number("rope_theta", GLOBAL_THETA)
    local_theta = keys.number("rope_local_base_freq", LOCAL_THETA)
    return _config(
        keys,
        "gemma3",
        period=keys.integer("sliding_window_pattern", GEMMA3_PERIOD),
        qk_norm=True,
        rope=huggingface_keys.rope_of_kind(keys, FULL, head_dim, {"rope_theta": theta}),
        local_rope=huggingface_keys.rope_of_kind(keys, WINDOW, head_dim, {"rope_theta": local_theta}),
    )


def _with_images_config(keys: HuggingFaceKeys) -> ModelConfig:
    """The text part of a model that reads images too."""
    text = keys.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(keys.path, f"text_config is {text!r}, expected an object")
    outer = {key: keys.get(key) for key in ("tie_word_embeddings",) if key in keys.values}
    return _gemma3_config(HuggingFaceKeys(keys.path, {**text, **outer}))


def _config(keys: HuggingFaceKeys, architecture: str, *, period: int, **changes: Any) -> ModelConfig:
    for key in ("attention_bias", "use_bidirectional_attention"):
        if keys.flag(key):
            raise UnsupportedError(f"{keys.path}: {key}: no Gemma that Paceline runs has this")
    activation = keys.get("hidden_activation")
    if activation not in ("gelu_pytorch_tanh", None):
        raise UnsupportedError(f"{keys.path}: hidden_activation {activation!r}; Gemma has gelu_pytorch_tanh")
    num_layers, hidden_size = keys.num_layers(), keys.integer("hidden_size")
    head_dim, scalar = keys.integer("head_dim"), keys.number("query_pre_attn_scalar")
    return huggingface_keys.dense_config(
        keys,
        architecture,
        activation="gelu_tanh",
        embedding_scale=_embedding_scale(hidden_size),
        attention_scale=None if scalar == head_dim else 1 / math.sqrt(scalar),
        logit_softcap=_optional_number(keys, "final_logit_softcapping"),
        sliding_window=keys.integer("sliding_window"),
        windowed_layers=huggingface_keys.windowed_layers(keys, all_but_every(period, num_layers)),
        **changes,
    )


def _optional_number(keys: HuggingFaceKeys, key: str) -> float | None:
    return None if keys.get(key) is None else keys.number(key)


def _embedding_scale(hidden_size: int) -> float:
    return float(np.float32(math.sqrt(hidden_size)))


def _text_name(name: str) -> str | None:
    """The name in a text-only model of a tensor of one that reads images too; None for a tensor of the images' part."""
    for outer in ("language_model.model.", "model.language_model."):
        if name.startswith(outer):
            return "model." + name.removeprefix(outer)
    inner = name.removeprefix("model.")
    return None if inner.startswith(OTHER_MODALITIES) else name.removeprefix("language_model.")


# ---- GGUF ----


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    architecture = fields.architecture
    is_second = architecture == "gemma2"
    num_layers, hidden_size = fields.num_layers(), fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    changes: dict[str, Any] = {"sliding_window": 4096} if is_second else {"qk_norm": True}
    if fields.get("attention.sliding_window"):
        changes["sliding_window"] = fields.integer("attention.sliding_window")
    if changes.get("sliding_window"):
        changes["windowed_layers"] = gguf_keys.windowed_layers(fields, GEMMA2_PERIOD if is_second else GEMMA3_PERIOD)
    if num_layers == LARGEST[architecture]:
        changes["attention_scale"] = 1 / math.sqrt(hidden_size / num_heads)
    if is_second:
        attention, final = GEMMA2_CAPS
        changes["attention_softcap"] = fields.number(attention, GEMMA2_CAPS[attention])
        changes["logit_softcap"] = fields.number(final, GEMMA2_CAPS[final])
    else:
        if fields.get("attn_logit_softcapping"):
            raise UnsupportedError(f"{fields.path}: gemma3.attn_logit_softcapping: Gemma 3 does not cap scores")
        head_dim = fields.integer("attention.key_length", max(hidden_size // num_heads, 1))
        changes["rope"] = gguf_keys.rope_config(fields, head_dim)
        changes["local_rope"] = RopeConfig(fields.number("rope.freq_base_swa", LOCAL_THETA), changes["rope"].dim)
        if fields.get("final_logit_softcapping"):
            changes["logit_softcap"] = fields.number("final_logit_softcapping")
    return gguf_keys.dense_config(
        fields, activation="gelu_tanh", embedding_scale=_embedding_scale(hidden_size), **changes
    )


GEMMA2 = Family(
    "gemma2",
    build,
    {"Gemma2ForCausalLM": _gemma2_config},
    _gguf_config,
    block_names=GEMMA_BLOCK_NAMES,
    norm_offset=1.0,
)
GEMMA3 = Family(
    "gemma3",
    build,
    {"Gemma3ForCausalLM": _gemma3_config, "Gemma3ForConditionalGeneration": _with_images_config},
    _gguf_config,
    block_names=GEMMA_BLOCK_NAMES,
    norm_offset=1.0,
    text_name=_text_name,
)

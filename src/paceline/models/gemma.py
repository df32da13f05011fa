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
from paceline.models import gguf_keys, huggingface_keys
from paceline.models.family import BLOCK_NAMES, Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys
from paceline.models.llama import attention_block, feed_forward_block
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

WINDOW, FULL = "sliding_attention", "full_attention"
OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.")


def build(config: ModelConfig) -> Graph:
    """The graph of a step, from tokens to logits."""
    g = GraphBuilder()
    x = g.embed(
        "token_embd.weight", vocab_size=config.vocab_size, width=config.hidden_size, scale=config.embedding_scale
    )
    for layer in range(config.num_layers):
        p, eps = f"blk.{layer}", config.rms_norm_eps
        x = g.add(x, g.rms_norm(attention_block(g, x, config, layer), f"{p}.post_attention_norm.weight", eps=eps))
        x = g.add(x, g.rms_norm(feed_forward_block(g, x, config, layer), f"{p}.post_ffw_norm.weight", eps=eps))
    x = g.select_outputs(x)
    x = g.rms_norm(x, "output_norm.weight", eps=config.rms_norm_eps)
    head = "token_embd.weight" if config.tie_embeddings else "output.weight"
    (logits,) = g.linear(x, [(head, config.vocab_size)], role="head")
    return g.finish(logits if config.logit_softcap is None else g.softcap(logits, cap=config.logit_softcap))


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
    head_dim = keys.integer("head_dim")
    return _config(
        keys,
        "gemma3",
        period=keys.integer("sliding_window_pattern", GEMMA3_PERIOD),
        qk_norm=True,
        rope=_rope_of(keys, FULL, head_dim, {"rope_theta": keys.get("rope_theta", GLOBAL_THETA)}),
        local_rope=_rope_of(keys, WINDOW, head_dim, {"rope_theta": keys.get("rope_local_base_freq", LOCAL_THETA)}),
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
    num_layers, hidden_size = keys.integer("num_hidden_layers"), keys.integer("hidden_size")
    head_dim, scalar = keys.integer("head_dim"), keys.number("query_pre_attn_scalar")
    return huggingface_keys.dense_config(
        keys,
        architecture,
        activation="gelu_tanh",
        embedding_scale=_embedding_scale(hidden_size),
        attention_scale=None if scalar == head_dim else 1 / math.sqrt(scalar),
        logit_softcap=_optional_number(keys, "final_logit_softcapping"),
        sliding_window=keys.integer("sliding_window"),
        windowed_layers=_windowed_layers(keys, num_layers, period),
        **changes,
    )


def _windowed_layers(keys: HuggingFaceKeys, num_layers: int, period: int) -> tuple[bool, ...]:
    kinds = huggingface_keys.layer_types(keys)
    if not kinds:
        return _every(num_layers, period)
    if unknown := sorted(set(kinds) - {WINDOW, FULL}):
        raise UnsupportedError(f"{keys.path}: layer_types: {', '.join(unknown)}; Paceline has {WINDOW} and {FULL}")
    if len(kinds) != num_layers:
        raise CheckpointError(keys.path, f"layer_types names {len(kinds)} layers of {num_layers}")
    return tuple(kind == WINDOW for kind in kinds)


def _rope_of(keys: HuggingFaceKeys, kind: str, head_dim: int, defaults: Mapping[str, Any]) -> RopeConfig:
    """The rotation of layers of one kind. Transformers 5 nests ``rope_parameters`` by kind; before, ``rope_scaling``
    was that of the layers that see everything.
    """
    nested = keys.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not all(isinstance(value or {}, Mapping) for value in nested.values()):
        raise CheckpointError(keys.path, f"rope_parameters is {nested!r}, expected an object a kind of layer")
    if unknown := sorted(nested.keys() - {WINDOW, FULL}):
        raise UnsupportedError(f"{keys.path}: rope_parameters: {', '.join(unknown)}; Gemma 3 has {FULL} and {WINDOW}")
    scaling = keys.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(keys.path, f"rope_scaling is {scaling!r}, expected an object")
    values = {**defaults, **(nested.get(kind) or {}), **(scaling if kind == FULL else {})}
    context = keys.get("max_position_embeddings")
    of_kind = HuggingFaceKeys(keys.path, {"rope_parameters": values, "max_position_embeddings": context})
    return huggingface_keys.rope_config(of_kind, head_dim)


def _optional_number(keys: HuggingFaceKeys, key: str) -> float | None:
    return None if keys.get(key) is None else keys.number(key)


def _embedding_scale(hidden_size: int) -> float:
    return float(np.float32(math.sqrt(hidden_size)))


def _every(num_layers: int, period: int) -> tuple[bool, ...]:
    """Which layers have the window when every ``period``-th sees everything."""
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


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
    num_layers, hidden_size = fields.integer("block_count"), fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    changes: dict[str, Any] = {"sliding_window": 4096} if is_second else {"qk_norm": True}
    if fields.get("attention.sliding_window"):
        changes["sliding_window"] = fields.integer("attention.sliding_window")
    if changes.get("sliding_window"):
        changes["windowed_layers"] = _gguf_windowed_layers(fields, num_layers)
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
        changes["local_rope"] = RopeConfig(fields.number("rope.freq_base_swa", LOCAL_THETA), head_dim)
        if fields.get("final_logit_softcapping"):
            changes["logit_softcap"] = fields.number("final_logit_softcapping")
    return gguf_keys.dense_config(
        fields, activation="gelu_tanh", embedding_scale=_embedding_scale(hidden_size), **changes
    )


def _gguf_windowed_layers(fields: GGUFKeys, num_layers: int) -> tuple[bool, ...]:
    """``attention.sliding_window_pattern`` is a period, or a flag for each layer."""
    pattern = fields.get("attention.sliding_window_pattern")
    if hasattr(pattern, "tolist"):
        if len(pattern) != num_layers:
            problem = f"names {len(pattern)} layers of {num_layers}"
            raise CheckpointError(fields.path, f"{fields.architecture}.attention.sliding_window_pattern {problem}")
        return tuple(bool(flag) for flag in pattern.tolist())
    period = GEMMA2_PERIOD if fields.architecture == "gemma2" else GEMMA3_PERIOD
    return _every(num_layers, fields.integer("attention.sliding_window_pattern", period))


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

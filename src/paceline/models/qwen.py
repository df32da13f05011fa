"""Qwen2 and Qwen2.5 (biases on query, key and value) and Qwen3 (a norm on each query and key head): Llama's graph
otherwise.

Source: the Qwen2 (2407.10671) and Qwen3 (2505.09388) reports. Both differences are switches of the shared attention
block, set here so that a configuration cannot ask for a mixture that no Qwen has.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.config import ModelConfig
from paceline.errors import CheckpointError, UnsupportedError
from paceline.models import gguf_keys, huggingface_keys, llama
from paceline.models.family import Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys
from paceline.ops.graph import Graph


def build_qwen2(config: ModelConfig) -> Graph:
    """The graph of a Qwen2 or Qwen2.5 step."""
    return llama.build(replace(config, attention_bias=True, qk_norm=False))


def build_qwen3(config: ModelConfig) -> Graph:
    """The graph of a Qwen3 step."""
    return llama.build(replace(config, qk_norm=True))


def _qwen2_config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096)
    return huggingface_keys.dense_config(keys, "qwen2", attention_bias=True, sliding_window=_sliding_window(keys))


def _qwen3_config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096, head_dim=128)
    return huggingface_keys.dense_config(
        keys, "qwen3", qk_norm=True, attention_bias=keys.flag("attention_bias"), sliding_window=_sliding_window(keys)
    )


def _sliding_window(keys: HuggingFaceKeys) -> int | None:
    """The window of all layers, None when all see everything; UnsupportedError when layers differ."""
    if keys.get("sliding_window") is None or not keys.flag("use_sliding_window"):
        return None
    first = keys.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise CheckpointError(keys.path, f"max_window_layers is {first!r}, expected an integer")
    usual = tuple(layer >= first for layer in range(keys.num_layers()))
    windowed = set(huggingface_keys.windowed_layers(keys, usual))
    if windowed == {False}:
        return None
    if windowed != {True}:
        key = "layer_types" if huggingface_keys.layer_types(keys) else f"max_window_layers {first}"
        raise UnsupportedError(f"{keys.path}: {key}: layers of different attention; all must have the window, or none")
    return keys.integer("sliding_window")


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    return gguf_keys.dense_config(fields, qk_norm=fields.architecture == "qwen3")


QWEN2 = Family("qwen2", build_qwen2, {"Qwen2ForCausalLM": _qwen2_config}, _gguf_config)
QWEN3 = Family("qwen3", build_qwen3, {"Qwen3ForCausalLM": _qwen3_config}, _gguf_config)

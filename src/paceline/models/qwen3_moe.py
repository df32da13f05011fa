"""Qwen3-MoE: Qwen3 with experts in place of its feed-forward networks (2505.09388), of all layers or of some."""

from __future__ import annotations

from paceline.config import ModelConfig
from paceline.errors import CheckpointError
from paceline.models import experts, gguf_keys, huggingface_keys, qwen
from paceline.models.family import BLOCK_NAMES, Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys


def _config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(
        max_position_embeddings=32768,
        num_key_value_heads=4,
        sliding_window=4096,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )
    has_window = keys.flag("use_sliding_window") and keys.get("sliding_window") is not None
    return huggingface_keys.dense_config(
        keys,
        "qwen3moe",
        qk_norm=True,
        attention_bias=keys.flag("attention_bias"),
        output_bias=keys.flag("attention_bias"),
        sliding_window=keys.integer("sliding_window") if has_window else None,
        experts=huggingface_keys.experts(
            keys,
            width="moe_intermediate_size",
            normalise=keys.flag("norm_topk_prob"),
            dense_layers=_dense_layers(keys),
        ),
    )


def _dense_layers(keys: HuggingFaceKeys) -> tuple[int, ...]:
    """Layers without experts: those of ``mlp_only_layers``, and all but each ``decoder_sparse_step``-th."""
    listed = keys.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise CheckpointError(keys.path, f"mlp_only_layers is {listed!r}, expected a list of integers")
    step = keys.integer("decoder_sparse_step", 1)
    layers = range(keys.num_layers())
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step)


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    """llama.cpp divides the chosen weights by their sum whatever the model did, and files do not say."""
    return gguf_keys.dense_config(fields, qk_norm=True, experts=gguf_keys.experts(fields))


FAMILY = Family(
    "qwen3moe",
    qwen.build_qwen3,
    {"Qwen3MoeForCausalLM": _config},
    _gguf_config,
    block_names={**BLOCK_NAMES, "mlp.gate": "ffn_gate_inp"},
    expert_sources=experts.sources(*(f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down"))),
)

"""Granite 3: Llama's graph with four numbers that say how large things are.

Source: IBM's Granite 3.0 report (2024); Transformers, modeling_granite.py; llama.cpp, its converter and its loader of
"granite". Embeddings, what blocks add to the residual stream, and scores are multiplied, logits are divided.

Checked by: tests/golden/test_transformers_dense.py, tests/golden/test_gguf_dense.py.
"""

from __future__ import annotations

from paceline.config import ModelConfig
from paceline.errors import UnsupportedError
from paceline.models import gguf_keys, huggingface_keys, llama
from paceline.models.family import Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys


def _config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(max_position_embeddings=2048)
    return huggingface_keys.dense_config(
        keys,
        "granite",
        attention_bias=keys.flag("attention_bias"),
        output_bias=keys.flag("attention_bias"),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        attention_scale=keys.number("attention_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1.0 / keys.number("logits_scaling", 1.0),
    )


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    if fields.get("rope.scaling.finetuned") is False:
        raise UnsupportedError(f"{fields.path}: granite.rope.scaling.finetuned is false: a model that does not rotate")
    if fields.values("deepstack_mapping") is not None:
        raise UnsupportedError(f"{fields.path}: granite.deepstack_mapping: images that enter between layers")
    has_scale = fields.get("attention.scale") is not None
    return gguf_keys.dense_config(
        fields,
        output_bias="blk.0.attn_output.bias" in fields.shapes,
        embedding_scale=fields.number("embedding_scale", 1.0),
        attention_scale=fields.number("attention.scale") if has_scale else None,
        residual_scale=fields.number("residual_scale", 1.0),
        logit_scale=1.0 / fields.number("logit_scale"),
    )


FAMILY = Family("granite", llama.build, {"GraniteForCausalLM": _config}, _gguf_config, interleaved_gguf=True)

"""gpt-oss: experts with biases and a clamped activation, attention with sinks, windows on every other layer, YaRN.

Source: OpenAI 2025, the model card of gpt-oss (2508.10925), and the model's code in Transformers.

Departures: GGUF files do not say that YaRN's ramp begins and ends between pairs; it did in training, so it does here,
whereas llama.cpp takes whole pairs.

Checked by: tests/golden/test_transformers_experts.py.
"""

from __future__ import annotations

from functools import partial

from paceline.config import ModelConfig
from paceline.errors import UnsupportedError
from paceline.models import gguf_keys, huggingface_keys, llama
from paceline.models.family import BLOCK_NAMES, ExpertSource, Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys
from paceline.models.layer_patterns import all_but_every

SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Numbers of the activation "swiglu_oai", by their keys."""

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

PERIOD = 2
"""Every so many layers one sees everything."""


def _config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(
        max_position_embeddings=131072,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_scaling=YARN,
        sliding_window=128,
        attention_bias=True,
        num_experts=128,
        num_experts_per_tok=4,
    )
    if (name := keys.get("hidden_act", "silu")) != "silu":
        raise UnsupportedError(f"{keys.path}: hidden_act {name!r}; gpt-oss has silu, with a clamp")
    for key, value in SWIGLU.items():
        if keys.number(key, value) != value:
            raise UnsupportedError(f"{keys.path}: {key} is {keys.get(key)}; Paceline has {value}")
    return huggingface_keys.dense_config(
        keys,
        "gpt-oss",
        activation="swiglu_oai",
        attention_bias=keys.flag("attention_bias"),
        output_bias=keys.flag("attention_bias"),
        attention_sinks=True,
        sliding_window=None if keys.get("sliding_window") is None else keys.integer("sliding_window"),
        windowed_layers=huggingface_keys.windowed_layers(keys, all_but_every(PERIOD, keys.num_layers())),
        experts=huggingface_keys.experts(keys, width="intermediate_size", biases=True),
    )


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    head_dim = fields.integer("attention.key_length")
    has_biases = "blk.0.attn_q.bias" in fields.shapes
    return gguf_keys.dense_config(
        fields,
        activation="swiglu_oai",
        attention_bias=has_biases,
        output_bias=has_biases,
        attention_sinks=True,
        windowed_layers=gguf_keys.windowed_layers(fields, PERIOD),
        rope=gguf_keys.rope_config(fields, head_dim, truncate=False),
        experts=gguf_keys.experts(fields, biases=True),
    )


FAMILY = Family(
    "gpt-oss",
    partial(llama.build, ffn_norm="post_attention_norm"),
    {"GptOssForCausalLM": _config},
    _gguf_config,
    block_names={**BLOCK_NAMES, "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    tensor_names={"self_attn.sinks": "attn_sinks.weight"},
    expert_sources={
        "ffn_gate_exps.weight": (ExpertSource("mlp.experts.gate_up_proj", "even", transposed=True),),
        "ffn_gate_exps.bias": (ExpertSource("mlp.experts.gate_up_proj_bias", "even"),),
        "ffn_up_exps.weight": (ExpertSource("mlp.experts.gate_up_proj", "odd", transposed=True),),
        "ffn_up_exps.bias": (ExpertSource("mlp.experts.gate_up_proj_bias", "odd"),),
        "ffn_down_exps.weight": (ExpertSource("mlp.experts.down_proj", transposed=True),),
        "ffn_down_exps.bias": (ExpertSource("mlp.experts.down_proj_bias"),),
    },
)

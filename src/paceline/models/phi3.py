"""Phi-3, Phi-3.5 and Phi-4, the mini ones too: Llama's graph from files in which query, key and value are one matrix,
and gate and up another.

Source: the Phi-3 (2404.14219) and Phi-4 (2412.08905) reports; Transformers, modeling_phi3.py; llama.cpp, its converter
and its loader of "phi3". Long contexts divide frequencies by numbers of the file (LongRoPE), which the context that is
served chooses; Transformers chooses anew for every sequence. In Phi-4-mini three quarters of a head rotate.

Departures: llama.cpp passes over the sliding window of such files; here it is as in Transformers.

Checked by: tests/golden/test_transformers_dense.py, tests/golden/test_gguf_dense.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.config import ModelConfig
from paceline.models import gguf_keys, huggingface_keys, llama
from paceline.models.family import BLOCK_NAMES, Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys

OLD_NAMES_OF_LONGROPE = ("su", "yarn")
"""Types of rotation in the first releases of the 128k models, which mean the same."""


def _config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = _with_todays_name(keys).with_defaults(
        max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5
    )
    head_dim = keys.integer("head_dim", max(keys.integer("hidden_size") // keys.integer("num_attention_heads"), 1))
    return huggingface_keys.dense_config(
        keys,
        "phi3",
        rope=huggingface_keys.rope_config(keys, head_dim, is_partial=True),
        sliding_window=None if keys.get("sliding_window") is None else keys.integer("sliding_window"),
    )


def _with_todays_name(keys: HuggingFaceKeys) -> HuggingFaceKeys:
    """The same with today's name of the type of rotation."""
    for key in ("rope_parameters", "rope_scaling"):
        given = keys.get(key)
        if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) in OLD_NAMES_OF_LONGROPE:
            renamed = {**keys.values, key: {**given, "rope_type": "longrope"}}
            return HuggingFaceKeys(keys.path, renamed, keys.defaults)
    return keys


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    return gguf_keys.dense_config(fields)


FAMILY = Family(
    "phi3",
    llama.build,
    {"Phi3ForCausalLM": _config},
    _gguf_config,
    block_names={**BLOCK_NAMES, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    fused={"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")},
)

"""What is read from config.json of released models: their keys that say what is computed, as they were published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.models.registry import config_from_json

COMMON: dict[str, Any] = {"attention_bias": False, "hidden_act": "silu", "rope_scaling": None, "mlp_bias": False}


def shape(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, context: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


GEMMA = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
}
PHI3 = COMMON | {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3-1b-it": (
        "Gemma3ForCausalLM",
        GEMMA
        | shape(26, 1152, 6912, 4, 1, 262144, 32768)
        | {"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512}
        | {"sliding_window_pattern": 6},
    ),
    "gemma-2-2b": (
        "Gemma2ForCausalLM",
        GEMMA
        | shape(26, 2304, 9216, 8, 4, 256000, 8192)
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope_theta": 10000.0}
        | {"sliding_window": 4096, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "Phi-3-mini-4k": ("Phi3ForCausalLM", PHI3 | shape(32, 3072, 8192, 32, 32, 32064, 4096) | {"sliding_window": 2047}),
    "Phi-4": (
        "Phi3ForCausalLM",
        PHI3 | shape(40, 5120, 17920, 40, 10, 100352, 16384) | {"sliding_window": None, "rope_theta": 250000},
    ),
    "Phi-4-mini": (
        "Phi3ForCausalLM",
        PHI3
        | shape(32, 3072, 8192, 24, 8, 200064, 131072)
        | {"sliding_window": 262144, "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}
        | {"tie_word_embeddings": True},
    ),
    "granite-3.3-2b": (
        "GraniteForCausalLM",
        COMMON
        | shape(40, 2048, 8192, 32, 8, 49159, 131072)
        | {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
        | {"residual_multiplier": 0.22, "rope_theta": 10000000.0, "tie_word_embeddings": True},
    ),
    "Olmo-3-7B": (
        "Olmo3ForCausalLM",
        COMMON
        | shape(32, 4096, 11008, 32, 32, 100278, 65536)
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "rope_scaling": YARN}
        | {"rope_theta": 500000, "sliding_window": 4096},
    ),
    "SmolLM3-3B": (
        "SmolLM3ForCausalLM",
        COMMON
        | shape(36, 2048, 11008, 16, 4, 128256, 65536)
        | {"layer_types": ["full_attention"] * 36, "no_rope_layers": [1, 1, 1, 0] * 9, "rope_theta": 5000000.0}
        | {"sliding_window": None, "use_sliding_window": False},
    ),
}
EXPECTED: dict[str, dict[str, Any]] = {
    "gemma-3-1b-it": {"qk_norm": True, "tie_embeddings": True, "query_scale": 1 / 16, "logit_softcap": None},
    "gemma-2-2b": {"attention_softcap": 50.0, "logit_softcap": 30.0, "embedding_scale": 48.0, "tie_embeddings": True},
    "Phi-3-mini-4k": {"head_dim": 96, "sliding_window": 2047, "kv_window": 2047, "tie_embeddings": False},
    "Phi-4": {"head_dim": 128, "sliding_window": None, "context_length": 16384},
    "Phi-4-mini": {"head_dim": 128, "tie_embeddings": True, "num_kv_heads": 8},
    "granite-3.3-2b": {
        "query_scale": 1 / 64,
        "embedding_scale": 12.0,
        "logit_scale": 1 / 8,
        "residual_scale": 0.22,
        "tie_embeddings": True,
        "attention_bias": False,
    },
    "Olmo-3-7B": {"sliding_window": 4096, "kv_window": None, "qk_norm": False},
    "SmolLM3-3B": {"unrotated_layers": tuple(range(3, 36, 4)), "sliding_window": None},
}
ROTATIONS = {  # of the last layer that rotates: base, components, kind of scaling, attention factor
    "gemma-3-1b-it": (1e4, 256, None, 1.0),
    "gemma-2-2b": (1e4, 256, None, 1.0),
    "Phi-3-mini-4k": (1e4, 96, None, 1.0),
    "Phi-4": (250000.0, 128, None, 1.0),
    "Phi-4-mini": (1e4, 96, "longrope", 1.1902380714238083),
    "granite-3.3-2b": (1e7, 64, None, 1.0),
    "Olmo-3-7B": (500000.0, 128, "yarn", 1.2079441541679836),
    "SmolLM3-3B": (5e6, 128, None, 1.0),
}


@pytest.mark.parametrize("name", FILES)
def test_a_published_file(name: str) -> None:
    class_name, values = FILES[name]
    config = config_from_json(Path("config.json"), values | {"architectures": [class_name]})
    assert {key: getattr(config, key) for key in EXPECTED[name]} == EXPECTED[name]
    *_, rope = (rope for layer in range(config.num_layers) if (rope := config.rope_of(layer)) is not None)
    theta, dim, kind, attention_factor = ROTATIONS[name]
    assert (rope.theta, rope.dim, rope.scaling and rope.scaling.kind) == (theta, dim, kind)
    assert rope.attention_factor == pytest.approx(attention_factor)
    period = {"gemma-3-1b-it": 6, "gemma-2-2b": 2, "Olmo-3-7B": 4}.get(name)
    sees_all = [layer for layer in range(config.num_layers) if config.window_of(layer) is None]
    if period is not None:
        assert sees_all == list(range(period - 1, config.num_layers, period))

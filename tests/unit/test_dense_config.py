"""Configurations of Phi-3, Granite, OLMo and SmolLM3: releases' own config.json, older spellings, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, PacelineError, UnsupportedError
from paceline.models.registry import config_from_json, config_from_metadata

PATH = Path("config.json")
SHAPE = {
    "vocab_size": 75,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def read(name: str, **changes: Any) -> ModelConfig:
    return config_from_json(PATH, SHAPE | {"architectures": [f"{name}ForCausalLM"]} | changes)


def phi3(**changes: Any) -> ModelConfig:
    return read("Phi3", **changes)


@pytest.mark.parametrize("spelling", ["longrope", "su", "yarn"])
def test_the_rotation_of_phi_3_under_all_its_names(spelling: str) -> None:
    """rope_scaling beside rope_theta, as releases have it; attention is scaled by the ratio of both contexts."""
    config = phi3(
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        rope_theta=5000.0,
        rope_scaling={"type": spelling, "short_factor": SHORT, "long_factor": LONG},
    )
    attention = math.sqrt(1 + math.log(32) / math.log(4096))
    scaling = RopeScaling(
        "longrope",
        original_context=4096,
        factors=tuple(SHORT),
        long_factors=tuple(LONG),
        attention_factor=attention,
    )
    assert config.rope == RopeConfig(5000.0, 12, scaling)
    assert config.at_context(4096).rope.scaling == RopeScaling(
        "factors", original_context=4096, factors=tuple(SHORT), attention_factor=attention
    )
    assert config.at_context(4097).rope.scaling == RopeScaling(
        "factors", original_context=4096, factors=tuple(LONG), attention_factor=attention
    )


def test_the_trained_context_outside_of_the_rotation_counts() -> None:
    rope = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "partial_rotary_factor": 0.75}
    config = phi3(rope_parameters=rope | {"original_max_position_embeddings": 64}, original_max_position_embeddings=32)
    assert config.rope.scaling is not None
    assert config.rope.scaling.original_context == 32
    usual = phi3(rope_parameters=rope | {"original_max_position_embeddings": 64})
    assert usual.rope.scaling is not None
    assert usual.rope.scaling.original_context == 4096  # Phi3Config has that where config.json has nothing


def test_phi_3_has_a_window_where_it_says_so() -> None:
    assert phi3(sliding_window=2047).kv_window == 2047
    assert phi3(sliding_window=None).kv_window is None


def test_granite_without_numbers_has_those_of_its_class() -> None:
    config = read("Granite")
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (1.0, 1.0, 1.0)
    assert config.query_scale == 1.0
    assert read("Granite", logits_scaling=8.0).logit_scale == 0.125


def test_olmo_3_as_released() -> None:
    """rope_scaling is that of layers that see all; no layer_types: every fourth."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    config = read("Olmo3", max_position_embeddings=65536, rope_theta=500000.0, rope_scaling=yarn)
    assert config.windowed_layers == (True, True, True, False, True)
    assert config.sliding_window == 4096
    assert config.rope_of(0) == RopeConfig(500000.0, 16)
    full = config.rope_of(3)
    assert full is not None
    assert full.scaling == RopeScaling("yarn", factor=8.0, original_context=8192, attention_factor=1.2)


def test_smollm3_without_a_list_rotates_three_of_four() -> None:
    assert read("SmolLM3").unrotated_layers == (3,)
    assert read("SmolLM3").rope.theta == 2e6
    assert read("SmolLM3").tie_embeddings
    assert read("SmolLM3", no_rope_layer_interval=2).unrotated_layers == (1, 3)
    assert read("SmolLM3", no_rope_layers=[1, 0, 1, 1, 0, 0]).unrotated_layers == (1, 4)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "short_factor": [*SHORT, 2.0, 2.0], "long_factor": [*LONG, 7.0, 8.0]}


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        ("Phi3", {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, CheckpointError, "long_factor is"),
        ("Phi3", {"rope_scaling": LONGROPE | {"short_factor": None}}, CheckpointError, "short_factor is None"),
        ("Phi3", {"rope_scaling": LONGROPE | {"long_factor": [0.0] * 8}}, CheckpointError, "long_factor is 0"),
        ("Phi3", {"rope_scaling": LONGROPE | {"short_mscale": 1.2}}, UnsupportedError, "'longrope' with short_mscale"),
        (
            "Phi3",
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
            CheckpointError,
            "original_max_position_embeddings is 1",
        ),
        ("Phi3", {"partial_rotary_factor": 0.7}, CheckpointError, "makes 11 components of 16"),
        ("Phi3", {"partial_rotary_factor": 1.5}, CheckpointError, "makes 24 components of 16"),
        ("Phi3", {"rope_scaling": {"rope_type": ["yarn"]}}, UnsupportedError, "rope_type"),
        ("Phi3", {"hidden_act": "gelu"}, UnsupportedError, "hidden_act 'gelu'"),
        ("Granite", {"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor"),
        ("Granite", {"residual_multiplier": 0}, CheckpointError, "residual_multiplier is 0"),
        ("Granite", {"logits_scaling": "8"}, CheckpointError, "logits_scaling is '8'"),
        ("Granite", {"mlp_bias": True}, UnsupportedError, "mlp_bias"),
        (
            "Olmo3",
            {"layer_types": ["full_attention"] * 4},
            CheckpointError,
            "layer_types names 4 layers, num_hidden_layers is 5",
        ),
        ("Olmo3", {"layer_types": ["chunked"] * 5}, UnsupportedError, "layer_types: chunked"),
        ("Olmo3", {"rope_parameters": {"chunked": {}}}, UnsupportedError, "rope_parameters: chunked"),
        ("Olmo3", {"num_hidden_layers": 2**60}, CheckpointError, "at most 10000"),
        ("SmolLM3", {"num_hidden_layers": 2**60}, CheckpointError, "at most 10000"),
        ("SmolLM3", {"no_rope_layers": [1, 1, 1]}, CheckpointError, "no_rope_layers is"),
        ("SmolLM3", {"no_rope_layers": [1, 1, 1, 2, 1]}, CheckpointError, "no_rope_layers is"),
        ("SmolLM3", {"layer_types": ["sliding_attention"] * 5}, CheckpointError, "sliding_window is None"),
        ("Qwen3", {"rope_scaling": YARN | {"beta_slow": 32}}, CheckpointError, "beta_slow 32"),
        ("Qwen3", {"rope_scaling": YARN, "rope_theta": 1}, CheckpointError, "rope_theta is 1"),
        ("Qwen3", {"rope_scaling": YARN | {"attn_factor": 2.0}}, UnsupportedError, "'yarn' with attn_factor"),
    ],
)
def test_what_is_refused_is_named(name: str, changes: dict[str, Any], error: type[PacelineError], words: str) -> None:
    with pytest.raises(error, match=words):
        read(name, **{"num_key_value_heads": 4, "head_dim": 16} | changes)


# ---- GGUF ----


def from_gguf(architecture: str, **changes: Any) -> ModelConfig:
    """``changes``: keys of the architecture, "__" for a dot; None removes one."""
    keys = {
        "block_count": 5,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    shapes = {"token_embd.weight": (75, 64), "output.weight": (75, 64)}
    return config_from_metadata(PATH, metadata | {"general.architecture": architecture}, shapes, rope_vectors={})


def test_gguf_files_of_olmo_2_and_3_have_one_name() -> None:
    plain = from_gguf("olmo2", rope__freq_base=500000.0)
    assert (plain.kv_window, plain.windowed_layers, plain.local_rope) == (None, (), None)
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0}
    third = from_gguf("olmo2", rope__freq_base=500000.0, attention__sliding_window=4096, **yarn)
    assert third.windowed_layers == (True, True, True, False, True)
    assert third.rope_of(0) == RopeConfig(500000.0, 16)
    assert third.rope_of(3) == third.rope
    assert third.rope.scaling is not None
    other = from_gguf("olmo2", attention__sliding_window=64, rope__freq_base_swa=100.0)
    assert other.local_rope == RopeConfig(100.0, 16)
    pattern = np.array([False, True, True, False, False])
    assert from_gguf(
        "olmo2", attention__sliding_window=64, attention__sliding_window_pattern=pattern
    ).windowed_layers == tuple(pattern.tolist())


def test_a_window_of_0_is_none() -> None:
    """Phi-4's files have it."""
    assert from_gguf("phi3", attention__sliding_window=0).kv_window is None
    assert from_gguf("phi3", attention__sliding_window=2047).kv_window == 2047


def test_smollm3_files_rotate_three_of_four() -> None:
    assert from_gguf("smollm3").unrotated_layers == (3,)
    with pytest.raises(CheckpointError, match="block_count is 1152921504606846976"):
        from_gguf("smollm3", block_count=2**60)


def test_the_context_chooses_rotations_of_layers_with_a_window_too() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    longrope = {"rope_type": "longrope", "rope_theta": 500.0, "attention_factor": 1.0} | factors
    config = read("Olmo3", rope_parameters={"sliding_attention": longrope, "full_attention": {"rope_theta": 500.0}})
    for context_length, factor in ((64, 1.0), (65, 2.0)):
        local = config.at_context(context_length).local_rope
        assert local is not None
        assert local.scaling is not None
        assert (local.scaling.kind, local.scaling.factors) == ("factors", (factor,) * 8)

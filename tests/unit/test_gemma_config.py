"""Configurations of Gemma 2 and 3: what releases leave out, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import CheckpointError, PacelineError, UnsupportedError
from paceline.models.registry import config_from_json, config_from_metadata

PATH = Path("config.json")
FOUR_B = {
    # All that the release of Gemma-3-4B says of its text part.
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def images(text: Any) -> dict[str, Any]:
    return {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}


def gemma3(**values: Any) -> dict[str, Any]:
    return {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2} | values


def gemma2(**values: Any) -> dict[str, Any]:
    return {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2} | values


def test_what_a_release_leaves_out() -> None:
    config = config_from_json(PATH, images(FOUR_B))
    assert (config.architecture, config.vocab_size, config.context_length) == ("gemma3", 262_208, 131_072)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.rope.theta == 1e6
    assert config.rope.scaling is not None
    assert config.rope.scaling.factor == 8.0
    assert config.local_rope is not None
    assert (config.local_rope.theta, config.local_rope.scaling) == (1e4, None)
    assert [layer for layer in range(34) if config.window_of(layer) is None] == [5, 11, 17, 23, 29]
    assert config.window_of(0) == 1024
    assert config.tie_embeddings
    assert config.kv_window is None
    assert config.embedding_scale == np.float32(2560**0.5)
    second = config_from_json(PATH, gemma2())
    assert (second.attention_softcap, second.logit_softcap, second.sliding_window) == (50.0, 30.0, 4096)
    assert second.windowed_layers == (True, False)
    assert second.query_scale == 1 / 16


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (gemma3(hidden_activation="gelu"), UnsupportedError, "hidden_activation 'gelu'"),
        (gemma2(hidden_activation="relu"), UnsupportedError, "hidden_activation 'relu'"),
        (gemma3(attention_bias=True), UnsupportedError, "attention_bias"),
        (gemma3(use_bidirectional_attention=True), UnsupportedError, "use_bidirectional_attention"),
        (gemma3(attn_logit_softcapping=50.0), UnsupportedError, "attn_logit_softcapping"),
        (gemma3(layer_types=["chunked_attention"] * 2), UnsupportedError, "layer_types: chunked_attention"),
        (gemma3(layer_types=["full_attention"]), CheckpointError, "layer_types names 1 layers, num_hidden_layers is 2"),
        (gemma3(sliding_window=None), CheckpointError, "sliding_window is None"),
        (gemma3(rope_parameters={"rope_type": "default"}), CheckpointError, "rope_parameters"),
        (gemma3(rope_parameters={"chunked": {}}), UnsupportedError, "rope_parameters: chunked"),
        (gemma3(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), UnsupportedError, "rope_type 'dynamic'"),
        (gemma3(rope_scaling="linear"), CheckpointError, "rope_scaling is 'linear'"),
        (gemma2(rope_parameters={"rope_type": "dynamic"}), UnsupportedError, "rope_type 'dynamic'"),
        (gemma2(query_pre_attn_scalar=0), CheckpointError, "query_pre_attn_scalar is 0"),
        (gemma2(final_logit_softcapping=-1.0), CheckpointError, "final_logit_softcapping is -1.0"),
        (images(None), CheckpointError, "text_config is None"),
        (images(FOUR_B | {"hidden_activation": "silu"}), UnsupportedError, "hidden_activation 'silu'"),
    ],
)
def test_errors_name_the_key(values: dict[str, Any], error: type[PacelineError], words: str) -> None:
    with pytest.raises(error) as caught:
        config_from_json(PATH, values)
    assert words in str(caught.value)
    assert str(PATH) in str(caught.value)


METADATA = {
    "block_count": 7,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
SHAPES = {"token_embd.weight": (75, 64)}


def from_gguf(architecture: str, **changes: Any) -> Any:
    keys = {f"{architecture}.{key.replace('__', '.')}": value for key, value in (METADATA | changes).items()}
    metadata = {"general.architecture": architecture} | keys
    return config_from_metadata(Path("m.gguf"), metadata, SHAPES, rope_vectors={})


def test_what_gguf_files_leave_to_the_reader() -> None:
    third = from_gguf("gemma3", attention__sliding_window=32)
    assert third.windowed_layers == (*[True] * 5, False, True)
    assert third.local_rope is not None
    assert third.local_rope.theta == 1e4
    assert (third.attention_softcap, third.logit_softcap) == (None, None)
    third = from_gguf("gemma3", attention__sliding_window=32, attention__sliding_window_pattern=2)
    assert third.windowed_layers == (True, False, True, False, True, False, True)
    assert from_gguf("gemma3").sliding_window is None
    second = from_gguf("gemma2")
    assert (second.sliding_window, second.attention_softcap, second.logit_softcap) == (4096, 50.0, 30.0)
    assert second.windowed_layers == (True, False, True, False, True, False, True)
    assert second.local_rope is None


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping"),
        ("gemma3", {"rope__freq_base_swa": 0.0}, "gemma3.rope.freq_base_swa is 0.0"),
        ("gemma3", {"rope__scaling__type": "dynamic"}, "rope.scaling.type 'dynamic'"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "gemma2.final_logit_softcapping is -1.0"),
        ("gemma2", {"attention__sliding_window_pattern": np.array([True])}, "sliding_window_pattern names 1 layers"),
        ("gemma2", {"attention__sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma2", {"expert_count": 8}, "expert_count"),
    ],
)
def test_errors_name_the_key_of_a_gguf_file(architecture: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PacelineError) as caught:
        from_gguf(architecture, **changes)
    assert words in str(caught.value)
    assert "m.gguf" in str(caught.value)

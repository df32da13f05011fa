"""Logits of tiny random models of Llama, Mistral and Qwen against Transformers, at every position of a prompt.

Bounds: golden_models.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_models import (
    F16_PAGES,
    FLOAT_LOGITS,
    NUM_TOKENS,
    WINDOW,
    Altered,
    Case,
    Change,
    Saved,
    assert_floats_agree,
    assert_mistake_is_seen,
    assert_native_agrees,
    assert_seen,
    error,
    saved_cases,
    with_fields,
    with_scaling,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.config import RopeConfig
from paceline.weights.checkpoint import open_checkpoint

LLAMA3_ROPE = {
    # Wavelengths 6.3, 19.9, 63, ... against 32: one frequency is kept, one interpolated, the others are divided.
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**changes: Any) -> Case:
    return Case(LlamaForCausalLM, LlamaConfig, changes)


CASES = {
    "llama": llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llama-tied-bf16": replace(llama(tie_word_embeddings=True, num_hidden_layers=3), dtype=torch.bfloat16),
    "llama-mha-wide": llama(hidden_size=96, num_attention_heads=3, num_key_value_heads=3, head_dim=32),
    "llama-mqa-sharded": replace(llama(num_key_value_heads=1, num_hidden_layers=3), shard="60KB"),
    "llama3-rope": llama(rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "mistral-window": Case(MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}, dtype=torch.float16),
    "mistral-no-window": Case(MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": Case(Qwen2ForCausalLM, Qwen2Config, {"hidden_size": 96, "num_attention_heads": 6}),
    "qwen2-tied-window": Case(
        Qwen2ForCausalLM,
        Qwen2Config,
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    ),
    "qwen3": Case(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}, dtype=torch.bfloat16),
    "qwen3-tied": Case(Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_cases(CASES, tmp_path_factory)


@pytest.mark.parametrize("executor", FLOAT_LOGITS)
@pytest.mark.parametrize("name", CASES)
def test_floats_have_the_logits_of_transformers(name: str, executor: str, saved: Any) -> None:
    assert_floats_agree(saved, name, executor)


@pytest.mark.parametrize("name", CASES)
def test_native_has_the_logits_of_transformers(name: str, saved: Any) -> None:
    assert_native_agrees(saved, name)


def test_the_f16_pages_of_transformers_matter(saved: Any) -> None:
    """Else the second comparison would be the first."""
    _, logits = saved("llama")
    assert F16_PAGES < error(logits["f16"], logits["float"]) < 10 * F16_PAGES


def test_the_cases_are_what_their_names_say(saved: Any) -> None:
    configs = {name: open_checkpoint(saved(name)[0]).config for name in CASES}
    assert len(list(saved("llama-mqa-sharded")[0].glob("*.safetensors"))) > 2
    assert json.loads((saved("mistral-window")[0] / "config.json").read_text())["sliding_window"] == WINDOW
    kinds = {name: open_checkpoint(saved(name)[0]).tensor("token_embd.weight").kind for name in CASES}
    assert set(kinds.values()) == {"F32", "F16", "BF16"}
    assert {name for name, config in configs.items() if config.tie_embeddings} == {
        "llama-tied-bf16",
        "qwen2-tied-window",
        "qwen3-tied",
    }
    assert {name for name, config in configs.items() if config.sliding_window == WINDOW} == {
        "mistral-window",
        "qwen2-tied-window",
    }
    scaled = {name: config.rope.scaling.kind for name, config in configs.items() if config.rope.scaling}
    assert scaled == {"llama3-rope": "llama3", "llama-linear-rope": "linear"}


MISTAKES: dict[str, tuple[str, Change]] = {
    "other theta": ("llama", with_fields(rope=RopeConfig(510.0, 16))),
    "half the head rotates": ("llama", with_fields(rope=RopeConfig(500.0, 8))),
    "other epsilon": ("llama", with_fields(rms_norm_eps=1e-3)),
    "rope scaling ignored (llama3)": ("llama3-rope", with_fields(rope=RopeConfig(10000.0, 16))),
    "low frequencies start elsewhere": ("llama3-rope", with_scaling(low_freq_factor=1.2)),
    "high frequencies start elsewhere": ("llama3-rope", with_scaling(high_freq_factor=4.5)),
    "another trained context": ("llama3-rope", with_scaling(original_context=36)),
    "rope scaling ignored (linear)": ("llama-linear-rope", with_fields(rope=RopeConfig(10000.0, 16))),
    "window ignored": ("mistral-window", with_fields(sliding_window=None)),
    "window one too long": ("mistral-window", with_fields(sliding_window=WINDOW + 1)),
    "window one too short": ("mistral-window", with_fields(sliding_window=WINDOW - 1)),
    "window where there is none": ("mistral-no-window", with_fields(sliding_window=NUM_TOKENS - 1)),
    "biases ignored": ("qwen2", with_fields(architecture="llama", attention_bias=False)),
    "norms of heads ignored": ("qwen3", with_fields(architecture="llama", qk_norm=False)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_a_reader_is_seen(mistake: str, saved: Saved) -> None:
    assert_mistake_is_seen(saved, *MISTAKES[mistake])


@pytest.mark.parametrize("name", CASES)
def test_the_wrong_rope_pairing_is_seen(name: str, saved: Any) -> None:
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, checkpoint.config, not checkpoint.interleaved_rope)
    assert_seen(altered, logits)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("qwen2", f"blk.1.attn_{x}.bias") for x in "qkv"] + [("qwen3", f"blk.1.attn_{x}_norm.weight") for x in "qk"],
)
def test_a_lost_vector_of_one_layer_is_seen(name: str, tensor: str, saved: Any) -> None:
    """Softmax would be blind to a bias of keys, but for their rotation."""
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, checkpoint.config, checkpoint.interleaved_rope, zeroed=tensor)
    assert_seen(altered, logits)

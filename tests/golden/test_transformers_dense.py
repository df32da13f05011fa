"""Logits of tiny random Phi-3, Granite, OLMo 2 and 3 and SmolLM3 models, and Qwen's with YaRN, against Transformers.

Bounds: golden_models.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from golden_models import (
    F16_PAGES,
    FLOAT,
    NUM_TOKENS,
    SEEN,
    WINDOW,
    Altered,
    Case,
    Saved,
    error,
    logits_of_native,
    logits_of_reference,
    saved_cases,
)
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.config import ModelConfig
from paceline.ops.reference import inverse_frequencies
from paceline.weights.checkpoint import open_checkpoint

PHI3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}
GRANITE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.31,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}
YARN = {
    # Pair i of 8 turns 64 * 0.56^i times in the trained context: the ramp goes from pair 4 to pair 12, which is not
    # there, and from 4.4 to 11.2 where ends are not taken whole.
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 5.0,
    "beta_slow": 0.1,
    "original_max_position_embeddings": 400,
}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

Change = Callable[[ModelConfig], ModelConfig]


def phi3(**changes: Any) -> Case:
    return Case(Phi3ForCausalLM, Phi3Config, PHI3 | {"pad_token_id": 0} | changes)


def granite(**changes: Any) -> Case:
    return Case(GraniteForCausalLM, GraniteConfig, GRANITE | changes)


def olmo2(**changes: Any) -> Case:
    return Case(Olmo2ForCausalLM, Olmo2Config, {"rope_parameters": DEFAULT} | changes)


def olmo3(**changes: Any) -> Case:
    ropes = {"full_attention": YARN, "sliding_attention": DEFAULT}
    usual = {"rope_parameters": ropes, "sliding_window": WINDOW, "layer_types": LAYERS, "num_hidden_layers": 3}
    return Case(Olmo3ForCausalLM, Olmo3Config, usual | changes)


def smollm3(**changes: Any) -> Case:
    usual = {"num_hidden_layers": 5, "rope_parameters": DEFAULT, "pad_token_id": 0}
    return Case(SmolLM3ForCausalLM, SmolLM3Config, usual | changes)


CASES = {
    "phi3": phi3(),
    "phi3-mha-window-bf16": replace(phi3(num_key_value_heads=4, sliding_window=WINDOW), dtype=torch.bfloat16),
    "phi3-partial": phi3(rope_parameters=PHI3["rope_parameters"] | {"partial_rotary_factor": 0.75}),
    "phi3-long-tied": phi3(rope_parameters=LONGROPE, original_max_position_embeddings=32, tie_word_embeddings=True),
    "phi3-short": phi3(
        rope_parameters=LONGROPE | {"factor": 4.0}, original_max_position_embeddings=64, max_position_embeddings=64
    ),
    "phi3-long-own-factor": phi3(
        rope_parameters=LONGROPE | {"attention_factor": 1.7}, original_max_position_embeddings=32
    ),
    "granite": granite(),
    "granite-tied-bias": granite(tie_word_embeddings=True, attention_bias=True, num_key_value_heads=4),
    "granite-bf16": replace(granite(head_dim=32), dtype=torch.bfloat16),
    "olmo2": olmo2(),
    "olmo2-bias-mha": olmo2(attention_bias=True, num_key_value_heads=4, num_hidden_layers=3),
    "olmo3": olmo3(),
    "olmo3-period": olmo3(layer_types=None, num_hidden_layers=5, rope_parameters={"full_attention": DEFAULT}),
    "smollm3": smollm3(),
    "smollm3-layers": smollm3(no_rope_layers=[0, 1, 1, 0, 1], tie_word_embeddings=False, attention_bias=True),
    "smollm3-interval": smollm3(no_rope_layer_interval=2, rope_parameters=YARN),
    "smollm3-window": smollm3(use_sliding_window=True, sliding_window=WINDOW),
    "qwen3-yarn": Case(Qwen3ForCausalLM, Qwen3Config, {"rope_parameters": YARN}),
    "qwen2-yarn-mscale": Case(
        Qwen2ForCausalLM,
        Qwen2Config,
        {"rope_parameters": YARN | {"mscale": 4.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_cases(CASES, tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_reference_has_the_logits_of_transformers(name: str, saved: Saved) -> None:
    directory, logits = saved(name)
    assert error(logits_of_reference(open_checkpoint(directory)), logits["float"]) < FLOAT


@pytest.mark.parametrize("name", CASES)
def test_native_has_the_logits_of_transformers(name: str, saved: Saved) -> None:
    directory, logits = saved(name)
    for chunk in (NUM_TOKENS, 1):
        assert error(logits_of_native(open_checkpoint(directory), chunk), logits["f16"]) < F16_PAGES


# ---- what is wrong is seen ----


def _with(**changes: Any) -> Change:
    return lambda config: replace(config, **changes)


def _rope(**changes: Any) -> Change:
    return lambda config: replace(config, rope=replace(config.rope, **changes))


def _scaling(**changes: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.rope.scaling is not None
        return replace(config, rope=replace(config.rope, scaling=replace(config.rope.scaling, **changes)))

    return change


MISTAKES: dict[str, tuple[str, Change]] = {
    "window ignored": ("phi3-mha-window-bf16", _with(sliding_window=None)),
    "window one too long": ("phi3-mha-window-bf16", _with(sliding_window=WINDOW + 1)),
    "the whole head rotates": ("phi3-partial", _rope(dim=16)),
    "half of the head rotates": ("phi3-partial", _rope(dim=8)),
    "factors ignored": ("phi3-long-tied", _rope(scaling=None)),
    "short factors for a long context": ("phi3-long-tied", lambda config: config.at_context(32)),
    "long factors for a short context": ("phi3-short", lambda config: config.at_context(65)),
    "attention factor ignored": ("phi3-long-tied", _scaling(attention_factor=1.0)),
    "attention factor ignored (short)": ("phi3-short", _scaling(attention_factor=1.0)),
    "attention factor implied": ("phi3-long-own-factor", _scaling(attention_factor=1.2649)),
    "other epsilon": ("phi3", _with(rms_norm_eps=1e-3)),
    "embeddings not scaled": ("granite", _with(embedding_scale=1.0)),
    "scores scaled as usual": ("granite", _with(attention_scale=None)),
    "residual not scaled": ("granite", _with(residual_scale=1.0)),
    "logits multiplied": ("granite", _with(logit_scale=4.0)),
    "logits not scaled": ("granite-tied-bias", _with(logit_scale=1.0)),
    "scaled rotation in every layer": ("olmo3", _with(local_rope=None)),
    "scaled rotation in no layer": ("olmo3", _rope(scaling=None)),
    "rotations exchanged": ("olmo3", lambda config: replace(config, rope=config.local_rope, local_rope=config.rope)),
    "every layer has the window": ("olmo3", _with(windowed_layers=())),
    "no layer has the window": ("olmo3", _with(sliding_window=None)),
    "window one too short": ("olmo3", _with(sliding_window=WINDOW - 1)),
    "the first of four layers sees all": ("olmo3-period", _with(windowed_layers=(False, True, True, True, True))),
    "every layer rotates": ("smollm3", _with(unrotated_layers=())),
    "another layer does not rotate": ("smollm3", _with(unrotated_layers=(4,))),
    "no_rope_layers as its name says": ("smollm3-layers", _with(unrotated_layers=(1, 2, 4))),
    "the interval ignored": ("smollm3-interval", _with(unrotated_layers=(3,))),
    "window of SmolLM3 ignored": ("smollm3-window", _with(sliding_window=None)),
    "window in layers that rotate": ("smollm3-window", _with(windowed_layers=(True, True, True, False, True))),
    "ramp ignored": ("qwen3-yarn", _scaling(kind="linear")),
    "ramp begins elsewhere": ("qwen3-yarn", _scaling(beta_fast=32.0)),
    "ramp ends elsewhere": ("qwen3-yarn", _scaling(beta_slow=1.0)),
    "another trained context": ("qwen3-yarn", _scaling(original_context=256)),
    "attention not scaled": ("qwen3-yarn", _scaling(attention_factor=1.0)),
    "mscale ignored": ("qwen2-yarn-mscale", _scaling(attention_factor=1.1386)),
    "whole pairs": ("qwen2-yarn-mscale", _scaling(truncate=True)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_a_reader_is_seen(mistake: str, saved: Saved) -> None:
    name, change = MISTAKES[mistake]
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    changed = change(checkpoint.config)
    assert changed != checkpoint.config
    altered = Altered(checkpoint, changed, checkpoint.interleaved_rope)
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT
    assert error(logits_of_native(altered, NUM_TOKENS), logits["f16"]) > SEEN * F16_PAGES


@pytest.mark.parametrize("name", [name for name in CASES if "yarn" not in name])
def test_the_wrong_rope_pairing_is_seen(name: str, saved: Saved) -> None:
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, checkpoint.config, not checkpoint.interleaved_rope)
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("granite-tied-bias", f"blk.1.attn_{part}.bias") for part in ("q", "k", "v", "output")]
    + [("olmo2", f"blk.1.{norm}.weight") for norm in ("attn_q_norm", "attn_k_norm", "post_attention_norm")]
    + [("olmo2", "blk.1.post_ffw_norm.weight"), ("olmo2-bias-mha", "blk.2.attn_output.bias")],
)
def test_a_lost_vector_of_one_layer_is_seen(name: str, tensor: str, saved: Saved) -> None:
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, checkpoint.config, checkpoint.interleaved_rope, zeroed=tensor)
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT
    assert error(logits_of_native(altered, NUM_TOKENS), logits["f16"]) > SEEN * F16_PAGES


# ---- rotations to the last bit ----

ROTATING = ["qwen3-yarn", "qwen2-yarn-mscale", "olmo3", "smollm3-interval", *(name for name in CASES if "phi3" in name)]


@pytest.mark.parametrize("name", ROTATING)
def test_frequencies_and_attention_factors_are_those_of_transformers(name: str, saved: Saved) -> None:
    """Transformers computes frequencies in f32, in at most six roundings of 2^-24 and one power, of 2 ulp."""
    directory, _ = saved(name)
    theirs = CASES[name].config.from_pretrained(directory)
    model = CASES[name].model(theirs).model
    config = open_checkpoint(directory).config
    kind = {"layer_type": "full_attention"} if name == "olmo3" else {}
    rope = theirs.rope_parameters["full_attention"] if kind else theirs.rope_parameters
    if rope["rope_type"] == "default":
        frequencies, factor = model.rotary_emb.inv_freq, model.rotary_emb.attention_scaling
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, seq_len=config.context_length, **kind)
    ours = config.at_context(config.context_length).rope
    pairs = inverse_frequencies(ours, config.head_dim)
    assert ours.attention_factor == pytest.approx(factor, rel=2**-50)
    assert len(frequencies) == ours.dim // 2
    np.testing.assert_allclose(pairs[: ours.dim // 2], frequencies.double().numpy(), rtol=10 * 2**-24)
    assert not pairs[ours.dim // 2 :].any()

"""Logits of tiny random Phi-3, Granite, OLMo 2 and 3 and SmolLM3 models, and Qwen's with YaRN, against Transformers.

Bounds: golden_models.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dense_cases import CASES
from golden_models import (
    FLOAT,
    FLOAT_LOGITS,
    SEEN,
    WINDOW,
    Altered,
    Change,
    Saved,
    assert_floats_agree,
    assert_mistake_is_seen,
    assert_native_agrees,
    assert_seen,
    error,
    logits_of_reference,
    saved_cases,
    with_fields,
    with_scaling,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.ops.reference import inverse_frequencies
from paceline.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_cases(CASES, tmp_path_factory)


@pytest.mark.parametrize("executor", FLOAT_LOGITS)
@pytest.mark.parametrize("name", CASES)
def test_floats_have_the_logits_of_transformers(name: str, executor: str, saved: Saved) -> None:
    assert_floats_agree(saved, name, executor)


@pytest.mark.parametrize("name", CASES)
def test_native_has_the_logits_of_transformers(name: str, saved: Saved) -> None:
    assert_native_agrees(saved, name)


# ---- what is wrong is seen ----


def _rope(**changes: Any) -> Change:
    return lambda config: replace(config, rope=replace(config.rope, **changes))


MISTAKES: dict[str, tuple[str, Change]] = {
    "window ignored": ("phi3-mha-window-bf16", with_fields(sliding_window=None)),
    "window one too long": ("phi3-mha-window-bf16", with_fields(sliding_window=WINDOW + 1)),
    "the whole head rotates": ("phi3-partial", _rope(dim=16)),
    "half of the head rotates": ("phi3-partial", _rope(dim=8)),
    "factors ignored": ("phi3-long-tied", _rope(scaling=None)),
    "short factors for a long context": ("phi3-long-tied", lambda config: config.at_context(32)),
    "long factors for a short context": ("phi3-short", lambda config: config.at_context(65)),
    "attention factor ignored": ("phi3-long-tied", with_scaling(attention_factor=1.0)),
    "attention factor ignored (short)": ("phi3-short", with_scaling(attention_factor=1.0)),
    "attention factor implied": ("phi3-long-own-factor", with_scaling(attention_factor=1.2649)),
    "other epsilon": ("phi3", with_fields(rms_norm_eps=1e-3)),
    "embeddings not scaled": ("granite", with_fields(embedding_scale=1.0)),
    "scores scaled as usual": ("granite", with_fields(attention_scale=None)),
    "residual not scaled": ("granite", with_fields(residual_scale=1.0)),
    "logits multiplied": ("granite", with_fields(logit_scale=4.0)),
    "logits not scaled": ("granite-tied-bias", with_fields(logit_scale=1.0)),
    "scaled rotation in every layer": ("olmo3", with_fields(local_rope=None)),
    "scaled rotation in no layer": ("olmo3", _rope(scaling=None)),
    "rotations exchanged": ("olmo3", lambda config: replace(config, rope=config.local_rope, local_rope=config.rope)),
    "every layer has the window": ("olmo3", with_fields(windowed_layers=())),
    "no layer has the window": ("olmo3", with_fields(sliding_window=None)),
    "window one too short": ("olmo3", with_fields(sliding_window=WINDOW - 1)),
    "the first of four layers sees all": ("olmo3-period", with_fields(windowed_layers=(False, True, True, True, True))),
    "every layer rotates": ("smollm3", with_fields(unrotated_layers=())),
    "another layer does not rotate": ("smollm3", with_fields(unrotated_layers=(4,))),
    "no_rope_layers as its name says": ("smollm3-layers", with_fields(unrotated_layers=(1, 2, 4))),
    "the interval ignored": ("smollm3-interval", with_fields(unrotated_layers=(3,))),
    "window of SmolLM3 ignored": ("smollm3-window", with_fields(sliding_window=None)),
    "window in layers that rotate": ("smollm3-window", with_fields(windowed_layers=(True, True, True, False, True))),
    "ramp ignored": ("qwen3-yarn", with_scaling(kind="linear")),
    "ramp begins elsewhere": ("qwen3-yarn", with_scaling(beta_fast=32.0)),
    "ramp ends elsewhere": ("qwen3-yarn", with_scaling(beta_slow=1.0)),
    "another trained context": ("qwen3-yarn", with_scaling(original_context=256)),
    "attention not scaled": ("qwen3-yarn", with_scaling(attention_factor=1.0)),
    "mscale ignored": ("qwen2-yarn-mscale", with_scaling(attention_factor=1.1386)),
    "whole pairs": ("qwen2-yarn-mscale", with_scaling(truncate=True)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_a_reader_is_seen(mistake: str, saved: Saved) -> None:
    assert_mistake_is_seen(saved, *MISTAKES[mistake])


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
    assert_seen(altered, logits)


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

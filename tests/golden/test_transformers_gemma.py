"""Logits of tiny random Gemma 2 and Gemma 3 models against Transformers, from directories and from GGUF files.

Bounds: golden_models.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from golden_models import (
    FLOAT,
    FLOAT_LOGITS,
    NUM_TOKENS,
    SHAPE,
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
    logits_of_reference,
    prompt,
    saved_cases,
    with_fields,
)
from tiny_models import as_f32
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from paceline.config import ModelConfig, RopeConfig
from paceline.weights.checkpoint import open_checkpoint

THETA, LOCAL_THETA = 5000.0, 100.0
GEMMA2 = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}, "sliding_window": WINDOW}
# Caps near the sizes of scores and logits, so that they matter; queries are scaled otherwise than by their width.
GEMMA2 |= {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 24}
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": THETA},
    "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_THETA},
}
LINEAR = ROPES | {"full_attention": {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}}
GEMMA3 = {"rope_parameters": ROPES, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


class WithImages(Gemma3Config):
    """Takes the sizes of the text part as other configurations do."""

    def __init__(self, **text: Any) -> None:
        size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision = SiglipVisionConfig(**size, image_size=28, patch_size=14)
        super().__init__(
            text_config=Gemma3TextConfig(**text), vision_config=vision, mm_tokens_per_image=4, image_token_index=300
        )


def gemma2(**changes: Any) -> Case:
    return Case(Gemma2ForCausalLM, Gemma2Config, GEMMA2 | changes)


def gemma3(**changes: Any) -> Case:
    return Case(Gemma3ForCausalLM, Gemma3TextConfig, GEMMA3 | changes)


CASES = {
    "gemma2": gemma2(num_hidden_layers=3),
    "gemma2-no-caps": gemma2(attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False),
    "gemma2-bf16": replace(gemma2(head_dim=32, num_key_value_heads=4), dtype=torch.bfloat16),
    "gemma3": gemma3(layer_types=LAYERS, num_hidden_layers=3),
    "gemma3-six": gemma3(num_hidden_layers=7, num_key_value_heads=1, final_logit_softcapping=4.0),
    "gemma3-linear-bf16": replace(gemma3(rope_parameters=LINEAR, layer_types=LAYERS[:2]), dtype=torch.bfloat16),
    "gemma3-untied-f16": replace(gemma3(layer_types=LAYERS[:2], tie_word_embeddings=False), dtype=torch.float16),
}


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


MISTAKES: dict[str, tuple[str, Change]] = {
    "embeddings not scaled": ("gemma2", with_fields(embedding_scale=1.0)),
    "queries scaled by their width": ("gemma2", with_fields(attention_scale=None)),
    "scores not capped": ("gemma2", with_fields(attention_softcap=None)),
    "scores capped elsewhere": ("gemma2", with_fields(attention_softcap=3.3)),
    "logits not capped": ("gemma2", with_fields(logit_softcap=None)),
    "logits not capped (gemma3)": ("gemma3-six", with_fields(logit_softcap=None)),
    "every layer has the window": ("gemma2", with_fields(windowed_layers=())),
    "no layer has the window": ("gemma2", with_fields(sliding_window=None)),
    "window one too long": ("gemma3", with_fields(sliding_window=WINDOW + 1)),
    "window one too short": ("gemma3", with_fields(sliding_window=WINDOW - 1)),
    "the other layers have the window": ("gemma3", with_fields(windowed_layers=(False, True, False))),
    "the first layer of six sees all": ("gemma3-six", with_fields(windowed_layers=(False, *[True] * 5, False))),
    "one rotation for all layers": ("gemma3", with_fields(local_rope=None)),
    "rotations exchanged": ("gemma3", with_fields(local_rope=RopeConfig(THETA, 16), rope=RopeConfig(LOCAL_THETA, 16))),
    "scaling ignored": ("gemma3-linear-bf16", with_fields(rope=RopeConfig(THETA, 16))),
    "SiLU": ("gemma3", with_fields(activation="silu")),
    "norms of heads ignored": ("gemma3", with_fields(qk_norm=False)),
    "other epsilon": ("gemma3", with_fields(rms_norm_eps=0.1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_a_reader_is_seen(mistake: str, saved: Saved) -> None:
    assert_mistake_is_seen(saved, *MISTAKES[mistake])


@pytest.mark.parametrize(
    "norm",
    ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm"],
)
def test_a_norm_read_as_the_file_stores_it_is_seen(norm: str, saved: Saved) -> None:
    """The file holds one less than the weight; each kind of norm by itself."""
    directory, logits = saved("gemma3")
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, checkpoint.config, False, less=(f"{norm}.weight", 1.0))
    assert_seen(altered, logits)


# ---- other spellings of the same model ----


def rewritten(source: Path, target: Path, values: dict[str, Any]) -> Path:
    """The directory with another config.json."""
    target.mkdir()
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    (target / "config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize("name", ["gemma3", "gemma3-six", "gemma3-linear-bf16"])
def test_configurations_of_older_releases(name: str, saved: Saved, tmp_path: Path) -> None:
    """rope_theta, rope_local_base_freq and rope_scaling before rope_parameters; a period before layer_types."""
    directory, _ = saved(name)
    values = json.loads((directory / "config.json").read_text())
    expected = open_checkpoint(directory)
    ropes = values.pop("rope_parameters")
    values |= {"rope_theta": THETA, "rope_local_base_freq": LOCAL_THETA}
    if ropes["full_attention"]["rope_type"] == "linear":
        values["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    if values.pop("layer_types") != LAYERS:
        values["sliding_window_pattern"] = 6 if name == "gemma3-six" else 2
    else:
        values["sliding_window_pattern"] = 2
    assert open_checkpoint(rewritten(directory, tmp_path / "old", values)).config == expected.config


def test_the_text_part_of_a_model_with_images(tmp_path: Path) -> None:
    """Gemma3ForConditionalGeneration, under the names that its releases have and under those inside Transformers."""
    cases = {"images": Case(Gemma3ForConditionalGeneration, WithImages, GEMMA3 | {"layer_types": LAYERS[:2]})}
    directory, logits = _save_with_images(cases["images"], tmp_path / "released")
    names = safetensors.torch.load_file(directory / "model.safetensors")
    assert any("vision_tower" in name for name in names)
    assert error(logits_of_reference(open_checkpoint(directory)), logits) < FLOAT
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = tmp_path / prefix
        renamed.mkdir()
        text = {name.split("language_model.")[-1].removeprefix("model."): name for name in names if "language" in name}
        tensors = {prefix + new: names[old].clone() for new, old in text.items() if "lm_head" not in new}
        safetensors.torch.save_file(tensors, renamed / "model.safetensors")
        (renamed / "config.json").write_text((directory / "config.json").read_text())
        assert error(logits_of_reference(open_checkpoint(renamed)), logits) < FLOAT


def _save_with_images(case: Case, directory: Path) -> tuple[Path, Any]:
    torch.manual_seed(1)
    model = case.model(case.config(**(SHAPE | case.changes), initializer_range=0.15)).eval()
    model.save_pretrained(directory)
    with torch.no_grad():
        return directory, model(torch.from_numpy(prompt().tokens.astype(np.int64))[None]).logits[0].numpy()


# ---- GGUF ----

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""As convert_hf_to_gguf.py of llama.cpp writes them."""


def write_gguf(directory: Path, path: Path, architecture: str) -> Path:
    """The model as llama.cpp's converter writes it: norms with their one added, no head where embeddings are tied."""
    values = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    writer.add_sliding_window(values["sliding_window"])
    if values["final_logit_softcapping"] is not None:
        writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(values["attn_logit_softcapping"])
        writer.add_rope_freq_base(values["rope_parameters"]["rope_theta"])
    else:
        full = values["rope_parameters"]["full_attention"]
        writer.add_rope_freq_base(full["rope_theta"])
        writer.add_rope_freq_base_swa(values["rope_parameters"]["sliding_attention"]["rope_theta"])
        if full["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(full["factor"])
        kinds = [kind == "sliding_attention" for kind in values["layer_types"]]
        if kinds != [(layer + 1) % 6 != 0 for layer in range(len(kinds))]:
            writer.add_sliding_window_pattern(kinds)
    for name, tensor in safetensors.torch.load_file(directory / "model.safetensors").items():
        array = tensor.float().numpy()
        array = array + np.float32(1) if name.endswith("norm.weight") else array
        writer.add_tensor(_gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module = name.removesuffix(".weight")
    if module in top:
        return top[module] + ".weight"
    layer, inner = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[inner]}.weight"


GGUF_CASES = {
    "gemma2": gemma2(num_hidden_layers=3, query_pre_attn_scalar=16),
    "gemma2-largest": gemma2(num_hidden_layers=46, query_pre_attn_scalar=24, hidden_size=96, head_dim=32),
    "gemma3": gemma3(layer_types=LAYERS, num_hidden_layers=3, query_pre_attn_scalar=16),
    "gemma3-six": gemma3(num_hidden_layers=7, query_pre_attn_scalar=16, final_logit_softcapping=4.0),
    "gemma3-linear": gemma3(rope_parameters=LINEAR, layer_types=LAYERS[:2], query_pre_attn_scalar=16),
    "gemma3-largest": gemma3(num_hidden_layers=62, query_pre_attn_scalar=24, hidden_size=96, head_dim=32),
    "gemma3-untied": gemma3(layer_types=LAYERS[:2], tie_word_embeddings=False, query_pre_attn_scalar=16),
}


@pytest.fixture(scope="module")
def saved_for_gguf(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_cases(GGUF_CASES, tmp_path_factory)


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_says_what_the_directory_says(name: str, saved_for_gguf: Saved, tmp_path: Path) -> None:
    directory, logits = saved_for_gguf(name)
    found = open_checkpoint(write_gguf(directory, tmp_path / "m.gguf", name.split("-")[0]))
    expected = open_checkpoint(directory)
    assert _without_precision(found.config) == _without_precision(expected.config)
    assert found.interleaved_rope == expected.interleaved_rope
    for tensor in expected.names():
        assert _values(found, tensor).tobytes() == _values(expected, tensor).tobytes(), tensor
    if "largest" not in name:
        assert error(logits_of_reference(found), logits["float"]) < FLOAT


def _without_precision(config: ModelConfig) -> ModelConfig:
    """GGUF holds numbers as f32."""
    epsilon, scale = float(np.float32(config.rms_norm_eps)), config.query_scale
    return replace(config, rms_norm_eps=epsilon, attention_scale=round(scale, 12))


def _values(checkpoint: Any, name: str) -> Any:
    return as_f32(checkpoint, [name])[name]


def test_the_cases_are_what_their_names_say(saved: Saved) -> None:
    configs = {name: open_checkpoint(saved(name)[0]).config for name in CASES}
    assert {name for name, config in configs.items() if config.attention_softcap} == {"gemma2", "gemma2-bf16"}
    assert {name for name, config in configs.items() if not config.tie_embeddings} == {
        "gemma2-no-caps",
        "gemma3-untied-f16",
    }
    assert configs["gemma3-six"].windowed_layers == (*[True] * 5, False, True)
    assert configs["gemma2"].windowed_layers == (True, False, True)
    assert {config.activation for config in configs.values()} == {"gelu_tanh"}
    assert NUM_TOKENS > 4 * WINDOW

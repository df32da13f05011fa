"""Logits of tiny random EXAONE 4 models against Transformers, from directories and from GGUF files.

Bounds: golden_models.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from golden_models import (
    FLOAT,
    FLOAT_LOGITS,
    SEEN,
    WINDOW,
    Altered,
    Case,
    Change,
    Saved,
    assert_floats_agree,
    assert_mistake_is_seen,
    assert_native_agrees,
    error,
    logits_of_reference,
    saved_cases,
    with_fields,
)
from llama_cpp_files import Values, write_gguf
from transformers import Exaone4Config, Exaone4ForCausalLM

from paceline.errors import UnsupportedError
from paceline.models.registry import config_from_json
from paceline.weights.checkpoint import open_checkpoint

LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def exaone4(**changes: Any) -> Case:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    return Case(Exaone4ForCausalLM, Exaone4Config, {"rope_parameters": rope, "sliding_window": WINDOW} | changes)


CASES = {
    "layers": exaone4(layer_types=LAYERS, num_hidden_layers=3),
    "period": exaone4(num_hidden_layers=5, tie_word_embeddings=True),
    "no-window-bf16": replace(exaone4(sliding_window=None, layer_types=LAYERS[1:2] * 2), dtype=torch.bfloat16),
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


def _keys(writer: gguf.GGUFWriter, values: Values) -> None:
    """``Exaone4Model.set_gguf_parameters`` of llama.cpp."""
    writer.add_vocab_size(values["vocab_size"])
    if values["sliding_window"] is not None:
        writer.add_sliding_window(values["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in values["layer_types"]])


@pytest.mark.parametrize("name", CASES)
def test_gguf_files_have_the_logits_of_transformers(name: str, saved: Saved, tmp_path: Path) -> None:
    directory, logits = saved(name)
    checkpoint = open_checkpoint(write_gguf(directory, tmp_path / "m.gguf", "exaone4", _keys))
    assert error(logits_of_reference(checkpoint), logits["float"]) < FLOAT


MISTAKES: dict[str, tuple[str, Change]] = {
    "every layer rotates": ("layers", with_fields(unrotated_layers=())),
    "no layer has the window": ("layers", with_fields(sliding_window=None)),
    "every layer has the window": ("layers", with_fields(windowed_layers=())),
    "window one too long": ("layers", with_fields(sliding_window=WINDOW + 1)),
    "another layer sees everything": ("period", with_fields(windowed_layers=(False, *[True] * 4))),
    "layers that see everything do not rotate without a window either": (
        "no-window-bf16",
        with_fields(unrotated_layers=(0, 1)),
    ),
    "other epsilon": ("layers", with_fields(rms_norm_eps=1e-3)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_a_reader_is_seen(mistake: str, saved: Saved) -> None:
    assert_mistake_is_seen(saved, *MISTAKES[mistake])


@pytest.mark.parametrize("vector", ["attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"])
def test_a_lost_norm_is_seen(vector: str, saved: Saved) -> None:
    directory, logits = saved("layers")
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, checkpoint.config, checkpoint.interleaved_rope, zeroed=f"blk.1.{vector}")
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT


def test_a_pattern_of_letters_needs_layer_types() -> None:
    values = Exaone4Config(num_hidden_layers=4).to_dict() | {"architectures": ["Exaone4ForCausalLM"]}
    listed = config_from_json(Path("config.json"), values | {"sliding_window_pattern": "LLLG"})
    assert listed.windowed_layers == (True, True, True, False)
    del values["layer_types"]
    with pytest.raises(UnsupportedError, match="sliding_window_pattern 'LLLG' without layer_types"):
        config_from_json(Path("config.json"), values | {"sliding_window_pattern": "LLLG"})

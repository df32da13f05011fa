"""GGUF files as llama.cpp's converter writes them, of tiny random models: their logits are those of Transformers.

Bounds: golden_models.py. GGUF holds constants in f32, which moves them by at most 2^-24.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from dense_cases import CASES
from golden_models import (
    F16_PAGES,
    FLOAT,
    NUM_TOKENS,
    SEEN,
    Altered,
    Saved,
    error,
    logits_of_native,
    logits_of_reference,
    saved_cases,
)
from llama_cpp_files import write_gguf

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.checkpoint import open_checkpoint

ARCHITECTURES = {
    "phi3": "phi3",
    "phi3-mha-window-bf16": "phi3",
    "phi3-partial": "phi3",
    "phi3-long-tied": "phi3",
    "granite": "granite",
    "granite-tied-bias": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmo3-period": "olmo2",
    "smollm3": "smollm3",
    "qwen3-yarn": "qwen3",
}
"""Case of ``dense_cases`` -> architecture in GGUF."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_cases(CASES, tmp_path_factory)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(name: str, saved: Saved, tmp_path: Path) -> None:
    directory, logits = saved(name)
    checkpoint = open_checkpoint(write_gguf(directory, tmp_path / "m.gguf", ARCHITECTURES[name]))
    assert error(logits_of_reference(checkpoint), logits["float"]) < FLOAT
    assert error(logits_of_native(checkpoint, NUM_TOKENS), logits["f16"]) < F16_PAGES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_configurations_are_those_of_the_directory(name: str, saved: Saved, tmp_path: Path) -> None:
    """Up to the last bits, and to layers that GGUF names where Transformers says all."""
    directory, _ = saved(name)
    ours = open_checkpoint(directory).config
    found = open_checkpoint(write_gguf(directory, tmp_path / "m.gguf", ARCHITECTURES[name])).config
    for field, value in vars(ours).items():
        other = getattr(found, field)
        if isinstance(value, float):
            assert other == pytest.approx(value, rel=2**-23), field
        elif field == "rope":
            assert (other.theta, other.dim) == (value.theta, value.dim)
            assert (other.scaling is None) == (value.scaling is None)
            if value.scaling is not None:
                assert other.scaling.kind == value.scaling.kind
                assert other.scaling.factors == pytest.approx(value.scaling.factors, rel=2**-23)
                assert other.scaling.long_factors == pytest.approx(value.scaling.long_factors, rel=2**-23)
                assert other.attention_factor == pytest.approx(value.attention_factor, rel=2**-23)
        else:
            assert other == value, field


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_wrong_rope_pairing_is_seen(name: str, saved: Saved, tmp_path: Path) -> None:
    directory, logits = saved(name)
    checkpoint = open_checkpoint(write_gguf(directory, tmp_path / "m.gguf", ARCHITECTURES[name]))
    altered = Altered(checkpoint, checkpoint.config, not checkpoint.interleaved_rope)
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT


# ---- what files say otherwise ----


def tiny_granite(path: Path, **keys: Any) -> Path:
    """Metadata only: what is refused is refused before tensors are missed."""
    writer = gguf.GGUFWriter(path, "granite")
    usual = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    usual |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "logit_scale": 4.0}
    for key, value in (usual | {key.replace("__", "."): value for key, value in keys.items()}).items():
        kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", list: "ARRAY"}
        if value is not None:
            writer.add_key_value(f"granite.{key}", value, gguf.GGUFValueType[kinds[type(value)]])
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"rope__scaling__finetuned": False}, UnsupportedError, "granite.rope.scaling.finetuned is false"),
        ({"deepstack_mapping": [0, 1]}, UnsupportedError, "granite.deepstack_mapping"),
        ({"logit_scale": None}, CheckpointError, "granite.logit_scale is None"),
        ({"residual_scale": -1.0}, CheckpointError, "granite.residual_scale is -1"),
        ({"expert_count": 4}, UnsupportedError, "expert_count: a mixture of 4 experts"),
    ],
)
def test_what_granite_may_not_say(keys: dict[str, Any], error: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        open_checkpoint(tiny_granite(tmp_path / "m.gguf", **keys))


def test_scores_are_scaled_as_usual_where_granite_does_not_say(saved: Saved, tmp_path: Path) -> None:
    directory, _ = saved("granite")
    config = open_checkpoint(write_gguf(directory, tmp_path / "m.gguf", "granite")).config
    assert config.attention_scale == pytest.approx(0.31)
    assert replace(config, attention_scale=None).query_scale == 0.25

"""EAGLE heads on disk: every tensor arrives, ids are offsets, and what does not fit the target is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_heads import head_arrays, head_json, write_head
from tiny_models import as_f32, tiny_checkpoint, tiny_config

from paceline.config import RopeConfig
from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.eagle_checkpoint import EagleCheckpoint

TARGET = tiny_checkpoint(tiny_config())
MODEL = TARGET.config
NAMES = {
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_norm.weight": "embed_norm.weight",
    "feature_norm.weight": "feature_norm.weight",
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_every_tensor_arrives(tmp_path: Path, dtype: Any) -> None:
    arrays = {
        name: array if name == "d2t" else array.astype(dtype) for name, array in head_arrays(MODEL, norms=True).items()
    }
    head = EagleCheckpoint(write_head(tmp_path, arrays, head_json(MODEL, input_norms=True)), TARGET)
    found = as_f32(head, head.names())
    hidden = MODEL.hidden_size
    expected = {canonical: arrays[name] for name, canonical in NAMES.items()}
    expected |= {"fc_embed.weight": arrays["fc.weight"][:, :hidden]}
    expected |= {"fc_feature.weight": arrays["fc.weight"][:, hidden:]}
    expected |= as_f32(TARGET, ["token_embd.weight"])
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(found[name], np.atleast_2d(values)), name
    assert not head.interleaved_rope
    assert [file.name for file in head.files] == ["config.json", "model.safetensors"]


def test_configuration(tmp_path: Path) -> None:
    config = EagleCheckpoint(write_head(tmp_path, head_arrays(MODEL), head_json(MODEL)), TARGET).config
    assert (config.architecture, config.num_layers, config.draft_vocab_size) == ("eagle", 1, 41)
    assert (config.num_logits, config.vocab_size) == (41, MODEL.vocab_size)
    assert (config.rope, config.context_length) == (MODEL.rope, MODEL.context_length)
    assert not config.input_norms
    own_rope = head_json(MODEL, rope_theta=77.0)
    config = EagleCheckpoint(write_head(tmp_path, head_arrays(MODEL), own_rope), TARGET).config
    assert config.rope == RopeConfig(77.0, MODEL.head_dim)


def test_ids_are_offsets(tmp_path: Path) -> None:
    arrays = head_arrays(MODEL, draft_vocab_size=4) | {"d2t": np.array([2, 2, 60, 1])}
    head = EagleCheckpoint(write_head(tmp_path, arrays, head_json(MODEL, draft_vocab_size=4)), TARGET)
    assert head.target_ids.tolist() == [2, 3, 62, 4]


def test_embeddings_of_its_own(tmp_path: Path) -> None:
    own = np.full((MODEL.vocab_size, MODEL.hidden_size), 0.5, np.float32)
    arrays = head_arrays(MODEL) | {"embed_tokens.weight": own}
    head = EagleCheckpoint(write_head(tmp_path, arrays, head_json(MODEL)), TARGET)
    assert np.array_equal(as_f32(head, ["token_embd.weight"])["token_embd.weight"], own)


def test_t2d_is_ignored(tmp_path: Path) -> None:
    arrays = head_arrays(MODEL) | {"t2d": np.zeros(MODEL.vocab_size, bool)}
    head = EagleCheckpoint(write_head(tmp_path, arrays, head_json(MODEL)), TARGET)
    assert "t2d" not in head.names()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, UnsupportedError, "LlamaForCausalLMEagle3"),
        ({"architectures": ...}, UnsupportedError, "architectures"),
        ({"architectures": 7}, UnsupportedError, "architectures is 7"),
        ({"hidden_size": 32, "head_dim": 16}, CheckpointError, "hidden_size is 32, but the target has 64"),
        ({"vocab_size": 76}, CheckpointError, "vocab_size is 76, but the target has 75"),
        ({"num_hidden_layers": 2}, CheckpointError, "num_hidden_layers is 2"),
        ({"draft_vocab_size": ...}, CheckpointError, "draft_vocab_size is None"),
        ({"draft_vocab_size": 76}, CheckpointError, "draft_vocab_size is 76"),
        ({"draft_vocab_size": True}, CheckpointError, "draft_vocab_size is True"),
        ({"input_norms": 1}, CheckpointError, "input_norms is 1"),
        ({"intermediate_size": ...}, CheckpointError, "intermediate_size is None"),
        ({"head_dim": 32}, CheckpointError, "rope_theta is missing, and head_dim is 32"),
        ({"intermediate_size": 64}, CheckpointError, r"ffn_gate.weight.*\(96, 64\).*\(64, 64\)"),
        ({"input_norms": True}, CheckpointError, "embed_norm.weight"),
        ({"draft_vocab_size": 40}, CheckpointError, "d2t.*I64.*40"),
    ],
)
def test_what_a_configuration_gets_wrong(tmp_path: Path, changes: Any, error: Any, message: str) -> None:
    directory = write_head(tmp_path, head_arrays(MODEL), head_json(MODEL, **changes))
    with pytest.raises(error, match=message):
        EagleCheckpoint(directory, TARGET)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"fc.weight": ...}, CheckpointError, "fc.weight.*missing"),
        ({"fc.weight": np.zeros((64, 64), np.float32)}, CheckpointError, r"fc.weight.*\(64, 128\)"),
        ({"d2t": ...}, CheckpointError, "d2t.*missing"),
        ({"d2t": np.zeros(41, np.int32)}, CheckpointError, "d2t.*I32"),
        ({"d2t": np.full(41, 40, np.int64)}, CheckpointError, "d2t.*token 35 of the head would be token 75"),
        ({"d2t": np.full(41, -1, np.int64)}, CheckpointError, "d2t.*token 0 of the head would be token -1"),
        ({"d2t": -np.arange(41)}, CheckpointError, "two tokens of the head"),
        ({"lm_head.weight": np.zeros((40, 64), np.float32)}, CheckpointError, r"output.weight.*\(40, 64\)"),
        ({"norm.weight": ...}, CheckpointError, "output_norm.weight.*missing"),
        ({"norm.weight": np.ones(64, np.float64)}, UnsupportedError, "output_norm.weight.*F64"),
        ({"fc.bias": np.ones(64, np.float32)}, UnsupportedError, "fc.bias"),
        ({"layers.1.input_layernorm.weight": np.ones(64, np.float32)}, UnsupportedError, "blk.1.attn_norm"),
        ({"embed_tokens.weight": np.ones((41, 64), np.float32)}, CheckpointError, "token_embd.weight"),
        ({"feature_norm.weight": np.ones(64, np.float32)}, UnsupportedError, "feature_norm.weight"),
    ],
)
def test_what_tensors_get_wrong(tmp_path: Path, changes: Any, error: Any, message: str) -> None:
    arrays = {name: array for name, array in (head_arrays(MODEL) | changes).items() if array is not ...}
    with pytest.raises(error, match=message):
        EagleCheckpoint(write_head(tmp_path, arrays, head_json(MODEL)), TARGET)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        EagleCheckpoint(tmp_path, TARGET)
    write_head(tmp_path, head_arrays(MODEL), head_json(MODEL))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        EagleCheckpoint(tmp_path, TARGET)

"""Tiny random EAGLE heads, on disk and in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from tiny_models import tiny_config

from paceline.config import ModelConfig
from paceline.weights.eagle_checkpoint import ARCHITECTURE

Arrays = dict[str, NDArray[Any]]


def tiny_head(**changes: Any) -> ModelConfig:
    """The configuration of a head for ``tiny_config``, with a vocabulary that is no multiple of a tile."""
    head: dict[str, Any] = {
        "architecture": "eagle", "num_layers": 1, "tie_embeddings": False, "draft_vocab_size": 41, "input_norms": True,
    }  # fmt: skip
    return tiny_config(**(head | changes))


def head_json(target: ModelConfig, *, draft_vocab_size: int = 41, **changes: Any) -> dict[str, Any]:
    """The config.json of a head with the target's heads; a change to ``...`` removes the key."""
    values = {
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
    } | changes
    return {key: value for key, value in values.items() if value is not ...}


def head_arrays(target: ModelConfig, *, draft_vocab_size: int = 41, norms: bool = False, seed: int = 0) -> Arrays:
    """Random tensors of unit gain, by their names in the file; the ids are spread over the target's vocabulary."""
    rng = np.random.default_rng(seed)
    hidden, ffn = target.hidden_size, target.intermediate_size
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (target.q_size, hidden),
        "layers.0.self_attn.k_proj.weight": (target.kv_size, hidden),
        "layers.0.self_attn.v_proj.weight": (target.kv_size, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, target.q_size),
        "layers.0.mlp.gate_proj.weight": (ffn, hidden),
        "layers.0.mlp.up_proj.weight": (ffn, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, ffn),
        "lm_head.weight": (draft_vocab_size, hidden),
    }
    arrays: Arrays = {
        name: (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32) for name, shape in shapes.items()
    }
    vectors = ["layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight", "norm.weight"]
    for name in vectors + (["embed_norm.weight", "feature_norm.weight"] if norms else []):
        arrays[name] = (1 + 0.2 * rng.standard_normal(hidden)).astype(np.float32)
    ids = np.sort(rng.choice(target.vocab_size, draft_vocab_size, replace=False))
    return arrays | {"d2t": ids - np.arange(draft_vocab_size)}


def write_head(directory: Path, arrays: Arrays, values: dict[str, Any]) -> Path:
    """Writes both files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()}, directory / "model.safetensors"
    )
    return directory

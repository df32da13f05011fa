"""Tiny Hugging Face directories with quantised weights, written by the packers, without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from quantized_matrices import random_matrix

from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.safetensors import canonical_name

HIDDEN, FFN, VOCAB, LAYERS = 64, 96, 48, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
Planes = dict[str, NDArray[Any]]

MODULES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}


def model_config(quantization: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """A config.json; a change to ``...`` removes the key."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "quantization_config": quantization,
    } | changes
    return {key: value for key, value in values.items() if value is not ...}


def layer_names() -> dict[str, tuple[int, int]]:
    """Module -> (outputs, inputs) of every matrix of a layer."""
    return {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in MODULES.items()}


def plain_tensors() -> Planes:
    """All other tensors, in f32."""
    random = np.random.default_rng(7)
    vectors = ["model.norm.weight"]
    for i in range(LAYERS):
        vectors += [f"model.layers.{i}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    tensors: Planes = {name: random.uniform(0.5, 1.5, HIDDEN).astype(np.float32) for name in vectors}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    return tensors


def random_matrices(**kind: Any) -> dict[str, QuantizedMatrix]:
    """A matrix for each module of the layers, in groups of 32 inputs; ``kind`` goes to ``random_matrix``."""
    return {
        module: random_matrix(seed, num_outputs, num_inputs // 32, **kind)
        for seed, (module, (num_outputs, num_inputs)) in enumerate(layer_names().items())
    }


def tensors_of(matrices: dict[str, QuantizedMatrix], pack: Callable[[QuantizedMatrix], Planes]) -> Planes:
    """All tensors of a model with these matrices."""
    tensors = plain_tensors()
    for module, matrix in matrices.items():
        tensors |= {f"{module}.{plane}": array for plane, array in pack(matrix).items()}
    return tensors


def write(directory: Path, tensors: Planes, quantization: dict[str, Any] | None, **changes: Any) -> Path:
    """The directory, with config.json and one file of tensors."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(quantization, **changes)))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def canonical(module: str) -> str:
    """The name of a module's matrix in a checkpoint."""
    return canonical_name(f"{module}.weight")

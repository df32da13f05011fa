"""GGUF files of tiny Hugging Face models with the metadata, names and values that llama.cpp's converter writes.

Source: llama.cpp, convert_hf_to_gguf.py (conversion/base.py, llama.py, phi.py, granite.py, olmo.py, ernie.py); names of
tensors come from the ``gguf`` library, as the converter's do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
from numpy.typing import NDArray

Values = Mapping[str, Any]
Keys = Callable[[gguf.GGUFWriter, Values], None]


def write_gguf(directory: Path, path: Path, architecture: str, keys: Keys | None = None) -> Path:
    """The model of a directory, in f32. ``keys`` writes what its converter writes beyond what all models have."""
    values = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    KEYS.get(architecture, _text_model)(writer, values)
    if keys is not None:
        keys(writer, values)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, values["num_hidden_layers"])
    for own_name, tensor in safetensors.torch.load_file(directory / "model.safetensors").items():
        name = names.get_name(own_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, own_name
        array = tensor.float().numpy()
        if architecture in PERMUTED and ("attn_q." in name or "attn_k." in name):
            heads = values["num_attention_heads" if "attn_q." in name else "num_key_value_heads"]
            array = permute(array, heads)
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(array: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows such that rotary pairs are neighbours (``LlamaModel.permute``)."""
    halves = array.reshape(num_heads, 2, len(array) // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


PERMUTED = ("granite", "smollm3")
"""Architectures of ``LlamaModel`` there: its loader rotates neighbours (LLAMA_ROPE_TYPE_NORM)."""


def _text_model(writer: gguf.GGUFWriter, values: Values) -> None:
    """``TextModel.set_gguf_parameters``."""
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    ropes = values["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    if values.get("head_dim") is not None:
        writer.add_key_length(values["head_dim"])
        writer.add_value_length(values["head_dim"])


def _llama_model(writer: gguf.GGUFWriter, values: Values) -> None:
    """``LlamaModel.set_gguf_parameters``."""
    _text_model(writer, values)
    writer.add_vocab_size(values["vocab_size"])
    writer.add_rope_dimension_count(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def _granite(writer: gguf.GGUFWriter, values: Values) -> None:
    """Heads of another length than usual have no key."""
    _llama_model(writer, {key: value for key, value in values.items() if key != "head_dim"})
    writer.add_attention_scale(values["attention_multiplier"])
    writer.add_embedding_scale(values["embedding_multiplier"])
    writer.add_residual_scale(values["residual_multiplier"])
    writer.add_logit_scale(values["logits_scaling"])


def _olmo2(writer: gguf.GGUFWriter, values: Values) -> None:
    _text_model(writer, values)
    if "sliding_window" in values:
        writer.add_sliding_window(values["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in values["layer_types"]])


def _phi3(writer: gguf.GGUFWriter, values: Values) -> None:
    rope = values["rope_parameters"]
    context, trained = values["max_position_embeddings"], values["original_max_position_embeddings"]
    dim = int(rope["partial_rotary_factor"] * values["hidden_size"]) // values["num_attention_heads"]
    writer.add_context_length(context)
    writer.add_rope_scaling_orig_ctx_len(trained)
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_sliding_window(values["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        factor = context / trained
        implied = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        writer.add_rope_scaling_attn_factors(implied)
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


KEYS: dict[str, Keys] = {
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "smollm3": _llama_model,
}
"""What is written of an architecture; all others have ``_text_model``."""

"""Tiny mixtures of experts: configurations of Transformers, and their GGUF files as llama.cpp writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
from golden_models import WINDOW, Case
from numpy.typing import NDArray
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FEW = {"num_experts_per_tok": 2}
MIXTRAL = {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}} | FEW
QWEN3 = {"num_experts": 6, "moe_intermediate_size": 48, "num_experts_per_tok": 3, "head_dim": 32}
YARN = {
    # Pairs 1.08 and 2.69 turn 4 times and once in 64 positions: whole pairs (1 and 3) are another ramp.
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GPT_OSS = {"num_local_experts": 4, "sliding_window": WINDOW, "rope_parameters": YARN} | FEW


def mixtral(**changes: Any) -> Case:
    return Case(MixtralForCausalLM, MixtralConfig, MIXTRAL | changes)


def qwen3(**changes: Any) -> Case:
    return Case(Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN3 | changes)


def gpt_oss(**changes: Any) -> Case:
    return Case(GptOssForCausalLM, GptOssConfig, GPT_OSS | changes)


Array = NDArray[Any]


def write_gguf(directory: Path, path: Path, architecture: str) -> Path:
    """The directory as llama.cpp's conversion/llama.py, qwen.py and gpt_oss.py convert it; MXFP4 stays so."""
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
    writer.add_vocab_size(values["vocab_size"])
    writer.add_expert_count(values["num_local_experts"])
    writer.add_expert_used_count(values["num_experts_per_tok"])
    rope = values["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if architecture == "llama":
        writer.add_rope_dimension_count(values["head_dim"])
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    if architecture == "gpt-oss":
        writer.add_sliding_window(values["sliding_window"])
        writer.add_expert_feed_forward_length(values["intermediate_size"])
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    arrays = {
        name: tensor.numpy() if tensor.dtype.itemsize == 1 else tensor.float().numpy()
        for name, tensor in tensors.items()
    }
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), values["num_hidden_layers"]
    )
    convert = {"llama": _mixtral, "qwen3moe": _qwen3, "gpt-oss": _gpt_oss}[architecture]
    for name, array in convert(arrays, values):
        canonical = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert canonical is not None, name
        is_packed = array.dtype == np.uint8
        writer.add_tensor(canonical, array, raw_dtype=gguf.GGMLQuantizationType.MXFP4 if is_packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _mixtral(arrays: dict[str, Array], values: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Rows of q and k such that rotary pairs are neighbours; experts of a layer as one."""
    heads = {"q_proj.weight": values["num_attention_heads"], "k_proj.weight": values["num_key_value_heads"]}
    for name, array in arrays.items():
        kind = ".".join(name.split(".")[-2:])
        if kind in heads:
            pairs = array.reshape(heads[kind], 2, array.shape[0] // heads[kind] // 2, -1)
            yield name, pairs.swapaxes(1, 2).reshape(array.shape)
        elif ".experts.0." in name:
            part = name.split(".")[-2]
            stacked = _stacked(arrays, name, values["num_local_experts"])
            yield f"layers.{name.split('.')[2]}.feed_forward.experts.{part}.weight", stacked
        elif ".experts." not in name:
            yield name, array


def _qwen3(arrays: dict[str, Array], values: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    for name, array in arrays.items():
        if ".experts.0." in name:
            yield name.replace(".experts.0.", ".experts."), _stacked(arrays, name, values["num_local_experts"])
        elif ".experts." not in name:
            yield name, array


def _stacked(arrays: dict[str, Array], first: str, count: int) -> Array:
    return np.stack([arrays[first.replace(".experts.0.", f".experts.{expert}.")] for expert in range(count)])


def _gpt_oss(arrays: dict[str, Array], values: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    for name, array in arrays.items():
        if name.endswith("_scales"):
            continue
        if name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            array, transposed = repacked_mxfp4(array, arrays[f"{name}_scales"]), False
        else:
            transposed = array.ndim == 3
        if name.endswith("sinks"):
            yield f"{name}.weight", array
        elif ".experts." in name:
            suffix = ".bias" if name.endswith("_bias") else ".weight"
            name, array = name.removesuffix("_bias"), array.transpose(0, 2, 1) if transposed else array
            if "gate_up" in name:
                yield name.replace("gate_up", "gate") + suffix, np.ascontiguousarray(array[:, 0::2])
                yield name.replace("gate_up", "up") + suffix, np.ascontiguousarray(array[:, 1::2])
            else:
                yield name + suffix, np.ascontiguousarray(array)
        else:
            yield name, array


def repacked_mxfp4(blocks: Array, scales: Array) -> Array:
    """Rows [experts, outputs, bytes] of GGUF's blocks: a scale, then byte j with codes j and j + 16 of 32."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    return np.concatenate([scales[..., None], packed], axis=-1).astype(np.uint8).reshape(*scales.shape[:2], -1)

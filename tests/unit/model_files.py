"""Tiny random models on disk, with a tokenizer: a GGUF file and Hugging Face directories, made without torch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from tiny_models import as_f32, tiny_checkpoint, tiny_config
from tokenizer_files import byte_level_values, train_byte_level
from tokenizers import Tokenizer as Backend

from paceline.config import ModelConfig
from paceline.quantize.export.gguf_metadata import model_metadata
from paceline.quantize.export.tensors import huggingface_name

TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NUMPY_TYPES = {"F32": np.float32, "F16": np.float16}


@cache
def byte_level(pre: str) -> Backend:
    """The tokenizer that ``train_byte_level`` trains."""
    return train_byte_level(pre)


def file_config(pre: str = "smollm", **changes: Any) -> ModelConfig:
    """A configuration whose vocabulary is that of ``byte_level``; 96 rows of 128 make groups of 32, 64 and 128."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 8, "num_kv_heads": 4}
    return tiny_config(**{**sizes, "vocab_size": byte_level(pre).get_vocab_size(), **changes})


def write_gguf_model(path: Path, config: ModelConfig, kinds: dict[str, str] | None = None, seed: int = 0) -> Path:
    """A GGUF file; ``kinds`` as ``tiny_checkpoint`` takes them. Rows of q and k are whatever the random ones are."""
    checkpoint = tiny_checkpoint(config, kinds=kinds, seed=seed)
    values = byte_level_values(byte_level("smollm"), "smollm")
    writer = gguf.GGUFWriter(path, config.architecture)
    for key, value in model_metadata(config, "tiny").items():
        if key == "general.architecture":
            continue
        kind = {str: "STRING", float: "FLOAT32", int: "UINT32"}[type(value)]
        writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    writer.add_chat_template(TEMPLATE)
    writer.add_tokenizer_model(values["model"])
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["token_type"])
    writer.add_token_merges(values["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    for raw in checkpoint.tensors.values():
        kind = gguf.GGMLQuantizationType[raw.kind]
        writer.add_tensor_info(raw.name, raw.shape, np.dtype(np.float32), raw.data.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for raw in checkpoint.tensors.values():
        writer.write_tensor_data(raw.data)
    writer.close()
    return path


def write_directory_model(
    path: Path, config: ModelConfig, kind: str = "F32", *, pre: str = "smollm", seed: int = 0
) -> Path:
    """A directory; tensors of ``kind``, F32 or F16."""
    checkpoint = tiny_checkpoint(config, kind, seed=seed)
    values = as_f32(checkpoint, checkpoint.names())
    arrays = {
        huggingface_name(name): value.reshape(checkpoint.tensors[name].shape).astype(NUMPY_TYPES[kind])
        for name, value in values.items()
    }
    path.mkdir()
    safetensors.numpy.save_file(arrays, path / "model.safetensors", {"format": "pt"})
    json_config = {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": {"F32": "float32", "F16": "float16"}[kind],
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(json_config))
    byte_level(pre).save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "LICENSE").write_text("free")
    return path

"""The metadata of a GGUF file: a GGUF source's own, or made from a Hugging Face directory.

Source: the keys that llama.cpp's convert_hf_to_gguf.py writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.config import ModelConfig, RopeScaling
from paceline.errors import UnsupportedError
from paceline.quantize.export.gguf_vocabulary import vocabulary_of
from paceline.weights.checksums import KEY
from paceline.weights.gguf import GGUFCheckpoint
from paceline.weights.raw import Checkpoint

NOT_COPIED = ("general.file_type", "general.quantization_version", "general.alignment", KEY)
NOT_COPIED_PREFIXES = ("split.", "quantize.")


def metadata_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """All but what depends on the tensors. Raises UnsupportedError for a tokenizer that such files cannot name."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return {
            key: value
            for key, value in checkpoint.metadata.items()
            if key not in NOT_COPIED and not key.startswith(NOT_COPIED_PREFIXES)
        }
    directory = Path(checkpoint.path)
    return {**model_metadata(checkpoint.config, directory.resolve().name), **vocabulary_of(checkpoint)}


def model_metadata(config: ModelConfig, name: str) -> dict[str, Any]:
    """The keys that say what ``config`` says."""
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope.theta),
        "rope.dimension_count": config.rope.dim,
    }
    if config.rope.scaling is not None:
        values |= _scaling(config.rope.scaling)
    if config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    architecture = config.architecture
    general = {"general.architecture": architecture, "general.type": "model", "general.name": name}
    return general | {f"{architecture}.{key}": value for key, value in values.items()}


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    """The keys of a scaled rotation; what it is divided by stands in tensors. UnsupportedError for what has no key."""
    if scaling.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind == "yarn":
        if not scaling.truncate:
            raise UnsupportedError("YaRN with truncate false: GGUF has no key for it; choose another format")
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(scaling.factor),
            "rope.scaling.original_context_length": scaling.original_context,
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
            "rope.scaling.yarn_attn_factor": float(scaling.attention_factor),
        }
    if scaling.kind == "longrope":
        return {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": scaling.original_context,
            "rope.scaling.attn_factor": float(scaling.attention_factor),
        }
    return {}

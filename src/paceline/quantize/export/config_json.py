"""config.json and generation_config.json of a directory: the source's, or made from what a GGUF file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import ModelConfig, RopeConfig, RopeScaling
from paceline.errors import UnsupportedError
from paceline.models.registry import config_from_json
from paceline.ops.reference import inverse_frequencies
from paceline.text.tokenizer import Tokenizer
from paceline.weights.safetensors import read_json

QUANTIZATION_KEYS = ("quantization_config", "compression_config")

CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""Class and model_type in Transformers."""

LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)
LLAMA3_CONTEXT = 8192


def source_values(directory: Path) -> dict[str, Any]:
    """The source's config.json without what it says about its own quantisation."""
    return {key: value for key, value in read_json(directory / "config.json").items() if key not in QUANTIZATION_KEYS}


def made_values(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """A config.json, but for quantization_config, that says what ``config`` says. UnsupportedError for what no class of
    Transformers has.
    """
    has_window = config.sliding_window is not None
    name, model_type = CLASSES["mistral" if config.architecture == "llama" and has_window else config.architecture]
    values: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": _shortest(config.rms_norm_eps),
        "rope_theta": _shortest(config.rope.theta),
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None,
        "dtype": "float16",
        "torch_dtype": "float16",
    }
    if has_window:
        values["sliding_window"] = config.sliding_window
    if config.architecture.startswith("qwen"):
        # Layers below max_window_layers see everything.
        values |= {"use_sliding_window": has_window, "max_window_layers": 0 if has_window else config.num_layers}
    if config.architecture == "qwen2":
        del values["attention_bias"]  # this class has them always, and no key for it
    written = config_from_json(Path("config.json"), values)
    assert _comparable(written) == _comparable(config), (written, config)
    return values


def made_generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """All tokens that end an answer: Transformers stops at these."""
    return {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": list(tokenizer.eos_token_ids) or None}


def _shortest(value: float) -> float:
    """The number with the fewest digits that is the same in f32: GGUF files hold 1e-5 with 32 bits."""
    return float(str(np.float32(value))) if float(np.float32(value)) == value else value


def _comparable(config: ModelConfig) -> tuple[Any, ...]:
    """What must be the same in f32, however it is written."""
    rope = config.rope.at_context(config.context_length)
    frequencies = inverse_frequencies(rope, config.head_dim).astype(np.float32)
    rest = {key: value for key, value in vars(config).items() if key not in ("rope", "rms_norm_eps")}
    numbers = np.float32(config.rms_norm_eps), np.float32(rope.attention_factor)
    return rest, numbers, tuple(np.round(np.log2(frequencies.astype(np.float64)), 5))


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    rope = config.rope
    if rope.dim != config.head_dim:
        raise UnsupportedError(
            f"heads of {config.head_dim} of which {rope.dim} rotate: no Hugging Face class that Paceline writes has "
            "this; choose the format gguf or paceline"
        )
    scaling = rope.scaling
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.truncate,
        }
    if scaling.kind == "longrope":
        return {
            "rope_type": "longrope",
            "short_factor": list(scaling.factors),
            "long_factor": list(scaling.long_factors),
            "original_max_position_embeddings": scaling.original_context,
            "attention_factor": scaling.attention_factor,
        }
    if scaling.kind == "factors":
        scaling = _llama3_of(rope, config.head_dim)
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def _llama3_of(rope: RopeConfig, head_dim: int) -> RopeScaling:
    """The scaling of Llama 3's releases that gives a GGUF file's factors. UnsupportedError when none does."""
    given = inverse_frequencies(rope, head_dim)
    for factor in LLAMA3_FACTORS if rope.attention_factor == 1 else ():
        scaling = RopeScaling("llama3", factor=factor, original_context=LLAMA3_CONTEXT)
        found = inverse_frequencies(RopeConfig(rope.theta, rope.dim, scaling), head_dim)
        if np.allclose(found, given, rtol=1e-5, atol=0):
            return scaling
    raise UnsupportedError(
        "the file's RoPE factors (rope_freqs.weight) are not those of a Llama 3 release, and config.json can name only "
        "these: choose the format gguf or paceline"
    )

"""SmolLM3: Llama's graph in which every fourth layer does not rotate (NoPE).

Source: Hugging Face's SmolLM3 (2025); Yang et al. 2501.18795 for layers without rotation; Transformers,
modeling_smollm3.py; llama.cpp, its loader of "smollm3", which has the period 4 and no key for it.

Checked by: tests/golden/test_transformers_dense.py, tests/golden/test_gguf_dense.py.
"""

from __future__ import annotations

from paceline.config import ModelConfig
from paceline.errors import CheckpointError
from paceline.models import gguf_keys, huggingface_keys, llama
from paceline.models.family import Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys
from paceline.models.layer_patterns import all_but_every

PERIOD = 4
"""Every so many layers one does not rotate."""


def _config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(
        num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2_000_000.0, tie_word_embeddings=True
    )
    num_layers = keys.num_layers()
    unrotated = _unrotated_layers(keys, num_layers)
    has_window = keys.flag("use_sliding_window") and keys.get("sliding_window") is not None
    usual = tuple(has_window and layer in unrotated for layer in range(num_layers))
    windowed = huggingface_keys.windowed_layers(keys, usual)
    return huggingface_keys.dense_config(
        keys,
        "smollm3",
        attention_bias=keys.flag("attention_bias"),
        output_bias=keys.flag("attention_bias"),
        unrotated_layers=unrotated,
        sliding_window=keys.integer("sliding_window") if any(windowed) else None,
        windowed_layers=windowed if any(windowed) else (),
    )


def _unrotated_layers(keys: HuggingFaceKeys, num_layers: int) -> tuple[int, ...]:
    """``no_rope_layers`` has a 1 for each layer that rotates, whatever its name says."""
    flags = keys.get("no_rope_layers")
    if flags is None:
        return _every(keys.integer("no_rope_layer_interval", PERIOD), num_layers)
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise CheckpointError(
            keys.path, f"no_rope_layers is {flags!r}, expected 0 or 1 for each of {num_layers} layers"
        )
    return tuple(layer for layer in range(num_layers) if not flags[layer])


def _every(period: int, num_layers: int) -> tuple[int, ...]:
    return tuple(layer for layer, rotates in enumerate(all_but_every(period, num_layers)) if not rotates)


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    return gguf_keys.dense_config(
        fields,
        output_bias="blk.0.attn_output.bias" in fields.shapes,
        unrotated_layers=_every(PERIOD, fields.num_layers()),
    )


FAMILY = Family("smollm3", llama.build, {"SmolLM3ForCausalLM": _config}, _gguf_config, interleaved_gguf=True)

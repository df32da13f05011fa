"""A Hugging Face config.json as a ModelConfig."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.config import ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, UnsupportedError


@dataclass(frozen=True)
class Family:
    """One class of Transformers: our architecture, and the values it takes for keys that config.json lacks."""

    architecture: Literal["llama", "qwen2", "qwen3"]
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", {"max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        "llama", {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    ),
}

REFUSED_WHEN_SET = {
    "mlp_bias": "biases in the feed-forward layers",
    "num_local_experts": "a mixture of {} experts",
}


class _Keys:
    """Typed access to config.json with a family's defaults; errors name the file and the key."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self.defaults = defaults

    def get(self, key: str, default: Any = None) -> Any:
        """The value (which may be null), else the family's default, else ``default``."""
        return self.values.get(key, self.defaults.get(key, default))

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; null counts as absent."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(self.path, f"{key} is {value!r}, expected a positive integer")
        return value

    def flag(self, key: str) -> bool:
        """True or false; null counts as absent, which is false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(self.path, f"{key} is {value!r}, expected true or false")
        return bool(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; null counts as absent."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(self.path, f"{key} is {value!r}, expected a positive number")
        return float(value)


def config_from_json(path: Path, values: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a config.json; ``path`` is only for errors.

    Raises CheckpointError for a missing or impossible value, UnsupportedError for a class or feature that is not built.
    """
    names = values.get("architectures") or [None]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(f"{path}: architecture {name!r}; Paceline runs {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    keys = _Keys(path, values, family.defaults)
    for key, feature in REFUSED_WHEN_SET.items():
        if value := keys.get(key):
            raise UnsupportedError(f"{path}: {key}: {feature.format(value)}")
    if keys.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"{path}: hidden_act {keys.get('hidden_act')!r}; Paceline has silu")
    num_heads, hidden_size = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(path, f"{num_heads} query heads cannot share {num_kv_heads} key/value heads")
    head_dim = keys.integer("head_dim", max(hidden_size // num_heads, 1))
    num_layers = keys.integer("num_hidden_layers")
    return ModelConfig(
        architecture=family.architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=keys.integer("vocab_size"),
        context_length=keys.integer("max_position_embeddings"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope(keys, head_dim),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        attention_bias=family.architecture == "qwen2" or keys.flag("attention_bias"),
        qk_norm=family.architecture == "qwen3",
        sliding_window=_sliding_window(keys, name, num_layers),
    )


def _sliding_window(keys: _Keys, class_name: str, num_layers: int) -> int | None:
    """The window of all layers, None when all see everything; UnsupportedError when layers differ."""
    if class_name == "LlamaForCausalLM" or keys.get("sliding_window") is None:
        return None
    layer_types = keys.get("layer_types") or []
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise CheckpointError(keys.path, f"layer_types is {layer_types!r}, expected a list of strings")
    kinds = set(layer_types)
    if class_name.startswith("Qwen"):
        if not keys.flag("use_sliding_window"):
            return None
        first = keys.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise CheckpointError(keys.path, f"max_window_layers is {first!r}, expected an integer")
        if not kinds:
            kinds |= {"full_attention"} if first > 0 else set()
            kinds |= {"sliding_attention"} if first < num_layers else set()
    kinds = kinds or {"sliding_attention"}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise UnsupportedError(f"{keys.path}: layers of different attention ({', '.join(sorted(kinds))})")
    return keys.integer("sliding_window")


def _rope(keys: _Keys, head_dim: int) -> RopeConfig:
    """Reads both styles: ``rope_parameters`` (Transformers 5) and ``rope_scaling`` beside ``rope_theta``."""
    values: Mapping[str, Any] = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(keys.path, f"rope scaling is {values!r}, expected an object")
    rope = _Keys(keys.path, values, {"rope_theta": keys.get("rope_theta")})
    theta = rope.number("rope_theta", 10000.0)
    if rope.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedError(f"{keys.path}: partial_rotary_factor other than 1")
    if head_dim % 2:
        raise CheckpointError(keys.path, f"head_dim is {head_dim}, expected an even number")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta, head_dim)
    if kind == "linear":
        return RopeConfig(theta, head_dim, RopeScaling("linear", factor=rope.number("factor")))
    if kind != "llama3":
        raise UnsupportedError(f"{keys.path}: RoPE scaling {kind!r}; Paceline has default, linear and llama3")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(keys.path, f"low_freq_factor {low} must be below high_freq_factor {high}")
    scaling = RopeScaling(
        "llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=rope.integer("original_max_position_embeddings", keys.integer("max_position_embeddings")),
    )
    return RopeConfig(theta, head_dim, scaling)

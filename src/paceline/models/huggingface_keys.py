"""Typed access to a Hugging Face config.json, and what all families read from it alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import Experts, ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, UnsupportedError
from paceline.models.number_ranges import LARGEST, MAX_LAYERS, SMALLEST

ACTIVATIONS = {"silu": "silu", "swish": "silu"}
"""Transformers' name -> ours."""

REFUSED_WHEN_SET = {
    "mlp_bias": "biases in the feed-forward layers",
    "num_local_experts": "a mixture of {} experts",
}


WINDOW, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in ``layer_types``."""

COMMON_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        "finetuned",  # says how the model came to be, not what it is
    },
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
"""Type of rotation -> keys that it has beside the common ones."""


class HuggingFaceKeys:
    """Typed access to config.json with a class's defaults; errors name the file and the key."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.values = values
        self.defaults = defaults or {}

    def with_defaults(self, **defaults: Any) -> HuggingFaceKeys:
        """The same with the values that a class of Transformers takes for keys that are absent."""
        return HuggingFaceKeys(self.path, self.values, {**self.defaults, **defaults})

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

    def num_layers(self) -> int:
        """The number of layers, for readers that say something of each."""
        count = self.integer("num_hidden_layers")
        if count > MAX_LAYERS:
            raise CheckpointError(self.path, f"num_hidden_layers is {count}, expected at most {MAX_LAYERS}")
        return count

    def flag(self, key: str) -> bool:
        """True or false; null counts as absent, which is false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(self.path, f"{key} is {value!r}, expected true or false")
        return bool(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that f32 has; null counts as absent."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST <= value <= LARGEST:
            raise CheckpointError(self.path, f"{key} is {value!r}, expected a positive number")
        return float(value)


def dense_config(keys: HuggingFaceKeys, architecture: str, **changes: Any) -> ModelConfig:
    """What all classes write alike, with a family's ``changes``: shapes, epsilon, RoPE, tied embeddings, SiLU.

    Raises CheckpointError for a missing or impossible value, UnsupportedError for a feature that is not built.
    """
    path = keys.path
    for key, feature in REFUSED_WHEN_SET.items():
        if (value := keys.get(key)) and not (key == "num_local_experts" and changes.get("experts")):
            raise UnsupportedError(f"{path}: {key}: {feature.format(value)}")
    num_heads, hidden_size = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        problem = f"num_attention_heads is {num_heads}, which cannot share num_key_value_heads {num_kv_heads}"
        raise CheckpointError(path, problem)
    head_dim = keys.integer("head_dim", max(hidden_size // num_heads, 1))
    read: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": keys.num_layers(),
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": keys.integer("vocab_size"),
        "context_length": keys.integer("max_position_embeddings"),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6),
        "rope": rope_config(keys, head_dim) if "rope" not in changes else None,
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        "activation": _activation(keys) if "activation" not in changes else None,
    }
    return ModelConfig(**{**read, **changes})


def _activation(keys: HuggingFaceKeys) -> str:
    name = keys.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedError(f"{keys.path}: hidden_act {name!r}; Paceline has {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layer_types(keys: HuggingFaceKeys) -> list[str]:
    """The kinds of attention of the layers, empty where the file does not say."""
    kinds = keys.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(keys.path, f"layer_types is {kinds!r}, expected a list of strings")
    return kinds


def windowed_layers(keys: HuggingFaceKeys, usual: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers have the window, as ``layer_types`` says, ``usual`` where the file has none."""
    kinds = layer_types(keys)
    if not kinds:
        return usual
    if unknown := sorted(set(kinds) - {WINDOW, FULL}):
        raise UnsupportedError(f"{keys.path}: layer_types: {', '.join(unknown)}; Paceline has {WINDOW} and {FULL}")
    if len(kinds) != keys.num_layers():
        raise CheckpointError(
            keys.path, f"layer_types names {len(kinds)} layers, num_hidden_layers is {keys.num_layers()}"
        )
    return tuple(kind == WINDOW for kind in kinds)


# ---- rotation ----


def rope_config(keys: HuggingFaceKeys, head_dim: int, *, is_partial: bool = False) -> RopeConfig:
    """Reads both styles: ``rope_parameters`` (Transformers 5) and ``rope_scaling`` beside ``rope_theta``.

    ``is_partial``: the family has heads of which only the first components rotate. Raises UnsupportedError for a type
    that is not built, and for a key that no reader of its type knows: it may change what the numbers mean.
    """
    source = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    values: Mapping[str, Any] = keys.get(source) or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(keys.path, f"{source} is {values!r}, expected an object")
    rope = HuggingFaceKeys(keys.path, values, {"rope_theta": keys.get("rope_theta")})
    theta = rope.number("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise UnsupportedError(f"{keys.path}: rope_type {kind!r}; Paceline has {', '.join(ROPE_KEYS)}")
    if unknown := sorted(key for key in values if key not in COMMON_ROPE_KEYS | ROPE_KEYS[kind] and values[key]):
        raise UnsupportedError(f"{keys.path}: rope_type {kind!r} with {', '.join(unknown)}, which Paceline lacks")
    dim = _rotating(keys, rope, head_dim, is_partial)
    if kind == "default":
        return RopeConfig(theta, dim)
    if kind == "linear":
        return RopeConfig(theta, dim, RopeScaling("linear", factor=rope.number("factor")))
    if kind == "llama3":
        return RopeConfig(theta, dim, _llama3(keys, rope))
    if kind == "yarn":
        if theta <= 1:
            raise CheckpointError(keys.path, f"rope_theta is {theta}, expected more than 1 with YaRN")
        return RopeConfig(theta, dim, _yarn(keys, rope))
    return RopeConfig(theta, dim, _longrope(keys, rope, dim))


def rope_of_kind(keys: HuggingFaceKeys, kind: str, head_dim: int, usual: Mapping[str, Any]) -> RopeConfig:
    """The rotation of the layers of one kind. Transformers 5 nests ``rope_parameters`` by kind; before,
    ``rope_scaling`` was that of the layers that see everything. ``usual`` are the values of keys that are absent.
    """
    nested = keys.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not all(isinstance(value or {}, Mapping) for value in nested.values()):
        raise CheckpointError(keys.path, f"rope_parameters is {nested!r}, expected an object a kind of layer")
    if unknown := sorted(nested.keys() - {WINDOW, FULL}):
        raise UnsupportedError(f"{keys.path}: rope_parameters: {', '.join(unknown)}; Paceline has {FULL} and {WINDOW}")
    scaling = keys.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(keys.path, f"rope_scaling is {scaling!r}, expected an object")
    values = {**usual, **(nested.get(kind) or {}), **(scaling if kind == FULL else {})}
    contexts = ("max_position_embeddings", "original_max_position_embeddings")
    of_kind = HuggingFaceKeys(keys.path, {"rope_parameters": values, **{key: keys.get(key) for key in contexts}})
    return rope_config(of_kind, head_dim)


def _rotating(keys: HuggingFaceKeys, rope: HuggingFaceKeys, head_dim: int, is_partial: bool) -> int:
    """How many components of a head rotate."""
    share = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    dim = head_dim if share == 1.0 else int(head_dim * share)
    if share != 1.0 and not is_partial:
        raise UnsupportedError(f"{keys.path}: partial_rotary_factor other than 1")
    if head_dim % 2:
        raise CheckpointError(keys.path, f"head_dim is {head_dim}, expected an even number")
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointError(keys.path, f"partial_rotary_factor {share} makes {dim} components of {head_dim} rotate")
    return dim


def _trained_context(keys: HuggingFaceKeys, rope: HuggingFaceKeys) -> int:
    """Of the two places for this key Transformers prefers that outside of the object."""
    inner = rope.integer("original_max_position_embeddings", keys.integer("max_position_embeddings"))
    return keys.integer("original_max_position_embeddings", inner)


def _llama3(keys: HuggingFaceKeys, rope: HuggingFaceKeys) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(keys.path, f"low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeScaling(
        "llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=_trained_context(keys, rope),
    )


def _yarn(keys: HuggingFaceKeys, rope: HuggingFaceKeys) -> RopeScaling:
    """Attention is scaled by 1 + 0.1 ln(factor) where the file gives no number of its own (2309.00071, 3.4)."""
    trained = _trained_context(keys, rope)
    factor = rope.number("factor", keys.integer("max_position_embeddings") / trained)

    def attention(multiplier: float) -> float:
        return 1.0 + 0.1 * multiplier * math.log(max(factor, 1.0))

    implied = attention(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        implied = attention(rope.number("mscale")) / attention(rope.number("mscale_all_dim"))
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast <= slow:
        raise CheckpointError(keys.path, f"beta_slow {slow} must be below beta_fast {fast}")
    return RopeScaling(
        "yarn",
        factor=factor,
        original_context=trained,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.get("truncate") is None or rope.flag("truncate"),
        attention_factor=rope.number("attention_factor", implied),
    )


def experts(keys: HuggingFaceKeys, *, width: str, **changes: Any) -> Experts:
    """The mixture of experts whose networks are as wide as the key ``width`` says, with a family's ``changes``."""
    names = [name for name in ("num_local_experts", "num_experts") if keys.values.get(name) is not None]
    name = names[0] if names else "num_experts"
    num_experts, num_chosen = keys.integer(name), keys.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise CheckpointError(keys.path, f"num_experts_per_tok is {num_chosen} of {name} {num_experts}")
    return Experts(num_experts, num_chosen, keys.integer(width), **changes)


def _longrope(keys: HuggingFaceKeys, rope: HuggingFaceKeys, dim: int) -> RopeScaling:
    """Attention is scaled by sqrt(1 + ln(factor) / ln(trained context)) where the file gives no number of its own
    (2402.13753, 3.3).
    """
    trained = _trained_context(keys, rope)
    if trained < 2:
        raise CheckpointError(keys.path, f"original_max_position_embeddings is {trained}, expected more")
    factor = rope.number("factor", keys.integer("max_position_embeddings") / trained)
    implied = math.sqrt(1.0 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return RopeScaling(
        "longrope",
        original_context=trained,
        factors=_factors(rope, "short_factor", dim // 2),
        long_factors=_factors(rope, "long_factor", dim // 2),
        attention_factor=rope.number("attention_factor", implied),
    )


def _factors(rope: HuggingFaceKeys, key: str, count: int) -> tuple[float, ...]:
    """One positive number a pair."""
    values = rope.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(rope.path, f"{key} is {values!r}, expected {count} positive numbers")
    return tuple(HuggingFaceKeys(rope.path, {key: value}).number(key) for value in values)

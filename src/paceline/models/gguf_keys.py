"""Typed access to the metadata of a GGUF file, and what all families read from it alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import Experts, ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, UnsupportedError
from paceline.models.layer_patterns import all_but_every
from paceline.models.number_ranges import LARGEST, MAX_LAYERS, SMALLEST

ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = ROPE_VECTORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
"""Tensors that are configuration: what rotary frequencies are divided by."""

SOFTMAX_GATING, SOFTMAX_WEIGHT_GATING = 1, 3
"""Values of expert_gating_func: softmax over all experts, and over the chosen ones."""

EXPERTS_REFUSED = ("expert_shared_count", "expert_shared_feed_forward_length", "expert_group_count")


class GGUFKeys:
    """Typed access to the keys of one architecture; errors name the file and the key.

    ``shapes`` are those of all tensors; ``rope_vectors`` the values of those of ROPE_VECTORS that the file has.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        architecture: str,
        shapes: Mapping[str, tuple[int, ...]],
        rope_vectors: Mapping[str, tuple[float, ...]],
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = architecture
        self.shapes = shapes
        self.rope_vectors = rope_vectors

    def get(self, key: str) -> Any:
        """The value, the same for all layers; None where the file has none. UnsupportedError for an array."""
        value = self.values(key)
        if isinstance(value, list) or hasattr(value, "tolist"):
            raise UnsupportedError(f"{self.path}: {self.architecture}.{key} differs from layer to layer")
        return value

    def values(self, key: str) -> Any:
        """The value, which may be an array."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer, the same for all layers."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(self.path, f"metadata lacks {self.architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(self.path, f"{self.architecture}.{key} is {value!r}, expected a positive integer")
        return value

    def num_layers(self) -> int:
        """The number of layers, for readers that say something of each."""
        count = self.integer("block_count")
        if count > MAX_LAYERS:
            raise CheckpointError(self.path, f"{self.architecture}.block_count is {count}, at most {MAX_LAYERS}")
        return count

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that f32 has."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST <= value <= LARGEST:
            raise CheckpointError(self.path, f"{self.architecture}.{key} is {value!r}, expected a positive number")
        return float(value)


def dense_config(fields: GGUFKeys, **changes: Any) -> ModelConfig:
    """What all architectures write alike, with a family's ``changes``.

    Raises CheckpointError for a missing or impossible value, UnsupportedError for a feature that is not built.
    """
    path = fields.path
    if (count := fields.get("expert_count")) and "experts" not in changes:
        raise UnsupportedError(f"{path}: expert_count: a mixture of {count} experts; Paceline runs dense models")
    num_heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", max(hidden_size // num_heads, 1))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{path}: attention.key_length is {head_dim}, attention.value_length another number")
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        problem = f"attention.head_count is {num_heads}, which cannot share attention.head_count_kv {num_kv_heads}"
        raise CheckpointError(path, problem)
    window = fields.integer("attention.sliding_window") if fields.get("attention.sliding_window") else None
    read: dict[str, Any] = {
        "architecture": fields.architecture,
        "num_layers": fields.num_layers(),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": fields.shapes["token_embd.weight"][0],
        "context_length": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope": rope_config(fields, head_dim) if "rope" not in changes else None,
        "tie_embeddings": "output.weight" not in fields.shapes,
        "attention_bias": "blk.0.attn_q.bias" in fields.shapes,
        "sliding_window": window,
    }
    return ModelConfig(**{**read, **changes})


def experts(fields: GGUFKeys, *, biases: bool = False) -> Experts:
    """The mixture of experts that the keys ``expert_*`` describe. Raises as ``dense_config`` does."""
    for key in EXPERTS_REFUSED:
        if fields.get(key):
            raise UnsupportedError(f"{fields.path}: {key}: Paceline has experts that a softmax chooses, and no others")
    if (gating := fields.get("expert_gating_func")) not in (None, SOFTMAX_GATING, SOFTMAX_WEIGHT_GATING):
        raise UnsupportedError(f"{fields.path}: expert_gating_func {gating!r}; Paceline has softmax")
    if (scale := fields.get("expert_weights_scale")) not in (None, 0.0, 1.0):
        raise UnsupportedError(f"{fields.path}: expert_weights_scale {scale!r}; Paceline has 1")
    num_experts, num_chosen = fields.integer("expert_count"), fields.integer("expert_used_count")
    if num_chosen > num_experts:
        raise CheckpointError(fields.path, f"expert_used_count is {num_chosen} of expert_count {num_experts}")
    width = fields.integer("expert_feed_forward_length", fields.integer("feed_forward_length"))
    return Experts(num_experts, num_chosen, width, fields.get("expert_weights_norm") is not False, biases)


def windowed_layers(fields: GGUFKeys, period: int) -> tuple[bool, ...]:
    """Which layers have the window: ``attention.sliding_window_pattern`` is a flag for each, or says that every so many
    layers one sees everything; it is ``period`` where the file has none.
    """
    num_layers, pattern = fields.num_layers(), fields.values("attention.sliding_window_pattern")
    if not hasattr(pattern, "tolist"):
        return all_but_every(fields.integer("attention.sliding_window_pattern", period), num_layers)
    if len(pattern) != num_layers:
        problem = f"names {len(pattern)} layers of {num_layers}"
        raise CheckpointError(fields.path, f"{fields.architecture}.attention.sliding_window_pattern {problem}")
    return tuple(bool(flag) for flag in pattern.tolist())


# ---- rotation ----


def rope_config(fields: GGUFKeys, head_dim: int, *, truncate: bool = True) -> RopeConfig:
    """The rotation of a head, as the keys ``rope.*`` and the tensors of ROPE_VECTORS say. No key says what YaRN's
    ``truncate`` is.
    """
    theta = fields.number("rope.freq_base", 10000.0)
    dim = fields.integer("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        problem = f"rope.dimension_count {dim} is impossible where attention.key_length is {head_dim}"
        raise CheckpointError(fields.path, problem)
    kind = fields.get("rope.scaling.type") or "linear"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedError(f"{fields.path}: rope.scaling.type {kind!r}; Paceline has linear, yarn and longrope")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    scaling = None
    if kind == "linear" and factor != 1.0:
        scaling = RopeScaling("linear", factor=factor)
    elif kind == "yarn":
        if theta <= 1:
            raise CheckpointError(fields.path, f"rope.freq_base is {theta}, expected more than 1 with YaRN")
        scaling = _yarn(fields, factor, truncate)
    elif kind == "longrope" and SHORT_FACTORS not in fields.rope_vectors:
        raise CheckpointError(fields.path, "missing", tensor=SHORT_FACTORS)
    if fields.rope_vectors:
        if scaling is not None:
            found = ", ".join(fields.rope_vectors)
            raise UnsupportedError(f"{fields.path}: rope.scaling.type {kind!r} together with {found}")
        scaling = _divided(fields, dim // 2)
    if scaling is None and fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedError(f"{fields.path}: rope.scaling.attn_factor without scaling")
    return RopeConfig(theta, dim, scaling)


def _divided(fields: GGUFKeys, num_pairs: int) -> RopeScaling:
    """Frequencies divided by numbers of the file, which choose themselves by the context if there are two sets."""
    for name, values in fields.rope_vectors.items():
        if len(values) != num_pairs or not all(0 < value < float("inf") for value in values):
            raise CheckpointError(fields.path, f"expected {num_pairs} positive numbers", tensor=name)
    attention = fields.number("rope.scaling.attn_factor", 1.0)
    if set(fields.rope_vectors) == {ROPE_FACTORS}:
        return RopeScaling("factors", factors=fields.rope_vectors[ROPE_FACTORS], attention_factor=attention)
    if set(fields.rope_vectors) != {SHORT_FACTORS, LONG_FACTORS}:
        found = ", ".join(fields.rope_vectors)
        raise UnsupportedError(f"{fields.path}: {found}; Paceline has {ROPE_FACTORS}, or {SHORT_FACTORS} with its pair")
    return RopeScaling(
        "longrope",
        original_context=fields.integer("rope.scaling.original_context_length"),
        factors=fields.rope_vectors[SHORT_FACTORS],
        long_factors=fields.rope_vectors[LONG_FACTORS],
        attention_factor=attention,
    )


def _yarn(fields: GGUFKeys, factor: float, truncate: bool) -> RopeScaling:
    for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.attn_factor"):
        if fields.get(key) not in (None, 0.0, 1.0):
            raise UnsupportedError(f"{fields.path}: {key} is {fields.get(key)!r}; Paceline has YaRN without it")
    fast, slow = fields.number("rope.scaling.yarn_beta_fast", 32.0), fields.number("rope.scaling.yarn_beta_slow", 1.0)
    if fast <= slow:
        problem = f"rope.scaling.yarn_beta_fast {fast} must be above rope.scaling.yarn_beta_slow {slow}"
        raise CheckpointError(fields.path, problem)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_context=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        attention_factor=fields.number("rope.scaling.yarn_attn_factor", 1.0 + 0.1 * math.log(max(factor, 1.0))),
    )

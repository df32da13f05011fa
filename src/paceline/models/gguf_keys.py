"""Typed access to the metadata of a GGUF file, and what all families read from it alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import Experts, ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, UnsupportedError

SOFTMAX_GATING, SOFTMAX_WEIGHT_GATING = 1, 3
"""Values of expert_gating_func: softmax over all experts, and over the chosen ones."""

EXPERTS_REFUSED = ("expert_shared_count", "expert_shared_feed_forward_length", "expert_group_count")


class GGUFKeys:
    """Typed access to the keys of one architecture; errors name the file and the key.

    ``shapes`` are those of all tensors, ``rope_factors`` the values of rope_freqs.weight where the file has that.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        architecture: str,
        shapes: Mapping[str, tuple[int, ...]],
        rope_factors: tuple[float, ...] | None,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = architecture
        self.shapes = shapes
        self.rope_factors = rope_factors

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer, the same for all layers."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(self.path, f"metadata lacks {self.architecture}.{key}")
        if hasattr(value, "tolist"):
            raise UnsupportedError(f"{self.path}: {self.architecture}.{key} differs from layer to layer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(self.path, f"{self.architecture}.{key} is {value!r}, expected a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
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
        raise UnsupportedError(f"{path}: heads whose keys ({head_dim}) and values differ in length")
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(path, f"{num_heads} query heads cannot share {num_kv_heads} key/value heads")
    window = fields.integer("attention.sliding_window") if fields.get("attention.sliding_window") else None
    read: dict[str, Any] = {
        "architecture": fields.architecture,
        "num_layers": fields.integer("block_count"),
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
        raise CheckpointError(fields.path, f"expert_used_count is {num_chosen} of {num_experts} experts")
    width = fields.integer("expert_feed_forward_length", fields.integer("feed_forward_length"))
    return Experts(num_experts, num_chosen, width, fields.get("expert_weights_norm") is not False, biases)


def rope_config(fields: GGUFKeys, head_dim: int, *, truncate: bool = True) -> RopeConfig:
    """The rotation of a head, as the keys ``rope.*`` and rope_freqs.weight say. No key says what YaRN's ``truncate``
    is.
    """
    factors = fields.rope_factors
    theta = fields.number("rope.freq_base", 10000.0)
    dim = fields.integer("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        raise CheckpointError(fields.path, f"rope.dimension_count {dim} is impossible for heads of {head_dim}")
    kind = fields.get("rope.scaling.type") or "linear"
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{fields.path}: rope.scaling.type {kind!r}; Paceline has linear, yarn and rope_freqs.weight"
        )
    scaling = None
    if kind == "linear" and factor != 1.0:
        scaling = RopeScaling("linear", factor=factor)
    elif kind == "yarn":
        scaling = _yarn(fields, factor, truncate)
    if factors is not None:
        if scaling is not None:
            raise UnsupportedError(f"{fields.path}: rope.scaling.type {kind!r} together with rope_freqs.weight")
        if len(factors) != dim // 2 or not all(0 < value < float("inf") for value in factors):
            raise CheckpointError(fields.path, f"expected {dim // 2} positive numbers", tensor="rope_freqs.weight")
        scaling = RopeScaling("factors", factors=factors)
    return RopeConfig(theta, dim, scaling)


def _yarn(fields: GGUFKeys, factor: float, truncate: bool) -> RopeScaling:
    for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.attn_factor"):
        if fields.get(key) not in (None, 0.0, 1.0):
            raise UnsupportedError(f"{fields.path}: {key} is {fields.get(key)!r}; Paceline has YaRN without it")
    return RopeScaling(
        "yarn",
        factor=factor,
        original_context=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        truncate=truncate,
        attention_factor=fields.number("rope.scaling.yarn_attn_factor", 1.0 + 0.1 * math.log(max(factor, 1.0))),
    )

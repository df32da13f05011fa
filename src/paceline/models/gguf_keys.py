"""Typed access to the metadata of a GGUF file, and what all families read from it alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, UnsupportedError


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


def rope_config(fields: GGUFKeys, head_dim: int) -> RopeConfig:
    """The rotation of a head, as the keys ``rope.*`` and rope_freqs.weight say."""
    factors = fields.rope_factors
    theta = fields.number("rope.freq_base", 10000.0)
    dim = fields.integer("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        raise CheckpointError(fields.path, f"rope.dimension_count {dim} is impossible for heads of {head_dim}")
    kind = fields.get("rope.scaling.type") or "linear"
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise UnsupportedError(f"{fields.path}: RoPE scaling {kind!r}; Paceline has linear and rope_freqs.weight")
    is_linear = kind == "linear" and factor != 1.0
    if factors is not None:
        if is_linear:
            raise UnsupportedError(f"{fields.path}: linear RoPE scaling together with rope_freqs.weight")
        if len(factors) != dim // 2 or not all(0 < value < float("inf") for value in factors):
            raise CheckpointError(fields.path, f"expected {dim // 2} positive numbers", tensor="rope_freqs.weight")
        return RopeConfig(theta, dim, RopeScaling("factors", factors=factors))
    return RopeConfig(theta, dim, RopeScaling("linear", factor=factor) if is_linear else None)

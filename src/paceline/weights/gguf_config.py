"""The metadata of a GGUF file as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from paceline.config import ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.inventory import Shape

ARCHITECTURES: dict[str, Literal["llama", "qwen2", "qwen3"]] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


class _Fields:
    """Typed access to the keys of one architecture; errors name the file and the key."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = architecture

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


def config_from_metadata(
    path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, Shape], *, rope_factors: tuple[float, ...] | None
) -> ModelConfig:
    """The configuration that a GGUF header describes.

    ``rope_factors`` are the values of the tensor rope_freqs.weight where the file has one. Raises CheckpointError for a
    missing or impossible value, UnsupportedError for an architecture or feature that is not built.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(path, "metadata lacks general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"{path}: architecture {name!r}; Paceline runs {', '.join(ARCHITECTURES)}")
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedError(f"{path}: one of {metadata['split.count']} parts; join them with gguf-split")
    fields = _Fields(path, metadata, name)
    if fields.get("expert_count"):
        raise UnsupportedError(f"{path}: a mixture of {fields.get('expert_count')} experts; Paceline runs dense models")
    if "token_embd.weight" not in shapes:
        raise CheckpointError(path, "missing", tensor="token_embd.weight")
    num_heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", max(hidden_size // num_heads, 1))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{path}: heads whose keys ({head_dim}) and values differ in length")
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(path, f"{num_heads} query heads cannot share {num_kv_heads} key/value heads")
    return ModelConfig(
        architecture=ARCHITECTURES[name],
        num_layers=fields.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=shapes["token_embd.weight"][0],
        context_length=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, head_dim, rope_factors),
        tie_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        qk_norm=name == "qwen3",
        sliding_window=fields.integer("attention.sliding_window") if fields.get("attention.sliding_window") else None,
    )


def _rope(fields: _Fields, head_dim: int, factors: tuple[float, ...] | None) -> RopeConfig:
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

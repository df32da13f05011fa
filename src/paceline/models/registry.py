"""The families that there are, by our name, by the class of Transformers, and by GGUF's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import ModelConfig
from paceline.errors import CheckpointError, UnsupportedError
from paceline.models import (
    eagle,
    exaone4,
    gemma,
    gpt_oss,
    granite,
    llama,
    mixtral,
    olmo,
    phi3,
    qwen,
    qwen3_moe,
    smollm3,
)
from paceline.models.family import Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys
from paceline.ops.graph import Graph

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi3.FAMILY,
    granite.FAMILY,
    olmo.FAMILY,
    smollm3.FAMILY,
    exaone4.FAMILY,
    mixtral.FAMILY,
    qwen3_moe.FAMILY,
    gpt_oss.FAMILY,
    eagle.FAMILY,
)


def family_of(architecture: str) -> Family:
    """The family of that name, or UnsupportedError naming those that exist."""
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    known = ", ".join(sorted(family.architecture for family in FAMILIES))
    raise UnsupportedError(f"architecture {architecture!r} is not built; known are {known}")


def build_graph(config: ModelConfig) -> Graph:
    """The graph of the configured model, or UnsupportedError naming the architectures that exist."""
    return family_of(config.architecture).build(config)


def config_from_json(path: Path, values: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a config.json; ``path`` is only for errors.

    Raises CheckpointError for a missing or impossible value, UnsupportedError for a class or feature that is not built.
    """
    names = values.get("architectures") or [None]
    name = names[0] if isinstance(names, list) else names
    readers = {known: reader for family in FAMILIES for known, reader in family.classes.items()}
    if not isinstance(name, str) or name not in readers:
        raise UnsupportedError(f"{path}: architectures names {name!r}; Paceline runs {', '.join(readers)}")
    return readers[name](HuggingFaceKeys(path, values))


def config_from_metadata(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_vectors: Mapping[str, tuple[float, ...]],
) -> ModelConfig:
    """The configuration that a GGUF header describes; ``shapes`` are those of the file's tensors.

    ``rope_vectors`` are the values of those of ``gguf_keys.ROPE_VECTORS`` that the file has. Raises CheckpointError for
    a missing or impossible value, UnsupportedError for an architecture or feature that is not built.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(path, "metadata lacks general.architecture")
    readers = {family.architecture: family.from_gguf for family in FAMILIES if family.from_gguf is not None}
    if name not in readers:
        raise UnsupportedError(f"{path}: architecture {name!r}; Paceline runs {', '.join(readers)}")
    parts = metadata.get("split.count", 1)
    if isinstance(parts, bool) or not isinstance(parts, int) or parts not in (0, 1):
        raise UnsupportedError(f"{path}: split.count is {parts!r}: one part of several; join them with gguf-split")
    if "token_embd.weight" not in shapes:
        raise CheckpointError(path, "missing", tensor="token_embd.weight")
    return readers[name](GGUFKeys(path, metadata, name, shapes, rope_vectors))

"""Opens a model on disk, whichever format it has."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import CheckpointError
from paceline.weights.gguf import MAGIC, GGUFCheckpoint
from paceline.weights.safetensors import HuggingFaceCheckpoint


def open_checkpoint(path: Path) -> GGUFCheckpoint | HuggingFaceCheckpoint:
    """The checkpoint at ``path``: a GGUF file (by name or by its first bytes) or a Hugging Face directory.

    Headers are checked at once, tensors are mapped when asked for. Raises CheckpointError, or UnsupportedError.
    """
    if path.is_dir():
        return HuggingFaceCheckpoint(path)
    if path.suffix == ".gguf" or _has_magic(path):
        return GGUFCheckpoint(path)
    raise CheckpointError(path, "neither a GGUF file nor a directory with config.json and safetensors")


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error

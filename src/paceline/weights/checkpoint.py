"""Opens a model on disk, whichever format it has."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import CheckpointError
from paceline.weights.gguf import MAGIC, GGUFCheckpoint
from paceline.weights.paceline_checkpoint import QUANT_METHOD, PacelineCheckpoint
from paceline.weights.safetensors import HuggingFaceCheckpoint, read_json

AnyCheckpoint = GGUFCheckpoint | HuggingFaceCheckpoint | PacelineCheckpoint


def open_checkpoint(path: Path) -> AnyCheckpoint:
    """The checkpoint at ``path``: a GGUF file (by name or by its first bytes), or a directory of Hugging Face's or of
    Paceline's own format.

    Headers are checked at once, tensors are mapped when asked for. Raises CheckpointError, or UnsupportedError.
    """
    if path.is_dir():
        values = read_json(path / "config.json")
        quantization = values.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD:
            return PacelineCheckpoint(path, values)
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

"""Writes a quantised model to disk, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from paceline.quantize.export.atomic import write_atomically
from paceline.quantize.export.config_json import made_values
from paceline.quantize.export.formats import check_format
from paceline.quantize.export.gguf_file import write_gguf_file
from paceline.quantize.export.gguf_metadata import metadata_of
from paceline.quantize.export.huggingface_directory import write_huggingface_directory
from paceline.quantize.export.paceline_directory import write_paceline_directory
from paceline.quantize.model import QuantizedModel
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.checksums import verify_checksums
from paceline.weights.gguf import GGUFCheckpoint
from paceline.weights.raw import Checkpoint


def check_source(checkpoint: Checkpoint, fmt: str) -> None:
    """UnsupportedError when the format cannot say what the checkpoint's tokenizer or configuration is: writers find out
    as well, but after all the work."""
    if fmt == "gguf":
        metadata_of(checkpoint)
    elif fmt != "paceline" and isinstance(checkpoint, GGUFCheckpoint):
        made_values(checkpoint.config, load_tokenizer(checkpoint))


def write_model(
    model: QuantizedModel, out: Path, fmt: str, *, head_bits: int | None = None, force: bool = False
) -> None:
    """The model as ``out`` in one of ``FORMATS``: a file for gguf, a directory for the others.

    It appears at once, after it has been read back and compared with its checksums; until then ``out`` stays as it was.
    Raises ParameterError for what the format cannot hold (``check_format``), OutputError (``write_atomically``),
    CheckpointError when a value is not finite or when what was written cannot be read back.
    """
    checkpoint = model.checkpoint
    check_format(checkpoint.config, model.scheme, fmt, head_bits=head_bits)

    def write(path: Path) -> None:
        if fmt == "gguf":
            write_gguf_file(model, path, head_bits=head_bits)
        elif fmt == "paceline":
            write_paceline_directory(model, path, head_bits=head_bits)
        else:
            write_huggingface_directory(model, path, fmt)

    write_atomically(out, write, verify_checksums, force=force, source=Path(checkpoint.path))

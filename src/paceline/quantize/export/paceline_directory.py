"""Our own directories: blocks as the packer reads them, see ``weights/paceline_checkpoint.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from paceline.quantize.export.config_json import source_values
from paceline.quantize.export.head import EMBEDDING, HEAD, head_tensor
from paceline.quantize.export.huggingface_directory import write_json, write_tokenizer
from paceline.quantize.export.safetensors_files import write_safetensors
from paceline.quantize.export.spool import TensorSpool
from paceline.quantize.export.tensors import float_tensor
from paceline.quantize.model import QuantizedModel
from paceline.weights.gguf import GGUFCheckpoint
from paceline.weights.paceline_checkpoint import BLOCKS_KEY, ORDER_SUFFIX, config_values
from paceline.weights.raw import BLOCK_KINDS, RawTensor


def write_paceline_directory(model: QuantizedModel, directory: Path, *, head_bits: int | None) -> None:
    """Makes the directory; ``check_format`` has been asked. Rows keep the source's order."""
    directory.mkdir()
    checkpoint = model.checkpoint
    blocks: dict[str, dict[str, Any]] = {}
    with TensorSpool(directory.parent / "spool") as spool:
        for name in checkpoint.names():
            matrix = model.matrix(name)
            if matrix is not None:
                _spool_raw(spool, matrix.blocks(name), blocks)
            elif name in (EMBEDDING, HEAD):
                _spool_raw(spool, head_tensor(model, name, head_bits=head_bits, default_bits=None), blocks)
            else:
                plain = float_tensor(model, name)
                spool.add(name, plain.kind, plain.data.shape, plain.data)
        values = config_values(checkpoint.config, interleaved_rope=checkpoint.interleaved_rope)
        write_tokenizer(checkpoint, directory)
        if not isinstance(checkpoint, GGUFCheckpoint):
            values = {**source_values(Path(checkpoint.path)), **values}
        write_json(directory / "config.json", values)
        write_safetensors(spool, directory, metadata={"format": "paceline", BLOCKS_KEY: json.dumps(blocks)})


def _spool_raw(spool: TensorSpool, raw: RawTensor, blocks: dict[str, dict[str, Any]]) -> None:
    """A row of bytes for each output; ``blocks`` gets what they are. Floats stay floats."""
    block, block_bytes = BLOCK_KINDS[raw.kind]
    if block == 1:
        spool.add(raw.name, raw.kind, raw.shape, raw.data)
        return
    spool.add(raw.name, "U8", (raw.shape[0], raw.shape[1] // block * block_bytes), raw.data)
    blocks[raw.name] = {"kind": raw.kind, "shape": list(raw.shape)}
    if raw.order is not None:
        spool.add(raw.name + ORDER_SUFFIX, "I32", raw.order.shape, raw.order.astype(np.int32))

"""Spooled tensors as safetensors files, in parts where they are many bytes.

Source: the safetensors format (huggingface/safetensors, README), and the names and index that Transformers gives parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.quantize.export.spool import SpooledTensor, TensorSpool
from paceline.weights.checksums import KEY, file_checksum, metadata_checksum

MAX_SHARD_BYTES = 5 * 10**9
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
INDEX = "model.safetensors.index.json"


def write_safetensors(spool: TensorSpool, directory: Path, *, metadata: Mapping[str, str]) -> None:
    """model.safetensors, or its parts and their index, with the checksums of all tensors and of what is in
    ``directory`` already: write all else before. A tensor larger than a part has one of its own.
    """
    shards: list[list[SpooledTensor]] = [[]]
    room = MAX_SHARD_BYTES
    for tensor in spool.tensors:
        if tensor.num_bytes > room and shards[-1]:
            shards.append([])
            room = MAX_SHARD_BYTES
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": spool.num_bytes}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    files = {path.name: file_checksum(path) for path in sorted(directory.iterdir())}
    for name, shard in zip(names, shards, strict=True):
        checksums = {
            "files": files,
            "metadata": metadata_checksum(metadata),
            "tensors": {tensor.name: tensor.checksum for tensor in shard},
        }
        _write_file(directory / name, spool, shard, {**metadata, KEY: json.dumps(checksums)})


def _write_file(path: Path, spool: TensorSpool, tensors: list[SpooledTensor], metadata: Mapping[str, str]) -> None:
    # Wide numbers first, so that each lies at a multiple of its size: readers map it as an array.
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.kind], tensor.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.kind,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in ordered:
            file.write(spool.data(tensor).data)

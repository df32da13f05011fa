"""A tensor as its file holds it, before any kernel's layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import ModelConfig

BLOCK_KINDS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
    "Q4G64": (64, 34),
    "Q4G128": (128, 66),
    "Q4G32Z": (32, 19),
    "Q4G64Z": (64, 35),
    "Q4G128Z": (128, 67),
    "Q8G64": (64, 66),
    "Q8G128": (128, 130),
    "Q8G32Z": (32, 35),
    "Q8G64Z": (64, 67),
    "Q8G128Z": (128, 131),
    "Q8C": (32, 36),
}
"""Kind -> (weights in a block, bytes of a block). The last eleven are those of ``quantized_matrix.py``."""


@dataclass(frozen=True)
class RawTensor:
    """One tensor of a checkpoint: canonical (GGUF) name, shape (outputs, inputs) or (length,), kind, and its bytes.

    ``data`` is a flat u8 view, usually of a memory-mapped file; rows follow each other without padding. Only ``data``
    of the mapped file is referenced: nothing is copied.

    ``order`` [inputs] i32, when given: column j of the tensor is input order[j] of the layer.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: NDArray[np.uint8]
    order: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class TensorHeader:
    """Shape and kind of a tensor, as ``RawTensor`` has them."""

    shape: tuple[int, ...]
    kind: str


class Checkpoint(Protocol):
    """An opened model: configuration, tensors by canonical name, tokenizer files.

    Canonical names are GGUF's: token_embd.weight, blk.{i}.attn_norm.weight, blk.{i}.attn_q.weight (also attn_k, attn_v,
    attn_output, with .bias where present), blk.{i}.attn_q_norm.weight, blk.{i}.attn_k_norm.weight,
    blk.{i}.ffn_norm.weight, blk.{i}.ffn_gate.weight (ffn_up, ffn_down), output_norm.weight, output.weight (absent when
    embeddings are tied).

    ``interleaved_rope``: True when rows of q and k are stored so that rotary pairs are neighbours (2i, 2i+1), as GGUF
    files of the llama architecture are; False when pairs are (i, i + dim/2), as in Hugging Face files and GGUF files of
    the Qwen family.
    """

    config: ModelConfig
    interleaved_rope: bool

    @property
    def path(self) -> str: ...

    @property
    def files(self) -> tuple[Path, ...]: ...

    def names(self) -> tuple[str, ...]: ...

    def header(self, name: str) -> TensorHeader:
        """Shape and kind of ``tensor(name)``, whose data are not read. Raises as it does."""
        ...

    def tensor(self, name: str) -> RawTensor:
        """The tensor, or CheckpointError naming file and tensor when it is missing or reaches past the end of the
        file.
        """
        ...

"""Tensors of a checkpoint into packed matrices: the format of each, rows in interleaved rope order, and memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from paceline.config import WeightFormat
from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.packed import (
    CHOSEN_FORMATS,
    MAX_CHANNEL_INPUTS,
    NATIVE_FORMATS,
    TILE,
    PackedFormat,
    PackedMatrix,
)
from paceline.weights.raw import BLOCK_KINDS, Checkpoint, RawTensor

Permutation = NDArray[np.int32]
Bytes = NDArray[np.uint8]

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20
_RELEASE_BYTES = 8 << 20


def target_format(kind: str, weights: WeightFormat) -> PackedFormat:
    """The packed format of a tensor of that kind under ``--weights``.

    What has that many bits in groups already stays as it is (under int4 Q4_0 and the kinds of quantised checkpoints,
    under int8 these): rounding it again could only lose.
    """
    has_bits = {"int4": kind == "Q4_0" or kind.startswith("Q4G"), "int8": kind.startswith("Q8G")}
    if weights == "native" or has_bits.get(weights, False):
        return NATIVE_FORMATS[kind]
    return CHOSEN_FORMATS[weights]


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is packed: biases of experts [experts, outputs] are vectors, one after the other."""
    return len(shape) >= 2 and not name.endswith(".bias")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(outputs, inputs) of the matrix that holds a tensor: those of all experts [experts, outputs, inputs] are one."""
    return math.prod(shape[:-1]), shape[-1]


def rope_permutation(num_heads: int, head_dim: int, rope_dim: int) -> Permutation:
    """int32 [num_heads * head_dim]: row r of the interleaved order is row ``permutation[r]`` of the half-split order.

    In each head, rows i and i + rope_dim / 2 (a rotary pair of the half-split order) become rows 2i and 2i + 1; rows
    from ``rope_dim`` on stay. Serves biases and per-head norms too: ``bias[permutation]``.
    """
    assert rope_dim % 2 == 0, rope_dim
    assert 0 <= rope_dim <= head_dim, (rope_dim, head_dim)
    head = np.arange(head_dim, dtype=np.int32)
    head[:rope_dim] = head[:rope_dim].reshape(2, -1).T.reshape(-1)
    return (np.arange(num_heads, dtype=np.int32)[:, None] * np.int32(head_dim) + head).reshape(-1)


class WeightArena:
    """Memory for packed matrices: large anonymous mappings on huge pages where the system grants them.

    One matrix of a small model is smaller than a huge page, so all matrices of a model share an arena. (On a Zen 3,
    streaming 96 MB takes 20 % less time than from 4 KB pages, touching it first a quarter.) Memory is only used once it
    is written; it lives as long as an array from ``take`` does.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk: Bytes = np.empty(0, np.uint8)
        self._used = 0
        self.taken_bytes = 0

    def take(self, num_bytes: int) -> Bytes:
        """A zeroed u8 [num_bytes], aligned to 64 bytes."""
        if self._used + num_bytes > self._chunk.size:
            self._chunk = _map_anonymous(max(num_bytes, self._chunk_bytes))
            self._used = 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // 64) * 64
        self.taken_bytes += num_bytes
        return piece


def _map_anonymous(num_bytes: int) -> Bytes:
    """Zeroed private memory that starts on a huge page, advised to use huge pages."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=flags)  # a shared mapping, the default, gets no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + num_bytes]


def drop_file_pages(data: Bytes) -> None:
    """Give the pages of a read-only memory-mapped array back to the system; contents stay and are read again on use.

    Keeps the file from being resident twice, as mapped pages and as packed matrices. Does nothing to any other array.
    """
    owner: object = data
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, mmap.mmap) or not memoryview(owner).readonly or not hasattr(mmap, "MADV_DONTNEED"):
        return
    offset = data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, start, offset + data.nbytes - start)


def pack_tensors(
    checkpoint: Checkpoint,
    names: Sequence[str],
    weights: WeightFormat,
    *,
    permutations: Mapping[str, Permutation] | None = None,
    num_threads: int,
    arena: WeightArena | None = None,
    release: Callable[[Bytes], None] = drop_file_pages,
) -> list[PackedMatrix]:
    """The tensors packed as ``weights`` asks, in their order along outputs: as few matrices as possible.

    Neighbours that share a packed format and an order of inputs, each with a multiple of 16 outputs, become one matrix,
    named "a+b"; any other tensor is a matrix of its own. Row r of a tensor named in ``permutations`` is the file's row
    ``permutation[r]``. A float format has its columns in the layer's order, whatever that of the tensor is. A tensor of
    experts [experts, outputs, inputs] becomes a matrix with the outputs of all experts, one after the other, each of
    them in tiles of its own. ``release`` is called with each part of the checkpoint's bytes once it was read.

    Raises CheckpointError, with file and tensor, when a tensor is no matrix, has not the bytes of its shape, has other
    inputs than the first one, an order that is no permutation of them, or holds a weight or scale that is infinite, not
    a number, or too large for f16; UnsupportedError for inputs whose integer sums could overflow, and for experts whose
    outputs are no whole tiles.
    """
    permutations = permutations or {}
    arena = arena or WeightArena()
    tensors = [_as_matrix(checkpoint.tensor(name), checkpoint.path) for name in names]
    for raw in tensors:
        _check(raw, tensors[0].shape[-1], checkpoint.path)
    matrices = []
    for fmt, run in _runs(tensors, weights):
        if fmt.per_token and run[0].shape[1] > MAX_CHANNEL_INPUTS:
            raise UnsupportedError(
                f"{checkpoint.path}: tensor {run[0].name!r} has {run[0].shape[1]} inputs; with one scale an output "
                f"int8 takes at most {MAX_CHANNEL_INPUTS}, or its sums overflow: use --weights int8 or bf16"
            )
        num_outputs, num_inputs = sum(raw.shape[0] for raw in run), run[0].shape[1]
        data = arena.take(fmt.matrix_bytes(num_outputs, num_inputs))
        at = 0
        for raw in run:
            part = data[at : at + fmt.matrix_bytes(raw.shape[0], num_inputs)]
            at += part.size
            finite = _pack_one(raw, fmt, part, permutations.get(raw.name), num_threads, release)
            if not finite:
                problem = f"a weight or block scale is infinite, not a number, or too large for {fmt}"
                raise CheckpointError(checkpoint.path, problem, tensor=raw.name)
        order = run[0].order if fmt.group else None
        matrices.append(PackedMatrix("+".join(raw.name for raw in run), fmt, num_outputs, num_inputs, data, order))
    return matrices


def _runs(tensors: Sequence[RawTensor], weights: WeightFormat) -> Iterator[tuple[PackedFormat, list[RawTensor]]]:
    """Tensors that make one matrix together, with its format."""

    def key(place: tuple[int, RawTensor]) -> tuple[PackedFormat, bytes, int | None]:
        index, raw = place
        fmt = target_format(raw.kind, weights)
        order = b"" if raw.order is None or not fmt.group else raw.order.tobytes()
        return fmt, order, index if raw.shape[0] % TILE else None

    for (fmt, *_), run in groupby(enumerate(tensors), key):
        yield fmt, [raw for _, raw in run]


def _as_matrix(raw: RawTensor, path: str) -> RawTensor:
    """Experts as one matrix; any other tensor as it is."""
    if len(raw.shape) != 3:
        return raw
    if raw.shape[1] % TILE:
        raise UnsupportedError(
            f"{path}: tensor {raw.name!r} has {raw.shape[1]} outputs for each of {raw.shape[0]} experts; "
            f"experts take a multiple of {TILE}"
        )
    return replace(raw, shape=matrix_shape(raw.shape))


def _check(raw: RawTensor, num_inputs: int, path: str) -> None:
    """Raise unless the tensor is a matrix with that many inputs and all its bytes."""
    if raw.kind not in BLOCK_KINDS:
        raise UnsupportedError(f"{path}: tensor {raw.name!r}: type {raw.kind} is not one of {', '.join(BLOCK_KINDS)}")
    if len(raw.shape) != 2 or min(raw.shape) < 1:
        raise CheckpointError(path, f"shape {raw.shape} is not that of a matrix", tensor=raw.name)
    if raw.shape[1] != num_inputs:
        raise CheckpointError(path, f"has {raw.shape[1]} inputs where {num_inputs} are expected", tensor=raw.name)
    block, block_bytes = BLOCK_KINDS[raw.kind]
    if num_inputs % block:
        raise CheckpointError(
            path, f"{num_inputs} inputs are not whole blocks of {block} ({raw.kind})", tensor=raw.name
        )
    expected = raw.shape[0] * (num_inputs // block) * block_bytes
    if raw.data.size != expected:
        raise CheckpointError(path, f"has {raw.data.size} bytes where {expected} are expected", tensor=raw.name)
    if raw.order is not None and not np.array_equal(np.sort(raw.order), np.arange(num_inputs)):
        raise CheckpointError(path, f"its order of inputs is no permutation of {num_inputs}", tensor=raw.name)


def _pack_one(
    raw: RawTensor,
    fmt: PackedFormat,
    out: Bytes,
    permutation: Permutation | None,
    num_threads: int,
    release: Callable[[Bytes], None],
) -> bool:
    """Pack one tensor into ``out``; False when it holds a number that is not finite.

    Without a permutation it goes in parts of about 8 MB, each released before the next is read, so that a large tensor
    is never resident whole.
    """
    # Imported here, so that formats, row orders and checks are usable (and tested) without the built module.
    from paceline import _native

    num_outputs, num_inputs = raw.shape
    row_bytes = raw.data.size // num_outputs
    rows = num_outputs if permutation is not None else max(_RELEASE_BYTES // row_bytes // TILE, 1) * TILE
    finite = True
    for first in range(0, num_outputs, rows):
        count = min(rows, num_outputs - first)
        source = raw.data[first * row_bytes : (first + count) * row_bytes]
        at = fmt.matrix_bytes(first, num_inputs)
        part = out[at : at + fmt.matrix_bytes(count, num_inputs)]
        finite &= _native.pack_matrix(
            source,
            raw.kind,
            count,
            num_inputs,
            permutation,
            raw.order,
            fmt.kind,
            fmt.group,
            fmt.offset,
            part,
            num_threads,
        )
        release(source)
    return finite

"""Formats, row orders and memory for packed tensors, and the tensors that are refused before anything is packed."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.config import WEIGHT_FORMATS
from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.packed import CHOSEN_FORMATS, NATIVE_FORMATS, PackedFormat
from paceline.weights.packing import WeightArena, drop_file_pages, pack_tensors, rope_permutation, target_format
from paceline.weights.raw import BLOCK_KINDS, RawTensor


@pytest.mark.parametrize(("num_heads", "head_dim", "rope_dim"), [(1, 2, 2), (3, 8, 8), (2, 10, 4), (2, 4, 0)])
def test_rope_permutation_interleaves_the_halves(num_heads: int, head_dim: int, rope_dim: int) -> None:
    permutation = rope_permutation(num_heads, head_dim, rope_dim)
    assert permutation.dtype == np.int32
    assert sorted(permutation) == list(range(num_heads * head_dim))
    for h in range(num_heads):
        for i in range(rope_dim // 2):
            assert permutation[h * head_dim + 2 * i] == h * head_dim + i
            assert permutation[h * head_dim + 2 * i + 1] == h * head_dim + i + rope_dim // 2
        for i in range(rope_dim, head_dim):
            assert permutation[h * head_dim + i] == h * head_dim + i


def test_rope_permutation_leaves_attention_scores_alone() -> None:
    # Rotating halves of q and k, or neighbours of their permuted selves, gives the same scores.
    rng = np.random.default_rng(0)
    dim, angles = 8, rng.standard_normal(4)
    q, k = rng.standard_normal((2, dim))
    turn = np.exp(1j * angles)

    def rotate(pairs: np.ndarray, by: np.ndarray) -> np.ndarray:
        return (pairs[:, 0] + 1j * pairs[:, 1]) * by

    order = rope_permutation(1, dim, dim)
    halves = [rotate(x.reshape(2, -1).T, turn**position) for x, position in ((q, 5), (k, 2))]
    neighbours = [rotate(x[order].reshape(-1, 2), turn**position) for x, position in ((q, 5), (k, 2))]
    scores = [(a * b.conj()).real.sum() for a, b in (halves, neighbours)]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_target_format(kind: str, weights: str) -> None:
    fmt = target_format(kind, weights)
    if weights == "native":
        assert fmt == NATIVE_FORMATS[kind]
    elif (kind, weights) == ("Q4_0", "int4"):
        assert fmt == PackedFormat("u4", 32)
    elif kind[:3] == {"int4": "Q4G", "int8": "Q8G"}.get(weights):
        assert fmt == NATIVE_FORMATS[kind]
    else:
        assert fmt == CHOSEN_FORMATS[weights]


def test_arena_pieces_are_aligned_zero_and_apart() -> None:
    arena = WeightArena(chunk_bytes=4096)
    pieces = [arena.take(size) for size in (1, 100, 4000, 64, 10000, 3)]
    assert [piece.size for piece in pieces] == [1, 100, 4000, 64, 10000, 3]
    assert all(piece.ctypes.data % 64 == 0 and piece.flags.writeable and not piece.any() for piece in pieces)
    for value, piece in enumerate(pieces):
        piece[:] = value + 1
    assert all((piece == value + 1).all() for value, piece in enumerate(pieces))
    assert arena.taken_bytes == 14168


def test_arena_memory_outlives_the_arena() -> None:
    piece = WeightArena().take(10)
    piece[:] = 7
    assert piece.tolist() == [7] * 10


def resident_kb(address: int) -> int:
    """Resident memory of the mapping that starts at that address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith((f"{address:x}-", f"{address:08x}-")):
            return next(int(field.split()[1]) for field in lines if field.startswith("Rss:"))
    raise AssertionError("no such mapping")


def test_drop_file_pages_frees_memory_and_keeps_contents(tmp_path: Path) -> None:
    contents = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    file = tmp_path / "weights"
    file.write_bytes(contents.tobytes())
    mapped = np.memmap(file, np.uint8, "r")
    assert np.array_equal(mapped, contents)
    assert resident_kb(mapped.ctypes.data) == 1024
    drop_file_pages(mapped[100:-100].view(np.ndarray))  # reaches into its neighbours' pages, which are read again
    assert resident_kb(mapped.ctypes.data) == 0
    assert np.array_equal(mapped, contents)


def test_drop_file_pages_leaves_other_memory_alone(tmp_path: Path) -> None:
    heap = np.full(1 << 16, 3, np.uint8)
    anonymous = np.frombuffer(mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    anonymous[:] = 3
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 16))
    copied = np.memmap(file, np.uint8, "c")  # copy on write: dropping its pages would undo what was written
    copied[:] = 3
    for data in (heap, anonymous, copied, np.frombuffer(bytes(heap), np.uint8)):
        drop_file_pages(data)
        assert (data == 3).all()
    anonymous.flags.writeable = False
    drop_file_pages(anonymous)
    assert (anonymous == 3).all()


def refuse(raw: RawTensor, first: RawTensor | None = None) -> str:
    tensors = {tensor.name: tensor for tensor in (first, raw) if tensor is not None}
    checkpoint = SimpleNamespace(path="model.gguf", tensor=tensors.__getitem__)
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        pack_tensors(checkpoint, list(tensors), "native", num_threads=1)
    message = str(caught.value)
    assert "model.gguf" in message
    assert repr(raw.name) in message
    return message


def test_refused_tensors_are_named() -> None:
    assert "not that of a matrix" in refuse(RawTensor("v", (8,), "F32", np.zeros(32, np.uint8)))
    assert "not that of a matrix" in refuse(RawTensor("v", (0, 8), "F32", np.zeros(0, np.uint8)))
    assert "31 bytes where 32" in refuse(RawTensor("v", (2, 4), "F32", np.zeros(31, np.uint8)))
    assert "48 inputs are not whole blocks of 32" in refuse(RawTensor("v", (1, 48), "Q8_0", np.zeros(51, np.uint8)))
    assert "IQ1_S" in refuse(RawTensor("v", (1, 256), "IQ1_S", np.zeros(50, np.uint8)))
    first = RawTensor("q", (1, 2), "F32", np.zeros(8, np.uint8))
    assert "4 inputs where 2" in refuse(RawTensor("k", (1, 4), "F32", np.zeros(16, np.uint8)), first)

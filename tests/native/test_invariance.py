"""The bits of a request's logits: the same alone or among others, in any chunks, on any threads, pages and instruction
set. This is what makes speculation and batching lossless (design, point 1).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config
from token_sequences import TokenSequence, engine_config, random_sequences, run_chunks, run_step, step_plan

from paceline import _native
from paceline.config import KV_FORMATS
from paceline.executors.native import NativeExecutor

ISAS = _native.isas()
LENGTH = 333  # three splits of 128 keys
NUM_PAGES = 96
FORMATS: dict[str, tuple[str, str, str]] = {  # of tensors, weights, keys and values
    "f32": ("F32", "native", "f16"),
    "f16": ("F16", "native", "f16"),
    "bf16": ("F32", "bf16", "f16"),
    "int8": ("F32", "int8", "f16"),
    "int4": ("F32", "int4", "f16"),
    "q4_0": ("Q4_0", "native", "f16"),
    "q4_1": ("Q4_1", "native", "f16"),
    "q5_1": ("Q5_1", "native", "f16"),
    "q4g64z": ("Q4G64Z", "native", "f16"),
    "q8c": ("Q8C", "native", "f16"),
    "kv_f32": ("Q4_1", "native", "f32"),
    "kv_int8": ("Q4_1", "native", "int8"),
}
WINDOWS = [None, 150]
CASES = [(fmt, None) for fmt in FORMATS] + [(fmt, 150) for fmt in ("f32", "q4_1", "kv_f32", "kv_int8")]


@lru_cache
def checkpoint_of(fmt: str, window: int | None) -> MemoryCheckpoint:
    intermediate = 192 if fmt == "q4g64z" else 160
    config = tiny_config(sliding_window=window, num_layers=2, intermediate_size=intermediate, tie_embeddings=False)
    return tiny_checkpoint(config, FORMATS[fmt][0])


def load(fmt: str, window: int | None = None, **config: Any) -> NativeExecutor:
    checkpoint = checkpoint_of(fmt, window)
    _, weights, kv_dtype = FORMATS[fmt]
    config = {"weights": weights, "kv_dtype": kv_dtype} | config
    engine = engine_config(checkpoint.config, num_pages=NUM_PAGES, **config)
    return NativeExecutor.load(checkpoint, engine)


def the_request() -> TokenSequence:
    return random_sequences([LENGTH], checkpoint_of("f32", None).config.vocab_size)[0]


@lru_cache
def expected(fmt: str, window: int | None = None) -> NDArray[np.float32]:
    """Logits [LENGTH, vocab] of the request alone, whole, on one thread of the plainest instruction set."""
    logits = run_chunks(load(fmt, window, isa="scalar", num_threads=1), the_request(), LENGTH)
    assert np.isfinite(logits).all()
    assert np.abs(np.diff(logits, axis=0)).max(axis=1).min() > 0  # no two positions are alike
    return logits


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_same_bits_tells_bits_apart() -> None:
    one = np.ones((2, 2), np.float32)
    assert same_bits(one, one.copy())
    assert not same_bits(one, np.nextafter(one, np.float32(2)))
    assert not same_bits(np.zeros(1, np.float32), -np.zeros(1, np.float32))
    assert not same_bits(one, one[:1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("fmt", "window"), CASES)
def test_chunks_threads_and_instruction_sets(fmt: str, window: int | None, isa: str) -> None:
    for threads, chunk in ((1, LENGTH), (1, 16), (2, 37), (2, LENGTH), (3, 37)):
        executor = load(fmt, window, isa=isa, num_threads=threads)
        assert same_bits(run_chunks(executor, the_request(), chunk), expected(fmt, window)), (threads, chunk)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("fmt", "window"), CASES)
def test_one_token_a_step(fmt: str, window: int | None, isa: str, threads: int) -> None:
    """A whole short request, then the end of a long one past 256 keys."""
    executor = load(fmt, window, isa=isa, num_threads=threads)
    request = the_request()
    for begin, end in ((0, 20), (250, 264)):
        for position in range(begin, end):
            (logits,), _ = run_step(executor, [request.part(position, position + 1)])
            assert same_bits(logits, expected(fmt, window)[position : position + 1]), position
        if end < 250:
            run_step(executor, [request.part(end, 250)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["f32", "q4_1", "kv_f32", "kv_int8"])
def test_every_chunk_size_a_speculation_may_verify(fmt: str, isa: str) -> None:
    """From 1 to past the number of rows up to which splits are read apart."""
    executor = load(fmt, isa=isa, num_threads=2)
    run_step(executor, [the_request().part(0, 300)])
    for rows in range(1, 18):
        (logits,), (tokens,) = run_step(executor, [the_request().part(300, 300 + rows)])
        assert same_bits(logits, expected(fmt)[300 : 300 + rows]), rows
        assert np.array_equal(tokens, expected(fmt)[300 : 300 + rows].argmax(axis=1))


@pytest.mark.parametrize("batch", [2, 7, 32])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("fmt", "window"), CASES)
def test_others_in_the_batch_change_nothing(fmt: str, window: int | None, isa: str, batch: int) -> None:
    """Others of several lengths, prompts and decodes together, the request at the front, inside and at the end."""
    executor = load(fmt, window, isa=isa, num_threads=2)
    rng = np.random.default_rng(batch)
    lengths = rng.integers(2, 32, batch)
    request, *others = random_sequences([LENGTH, *lengths[1:]], executor.model.vocab_size)
    run_step(executor, [request.part(0, 300)])
    run_step(executor, [other.part(0, len(other.tokens) // 2) for other in others])
    for place, position in ((0, 300), (batch // 2, 301), (batch - 1, 302)):
        parts = [other.part(len(other.tokens) // 2, len(other.tokens)) for other in others]
        parts.insert(place, request.part(position, position + 1))
        logits, tokens = run_step(executor, parts)
        assert same_bits(logits[place], expected(fmt, window)[position : position + 1])
        assert tokens[place][0] == expected(fmt, window)[position].argmax()
    parts = [other.part(len(other.tokens) // 2, len(other.tokens)) for other in others]
    logits, _ = run_step(executor, [*parts, request.part(303, LENGTH)])
    assert same_bits(logits[-1], expected(fmt, window)[303:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["f32", "q4_1", "kv_f32", "kv_int8"])
def test_twins_in_one_batch_have_the_same_bits(fmt: str, isa: str) -> None:
    """Rows of equal content, wherever they land in blocks of rows, units of attention and threads."""
    executor = load(fmt, isa=isa, num_threads=2)
    tokens = the_request().tokens[:20]
    twins = [TokenSequence(tokens, np.array([page], np.int32)) for page in range(11)]
    logits, _ = run_step(executor, [twin.part(0, 20) for twin in twins])
    assert all(same_bits(logits[0], other) for other in logits)
    assert same_bits(logits[0], expected(fmt)[:20])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["f32", "q4_1", "kv_f32", "kv_int8"])
@pytest.mark.parametrize("window", WINDOWS)
def test_pages_may_lie_anywhere(fmt: str, isa: str, window: int | None) -> None:
    executor = load(fmt, window, isa=isa, num_threads=2)
    executor.pages.view(np.uint16)[:] = (
        0x7BFF  # the largest f16, and a number elsewhere: what an earlier request left must not matter
    )
    pages = np.random.default_rng(3).permutation(NUM_PAGES)[: -(-LENGTH // 32)].astype(np.int32)
    assert same_bits(run_chunks(executor, replace(the_request(), pages=pages), 37), expected(fmt, window))


@pytest.mark.parametrize("fmt", ["f32", "q4_1", "kv_f32", "kv_int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_not_a_number_in_stale_pages_is_never_read(fmt: str, isa: str) -> None:
    """An infinity or NaN that a failed request left behind in a reused page stays out of later ones."""
    executor = load(fmt, isa=isa, num_threads=2)
    executor.pages[:] = 0xFF  # NaN in every format
    assert same_bits(run_chunks(executor, the_request(), 37), expected(fmt))
    executor.pages[:] = 0xFF
    assert same_bits(run_chunks(executor, the_request(), 1), expected(fmt))


@pytest.mark.parametrize("fmt", ["f32", "q4_1", "kv_f32", "kv_int8"])
def test_which_rows_are_outputs_changes_nothing(fmt: str) -> None:
    executor = load(fmt, num_threads=2)
    for outputs in ([], [5], [0, 299], list(range(0, 300, 7))):
        executor.run(step_plan([the_request().part(0, 300)], outputs=outputs))
        assert same_bits(executor.logits(), expected(fmt)[outputs])


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_kv_formats(kv_dtype: str, isa: str) -> None:
    plain = run_chunks(load("int8", isa="scalar", kv_dtype=kv_dtype), the_request(), LENGTH)
    found = run_chunks(load("int8", isa=isa, kv_dtype=kv_dtype, num_threads=2), the_request(), 37)
    assert same_bits(found, plain)
    assert same_bits(plain, expected("int8")) == (kv_dtype == "f16")  # the format is really another


def test_a_longer_history_does_change_the_bits() -> None:
    """The comparison is not blind: one token more before the same row is another result."""
    executor = load("q4_1", num_threads=2)
    request = the_request()
    shifted = replace(request, tokens=np.concatenate([request.tokens[:1], request.tokens[:-1]]))
    assert not same_bits(run_chunks(executor, shifted, 37)[1:], expected("q4_1")[:-1])

"""Sequences that share pages in one step: the same bits as on pages of their own and as alone, and their keys and
values really are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config
from token_sequences import TokenSequence, engine_config, random_sequences, run_step

from paceline import _native
from paceline.config import PAGE_TOKENS, RopeConfig
from paceline.executors.native import NativeExecutor

ISAS = _native.isas()
NUM_PAGES = 400
Logits = NDArray[np.float32]


@lru_cache
def checkpoint_of(kind: str = "Q4_1", **changes: Any) -> MemoryCheckpoint:
    return tiny_checkpoint(tiny_config(**changes), kind)


def load(checkpoint: MemoryCheckpoint, *, num_pages: int = NUM_PAGES, **config: Any) -> NativeExecutor:
    return NativeExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=num_pages, rows=256, **config))


class Tree:
    """Sequences of which each continues an earlier one, computed on an executor's pages."""

    def __init__(self, executor: NativeExecutor, *, seed: int = 0) -> None:
        self.executor = executor
        self.sequences: list[TokenSequence] = []
        self._rng = np.random.default_rng(seed)
        self._free = list(self._rng.permutation(executor.num_pages))

    def add(self, length: int, parent: int | None = None, shared_pages: int = 0) -> None:
        """A sequence of ``length`` tokens, the first pages of them those of its parent."""
        own = np.array([self._free.pop() for _ in range(-(-length // PAGE_TOKENS) - shared_pages)], np.int32)
        tokens = self._rng.integers(0, self.executor.model.vocab_size, length, dtype=np.int32)
        begin = shared_pages * PAGE_TOKENS
        if parent is not None:
            own = np.concatenate([self.sequences[parent].pages[:shared_pages], own])
            tokens[:begin] = self.sequences[parent].tokens[:begin]
        sequence = TokenSequence(tokens, own)
        for at in range(begin, length, 250):
            run_step(self.executor, [sequence.part(at, min(at + 250, length))])
        self.sequences.append(sequence)

    def step(self, rows: Sequence[int], *, own_pages: bool = False) -> list[Logits]:
        """Logits of the last ``rows`` tokens of each sequence, in one step, on pages as they are or copied apart."""
        sequences = self.sequences
        if own_pages:
            executor, at, sequences = self.executor, 0, []
            copies = executor.pages[np.concatenate([sequence.pages for sequence in self.sequences])]
            before = executor.pages[: len(copies)].copy()
            for sequence in self.sequences:
                pages = np.arange(at, at + len(sequence.pages), dtype=np.int32)
                at += len(pages)
                sequences.append(replace(sequence, pages=pages))
            executor.pages[: len(copies)] = copies
        parts = [
            sequence.part(len(sequence.tokens) - count, len(sequence.tokens))
            for sequence, count in zip(sequences, rows, strict=True)
        ]
        logits, _ = run_step(self.executor, parts)
        if own_pages:
            executor.pages[: len(copies)] = before
        return logits

    def alone(self, rows: Sequence[int]) -> list[Logits]:
        """The same, each sequence in a step of its own."""
        found = []
        for sequence, count in zip(self.sequences, rows, strict=True):
            found += run_step(self.executor, [sequence.part(len(sequence.tokens) - count, len(sequence.tokens))])[0]
        return found


def same_bits(a: Sequence[Logits], b: Sequence[Logits]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True)
    )


def assert_shares(tree: Tree, rows: Sequence[int], shared_splits: int) -> list[Logits]:
    """The step's logits, after comparing them with those on pages apart and those of each alone."""
    found = tree.step(rows)
    assert tree.executor.program.shared_splits == shared_splits
    apart = tree.step(rows, own_pages=True)
    assert tree.executor.program.shared_splits == 0
    assert same_bits(found, apart)
    assert same_bits(found, tree.alone(rows))
    return found


def over_one_prefix(executor: NativeExecutor, count: int, *, prefix: int = 300) -> Tree:
    """That many sequences over one prefix, which a first one holds, with tails of 1 to 69 tokens."""
    tree = Tree(executor)
    tree.add(prefix + 5)
    for index in range(1, count):
        tree.add(prefix + 1 + 17 * index % 69, 0, prefix // PAGE_TOKENS)
    return tree


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [2, 3, 7, 33])
def test_rows_over_one_prefix(count: int, isa: str) -> None:
    results = []
    for threads in (1, 2, 3):
        tree = over_one_prefix(load(checkpoint_of(), isa=isa, num_threads=threads), count)
        results.append(assert_shares(tree, [1] * count, 2 * (count - 1)))
    plain = over_one_prefix(load(checkpoint_of(), isa="scalar"), count).alone([1] * count)
    assert all(same_bits(found, plain) for found in results)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_prefixes_within_prefixes(threads: int) -> None:
    """All share one split; three of them three more, and two of those yet another."""
    tree = Tree(load(checkpoint_of("F32"), num_threads=threads))
    tree.add(150)
    for length in (140, 200, 700):
        tree.add(length, 0, 4)
    tree.add(720, 3, 16)
    tree.add(730, 4, 21)
    tree.add(500)
    assert_shares(tree, [1] * 7, 5 + 2 * 3 + 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [100, 150, 500])
def test_windows(window: int, isa: str) -> None:
    """Rows share splits only where they begin with the same one."""
    tree = Tree(load(checkpoint_of("F32", sliding_window=window), isa=isa, num_threads=2))
    tree.add(620)
    for length in (420, 425, 530, 531, 640, 645):
        tree.add(length, 0, 12)
    # Of the three splits in common: with 100 two rows see the last, with 150 four do; with 500 five see all, two the
    # last two.
    assert_shares(tree, [1] * 7, {100: 1, 150: 3, 500: 4 * 3 + 2}[window])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 1), (9, 3), (16, 1), (33, 1)])
def test_groups_of_heads(num_heads: int, num_kv_heads: int) -> None:
    checkpoint = checkpoint_of("F32", num_heads=num_heads, num_kv_heads=num_kv_heads)
    tree = over_one_prefix(load(checkpoint, num_threads=2), 7)
    fits = 2 * num_heads // num_kv_heads <= 32  # two rows in a unit
    assert_shares(tree, [1] * 7, 2 * 6 if fits else 0)


@pytest.mark.parametrize("isa", ISAS)
def test_several_rows_a_sequence(isa: str) -> None:
    """Drafts being verified share; a chunk of a prompt, which reads for many rows anyway, does not."""
    tree = over_one_prefix(load(checkpoint_of(), isa=isa, num_threads=2), 6)
    tree.add(400, 0, 9)
    assert_shares(tree, [1, 2, 3, 4, 8, 1, 100], 2 * 5)


def test_rows_within_the_prefix_of_others() -> None:
    """A sequence that has only just reached the end of a shared split reads it for itself."""
    tree = Tree(load(checkpoint_of("F32"), num_threads=2))
    tree.add(400)
    for length in (129, 256, 257, 258):
        tree.add(length, 0, (length - 1) // PAGE_TOKENS)
    assert_shares(tree, [1] * 5, 2 + 1 + 1 + 2)


def test_more_partials_than_there_is_room_for() -> None:
    """Forty long rows are read apart, three short ones still share.

    Their keys are those of one sequence in any order: the answer means nothing, but it must be the same.
    """
    config = {"context_length": 8192, "rope": RopeConfig(10000.0, 16)}
    executor = load(checkpoint_of("F32", num_layers=1, **config), num_threads=2)
    tree = Tree(executor)
    tree.add(2048)
    (source,) = tree.sequences
    rng = np.random.default_rng(5)
    parts = []
    for index in range(43):
        count, shared = (256, 20) if index < 40 else (60, 16)
        pages = rng.choice(source.pages, count)
        pages[:shared] = source.pages[:shared] if index < 40 else source.pages[shared : 2 * shared]
        pages[-1] = tree._free.pop()
        sequence = TokenSequence(rng.integers(0, 75, count * PAGE_TOKENS, dtype=np.int32), pages)
        parts.append(sequence.part(len(sequence.tokens) - 1, len(sequence.tokens)))
    executor.pages[[part.sequence.pages[-1] for part in parts]] = executor.pages[source.pages[3]]
    found, _ = run_step(executor, parts)
    assert executor.program.shared_splits == 2 * 4
    run_step(executor, parts[:30])
    assert executor.program.shared_splits == 29 * 5
    assert same_bits(found, [run_step(executor, [part])[0][0] for part in parts])


def test_a_shared_page_is_what_all_rows_read() -> None:
    """The comparison is not blind: a changed page of the prefix changes every row."""
    tree = over_one_prefix(load(checkpoint_of("F32"), num_threads=2), 4)
    before = tree.step([1] * 4)
    page = tree.sequences[0].pages[5]
    tree.executor.pages[page] = tree.executor.pages[tree.sequences[0].pages[6]]
    after = tree.step([1] * 4)
    assert not any(same_bits([x], [y]) for x, y in zip(before, after, strict=True))


def test_nothing_is_shared_without_common_pages() -> None:
    executor = load(checkpoint_of("F32"))
    sequences = random_sequences([300, 300], executor.model.vocab_size)
    for sequence in sequences:
        run_step(executor, [sequence.part(0, 256)])
        run_step(executor, [sequence.part(256, 299)])
    run_step(executor, [sequence.part(299, 300) for sequence in sequences])
    assert executor.program.shared_splits == 0

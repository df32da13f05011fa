"""Trees of tokens in one step: every node has the bits that its own sequence has when it is decoded row by row, and so
have the pages of every branch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, run_step
from token_trees import SHAPES, PlainPath, TokenTree, TreeStep, decode_path, run_tree, tree_step

from paceline import _native
from paceline.config import KV_FORMATS
from paceline.executors.base import StepPlan
from paceline.executors.compare import compare_step
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor

ISAS = _native.isas()
PREFIXES = (30, 126, 128, 300)  # the first nodes cross a page, a split, begin one, and share two
NUM_PAGES = 96


@lru_cache
def checkpoint_of(window: int | None = None) -> MemoryCheckpoint:
    return tiny_checkpoint(tiny_config(sliding_window=window), "Q4_1")


def load(window: int | None = None, **config: Any) -> NativeExecutor:
    checkpoint = checkpoint_of(window)
    return NativeExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=320, **config))


def tree_of(shape: str, prefix: int) -> TokenTree:
    return TokenTree.random(shape, prefix, checkpoint_of().config.vocab_size)


@lru_cache
def plain_paths(shape: str, prefix: int, kv_dtype: str, window: int | None = None) -> list[PlainPath]:
    tree = tree_of(shape, prefix)
    return [
        decode_path(load(window, isa="scalar", num_threads=1, kv_dtype=kv_dtype), tree, path) for path in tree.paths()
    ]


def differences(
    executor: NativeExecutor, step: TreeStep, logits: dict[int, NDArray[np.float32]], plain: list[PlainPath]
) -> list[str]:
    """What is not, bit by bit, as in the plain sequences."""
    found = []
    for (path, sequence), expected in zip(step.branches, plain, strict=True):
        for node, own in zip(path, expected.logits, strict=True):
            if logits[node].tobytes() != own.tobytes():
                found.append(f"logits of {node}")
        if executor.pages[sequence.pages].tobytes() != expected.pages.tobytes():
            found.append(f"pages of {path}")
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_has_the_bits_of_its_own_sequence(shape: str, kv_dtype: str, isa: str) -> None:
    for prefix in PREFIXES:
        tree = tree_of(shape, prefix)
        for threads, share_written in ((1, False), (2, False), (2, True)):
            executor = load(isa=isa, num_threads=threads, kv_dtype=kv_dtype)
            step = tree_step(tree, share_written=share_written)
            logits = run_tree(executor, tree, step)
            found = differences(executor, step, logits, plain_paths(shape, prefix, kv_dtype))
            assert not found, (prefix, threads, share_written)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [3, 20, 140])
def test_windows(window: int, isa: str) -> None:
    for shape, prefix in (("comb", 30), ("long", 126), ("long", 300)):
        tree = tree_of(shape, prefix)
        executor = load(window, isa=isa, num_threads=2)
        step = tree_step(tree)
        logits = run_tree(executor, tree, step)
        assert not differences(executor, step, logits, plain_paths(shape, prefix, "f16", window))


@pytest.mark.parametrize("isa", ISAS)
def test_among_other_sequences(isa: str) -> None:
    """Rows of others come first, so neither rows nor sequences of the tree begin at 0."""
    tree = tree_of("comb", 126)
    others = random_sequences([40, 9], checkpoint_of().config.vocab_size, seed=1)
    others = [replace(other, pages=other.pages + NUM_PAGES - 4) for other in others]
    executor = load(isa=isa, num_threads=2)
    run_step(executor, [other.part(0, 5) for other in others])
    step = tree_step(tree, among=[others[0].part(5, 40), others[1].part(5, 9)])
    logits = run_tree(executor, tree, step)
    assert not differences(executor, step, logits, plain_paths("comb", 126, "f16"))
    alone = load(isa="scalar")
    run_step(alone, [others[0].part(0, 40)])
    assert np.array_equal(executor.pages[others[0].pages], alone.pages[others[0].pages])


@pytest.mark.parametrize("shape", ["star", "comb", "long"])
def test_branches_share_the_splits_of_their_prefix(shape: str) -> None:
    """Also a split that is written in this step, by the rows of the first branch."""
    executor = load(num_threads=2)
    tree = tree_of(shape, 300)
    run_tree(executor, tree, tree_step(tree))
    assert executor.shared_splits > 0
    tree = tree_of("long", 126)
    run_tree(executor, tree, tree_step(tree))
    assert executor.shared_splits == 0
    run_tree(executor, tree, tree_step(tree, share_written=True))
    assert executor.shared_splits > 0


def test_without_the_writes_the_comparison_fails() -> None:
    for shape in ("comb", "binary", "two trees", "long"):
        tree = tree_of(shape, 30)
        step = tree_step(tree)
        assert len(step.plan.kv_writes)
        for dropped in (np.zeros((0, 2), np.int32), step.plan.kv_writes[1:], step.plan.kv_writes[:-1]):
            executor = load()
            logits = run_tree(executor, tree, replace(step, plan=replace(step.plan, kv_writes=dropped)))
            found = differences(executor, step, logits, plain_paths(shape, 30, "f16"))
            assert any("logits" in name for name in found)
            assert any("pages" in name for name in found)


def test_writes_that_would_leave_the_memory_are_refused() -> None:
    executor = load()
    tree = tree_of("comb", 30)
    step = tree_step(tree)
    run_tree(executor, tree, step)
    rows, sequences = len(step.nodes), len(step.branches)
    before = executor.pages.copy()

    def refused(problem: str, writes: list[tuple[int, int]], **changes: Any) -> None:
        plan = replace(step.plan, kv_writes=np.array(writes, np.int32), **changes)
        with pytest.raises(ValueError, match=problem):
            executor.run(plan)
        assert np.array_equal(executor.pages, before)

    refused("row of a KV write", [(rows, 0)])
    refused("row of a KV write", [(0, 0), (-1, 0)])
    refused("sequence of a KV write", [(0, sequences)])
    refused("sequence of a KV write", [(0, -1)])
    refused("columns of kv_writes", [(0, 0, 0)])  # type: ignore[list-item]
    for page in (-1, NUM_PAGES):  # past the end of the other sequence, where a table may hold anything
        table = step.plan.page_table.copy()
        table[1, 1] = page
        positions = step.plan.positions.copy()
        shorter = step.plan.row_starts[1] + np.arange(step.plan.row_starts[2] - step.plan.row_starts[1])
        positions[shorter] = np.arange(len(shorter))
        refused("page of a KV write", [(2, 1)], page_table=table, positions=positions)


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_the_reference_sees_where_rows_are_written(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node by node both agree; a program that drops a write is reported where pages are compared."""
    checkpoint = checkpoint_of()
    engine = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=320, kv_dtype=kv_dtype)
    native = NativeExecutor.load(checkpoint, engine)
    reference = ReferenceExecutor.load(checkpoint, engine, num_pages=NUM_PAGES)
    tree = tree_of("comb", 30)
    step = tree_step(tree)
    run_tree(native, tree, step)
    assert all(difference.bound_ratio <= 1 for difference in compare_step(native, reference, step.plan))
    native.pages[:] = 0
    set_step = native.set_step

    def without_one(plan: StepPlan, *tops: Any) -> None:
        set_step(replace(plan, kv_writes=plan.kv_writes[1:]), *tops)

    monkeypatch.setattr(native, "set_step", without_one)
    wrong = {found.value for found in compare_step(native, reference, step.plan) if not found.bound_ratio <= 1}
    assert any(name.endswith(".pages") for name in wrong)

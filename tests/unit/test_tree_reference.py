"""The reference executor's own trees of tokens: each node as in the plain sequence that ends with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import tiny_checkpoint, tiny_config
from token_sequences import engine_config
from token_trees import SHAPES, TokenTree, TreeStep, decode_path, run_tree, tree_step

from paceline.executors.reference import ReferenceExecutor

CHECKPOINT = tiny_checkpoint(tiny_config(num_layers=1))
NUM_PAGES = 16


def load() -> ReferenceExecutor:
    engine = engine_config(CHECKPOINT.config, num_pages=NUM_PAGES, rows=160, kv_dtype="f32")
    return ReferenceExecutor.load(CHECKPOINT, engine, num_pages=NUM_PAGES)


def largest_errors(tree: TokenTree, step: TreeStep) -> tuple[float, float]:
    """Of logits and of the numbers in the branches' pages."""
    executor = load()
    logits = run_tree(executor, tree, step)
    errors, page_errors = [], []
    for path, sequence in step.branches:
        plain = decode_path(load(), tree, path)
        errors.append(np.abs(np.stack([logits[node] for node in path]) - plain.logits).max())
        page_errors.append(np.abs(numbers(executor.pages[sequence.pages]) - numbers(plain.pages)).max())
    return float(max(errors)), float(max(page_errors))


def numbers(pages: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(pages).view(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_is_as_in_its_own_sequence(shape: str) -> None:
    """Up to numpy's products, whose order of summation depends on the number of rows: numbers of about 1, each after a
    few sums of at most 96 terms that are off by 96 * 2^-24.
    """
    for share_written in (False, True):
        tree = TokenTree.random(shape, 30, CHECKPOINT.config.vocab_size)
        assert max(largest_errors(tree, tree_step(tree, share_written=share_written))) < 1e-4


def test_without_a_write_a_branch_is_wrong() -> None:
    tree = TokenTree.random("comb", 30, CHECKPOINT.config.vocab_size)
    step = tree_step(tree)
    for dropped in range(len(step.plan.kv_writes)):
        writes = np.delete(step.plan.kv_writes, dropped, axis=0)
        errors = largest_errors(tree, replace(step, plan=replace(step.plan, kv_writes=writes)))
        assert min(errors) > 0.1

"""Trees of tokens after a prefix, as steps whose branches are sequences of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from token_sequences import Ids, Part, TokenSequence, run_step, step_plan

from paceline.config import PAGE_TOKENS
from paceline.executors.base import Executor, StepPlan

SHAPES = {  # the parent of each node, -1 for the prefix
    "chain": (-1, 0, 1, 2, 3),
    "star": (-1, -1, -1, -1),
    "comb": (-1, 0, 0, 1, 1, 3, 3, 5),
    "binary": (-1, 0, 0, 1, 1, 2, 2),
    "two trees": (-1, 0, 1, -1, 3, 4, 3),
    "long": (*range(-1, 39), 9, 40, 41, 33, 43, 43),
}


@dataclass(frozen=True)
class TokenTree:
    """Tokens [prefix] and a token a node; parents come before their children."""

    prefix: Ids
    tokens: Ids
    parents: tuple[int, ...]

    @classmethod
    def random(cls, shape: str, prefix: int, vocab_size: int, *, seed: int = 0) -> TokenTree:
        """Random tokens."""
        rng = np.random.default_rng((seed, prefix))
        parents = SHAPES[shape]
        tokens = rng.integers(0, vocab_size, prefix + len(parents), dtype=np.int32)
        return cls(tokens[:prefix], tokens[prefix:], parents)

    def path(self, node: int) -> list[int]:
        """Nodes from a child of the prefix to this one."""
        return [*self.path(self.parents[node]), node] if node >= 0 else []

    def paths(self) -> list[list[int]]:
        """The paths to the leaves, depth first."""
        return sorted(self.path(node) for node in range(len(self.parents)) if node not in self.parents)

    def sequence(self, path: Sequence[int], pages: Sequence[int]) -> TokenSequence:
        """The prefix and the tokens of a path."""
        return TokenSequence(np.concatenate([self.prefix, self.tokens[path]]), np.array(pages, np.int32))


@dataclass(frozen=True)
class TreeStep:
    """A step of all nodes: ``nodes`` [rows], and of each branch its path and its sequence."""

    plan: StepPlan
    nodes: list[int]
    branches: list[tuple[list[int], TokenSequence]]


def num_pages(num_tokens: int) -> int:
    """Pages of so many tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def tree_step(tree: TokenTree, *, share_written: bool = False, among: Sequence[Part] = ()) -> TreeStep:
    """The step over pages from 0 on, the prefix on the first of them; rows of ``among`` come before its own.

    Branches share the whole pages of the prefix; with ``share_written`` also those that lie before their first row and
    are written in this step.
    """
    prefix = len(tree.prefix)
    free = num_pages(prefix)
    tables: dict[int, list[int]] = {-1: list(range(free))}  # of the branch that has the node as a row
    parts: list[Part] = list(among)
    branches, nodes, copies, writes = [], [], [], []
    rows: dict[int, int] = {}
    for path in tree.paths():
        known = [node for node in path if node in rows]
        begin = prefix + len(known)
        source = tables[known[-1] if known else -1]
        shared = (begin if share_written else prefix) // PAGE_TOKENS
        own = range(free, free + num_pages(prefix + len(path)) - shared)
        free = own.stop
        table = [*source[:shared], *own]
        if prefix % PAGE_TOKENS and shared == prefix // PAGE_TOKENS:
            copies.append((tables[-1][shared], table[shared]))
        sequence = tree.sequence(path, table)
        for depth, node in enumerate(known):
            if (prefix + depth) // PAGE_TOKENS >= shared:
                writes.append((rows[node], len(parts)))
        first_row = sum(part.end - part.begin for part in parts)
        parts.append(sequence.part(begin, prefix + len(path)))
        branches.append((path, sequence))
        for index, node in enumerate(path[len(known) :]):
            rows[node] = first_row + index
            tables[node] = table
            nodes.append(node)
    plan = replace(
        step_plan(parts),
        page_copies=np.array(copies, np.int32).reshape(-1, 2),
        kv_writes=np.array(sorted(writes), np.int32).reshape(-1, 2),
    )
    return TreeStep(plan, nodes, branches)


def run_tree(executor: Executor, tree: TokenTree, step: TreeStep) -> dict[int, NDArray[np.float32]]:
    """Logits [vocab] of each node: the prefix, then the step."""
    run_step(executor, [tree.sequence([], range(num_pages(len(tree.prefix)))).part(0, len(tree.prefix))])
    executor.run(step.plan)
    logits = executor.logits()[-len(step.nodes) :].copy()
    return dict(zip(step.nodes, logits, strict=True))


@dataclass(frozen=True)
class PlainPath:
    """A path decoded row by row: logits [nodes, vocab] and the bytes of its pages."""

    logits: NDArray[np.float32]
    pages: NDArray[np.uint8]


def decode_path(executor: Executor, tree: TokenTree, path: Sequence[int]) -> PlainPath:
    """A path as a plain sequence on the first pages of an executor, which must be empty."""
    prefix, length = len(tree.prefix), len(tree.prefix) + len(path)
    sequence = tree.sequence(path, range(num_pages(length)))
    run_step(executor, [sequence.part(0, prefix)])
    logits = [run_step(executor, [sequence.part(at, at + 1)])[0][0][0] for at in range(prefix, length)]
    return PlainPath(np.stack(logits), executor.pages[sequence.pages].copy())

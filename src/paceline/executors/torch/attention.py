"""Attention over pages, in splits of a fixed number of keys, so that a row has the same bits in every step.

Notation
    q, K, V  queries [rows, head_dim], keys and values of one KV head
    s        a split: keys 128 s .. 128 s + 127 of a sequence
    m        the largest score of a row, over all splits; that of the sink too
    P_s      exp(q K_s^T - m), 0 where a row does not see the key

    out = (P_0 V_0 + P_1 V_1 + ...) / (P_0 1 + P_1 1 + ...), added from the left

Each product has 128 keys, whatever the context, and splits that a row does not see add exact zeros: so a row's bits
depend neither on how far its neighbours or its chunk reach, nor on where its window begins. The largest score is exact
in any order. Queries of several heads that share keys, and of several rows, are the rows of one product; ``rows`` says
how many it may have.

Departures: ``scaled_dot_product_attention`` is not used here: it cuts queries into blocks by their number, and a row
decoded alone then differs in its last bits from the same row in a prompt. ``forward`` uses it, with gradients.

Checked by: tests/native/test_torch_executor.py, tests/unit/test_torch_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config import PAGE_TOKENS, SPLIT_TOKENS
from paceline.executors.base import StepPlan
from paceline.executors.torch.operations import capped
from paceline.executors.torch.pages import PAGES_PER_SPLIT, PagePool
from paceline.executors.torch.rows import Rows, steady_rows

QUERY_ROWS = 128
"""Rows of a step that are attended together: bounds the memory of scores, and rows of a long chunk leave out the splits
that only later ones see."""


@dataclass(frozen=True)
class Group:
    """Parts of sequences with the same number of rows and of splits.

    rows    [n, rows_each] i64  rows of the step; a part that is filled up has its last row several times
    num_rows_each               those that count
    pages   [n, splits * PAGES_PER_SPLIT] i64
    hidden  [n, splits, 1, rows_each, 1, SPLIT_TOKENS] bool  keys that a row does not see
    kept    [n * num_rows_each] i64  where results go; None where they are all rows of the step in order
    """

    rows: Tensor
    num_rows_each: int
    pages: Tensor
    hidden: Tensor
    kept: Tensor | None


@dataclass
class Sequences:
    """The sequences of a step, as its plan has them, and how they are grouped for each window."""

    positions: NDArray[np.int32]
    row_starts: NDArray[np.int32]
    page_table: NDArray[np.int32]
    device: torch.device
    _groups: dict[tuple[int | None, int, Rows], list[Group]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: StepPlan, device: torch.device) -> Sequences:
        """Those of a plan."""
        return cls(plan.positions, plan.row_starts, plan.page_table, device)

    def groups(self, window: int | None, queries_a_row: int, rows: Rows) -> list[Group]:
        """Parts of sequences grouped so that a product has as many queries as ``rows`` allows."""
        key = (window, queries_a_row, rows)
        if key not in self._groups:
            self._groups[key] = self._grouped(window, queries_a_row, rows)
        return self._groups[key]

    def _grouped(self, window: int | None, queries_a_row: int, rows: Rows) -> list[Group]:
        least = -(-rows.least // queries_a_row)
        most = QUERY_ROWS if rows.most is None else least
        parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for sequence in range(len(self.row_starts) - 1):
            end = int(self.row_starts[sequence + 1])
            for begin in range(int(self.row_starts[sequence]), end, most):
                count = min(most, end - begin)
                first = 0 if window is None else max(0, int(self.positions[begin]) - window + 1) // SPLIT_TOKENS
                num_splits = int(self.positions[begin + count - 1]) // SPLIT_TOKENS + 1 - first
                parts.setdefault((count, num_splits), []).append((sequence, begin, first))
        groups = []
        for (count, num_splits), members in parts.items():
            at_a_time = max(1, QUERY_ROWS // count)
            for start in range(0, len(members), at_a_time):
                chosen = np.array(members[start : start + at_a_time])
                groups.append(self._group(chosen, count, num_splits, window, max(count, least)))
        return groups

    def _group(
        self, members: NDArray[np.int64], count: int, num_splits: int, window: int | None, rows_each: int
    ) -> Group:
        sequences, begins, firsts = members.T
        rows = begins[:, None] + np.minimum(np.arange(rows_each), count - 1)
        columns = firsts[:, None] * PAGES_PER_SPLIT + np.arange(num_splits * PAGES_PER_SPLIT)
        width = self.page_table.shape[1]
        pages = np.where(
            columns < width, self.page_table[sequences[:, None], np.minimum(columns, width - 1)], 0
        ).astype(np.int64)
        keys = firsts[:, None] * SPLIT_TOKENS + np.arange(num_splits * SPLIT_TOKENS)
        positions = self.positions[rows]
        # Past a sequence's end the table says nothing: page 0 stands there, hidden.
        pages[columns * PAGE_TOKENS > positions[:, -1:]] = 0
        distance = positions[:, None, :, None] - keys.reshape(len(members), num_splits, 1, SPLIT_TOKENS)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        kept = rows[:, :count].reshape(-1)
        tensors = [torch.from_numpy(x).to(self.device) for x in (rows, pages, hidden, kept)]
        is_step = np.array_equal(kept, np.arange(len(self.positions)))
        return Group(tensors[0], count, tensors[1], tensors[2][:, :, None, :, None, :], None if is_step else tensors[3])


PagedAttention = Callable[..., Tensor]
"""attend(q, pool, layer, sequences, window=, softcap=, sinks=): q [rows, heads, head_dim] scaled -> the same shape."""


class SplitAttention:
    """``PagedAttention`` by batched products; ``rows`` of queries that have one order of sums."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @classmethod
    def measured(cls, head_dim: int, device: torch.device) -> SplitAttention:
        """With the number of rows that proves steady for both products."""
        generator = torch.Generator().manual_seed(1)
        keys = torch.randn((3, SPLIT_TOKENS, head_dim), generator=generator).to(device)

        def scores(x: Tensor) -> Tensor:
            return torch.matmul(x.expand(3, -1, -1), keys.transpose(1, 2))[2]

        def sums(x: Tensor) -> Tensor:
            return torch.matmul(x.expand(3, -1, -1), keys)[2]

        found = [steady_rows(scores, head_dim, device=device), steady_rows(sums, SPLIT_TOKENS, device=device)]
        return cls(max(found, key=lambda rows: (rows.most is not None, rows.least)))

    def __call__(
        self,
        q: Tensor,
        pool: PagePool,
        layer: int,
        sequences: Sequences,
        *,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """softmax(q K^T) V of each row over what it sees."""
        heads, head_dim = q.shape[1:]
        groups = sequences.groups(window, heads // pool.model.num_kv_heads, self.rows)
        out = torch.empty_like(q)
        for group in groups:
            count, rows_each = group.rows.shape
            # [n, 1, kv_heads, rows * heads that share keys, head_dim]
            queries = q.index_select(0, group.rows.flatten())
            queries = queries.view(count, rows_each, pool.model.num_kv_heads, -1, head_dim).transpose(1, 2)
            found = _attend(queries.flatten(2, 3), *pool.gather(layer, group.pages), group.hidden, softcap, sinks)
            found = found.view(count, pool.model.num_kv_heads, rows_each, -1, head_dim).transpose(1, 2)
            found = found[:, : group.num_rows_each].reshape(-1, heads, head_dim)
            if group.kept is None:
                return found
            out.index_copy_(0, group.kept, found)
        return out


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Of queries [n, kv_heads, m, head_dim] over keys and values [n, splits, kv_heads, SPLIT_TOKENS, head_dim].

    Changes ``values`` that no row sees to zeros: what another request has left there may be no number, and 0 times that
    is none.
    """
    values.masked_fill_(hidden.all(dim=3).transpose(-1, -2), 0.0)
    scores = torch.matmul(queries[:, None], keys.transpose(-1, -2))
    if softcap is not None:
        scores = capped(scores, softcap)
    rows_each = hidden.shape[3]
    scores.view(*scores.shape[:3], rows_each, -1, SPLIT_TOKENS).masked_fill_(hidden, float("-inf"))
    largest = scores.amax(dim=(1, 4), keepdim=True)
    if sinks is not None:
        each = sinks.view(1, 1, scores.shape[2], 1, -1, 1).expand(-1, -1, -1, rows_each, -1, -1).flatten(3, 4)
        largest = torch.maximum(largest, each)
    numerators = scores.sub_(largest).exp_()
    parts = torch.matmul(numerators, values)
    totals = numerators.sum(dim=-1, keepdim=True)
    total, out = totals[:, 0], parts[:, 0]
    for split in range(1, parts.shape[1]):
        total = total + totals[:, split]
        out = out + parts[:, split]
    if sinks is not None:
        total = total + torch.exp(each - largest)[:, 0]
    return out / total


class PagedContext:
    """``Context`` of a step of the engine: keys and values go to pages and are read from there."""

    def __init__(self, pool: PagePool, attention: PagedAttention, plan: StepPlan) -> None:
        self._pool = pool
        self._attention = attention
        self._sequences = Sequences.of(plan, pool.device)
        sequence_of_row = np.repeat(np.arange(len(plan.row_starts) - 1), np.diff(plan.row_starts))
        rows = np.concatenate([np.arange(len(plan.positions)), plan.kv_writes[:, 0]])
        sequences = np.concatenate([sequence_of_row, plan.kv_writes[:, 1]])
        positions = plan.positions[rows]
        places = (plan.page_table[sequences, positions // PAGE_TOKENS], positions % PAGE_TOKENS)
        self._pages, self._slots = (torch.from_numpy(x.astype(np.int64)).to(pool.device) for x in places)
        self._written = torch.from_numpy(rows).to(pool.device) if len(plan.kv_writes) else None

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See ``Context``."""
        if self._written is not None:
            k, v = k[self._written], v[self._written]
        self._pool.write(layer, k, v, self._pages, self._slots)

    def attend(
        self, layer: int, q: Tensor, *, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """See ``Context``."""
        return self._attention(q, self._pool, layer, self._sequences, window=window, softcap=softcap, sinks=sinks)

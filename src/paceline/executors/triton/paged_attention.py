"""Attention of decoded rows and small chunks over pages of keys and values.

Source: Dao et al., Flash-Decoding (2023), and Kwon et al. 2309.06180 for pages.

Notation: q [rows, heads, d] queries, already multiplied by the scale; k, v [pages, KV heads, 32, d]; a split is 128
consecutive keys, from a multiple of 128 on; a tile is up to 16 queries: heads that share a KV head, of neighbouring
rows of one sequence. Of a split a query keeps m = max s, l = sum exp(s - m) and a = sum exp(s - m) v.

A program computes a tile over one split, 32 or 64 keys at a time from the left; every key is read once for all queries
of the tile. Keys that a query does not see leave its m, l and a as they are. Which splits it has follows from its
position and the window alone. They are merged 16 at a time, from the left; within such a run in one fixed order. Tensor
cores sum each row of a tile by itself. So a row has the same bits whatever else the batch holds, and in a chunk those
that it would have alone.

Queries and numerators that are wider than the pages' type are sums of two or three terms of that type
(``split_dot.py``): scores have at least 22 bits with f16 pages, whose queries must stay below 65504, and all 24 with
bf16 pages; numerators 22 and 16.

Departures: the merge is a kernel of its own. A split is not cut further, so one short request uses few
multiprocessors.

Checked by: tests/triton/test_paged_attention.py (in the interpreter, or compiled where there is a GPU),
tests/triton/test_compiled.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.executors.triton.attention_rows import AttentionRows, tile_height
from paceline.executors.triton.split_dot import split_dot

PAGE_TOKENS = 32
MERGE_RUN = 16


def step_keys(dim: int, element_bytes: int) -> int:
    """Keys that a program holds at a time: with their values at most 32 kB, of which an A100 has room for five."""
    return 64 if dim * element_bytes <= 256 else 32


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: AttentionRows,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T) v [rows, heads, d] in q's type, of each row over the positions up to its own.

    q [rows, heads, d] f16, bf16 or f32; keys and values [pages, KV heads, 32, d] f16, bf16 or f32, strided but for d.
    window: latest positions that a row sees; softcap: scores become cap tanh(score / cap); sinks [heads] f32: one more
    term exp(sink) in the denominator. All positions up to a row's own must have been written.
    """
    num_rows, heads, dim = q.shape
    assert keys.shape == values.shape, (keys.shape, values.shape)
    assert keys.shape[2:] == (PAGE_TOKENS, dim), keys.shape
    assert heads % keys.shape[1] == 0, (heads, keys.shape[1])
    assert keys.dtype == values.dtype, (keys.dtype, values.dtype)
    assert keys.stride() == values.stride(), "keys and values lie alike"
    assert keys.stride(3) == q.stride(2) == rows.page_table.stride(1) == 1, "numbers of a vector are neighbours"
    assert window is None or window > 0, window
    out = torch.empty((num_rows, heads, dim), dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    partial = torch.empty((num_rows, heads, rows.max_splits, dim), dtype=torch.float32, device=q.device)
    limits = torch.empty((2, num_rows, heads, rows.max_splits), dtype=torch.float32, device=q.device)
    _compute_splits(q, keys, values, rows, partial, limits, window, softcap)
    merge_kernel[(num_rows, heads)](
        partial,
        limits,
        limits[1],
        rows.positions,
        q if sinks is None else sinks,
        out,
        heads,
        dim,
        rows.max_splits,
        WINDOW=window,
        HAS_SINKS=sinks is not None,
        BLOCK_DIM=_block(dim),
        RUN=MERGE_RUN,
    )
    return out


def _compute_splits(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: AttentionRows,
    partial: torch.Tensor,
    limits: torch.Tensor,
    window: int | None,
    softcap: float | None,
) -> None:
    """Fills ``partial`` [rows, heads, splits, d] with a and ``limits`` [2, rows, heads, splits] with m and l."""
    heads, dim = q.shape[1:]
    group = heads // keys.shape[1]
    query_terms, weight_terms = _terms(q.dtype, keys.dtype)
    split_kernel[(len(rows.tile_first), keys.shape[1], rows.max_splits)](
        q,
        keys,
        values,
        rows.tile_first,
        rows.tile_count,
        rows.positions,
        rows.sequence_of_row,
        rows.page_table,
        partial,
        limits,
        limits[1],
        q.stride(0),
        q.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        rows.page_table.stride(0),
        heads,
        group,
        dim,
        rows.max_splits,
        WINDOW=window,
        SOFTCAP=softcap,
        QUERY_TERMS=query_terms,
        WEIGHT_TERMS=weight_terms,
        HEIGHT=tile_height(group),
        KEYS=step_keys(_block(dim), keys.element_size()),
        BLOCK_DIM=_block(dim),
    )


def _block(dim: int) -> int:
    """The size of a head's block: a power of two, and what a tensor core takes."""
    return max(16, 1 << (dim - 1).bit_length())


def _terms(queries: torch.dtype, pages: torch.dtype) -> tuple[int, int]:
    """Terms of a query and of a numerator."""
    if pages == torch.float32:
        return 1, 1
    if queries == pages:
        return 1, 2
    return (2 if pages == torch.float16 else 3), 2


@triton.jit
def split_kernel(
    q,
    keys,
    values,
    tile_first,
    tile_count,
    positions,
    sequence_of_row,
    page_table,
    partial,
    maxima,
    sums,
    q_row,
    q_head,
    kv_page,
    kv_head,
    kv_token,
    table_row,
    num_heads,
    group,
    dim,
    max_splits,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUERY_TERMS: tl.constexpr,
    WEIGHT_TERMS: tl.constexpr,
    HEIGHT: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One tile over one split: what the merge reads of it. Grid: tiles, KV heads, splits."""
    first_row = tl.load(tile_first + tl.program_id(0))
    split = tl.program_id(2)
    lanes = tl.arange(0, HEIGHT)
    is_query = lanes // group < tl.load(tile_count + tl.program_id(0))
    row = first_row + lanes // group
    head = tl.program_id(1) * group + lanes % group
    position = tl.load(positions + row, mask=is_query, other=-1)
    last = tl.max(position, axis=0)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(tl.min(tl.where(is_query, position, last), axis=0) - WINDOW + 1, 0)
    if (split * 128 > last) | (split * 128 + 128 <= first):
        return
    d = tl.arange(0, BLOCK_DIM)
    sequence = tl.load(sequence_of_row + first_row)
    query = tl.load(
        q + row[:, None] * q_row + head[:, None] * q_head + d[None, :],
        mask=is_query[:, None] & (d[None, :] < dim),
        other=0.0,
    ).to(tl.float32)
    maximum = tl.full((HEIGHT,), float("-inf"), tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    summed = tl.zeros((HEIGHT, BLOCK_DIM), tl.float32)
    begin = tl.maximum(split * 128, first // KEYS * KEYS)
    for start in range(begin, tl.minimum(split * 128 + 128, last + 1), KEYS):
        at = start + tl.arange(0, KEYS)
        is_key = (at >= first) & (at <= last)  # pages of positions that nobody sees may have been given up
        page = tl.load(page_table + sequence * table_row + at // 32, mask=is_key, other=0)
        place = page.to(tl.int64) * kv_page + tl.program_id(1) * kv_head + (at % 32) * kv_token
        k = tl.load(keys + place[None, :] + d[:, None], mask=is_key[None, :] & (d[:, None] < dim), other=0.0)
        v = tl.load(values + place[:, None] + d[None, :], mask=is_key[:, None] & (d[None, :] < dim), other=0.0)
        score = split_dot(query, k, tl.zeros((HEIGHT, KEYS), tl.float32), QUERY_TERMS)
        if SOFTCAP is not None:
            score = SOFTCAP * (1.0 - 2.0 / (tl.exp(score * (2.0 / SOFTCAP)) + 1.0))  # tanh
        is_seen = (at[None, :] <= position[:, None]) & is_key[None, :]
        if WINDOW is not None:
            is_seen = is_seen & (at[None, :] > position[:, None] - WINDOW)
        score = tl.where(is_seen, score, float("-inf"))
        higher = tl.maximum(maximum, tl.max(score, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet must not become NaN
        kept = tl.exp(maximum - shift)
        weight = tl.exp(score - shift[:, None])
        total = total * kept + tl.sum(weight, axis=1)
        summed = split_dot(weight, v, summed * kept[:, None], WEIGHT_TERMS)
        maximum = higher
    slot = (row.to(tl.int64) * num_heads + head) * max_splits + split
    tl.store(maxima + slot, maximum, mask=is_query)
    tl.store(sums + slot, total, mask=is_query)
    tl.store(partial + slot[:, None] * dim + d[None, :], summed, mask=is_query[:, None] & (d[None, :] < dim))


@triton.jit
def merge_kernel(
    partial,
    maxima,
    sums,
    positions,
    sinks,
    out,
    num_heads,
    dim,
    max_splits,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    RUN: tl.constexpr,
):
    """The splits of one query, ``RUN`` at a time from the left. Grid: rows, heads."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(position - WINDOW + 1, 0) // 128
    last = position // 128
    d = tl.arange(0, BLOCK_DIM)
    query = row.to(tl.int64) * num_heads + head
    maximum = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head + tl.arange(0, 1))
        total = tl.full((1,), 1.0, tl.float32)
    summed = tl.zeros((BLOCK_DIM,), tl.float32)
    for run in range(first // RUN, last // RUN + 1):
        split = run * RUN + tl.arange(0, RUN)
        is_split = (split >= first) & (split <= last)
        slot = query * max_splits + split
        m = tl.load(maxima + slot, mask=is_split, other=float("-inf"))
        sum_ = tl.load(sums + slot, mask=is_split, other=0.0)
        a = tl.load(partial + slot[:, None] * dim + d[None, :], mask=is_split[:, None] & (d[None, :] < dim), other=0.0)
        higher = tl.maximum(maximum, tl.max(m, axis=0))
        kept = tl.exp(maximum - higher)
        weight = tl.exp(m - higher)
        total = total * kept + tl.sum(weight * sum_, axis=0)
        summed = summed * kept + tl.sum(weight[:, None] * a, axis=0)
        maximum = higher
    tl.store(out + query * dim + d, (summed / total).to(out.dtype.element_ty), mask=d < dim)

"""Attention over pages: equal to softmax in f64, and the same bits in every batch and chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from paceline.executors.triton.attention_rows import AttentionRows, tile_height, tile_ranges
from paceline.executors.triton.paged_attention import PAGE_TOKENS, paged_attention


@dataclass(frozen=True)
class Batch:
    """Sequences over shuffled pages, and the rows of a step: the last ``chunks[s]`` tokens of sequence s."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor
    lengths: tuple[int, ...]
    chunks: tuple[int, ...]

    @classmethod
    def random(
        cls,
        lengths: tuple[int, ...],
        chunks: tuple[int, ...],
        device: torch.device,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        kind: torch.dtype = torch.float32,
        pages: torch.dtype = torch.float32,
    ) -> Batch:
        """Queries, keys and values from normal distributions; pages that belong to nobody hold NaN."""
        torch.manual_seed(sum(lengths) + dim)
        used = [-(-length // PAGE_TOKENS) for length in lengths]
        table = torch.full((len(lengths), max(used)), 10**6, dtype=torch.int32)
        order = torch.randperm(sum(used) + 2)[: sum(used)].int()
        shape = (sum(used) + 2, kv_heads, PAGE_TOKENS, dim)
        keys, values = (torch.full(shape, float("nan"), dtype=pages) for _ in range(2))
        for sequence, length in enumerate(lengths):
            mine, order = order[: used[sequence]], order[used[sequence] :]
            table[sequence, : len(mine)] = mine
            for at in range(length):
                page = int(mine[at // PAGE_TOKENS])
                keys[page, :, at % PAGE_TOKENS] = torch.randn(kv_heads, dim).to(pages)
                values[page, :, at % PAGE_TOKENS] = torch.randn(kv_heads, dim).to(pages)
        q = torch.randn(sum(chunks), heads, dim).to(kind)
        return cls(*(x.to(device) for x in (q, keys, values, table)), lengths, chunks)

    @property
    def positions(self) -> list[int]:
        """Of the rows."""
        return [
            at for length, chunk in zip(self.lengths, self.chunks, strict=True) for at in range(length - chunk, length)
        ]

    @property
    def sequences(self) -> list[int]:
        """Of the rows."""
        return [sequence for sequence, chunk in enumerate(self.chunks) for _ in range(chunk)]

    def run(
        self,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        more_splits: int = 0,
    ) -> torch.Tensor:
        """What the kernels make of it."""
        rows = AttentionRows.of(
            np.array(self.positions, np.int32),
            np.concatenate([[0], np.cumsum(self.chunks)]).astype(np.int32),
            self.page_table.cpu().numpy(),
            group=self.q.shape[1] // self.keys.shape[1],
            device=self.q.device,
        )
        rows = replace(rows, max_splits=rows.max_splits + more_splits)
        return paged_attention(self.q, self.keys, self.values, rows, window=window, softcap=softcap, sinks=sinks)

    def exact(
        self, *, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """softmax(q k^T) v in f64, row by row."""
        q, keys, values, table = (x.cpu() for x in (self.q, self.keys, self.values, self.page_table))
        out = torch.empty(q.shape, dtype=torch.float64)
        group = q.shape[1] // keys.shape[1]
        for row, (position, sequence) in enumerate(zip(self.positions, self.sequences, strict=True)):
            seen = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
            pages = table[sequence, seen // PAGE_TOKENS].long()
            k = keys[pages, :, seen % PAGE_TOKENS].double().repeat_interleave(group, dim=1)
            v = values[pages, :, seen % PAGE_TOKENS].double().repeat_interleave(group, dim=1)
            score = torch.einsum("hd,thd->ht", q[row].double(), k)
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if sinks is not None:
                score = torch.cat([score, sinks.cpu().double()[:, None]], dim=1)
            weight = torch.softmax(score, dim=1)[:, : len(seen)]
            out[row] = torch.einsum("ht,thd->hd", weight, v)
        return out


def check(batch: Batch, tolerance: float = 2e-5, **options: object) -> None:
    """Within ``tolerance`` (values are of the order of 1, scores up to 20) and the rounding to the type of q."""
    found, exact = batch.run(**options), batch.exact(**options)  # type: ignore[arg-type]
    assert found.dtype == batch.q.dtype
    error = (found.cpu().double() - exact).abs()
    assert (error <= tolerance + exact.abs() * torch.finfo(found.dtype).eps).all(), error.max()


@pytest.mark.parametrize("length", [1, 31, 32, 33, 127, 128, 129, 300])
def test_lengths(device: torch.device, length: int) -> None:
    check(Batch.random((length,), (1,), device))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (9, 3), (8, 1), (6, 6), (20, 1)])
@pytest.mark.parametrize("dim", [16, 40])
def test_heads(device: torch.device, heads: int, kv_heads: int, dim: int) -> None:
    check(Batch.random((70, 33), (1, 9), device, heads=heads, kv_heads=kv_heads, dim=dim))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16, torch.float16])
def test_types(device: torch.device, kind: torch.dtype, pages: torch.dtype) -> None:
    """Numerators are two terms: 16 bits in bf16 (14 in the interpreter, which cuts off)."""
    tolerance = 3e-4 if pages == torch.bfloat16 else 2e-5
    check(Batch.random((140, 5), (3, 2), device, kind=kind, pages=pages), tolerance)


@pytest.mark.parametrize("window", [1, 5, 32, 130, 1000])
def test_windows(device: torch.device, window: int) -> None:
    check(Batch.random((290, 40), (7, 3), device), window=window)


def test_pages_before_the_window_are_not_read(device: torch.device) -> None:
    batch = Batch.random((290,), (2,), device)
    whole = batch.run(window=40)
    table = batch.page_table.clone()
    table[0, : (290 - 2 - 40 + 1) // PAGE_TOKENS] = 10**6
    assert torch.equal(replace(batch, page_table=table).run(window=40), whole)


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_softcap(device: torch.device, softcap: float) -> None:
    check(Batch.random((150, 9), (2, 1), device), softcap=softcap)


def test_sinks(device: torch.device) -> None:
    sinks = torch.tensor([-2.0, 0.0, 3.0, 30.0], device=device)
    check(Batch.random((150, 1), (2, 1), device), sinks=sinks)
    check(Batch.random((150, 1), (2, 1), device), sinks=sinks, window=20, softcap=15.0)


def test_many_splits(device: torch.device) -> None:
    """More than one run of the merge."""
    check(Batch.random((128 * 17 + 5,), (1,), device, heads=1, kv_heads=1, dim=16))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(device: torch.device, kind: torch.dtype) -> None:
    batch = Batch.random((200, 33, 129), (6, 1, 8), device, kind=kind, pages=kind)
    options = [{}, {"window": 50}, {"softcap": 10.0}]
    for option in options:
        together = batch.run(**option)  # type: ignore[arg-type]
        for row in (0, 5, 6, 7, 14):
            sequence = batch.sequences[row]
            alone = replace(
                batch,
                q=batch.q[row : row + 1],
                page_table=batch.page_table[sequence : sequence + 1],
                lengths=(batch.positions[row] + 1,),
                chunks=(1,),
            )
            assert torch.equal(alone.run(more_splits=row, **option)[0], together[row])  # type: ignore[arg-type]


def test_keys_and_values_inside_a_pool(device: torch.device) -> None:
    """[pages, 2, layers, KV heads, 32, d] as executors keep them."""
    batch = Batch.random((70,), (3,), device)
    pool = torch.zeros((len(batch.keys), 2, 3, *batch.keys.shape[1:]), device=device)
    pool[:, 0, 1], pool[:, 1, 1] = batch.keys, batch.values
    assert torch.equal(replace(batch, keys=pool[:, 0, 1], values=pool[:, 1, 1]).run(), batch.run())


def test_no_rows(device: torch.device) -> None:
    batch = Batch.random((4,), (1,), device)
    assert replace(batch, q=batch.q[:0], chunks=(0,)).run().shape == (0, 4, 32)


@pytest.mark.parametrize("damage", ["key", "value", "page"])
def test_a_wrong_key_value_or_page_is_seen(device: torch.device, damage: str) -> None:
    batch = Batch.random((140, 60), (2, 1), device)
    exact = batch.exact()
    page = int(batch.page_table[0, 4])
    if damage == "key":
        batch.keys[page, 1, 3] = 100.0
    elif damage == "value":
        batch.values[page, 1, 3] = 1e6
    else:
        batch.page_table[0, 1] = batch.page_table[1, 0]
    assert (batch.run().cpu().double() - exact).abs().max() > 1e-3


@pytest.mark.parametrize("group", [1, 3, 4, 8, 20])
def test_tiles_cover_every_row_once(group: int) -> None:
    rng = np.random.default_rng(group)
    starts = np.concatenate([[0], np.cumsum(rng.integers(0, 40, 9))]).astype(np.int32)
    first, count = tile_ranges(starts, group)
    rows = np.concatenate([np.arange(a, a + n) for a, n in zip(first, count, strict=True)])
    assert np.array_equal(rows, np.arange(starts[-1]))
    assert count.min() > 0
    assert count.max() * group <= tile_height(group)
    sequence = np.searchsorted(starts, rows, side="right")
    for a, n in zip(first, count, strict=True):
        assert len(set(sequence[a : a + n])) == 1

"""Page tables and the sizing of the KV pool."""

from __future__ import annotations

import numpy as np
import pytest
from fake_executor import tiny_model

from paceline.config import KV_FORMATS, PAGE_TOKENS
from paceline.errors import MemoryBudgetError
from paceline.kv.layout import KVLayout, format_bytes, pages_for, plan_memory
from paceline.kv.manager import KVManager

LAYOUT = KVLayout(bytes_per_token=1000)


def test_a_page_holds_keys_and_values_of_all_layers() -> None:
    model = tiny_model()
    vectors = 2 * model.num_kv_heads * model.num_layers
    of_a_vector = {
        "f16": 2 * model.head_dim,
        "bf16": 2 * model.head_dim,
        "f32": 4 * model.head_dim,
        "int8": model.head_dim + 2,  # and its scale
    }
    assert set(of_a_vector) == set(KV_FORMATS)
    for kv_dtype in KV_FORMATS:
        layout = KVLayout.of(model, kv_dtype)
        assert layout.bytes_per_token == vectors * of_a_vector[kv_dtype]
        assert layout.page_bytes == PAGE_TOKENS * layout.bytes_per_token


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def plan(available: int, *, asked: int | None = None, max_batch: int = 4, context: int = 320) -> int:
    """Pages of a plan with 1 MB of weights and 0.5 MB of workspace."""
    return plan_memory(
        LAYOUT,
        available_bytes=available,
        weight_bytes=1_000_000,
        workspace_bytes=500_000,
        max_batch=max_batch,
        context_length=context,
        kv_memory_bytes=asked,
    ).num_pages


def test_the_pool_takes_half_of_what_is_left() -> None:
    assert plan(1_500_000 + 640_000) == 320_000 // LAYOUT.page_bytes


def test_the_pool_is_never_larger_than_the_batch_can_use() -> None:
    assert plan(10**9) == 4 * 10
    assert plan(10**9, asked=10**8) > 4 * 10, "what is asked for beyond that is for the prefix cache"


def test_what_was_asked_for_is_honoured() -> None:
    assert plan(10**9, asked=3 * LAYOUT.page_bytes + 5) == 3
    assert plan(1_500_000 + 3 * LAYOUT.page_bytes, asked=3 * LAYOUT.page_bytes) == 3


@pytest.mark.parametrize(
    ("available", "asked"),
    [(1_000_000, None), (1_500_000 + LAYOUT.page_bytes, None), (10**9, 1000), (1_550_000, 96_000)],
)
def test_a_budget_that_cannot_be_met_names_its_numbers(available: int, asked: int | None) -> None:
    with pytest.raises(MemoryBudgetError) as error:
        plan(available, asked=asked)
    text = str(error.value)
    for number in (available, 1_000_000, 500_000, LAYOUT.page_bytes, LAYOUT.bytes_per_token):
        assert format_bytes(number) in text


def test_the_table_says_what_fits() -> None:
    memory = plan_memory(
        LAYOUT, available_bytes=10**9, weight_bytes=10**6, workspace_bytes=0, max_batch=4, context_length=320
    )
    table = memory.table()
    assert [line.split("  ")[0] for line in table.splitlines()] == [
        "available",
        "weights",
        "workspace",
        "KV per token",
        "KV pool",
        "tokens that fit",
    ]
    assert f"{memory.num_tokens:,}" in table
    assert memory.kv_bytes == memory.num_pages * LAYOUT.page_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (23_040, "23.0 kB"),
        (999_990, "1.0 MB"),
        (98_362_432, "98.4 MB"),
        (5 * 10**12, "5.0 TB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def open_empty(kv: KVManager) -> int:
    """A slot without pages."""
    opened = kv.open(b"", b"", limit=0)
    assert opened is not None
    return opened.slot


def test_a_sequence_grows_by_whole_pages_and_all_or_nothing() -> None:
    kv = KVManager(4, 3, 128)
    first, second = open_empty(kv), open_empty(kv)
    assert kv.grow(first, 1)
    assert kv.capacity[first] == 32
    assert kv.grow(first, 32)
    assert len(kv.pages(first)) == 1
    assert kv.grow(second, 96)
    assert not kv.grow(first, 65)
    assert len(kv.pages(first)) == 1
    kv.check()
    kv.close(second)
    assert kv.grow(first, 65)
    assert kv.table[first, :3].tolist() == list(kv.pages(first))
    kv.check()
    kv.close(first)
    assert kv.pool.num_free == 4
    kv.check()


def test_a_closed_sequence_gives_the_same_pages_to_the_next() -> None:
    kv = KVManager(64, 2, 1024)
    slot = open_empty(kv)
    kv.grow(slot, 100)
    pages = kv.pages(slot)
    kv.close(slot)
    slot = open_empty(kv)
    kv.grow(slot, 100)
    assert kv.pages(slot) == pages
    assert kv.pool.num_touched == 4


def test_check_finds_a_wrong_table() -> None:
    kv = KVManager(4, 2, 128)
    slot = open_empty(kv)
    kv.grow(slot, 64)
    kv.table[slot, 1] = 3
    with pytest.raises(AssertionError, match="table"):
        kv.check()


def test_tables_are_what_a_plan_needs() -> None:
    kv = KVManager(4, 2, 33)
    assert kv.table.dtype == np.int32
    assert kv.table.shape == (2, 2)
    assert kv.num_pool_tokens == 128

"""The division of a step's attention: whatever sequences share, each row gets every split that it sees exactly once, in
order, from its own pages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline import _native

SPLIT, PAGE, MAX_SPLITS, MAX_ROWS, NUM_KV_HEADS = 128, 32, 40, 64, 2


class Unit(NamedTuple):
    """What the native program says of one; heads are those of the KV head's group."""

    rows: list[int]
    sequence: int
    kv_head: int
    first_head: int
    end_head: int
    begin: int
    end: int
    result: str


Merge = tuple[int, int, int, int]


@dataclass(frozen=True)
class Planned:
    """A step's rows, and how its attention was divided."""

    positions: NDArray[np.int32]
    sequence_of_row: NDArray[np.int32]
    page_table: NDArray[np.int32]
    window: int
    group: int
    units: list[Unit]
    merges: list[Merge]
    num_slots: int
    shared_splits: int


@dataclass(frozen=True)
class Shape:
    """What a sequence of a step is: a copy of an earlier one's first pages, then pages of its own."""

    parent: int
    shared_pages: int
    num_rows: int
    last_position: int


def plan_of(shapes: list[Shape], *, window: int = 0, group: int = 2, threads: int = 2) -> Planned:
    """The plan that the native program makes for such sequences."""
    num_pages = len(shapes) * MAX_SPLITS * SPLIT // PAGE
    program = _native.Program(
        "scalar", threads, MAX_ROWS, 1, 8, num_pages, MAX_SPLITS * SPLIT, group * NUM_KV_HEADS, NUM_KV_HEADS, 16, 1,
        "f16",
    )  # fmt: skip
    program.add_attention_plan(window)
    page_table = np.arange(num_pages, dtype=np.int32).reshape(len(shapes), -1)
    for index, shape in enumerate(shapes):
        page_table[index, : shape.shared_pages] = page_table[min(shape.parent, index), : shape.shared_pages]
    rows = [
        np.arange(max(0, shape.last_position - shape.num_rows + 1), shape.last_position + 1, dtype=np.int32)
        for shape in shapes
    ]
    positions = np.concatenate(rows)
    lengths = [len(part) for part in rows]
    nothing = np.zeros(0, np.int32)
    program.set_step(
        np.zeros(len(positions), np.int32), positions, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        page_table, nothing, np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int32), np.zeros(0, np.uint8), nothing,
        nothing, nothing, np.zeros(0, np.float32), nothing, np.zeros((0, 1), np.uint32), np.zeros((0, 0), np.int32),
        np.zeros((0, 0), np.float32),
    )  # fmt: skip
    program.begin_step()
    return Planned(
        positions, np.repeat(np.arange(len(shapes), dtype=np.int32), lengths), page_table, window, group,
        [Unit(*unit) for unit in program.attention_units()], program.attention_merges(), program.attention_slots,
        program.shared_splits,
    )  # fmt: skip


def check(plan: Planned) -> None:
    """Raises AssertionError unless folding what the units leave is each row's attention over its own keys."""
    units_of = defaultdict(list)
    for unit in plan.units:
        check_unit(plan, unit)
        for row in unit.rows:
            for head in range(unit.first_head, unit.end_head):
                units_of[row, unit.kv_head * plan.group + head].append((unit.begin, unit.end, unit.result))
    merges = {row: (slot, first, end) for row, slot, first, end in plan.merges}
    slots = [slot + i for slot, first, end in merges.values() for i in range(end - first)]
    assert len(merges) == len(plan.merges)
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < plan.num_slots for slot in slots)
    for row, position in enumerate(plan.positions):
        oldest = max(0, position - plan.window + 1) if plan.window else 0
        for head in range(NUM_KV_HEADS * plan.group):
            begins, ends, results = zip(*sorted(units_of[row, head]), strict=True)
            assert begins[0] <= oldest // SPLIT
            assert begins[1:] == ends[:-1]
            assert ends[-1] > position // SPLIT
            if row in merges:
                assert merges[row][1:] == (ends[0] - 1, ends[-1])
                assert results == ("folded",) + ("splits",) * (len(results) - 1)
            else:
                assert results == ("rows",)
    assert sum(count for _, count in shared(plan)) == plan.shared_splits


def check_unit(plan: Planned, unit: Unit) -> None:
    rows, sequence, begin, end = unit.rows, unit.sequence, unit.begin, unit.end
    assert begin < end
    assert 0 <= unit.first_head < unit.end_head <= plan.group
    assert 0 < len(rows) * (unit.end_head - unit.first_head) <= max(32, plan.group)
    keys = min(end * SPLIT, int(plan.positions[rows[-1]]) + 1)  # that the kernel reads
    for row in rows:
        own = plan.sequence_of_row[row]
        visible = min(end * SPLIT, int(plan.positions[row]) + 1)
        assert visible <= keys
        if own != sequence:
            assert plan.positions[row] >= end * SPLIT  # nothing that this step writes
        pages = slice(begin * SPLIT // PAGE, -(-visible // PAGE))
        assert np.array_equal(plan.page_table[own, pages], plan.page_table[sequence, pages])


def shared(plan: Planned) -> list[tuple[set[int], int]]:
    """Sequences that share splits, and how many reads of a split that saves."""
    sequences: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for unit in plan.units:
        if unit.kv_head == unit.first_head == 0:
            rows = {int(plan.sequence_of_row[row]) for row in unit.rows}
            sequences[unit.sequence, unit.begin, unit.end] |= rows
    return [(found, (len(found) - 1) * (end - begin)) for (_, begin, end), found in sequences.items() if len(found) > 1]


@st.composite
def steps(draw: st.DrawFn) -> list[Shape]:
    """Up to 12 sequences, of which most continue an earlier one, somewhere before, at or after a split's end."""
    shapes: list[Shape] = []
    for index in range(draw(st.integers(1, 12))):
        last = draw(st.integers(0, 10 * SPLIT - 1))
        rows = draw(st.sampled_from([1, 1, 1, 2, 4]))
        shapes.append(Shape(draw(st.integers(0, index)), draw(st.integers(0, last // PAGE + 1)), rows, last))
    if draw(st.booleans()):
        shapes.append(Shape(0, draw(st.sampled_from([0, 8])), 16, draw(st.integers(300, 1000))))
    return shapes


@settings(max_examples=300, deadline=None)
@given(
    steps(),
    st.sampled_from([0, 1, 100, 300]),
    st.sampled_from([1, 3, 8, 16, 33]),
    st.sampled_from([1, 2, 5]),
)
def test_every_row_gets_its_splits_once(shapes: list[Shape], window: int, group: int, threads: int) -> None:
    check(plan_of(shapes, window=window, group=group, threads=threads))


def over_one_prefix(rows: int, *, splits: int = 4, last: int = 600) -> list[Shape]:
    return [Shape(0, splits * SPLIT // PAGE, 1, last + row) for row in range(rows)]


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("rows", [2, 3, 17, 64])
def test_a_common_prefix_is_read_once(rows: int, threads: int) -> None:
    plan = plan_of(over_one_prefix(rows), threads=threads)
    check(plan)
    assert plan.shared_splits == 4 * (rows - 1)


def test_a_tree_shares_at_every_level() -> None:
    """Six over two splits, of which three go on together for three more and two of those for yet another."""
    two, five, six = (splits * SPLIT // PAGE for splits in (2, 5, 6))
    parents = [(0, 0), (0, two), (0, two), (0, five), (3, six), (0, five)]
    plan = plan_of([Shape(parent, pages, 1, 800) for parent, pages in parents])
    check(plan)
    # Sequences 0, 3, 4 and 5 have five splits in common, 3 and 4 six.
    assert plan.shared_splits == 5 * 2 + 3 * 3 + 1 * 1


def test_what_does_not_repay_its_partials_is_not_shared() -> None:
    pair = [replace(shape, last_position=1279) for shape in over_one_prefix(2, splits=1)]
    assert plan_of(pair, group=16).shared_splits == 0
    assert plan_of(pair, group=2).shared_splits == 1
    # Two of many may have more in common than all.
    plan = plan_of([*pair, Shape(1, 6 * SPLIT // PAGE, 1, 1279)], group=16)
    check(plan)
    assert plan.shared_splits == 6
    assert all(found == {1, 2} for found, _ in shared(plan))


def test_without_room_for_their_partials_rows_are_read_apart() -> None:
    many = over_one_prefix(60, last=4900)
    few = [Shape(60, 8 * SPLIT // PAGE, 1, 1100) for _ in range(4)]
    for shapes, shared_splits in ((many, 0), ([*many, *few], 3 * 8), (many[:40], 39 * 4)):
        plan = plan_of(shapes, group=1)
        check(plan)
        assert plan.shared_splits == shared_splits


def test_a_long_row_is_cut_for_several_threads_only() -> None:
    lone = [Shape(0, 0, 1, 10 * SPLIT - 1)]
    assert len(plan_of(lone, threads=1).units) == NUM_KV_HEADS
    assert len(plan_of(lone, threads=2).units) == NUM_KV_HEADS * 10
    among_short = [*lone, *(Shape(0, 0, 1, 20) for _ in range(60))]
    assert any(unit.begin > 0 for unit in plan_of(among_short, threads=2).units)


@pytest.mark.parametrize(
    ("group", "threads", "parts"),
    [(1, 8, 1), (4, 1, 1), (4, 2, 1), (4, 3, 2), (4, 4, 2), (9, 6, 3), (4, 16, 4), (3, 16, 3)],
)
def test_heads_are_taken_apart_where_threads_would_be_idle(group: int, threads: int, parts: int) -> None:
    """Two KV heads and one split are two units: too few for more threads."""
    plan = plan_of([Shape(0, 0, 1, 100)], group=group, threads=threads)
    check(plan)
    assert len(plan.units) == NUM_KV_HEADS * parts


def wrong_plans() -> dict[str, Planned]:
    """Plans with one thing wrong each."""
    right = plan_of(over_one_prefix(5))
    check(right)
    units, merges = right.units, right.merges
    first = units[0]

    def first_unit(**changes: object) -> Planned:
        return replace(right, units=[first._replace(**changes), *units[1:]])

    other_page = right.page_table.copy()
    other_page[3, 2] += 1
    row, slot, first_split, last = merges[0]
    return {
        "unit lost": replace(right, units=units[1:]),
        "unit twice": replace(right, units=[units[0], *units]),
        "row lost": first_unit(rows=first.rows[1:]),
        "head lost": first_unit(first_head=first.first_head + 1),
        "split lost": first_unit(begin=first.begin + 1),
        "result": first_unit(result="splits"),
        "own keys": first_unit(end=6),
        "page": replace(right, page_table=other_page),
        "slot of another": replace(right, merges=[(row, slot + 1, first_split, last), *merges[1:]]),
        "slot outside": replace(right, num_slots=right.num_slots // 1000),
        "not merged": replace(right, merges=merges[1:]),
        "count": replace(right, shared_splits=right.shared_splits + 1),
    }


@pytest.mark.parametrize("name", wrong_plans())
def test_the_check_sees_what_is_wrong(name: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong_plans()[name])

"""The cost of a step by its rows: the table, what it learns on machines that are formulas, measuring and keeping it."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_executor import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.executors.base import StepPlan
from paceline.speculate import cost_memory
from paceline.speculate.cost import (
    COARSE_FIRST,
    NUM_CHECKS,
    SHAPE_RATE,
    SIZES,
    StepCost,
    measure_step_cost,
    pooled,
    still_holds,
)
from paceline.speculate.cost_memory import MAX_ENTRIES, cost_key, load_step_cost, save_step_cost

TABLE = {1: 7.0, 2: 7.5, 4: 9.0, 8: 14.0, 16: 25.0, 32: 48.0, 64: 95.0}


def test_between_points_it_is_a_line_and_beyond_it_goes_on() -> None:
    cost = StepCost(TABLE)
    assert [cost.seconds(n) for n in (1, 2, 3, 6, 64)] == pytest.approx([7.0, 7.5, 8.25, 11.5, 95.0])
    assert cost.seconds(96) == pytest.approx(95.0 * 96 / 64)
    assert cost.relative(8) == pytest.approx(2.0)
    assert cost.relative(9, 8) == pytest.approx((14 + 11 / 8) / 14)
    assert cost.shape(3)[0] == 0.0


@pytest.mark.parametrize(
    ("table", "n", "seconds"),
    [
        ({1: 2.0}, 64, 128.0),
        ({4: 8.0}, 1, 8.0),
        ({4: 8.0}, 8, 16.0),
        ({3: 1.0, 4: 1.5}, 6, 2.25),
        ({1: 1, 8: 8}, 80, 80),
    ],
)
def test_few_points(table: dict[int, float], n: int, seconds: float) -> None:
    assert StepCost(table).seconds(n) == pytest.approx(seconds)


def slow_pooled(values: list[float]) -> list[float]:
    """By the min-max formula of isotonic regression: for each i the largest, over starts up to it, of the smallest mean
    over ends from it."""

    def mean(start: int, end: int) -> float:
        return sum(values[start : end + 1]) / (end + 1 - start)

    count = len(values)
    return [max(min(mean(a, b) for b in range(i, count)) for a in range(i + 1)) for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20).map(float), min_size=1, max_size=8))
def test_pooling_is_isotonic_regression(values: list[float]) -> None:
    assert pooled(values) == pytest.approx(slow_pooled(values))


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from(SIZES), st.floats(0.1, 10.0), min_size=1),
    st.lists(st.tuples(st.integers(1, 80), st.floats(0.01, 100.0)), max_size=40),
)
def test_more_rows_are_never_cheaper(table: dict[int, float], steps: list[tuple[int, float]]) -> None:
    cost = StepCost(table)
    for n, elapsed_s in steps:
        cost.observe(n, 100, elapsed_s)
    seconds = cost.shape(100)[1:]
    assert all(0 < a <= b + 1e-9 < math.inf for a, b in itertools.pairwise(seconds))


def run(
    cost: StepCost,
    true: Callable[[int], float],
    *,
    steps: int,
) -> None:
    """Steps of 1, 9, 1, 5, ... rows, as speculation makes them, on a machine with 4 % noise and a stall in 50."""
    rng = random.Random(5)
    for i in range(steps):
        n = 1 if i % 2 == 0 else rng.choice([5, 9, 12])
        stall = 20.0 if rng.random() < 0.02 else 1.0
        cost.observe(n, 100, true(n) * math.exp(rng.gauss(0, 0.04)) * stall)


def test_a_slower_machine_is_drift_and_not_shape() -> None:
    cost, known = StepCost(TABLE), StepCost(TABLE)
    run(cost, lambda n: 1.4 * known.seconds(n), steps=400)
    assert cost.drift == pytest.approx(1.4, rel=0.12)
    for n in (5, 9, 12):
        assert cost.relative(n) == pytest.approx(known.relative(n), rel=0.1)


def test_only_one_size_of_steps_teaches_no_shape() -> None:
    cost = StepCost(TABLE)
    for _ in range(300):
        cost.observe(9, 100, 60.0)
    assert cost.seconds(9) == pytest.approx(60.0, rel=0.01)
    assert cost.relative(9) == pytest.approx(StepCost(TABLE).relative(9))


def test_a_wrong_shape_is_learnt_on_a_machine_that_is_slower_as_well() -> None:
    cost, true = StepCost(TABLE), StepCost({1: 7.0, 2: 8.5, 4: 14.0, 8: 24.0, 16: 40.0})
    assert cost.relative(9) < 0.65 * true.relative(9)
    run(cost, lambda n: 1.3 * true.seconds(n), steps=1500)
    for n in (5, 9, 12):
        assert cost.relative(n) == pytest.approx(true.relative(n), rel=0.15)
    assert cost.version > 0


def test_both_steps_of_a_pair_share_the_error() -> None:
    cost = StepCost(TABLE)
    for _ in range(2):
        cost.observe(1, 100, 7.0)
        cost.observe(8, 100, 14.0 * math.exp(0.2))
    moved = math.log(cost.relative(8) / 2.0)
    assert 3 * SHAPE_RATE * 0.2 < moved <= 3 * 2 * SHAPE_RATE * 0.2


def test_points_beyond_all_that_were_seen_follow_the_smaller_ones() -> None:
    cost = StepCost(TABLE)

    def pairs(n: int, count: int) -> None:
        """Steps of 1 and of n rows, the latter too slow by a fifth."""
        for _ in range(count):
            cost.observe(1, 100, cost.seconds(1))
            cost.observe(n, 100, cost.seconds(n) * 1.2)

    pairs(4, 8)
    assert cost.relative(4) > 1.1 * 9 / 7
    assert (cost.relative(8, 4), cost.relative(64, 4)) == pytest.approx((14 / 9, 95 / 9))
    pairs(8, 2)
    eight = cost.seconds(8) / cost.seconds(4)
    pairs(4, 8)
    assert cost.seconds(8) / cost.seconds(4) < 0.95 * eight, "it was seen: it stays"
    assert cost.relative(64, 32) == pytest.approx(95 / 48)


@pytest.mark.parametrize(
    ("table", "true", "agrees"),
    [
        (TABLE, TABLE, True),
        (TABLE, {n: 3 * t for n, t in TABLE.items()}, True),
        (TABLE, {**TABLE, 8: 17.5}, True),
        (TABLE, {**TABLE, 8: 19.0}, False),
        (TABLE, {**TABLE, 1: 5.0}, False),
        ({n: 8 * t for n, t in TABLE.items()}, {**TABLE, 1: 5.0}, True),
    ],
    ids=["same", "slower", "a little", "8 rows", "1 row", "too slow to look"],
)
def test_a_kept_table_is_compared_with_the_machine(
    table: dict[int, float], true: dict[int, float], agrees: bool
) -> None:
    cost = StepCost({n: t / 1000 for n, t in table.items()})
    machine = StepCost({n: t / 1000 for n, t in true.items()})
    executor = FormulaExecutor(machine.seconds)
    assert still_holds(cost, executor, clock=executor.clock) is agrees  # type: ignore[arg-type]
    if cost.seconds(1) > 0.05:
        assert executor.log == []
    else:  # one pass to warm up, then rounds of 1, 4 and 8 rows; the first pass of a size is slow, as is one in seven
        assert len(executor.log) <= 10 if agrees else len(executor.log) == 1 + 3 * NUM_CHECKS


def test_a_kept_table_is_compared_where_only_one_row_fits() -> None:
    executor = FormulaExecutor(formula, max_rows=1)
    assert still_holds(StepCost({1: 0.007}), executor, clock=executor.clock)  # type: ignore[arg-type]


def test_steps_of_unlike_depth_are_not_compared() -> None:
    cost = StepCost(TABLE)
    known = StepCost(TABLE)
    for i in range(400):  # only the deep steps have many rows
        n, depth = (1, 100) if i % 2 == 0 else (9, 4000)
        cost.observe(n, depth, known.seconds(n) * (1 if n == 1 else 2))
    assert cost.relative(9) == pytest.approx(known.relative(9))


def test_steps_beyond_the_table_teach_nothing() -> None:
    cost = StepCost(TABLE)
    for _ in range(50):
        cost.observe(512, 600, 1e9)
        cost.observe(1, 600, 7.0)
    assert (cost.drift, cost.relative(9)) == pytest.approx((1.0, StepCost(TABLE).relative(9)))


class FormulaExecutor:
    """Takes time by a formula, on a clock of its own."""

    def __init__(self, seconds: Callable[[int], float], *, max_rows: int = 64, num_pages: int = 2) -> None:
        self.model = tiny_model()
        self.max_rows, self.max_outputs, self.num_pages = max_rows, 64, num_pages
        self.now, self.log = 0.0, list[int]()
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> None:
        n = len(plan.tokens)
        assert plan.positions.tolist() == list(range(n))
        assert len(plan.logit_rows) == n
        assert plan.page_table.max() < self.num_pages
        self.log.append(n)
        # The first of a kind is slow, and so is one in seven.
        self.now += self._seconds(n) * (1.7 if n not in self.log[:-1] or len(self.log) % 7 == 0 else 1.0)


def measure(executor: FormulaExecutor, budget_s: float) -> StepCost:
    return measure_step_cost(executor, budget_s=budget_s, clock=executor.clock)  # type: ignore[arg-type]


def formula(n: int) -> float:
    return 0.006 + 0.001 * n if n <= 8 else 0.014 + 0.0015 * (n - 8)


def test_measuring_finds_the_formula_and_keeps_to_its_budget() -> None:
    executor = FormulaExecutor(formula)
    cost = measure(executor, 4.0)
    assert set(cost.measured) == set(SIZES)
    assert cost.measured == pytest.approx({n: formula(n) for n in SIZES})
    assert executor.now <= 4.0 * 1.05, "the last round may meet a slow pass"
    rounds = executor.log[1 + len(SIZES) :]
    assert rounds == list(COARSE_FIRST) * (len(rounds) // len(SIZES)), "sizes take turns"


def test_a_short_budget_measures_coarsely_and_goes_on_as_a_line() -> None:
    executor = FormulaExecutor(formula)
    cost = measure(executor, 0.4)
    assert executor.now <= 0.4
    assert {1, 4, 8, 16} <= set(cost.measured) < set(SIZES)
    assert cost.seconds(64) == pytest.approx(formula(64), rel=0.3)


def test_a_large_model_is_measured_where_it_must_be() -> None:
    cost = measure(FormulaExecutor(lambda n: 60 * formula(n)), 0.4)
    assert set(cost.measured) == {1, 4, 8}


@pytest.mark.parametrize(("max_rows", "num_pages", "most"), [(5, 2, 4), (64, 1, 32), (1, 1, 1)])
def test_measuring_fits_the_executor(max_rows: int, num_pages: int, most: int) -> None:
    executor = FormulaExecutor(formula, max_rows=max_rows, num_pages=num_pages)
    assert max(measure(executor, 2.0).measured) == most
    assert max(executor.log) <= min(max_rows, 32 * num_pages)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "step_costs.json"


def test_what_is_saved_is_loaded_under_its_key_only(file: Path) -> None:
    path: dict[str, str | int] = {"isa": "avx2", "threads": 2}
    key = cost_key("model", path, processor="A")
    assert load_step_cost(key) is None
    cost = StepCost(TABLE)
    cost.observe(1, 10, 99.0)
    assert save_step_cost(key, cost)
    loaded = load_step_cost(key)
    assert loaded is not None
    assert loaded.measured == TABLE
    assert file.is_file()
    assert [other.name for other in file.parent.iterdir()] == [file.name], "no scratch file stays"
    others = [
        cost_key("other", path, processor="A"),
        cost_key("model", {**path, "threads": 1}, processor="A"),
        cost_key("model", path, processor="B"),
    ]
    assert len({key, *others}) == 4
    assert all(load_step_cost(other) is None for other in others)
    assert cost_key("model", {"threads": 2, "isa": "avx2"}, processor="A") == key


def test_another_release_measures_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = cost_key("model", {})
    monkeypatch.setattr(cost_memory, "__version__", "another")
    assert cost_key("model", {}) != key


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"{",
        b'{"format": "other", "costs": {}}',
        b'{"format": "paceline step costs 1"}',
        b"[" * 9999,
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_rewritten(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    assert load_step_cost("k") is None
    assert save_step_cost("k", StepCost(TABLE))
    assert load_step_cost("k") is not None


@pytest.mark.parametrize(
    "entry", [None, [], {}, {"1": "x"}, {"a": 1.0}, {"1": -1.0}, {"0": 1.0}, {"1": None}, {"1": 1e999}]
)
def test_a_damaged_entry_is_ignored_and_others_stay(file: Path, entry: object) -> None:
    save_step_cost("good", StepCost(TABLE))
    document = json.loads(file.read_bytes())
    document["costs"]["bad"] = entry
    file.write_text(json.dumps(document))
    assert load_step_cost("bad") is None
    assert load_step_cost("good") is not None


def test_the_file_stays_small_and_the_newest_stay(file: Path) -> None:
    for index in range(MAX_ENTRIES + 3):
        save_step_cost(str(index), StepCost({1: 1.0}))
    assert load_step_cost("2") is None
    assert load_step_cost("3") is not None


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not save_step_cost("k", StepCost(TABLE), tmp_path / "file" / "step_costs.json")

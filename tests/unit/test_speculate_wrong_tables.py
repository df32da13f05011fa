"""A controller whose table is wrong, in simulations: it finds out, whether it speculates or not."""

from __future__ import annotations

import pytest
from speculation_world import VERIFY_COST, World

from paceline.speculate.checks import SURPRISE, Check
from paceline.speculate.controller import DRAFTS_GAP, PLAIN_GAP, Controller
from paceline.speculate.cost import StepCost

Table = dict[int, float]

LINEAR = {n: 7.0 * n for n in VERIFY_COST}
STEEP = {n: 7.0 * (1 + 0.6 * (n - 1)) for n in VERIFY_COST}
VERY_STEEP = {n: t * (1 if n == 1 else 1 + 0.6 * min(n, 8)) for n, t in VERIFY_COST.items()}
ONE_CORE = {n: 9.0 if n == 1 else 1.3 * t if n == 2 else 1.7 * t if n < 6 else 2 * t for n, t in VERIFY_COST.items()}
SLOW_FIRST = {n: max(t, 12.6) for n, t in VERIFY_COST.items()}


def simulate(table: Table, true: Table, rate: float, *, num_requests: int = 1, num_steps: int = 6000) -> World:
    control = Controller(StepCost(table), max_rows=256)
    return World(lambda step: rate, confidence=rate, num_requests=num_requests, cost=true, controller=control).run(
        num_steps
    )


def speed_at_the_end(world: World, num_steps: int = 1000) -> float:
    """Over plain decoding's."""
    plain_s = world.true_cost.seconds(world.num_requests) / world.num_requests
    return sum(world.step_tokens[-num_steps:]) * plain_s / sum(world.step_times[-num_steps:])


@pytest.mark.parametrize("rate", [0.4, 0.8, 0.95, 1.0])
@pytest.mark.parametrize(
    ("table", "true"),
    [
        (VERIFY_COST, LINEAR),
        (VERIFY_COST, STEEP),
        (VERIFY_COST, VERY_STEEP),
        (VERIFY_COST, ONE_CORE),
        (SLOW_FIRST, VERIFY_COST),
    ],
    ids=["linear", "steep", "very steep", "one core", "slow first"],
)
def test_a_table_that_makes_drafts_look_cheap_is_corrected_although_every_step_drafts(
    table: Table, true: Table, rate: float
) -> None:
    assert speed_at_the_end(simulate(table, true, rate)) >= 0.97


@pytest.mark.parametrize(("num_requests", "gain"), [(1, 3.6), (2, 1.8), (4, 1.2)])
def test_a_table_that_makes_drafts_look_dear_is_corrected_although_nobody_is_asked(
    num_requests: int, gain: float
) -> None:
    world = simulate(LINEAR, VERIFY_COST, 0.98, num_requests=num_requests)
    assert speed_at_the_end(world) > gain


def test_a_costly_drafter_gets_out_of_it_as_well() -> None:
    control = Controller(StepCost(LINEAR), max_rows=256)
    world = World(lambda step: 0.95, draft_s=(0.5, 0.3), controller=control).run(4000)
    assert speed_at_the_end(world) > 1.5


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_where_nothing_can_pay_looking_costs_next_to_nothing(rate: float, num_requests: int) -> None:
    world = simulate(LINEAR, LINEAR, rate, num_requests=num_requests)
    assert world.speedup >= 0.99
    assert len(world.asked_steps) < 200 or rate == 0.0


@pytest.mark.parametrize("rate", [0.8, 1.0])
def test_steps_without_drafts_cost_little_where_the_table_is_right(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = simulate(VERIFY_COST, VERIFY_COST, rate)
    monkeypatch.setattr("paceline.speculate.controller.PLAIN_GAP", 10**9)
    unchecked = simulate(VERIFY_COST, VERIFY_COST, rate)
    assert 0.975 * unchecked.speedup <= checked.speedup < unchecked.speedup


@pytest.mark.parametrize(
    ("gap", "table", "true", "rate"),
    [
        ("PLAIN_GAP", VERIFY_COST, LINEAR, 0.6),
        ("DRAFTS_GAP", LINEAR, VERIFY_COST, 0.98),
    ],
)
def test_a_controller_that_does_not_look_is_found(
    gap: str, table: Table, true: Table, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"paceline.speculate.controller.{gap}", 10**9)
    assert speed_at_the_end(simulate(table, true, rate)) < (0.97 if gap == "PLAIN_GAP" else 1.01)


def test_gaps_double_and_a_surprise_or_a_step_that_came_shortens_them() -> None:
    check = Check(4, 16, 2)

    def gap() -> int:
        steps = 0
        while not check.is_due:
            check.passed()
            steps += 1
        return steps

    gaps = []
    for cheaper in (0.0, 0.0, 0.0, -1.0, SURPRISE + 0.01, 0.0):
        gaps.append(gap())
        check.made(cheaper)
    assert gaps == [4, 8, 16, 16, 16, 2]
    check.came()
    assert gap() == 4
    assert PLAIN_GAP < DRAFTS_GAP

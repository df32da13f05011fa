"""The controller in simulations without a clock, and planted errors that they find."""

from __future__ import annotations

import random

import pytest
from speculation_world import (
    LINEAR,
    VERIFY_COST,
    WRONG,
    World,
    best_fixed_speedup,
    chain,
    controller,
    limits,
)

from paceline.speculate.controller import Controller
from paceline.speculate.cost import StepCost
from paceline.speculate.counts import ZeroReason
from paceline.speculate.spending import MAX_BACKOFF

# Simulations. Plain decoding is 1.0.


@pytest.mark.parametrize("confidence", [0.3, 0.9, 0.99])
@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_that_are_never_right_cost_next_to_nothing(confidence: float, seed: int) -> None:
    world = World(lambda step: 0.0, confidence=confidence, seed=seed).run(500)
    assert world.speedup >= 1 / 1.01
    assert len(world.asked_steps) == 500, "a free drafter is asked again and again"
    before = world.num_verified
    world.run(500)
    assert world.num_verified == before, "nothing is verified any more"


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.15, 0.2])
def test_around_the_point_where_it_pays_it_is_not_slower(rate: float) -> None:
    assert World(lambda step: rate).run(1500).speedup >= 0.99


@pytest.mark.parametrize("rate", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("confidence", [0.5, 0.9])
def test_steady_acceptance_reaches_the_best_fixed_length(rate: float, confidence: float) -> None:
    worlds = [World(lambda step: rate, confidence=confidence, seed=seed).run(400) for seed in range(3)]
    speedup = sum(world.speedup for world in worlds) / len(worlds)
    assert speedup >= 0.95 * best_fixed_speedup(rate, StepCost(VERIFY_COST))


def test_a_text_that_turns_repetitive_and_back_is_followed() -> None:
    period = 60
    worlds = [World(lambda step: 0.95 if step // period % 2 else 0.0, seed=seed).run(6 * period) for seed in range(6)]

    def mean(values: list[list[float]], start: int, count: int) -> float:
        return sum(sum(v[start + period * at :][:count]) for v in values for at in (1, 3)) / (2 * count * len(values))

    tokens = [[float(count) for count in world.step_tokens] for world in worlds]
    times = [world.step_times for world in worlds]
    steady = mean(tokens, 30, 25)
    assert steady > 5
    assert mean(tokens, 0, 6) > 1.6, "within six steps it speculates"
    assert mean(tokens, 8, 8) > 0.6 * steady
    assert mean(times, period, 10) < 1.6 * VERIFY_COST[1], "within ten it has mostly stopped"
    assert mean(times, period + 20, 20) < 1.03 * VERIFY_COST[1]


def test_a_large_batch_of_linear_cost_is_not_even_asked_about() -> None:
    world = World(lambda step: 1.0, num_requests=32, cost=LINEAR).run(50)
    assert world.asked_steps == []
    assert world.speedup == pytest.approx(1.0)
    assert world.controller is not None
    assert world.controller._requests == {}, "and nothing is kept for it"
    assert world.controller.counts().zero_reason is ZeroReason.DOES_NOT_PAY


@pytest.mark.parametrize("num_requests", [2, 4, 8])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.95])
def test_batches_are_not_slower(num_requests: int, rate: float) -> None:
    world = World(lambda step: rate, num_requests=num_requests).run(400)
    assert world.speedup >= 0.985
    if rate == 0.95:
        assert world.speedup > 1.1


@pytest.mark.parametrize("draft_s", [(1.0, 0.5), (2.0, 4.0)])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_costly_drafter_that_does_not_pay_is_probed_rarely(draft_s: tuple[float, float], rate: float) -> None:
    world = World(lambda step: rate, confidence=0.7, draft_s=draft_s).run(2**MAX_BACKOFF)
    assert MAX_BACKOFF - 2 <= len(world.asked_steps) <= 3 * MAX_BACKOFF
    assert world.run(2000).speedup >= 1 / 1.02


def test_a_costly_drafter_that_could_not_pay_is_probed_as_rarely() -> None:
    world = World(lambda step: 1.0, draft_s=(0.0, 9.0)).run(2**MAX_BACKOFF + 9)
    assert MAX_BACKOFF - 2 <= len(world.asked_steps) <= MAX_BACKOFF + 2
    assert world.controller is not None
    assert world.controller.counts().zero_reason is ZeroReason.DOES_NOT_PAY
    assert world.run(2000).speedup >= 1 / 1.02


def test_a_costly_drafter_that_once_took_far_too_long_recovers() -> None:
    control = controller()
    control.observe_draft_cost("coin", 4, 2000.0)
    world = World(lambda step: 0.9, draft_s=(1.0, 0.5), controller=control).run(100)
    assert len(set(world.asked_steps) & set(range(50, 100))) >= 49


@pytest.mark.parametrize("batches", [(1, 4, 1), (4, 1, 4), (1, 2), (2,)])
def test_the_cost_of_drafting_holds_when_the_batch_changes(batches: tuple[int, ...]) -> None:
    control = controller()
    for count in batches:
        token_s = {1: 1.0, 2: 1.05, 4: 1.15}[count]
        world = World(lambda step: 0.9, num_requests=count, draft_s=(0.0, token_s), controller=control).run(300)
        assert len(world.asked_steps) >= 290
        assert world.speedup > 1.08


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
def test_a_costly_drafter_that_pays_gets_the_length_that_pays_best(rate: float) -> None:
    draft_s = (1.0, 0.5)
    worlds = [World(lambda step: rate, confidence=0.7, draft_s=draft_s, seed=seed).run(600) for seed in range(3)]
    speedup = sum(world.speedup for world in worlds) / len(worlds)
    assert speedup >= 0.95 * best_fixed_speedup(rate, StepCost(VERIFY_COST), draft_s)


def test_a_costly_drafter_recovers() -> None:
    world = World(lambda step: 0.05 if step < 500 else 0.9, confidence=0.7, draft_s=(1.0, 0.5)).run(
        500 + 2 * 2**MAX_BACKOFF
    )
    again = [step for step in world.asked_steps if step >= 500]
    assert len(again) > 20
    assert again[-20:] == list(range(again[-1] - 19, again[-1] + 1)), "asked at every step"
    assert sum(world.step_tokens[-20:]) > 40


def test_depths_that_were_given_up_are_tried_again_while_those_before_go_well() -> None:
    control = controller()
    for _ in range(60):
        control.observe(1, chain(2), None, [0, WRONG])
    assert limits(control, "d", False, [1], 1, 1) == [1]
    for _ in range(200):
        control.observe(1, chain(1), None, [0, 1])
    assert limits(control, "d", False, [1], 1, 1)[0] > 1


# Planted errors: what the simulations are for.


def test_a_controller_that_ignores_cost_is_found() -> None:
    careless = Controller(StepCost({1: 1.0, 64: 1.0 + 1e-6}), max_rows=256)
    careless.observe_step = lambda *arguments, **named: None  # type: ignore[method-assign]
    assert World(lambda step: 0.05, controller=careless).run(300).speedup < 0.9


def test_a_controller_that_learns_nothing_is_found() -> None:
    stubborn = controller()
    stubborn.observe = lambda *arguments: None  # type: ignore[method-assign]
    assert World(lambda step: 0.0, controller=stubborn).run(100).speedup < 0.7
    shy = controller()
    shy.observe = lambda *arguments: None  # type: ignore[method-assign]
    assert World(lambda step: 0.95, confidence=0.3, controller=shy).run(300).speedup < 2.0


def test_probes_without_backoff_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.speculate.spending.MAX_BACKOFF", 0)
    world = World(lambda step: 0.0, draft_s=(2.0, 4.0)).run(300)
    assert len(world.asked_steps) > 3 * MAX_BACKOFF
    assert world.speedup < 1 / 1.02


def test_it_follows_a_machine_whose_shape_is_not_what_was_measured() -> None:
    """Rows were measured far too cheap: once steps have shown it, drafts that do not pay are left."""
    rng = random.Random(3)
    control = controller({1: 7.0, 8: 7.4, 64: 9.0})
    worst = controller({1: 7.0, 8: 7.4, 64: 9.0})
    worst._cost.observe = lambda *arguments: 0.0  # type: ignore[method-assign]
    follows, ignores = (
        World(lambda step: 0.3 if rng.random() < 0.5 else 0.0, controller=c).run(1500) for c in (control, worst)
    )
    rate = [sum(w.step_tokens[-300:]) / sum(w.step_times[-300:]) * VERIFY_COST[1] for w in (follows, ignores)]
    assert rate[0] > rate[1]

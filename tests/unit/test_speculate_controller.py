"""How much to speculate: against all subsets of small drafts, and in simulations without a clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_world import VERIFY_COST, WRONG, World, best_fixed_speedup

from paceline.speculate.acceptance import Acceptance
from paceline.speculate.controller import HIGH_BREAK_EVEN, MIN_SHARE, NUM_WEAK, SMALL_BATCH, Controller
from paceline.speculate.cost import StepCost
from paceline.speculate.counts import DrafterCounts, SpeculationCounts, ZeroReason
from paceline.speculate.draft import Draft
from paceline.speculate.payoff import START_GAIN, STAY_GAIN, Payoff
from paceline.speculate.spending import MAX_BACKOFF

CHEAP = {1: 10.0, 9: 11.0}
LINEAR = {1: 1.0, 64: 64.0}


def controller(cost: dict[int, float] | None = None, *, max_rows: int = 256) -> Controller:
    return Controller(StepCost(cost or VERIFY_COST), max_rows=max_rows)


def limits(
    control: Controller, drafter: str, is_free: bool, ids: Sequence[int], num_rows: int, num_requests: int
) -> list[int]:
    """Of a step of its own."""
    control.begin_step(num_rows, num_requests, 256)
    return control.limits(drafter, is_free, ids)


def choose(
    control: Controller,
    ids: Sequence[int],
    drafts: Sequence[Draft | None],
    num_rows: int,
    num_requests: int,
    price_s: float = 0.0,
) -> list[Draft | None]:
    """Of a step of its own."""
    control.begin_step(num_rows, num_requests, 256)
    return control.choose("d", ids, drafts, spent_s=price_s, price_s=price_s)


def chain(length: int, confidence: float = 0.9, drafter: str = "d") -> Draft:
    return Draft.chain(range(length), [confidence] * length, drafter)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(1, 5))
    parents = tuple(draw(st.integers(0, node)) for node in range(size))
    confidence = tuple(draw(st.sampled_from([0.02, 0.3, 0.6, 0.85, 0.97])) for _ in range(size))
    return Draft(tuple(range(size)), parents, confidence, "d")


def best_rate(drafts: Sequence[Draft], cost: StepCost, num_rows: int, draft_s: float) -> tuple[float, float]:
    """The highest rate of all sets of nodes that hold their parents, and that of no nodes, by the definition."""
    p = Acceptance()
    requests = len(drafts)
    nodes = [(which, node) for which, draft in enumerate(drafts) for node in range(len(draft))]
    best = plain = requests / (cost.seconds(num_rows) + draft_s)
    for size in range(1, len(nodes) + 1):
        for subset in itertools.combinations(nodes, size):
            chosen = set(subset)
            if all(drafts[w].parents[n] == 0 or (w, drafts[w].parents[n] - 1) in chosen for w, n in subset):
                best = max(best, expected_rate(subset, drafts, p, cost, num_rows, draft_s))
    return best, plain


def most_drafting_s(drafts: Sequence[Draft], cost: StepCost, num_rows: int) -> float:
    """By bisection: the longest that drafting may take for the best nodes to be as fast as plain decoding without."""
    plain = len(drafts) / cost.seconds(num_rows)
    low, high = 0.0, 1000.0
    for _ in range(40):
        middle = (low + high) / 2
        subsets_rate = best_rate(drafts, cost, num_rows, middle)[0]
        low, high = (middle, high) if subsets_rate > plain else (low, middle)
    return low


def expected_rate(
    nodes: Sequence[tuple[int, int]],
    drafts: Sequence[Draft],
    acceptance: Acceptance,
    cost: StepCost,
    num_rows: int,
    draft_s: float,
) -> float:
    tokens = float(len(drafts))
    for which, node in nodes:
        draft = drafts[which]
        product = 1.0
        for depth, row in enumerate(draft.path(node + 1), 1):
            product *= acceptance.probability(draft.confidence[row - 1], depth)
        tokens += product
    return tokens / (cost.seconds(num_rows + len(nodes)) + draft_s)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(trees(), min_size=1, max_size=2),
    st.sampled_from([VERIFY_COST, CHEAP, LINEAR, {1: 1.0, 2: 1.9, 3: 2.0, 5: 2.1, 6: 4.0}]),
    st.sampled_from([0.0, 3.0]),
)
def test_what_is_chosen_has_the_best_rate_of_all_sets(
    drafts: list[Draft], table: dict[int, float], draft_s: float
) -> None:
    cost = StepCost(table)
    ids, num_rows = list(range(len(drafts))), len(drafts) + 1
    chosen = choose(Controller(cost, max_rows=64), ids, drafts, num_rows, len(drafts), draft_s)
    draft_s = min(draft_s, most_drafting_s(drafts, cost, num_rows))
    best, plain = best_rate(drafts, cost, num_rows, draft_s)
    nodes = [(w, token) for w, draft in enumerate(chosen) if draft is not None for token in draft.tokens]
    rate = expected_rate(nodes, drafts, Acceptance(), cost, num_rows, draft_s)
    if best < START_GAIN * plain * (1 - 1e-9):
        assert nodes == []
    elif best > START_GAIN * plain * (1 + 1e-9):
        assert rate >= best * (1 - 0.02), "only what is negligible may be left"
        assert nodes


def test_the_check_of_the_best_rate_finds_a_choice_that_is_not() -> None:
    draft, cost = chain(4, 0.85), StepCost(VERIFY_COST)
    best, _ = best_rate([draft], cost, 1, 0.0)
    assert expected_rate([(0, 0)], [draft], Acceptance(), cost, 1, 0.0) < 0.98 * best


def test_pruned_drafts_keep_what_belongs_to_their_nodes() -> None:
    tree = Draft((5, 6, 7, 8), (0, 0, 1, 2), (0.9, 0.02, 0.9, 0.02), "d")
    (chosen,) = choose(controller(), [1], [tree], 1, 1)
    assert chosen == tree.keep([0, 2])
    whole = chain(2, 0.97)
    assert choose(controller(CHEAP), [1], [whole], 1, 1)[0] is whole
    (short,) = choose(controller(), [1], [chain(64, 0.9)], 1, 1)
    assert short is not None
    assert short == chain(64, 0.9).keep(range(len(short)))
    assert 4 <= len(short) < 20


def test_it_takes_more_to_begin_than_to_go_on() -> None:
    table = {1: 1.0, 2: 1.45 / 1.035, 3: 9.0}  # a node of confidence 0.45 gains 3.5 %
    assert STAY_GAIN < 1.035 < START_GAIN
    control = controller(table)
    weak, strong = chain(1, 0.45), chain(1, 0.97)
    assert choose(control, [1], [weak], 1, 1) == [None]
    assert choose(control, [1], [strong], 1, 1) == [strong]
    assert choose(control, [1], [None], 1, 1) == [None], "no match is no reason to stop"
    assert choose(control, [1], [weak], 1, 1) == [weak]
    assert choose(control, [1], [chain(1, 0.04)], 1, 1) == [None]
    assert choose(control, [1], [weak], 1, 1) == [None]


def test_nodes_go_to_the_requests_that_use_them_best() -> None:
    control = controller()
    for _ in range(12):
        control.observe(1, chain(3), None, [WRONG])
        control.observe(2, chain(3), None, [0, 1, 2, WRONG])
    first, second = choose(control, [1, 2], [chain(8), chain(8)], 2, 2)
    assert first is None
    assert second is not None
    (new,) = choose(control, [3], [chain(8)], 1, 1)
    assert new is not None, "a new request begins with the average"
    assert len(new) < len(second)


@pytest.mark.parametrize(("num_rows", "num_requests"), [(1, 1), (4, 4), (9, 8), (32, 32), (100, 1)])
@pytest.mark.parametrize("table", [VERIFY_COST, CHEAP, LINEAR])
def test_free_drafters_are_asked_for_what_could_pay(table: dict[int, float], num_rows: int, num_requests: int) -> None:
    cost = StepCost(table)
    for gain in (START_GAIN, STAY_GAIN):
        pays = [
            k
            for k in range(1, min(64, 120 - num_rows) + 1)
            if (num_requests + k) / cost.seconds(num_rows + k) >= gain * num_requests / cost.seconds(num_rows)
        ]
        most = max(pays, default=0)
        share = most if num_requests <= SMALL_BATCH else min(most, max(MIN_SHARE, 2 * most // num_requests))
        control = Controller(cost, max_rows=120)
        control._is_on = gain == STAY_GAIN
        assert limits(control, "d", True, [7, 8], num_rows, num_requests) == [share] * 2


def test_requests_of_a_large_batch_whose_drafts_are_weak_are_asked_now_and_then_and_at_different_steps() -> None:
    control, ids = controller(), list(range(8))
    bounds = control._payoff.bounds(8, 8)
    assert bounds.break_even > HIGH_BREAK_EVEN
    asked = []
    for _ in range(40):
        lengths = limits(control, "d", True, ids, 8, 8)
        asked.append([which for which in ids if lengths[which]])
        if asked[-1]:
            control.choose("d", asked[-1], [chain(lengths[which], 0.3) for which in asked[-1]])
    assert asked[:NUM_WEAK] == [ids] * NUM_WEAK
    assert all(len(which) == 1 for which in asked[NUM_WEAK:])
    assert {which for (which,) in asked[NUM_WEAK:]} == set(ids)
    control.observe(3, chain(4, 0.3), None, [0])
    assert all(limits(control, "d", True, [3], 8, 8)[0] for _ in range(4)), "it was right: asked at every step"
    assert limits(control, "d", True, [5], 1, 1)[0] > 0, "and so is who is alone"


@pytest.mark.parametrize("num_requests", [4, 8])
def test_a_text_that_turns_repetitive_is_followed_in_large_batches(num_requests: int) -> None:
    def mean(start: int, count: int) -> float:
        tokens = [sum(world.step_tokens[start : start + count]) for world in worlds]
        return sum(tokens) / (len(worlds) * count * num_requests)

    worlds = [
        World(lambda step: 0.97 if step >= 100 else 0.05, num_requests=num_requests, seed=seed).run(160)
        for seed in range(4)
    ]
    assert mean(112, 8) > 1 + 0.5 * (mean(130, 30) - 1)


def test_the_break_even_probability_is_that_of_the_cheapest_rows() -> None:
    cost = StepCost(VERIFY_COST)
    for n, num_requests in ((1, 1), (4, 4), (16, 9)):
        nodes = {k: (cost.seconds(n + k) - cost.seconds(n)) / k for k in range(1, 33)}
        value = cost.seconds(n) / num_requests
        payoff = Payoff(cost, n + 32)
        assert payoff.bounds(n, num_requests).break_even == pytest.approx(min(nodes.values()) / value)
    assert Payoff(cost, 8).bounds(8, 8).break_even == math.inf


def test_room_bounds_what_is_asked_and_what_is_chosen() -> None:
    control = controller(CHEAP, max_rows=10)
    assert limits(control, "d", True, [1], 7, 1) == [3]
    (chosen,) = choose(control, [1], [chain(8, 0.97)], 7, 1)
    assert chosen is not None
    assert len(chosen) == 3
    assert limits(control, "d", True, [1], 10, 1) == [0]
    assert choose(control, [1], [chain(2, 0.97)], 10, 1) == [None]


# Learning


@settings(max_examples=60, deadline=None)
@given(trees(), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_every_node_whose_parents_agree_is_learnt(draft: Draft, tokens: list[int]) -> None:
    learnt = []

    class Recorder(Acceptance):
        def learn(self, confidence: float, depth: int, taken: bool, odds: float) -> float:
            learnt.append((confidence, depth, taken))
            return odds

    control = controller()
    control._drafter("d").acceptance = Recorder()
    control.observe(1, draft, None, tokens)
    expected = []
    for row in range(1, len(draft) + 1):
        path = [draft.tokens[at - 1] for at in draft.path(row)]
        if len(path) <= len(tokens) and path[:-1] == tokens[: len(path) - 1]:
            expected.append((draft.confidence[row - 1], len(path), path[-1] == tokens[len(path) - 1]))
    assert learnt == expected


@pytest.mark.parametrize("confidence", [0.3, 0.99])
def test_a_drafter_that_is_wrong_about_itself_is_learnt(confidence: float) -> None:
    world = World(lambda step: 0.3, confidence=confidence).run(400)
    assert world.controller is not None
    acceptance = world.controller._drafter("coin").acceptance
    assert acceptance.probability(confidence, 1) == pytest.approx(0.3, abs=0.12)


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


# Counts


@pytest.mark.parametrize("draft_s", [None, (1.0, 0.5)])
@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("rate", [0.0, 0.8])
def test_seconds_saved_are_those_of_plain_decoding_less_what_it_took(
    draft_s: tuple[float, float] | None, num_requests: int, rate: float
) -> None:
    world = World(lambda step: rate, num_requests=num_requests, draft_s=draft_s).run(150)
    assert world.controller is not None
    plain_s = world.tokens / num_requests * world.true_cost.seconds(num_requests)
    total = world.controller.counts()
    assert total.saved_s == pytest.approx(plain_s - world.elapsed_s, rel=1e-6, abs=1e-6)
    requests = [world.controller.finish(request) for request in range(num_requests)]
    assert sum(counts.saved_s for counts in requests) == pytest.approx(total.saved_s)
    assert sum(counts.draft_s for counts in requests) == pytest.approx(total.draft_s)
    assert total.proposed == world.num_verified == sum(counts.proposed for counts in requests)
    assert total.accepted == world.tokens - 150 * num_requests == sum(counts.accepted for counts in requests)


def test_counts_by_hand() -> None:
    control = controller()
    tree = Draft((0, 1, 2, 3), (0, 0, 1, 3), (0.9,) * 4, "tree")  # 0 -> 2 -> 3 and 1
    control.observe(1, tree, tree, [0, 2, WRONG])
    control.observe(1, chain(3), chain(2), [WRONG])
    control.observe(2, chain(3), chain(2), [0, 1, 2])
    control.observe(2, chain(3), None, [0])
    counts = control.counts()
    assert (counts.steps, counts.proposed, counts.accepted) == (3, 8, 4)
    assert (counts.position_proposed, counts.position_accepted) == ((3, 3, 1), (2, 2, 0))
    assert counts.mean_accepted_length == pytest.approx(1 + 4 / 3)
    assert counts.drafters == {"tree": DrafterCounts(1, 4, 2), "d": DrafterCounts(2, 4, 2)}
    assert control.finish(1).proposed == 6
    assert control.counts(1) == SpeculationCounts()
    assert control.counts(2).accepted == 2
    assert control.counts().proposed == 8
    assert SpeculationCounts().mean_accepted_length == 1.0


def test_reasons() -> None:
    control = controller(max_rows=8)
    assert control.counts().zero_reason is None
    assert limits(control, "d", True, [1], 1, 1) == [7]
    choose(control, [1, 2], [None, None], 2, 2)
    assert control.counts().zero_reason is control.counts(1).zero_reason is ZeroReason.NO_MATCH
    choose(control, [1, 2], [chain(2, 0.97), None], 2, 2)
    assert control.counts().zero_reason is control.counts(1).zero_reason is None
    assert control.counts(2).zero_reason is ZeroReason.NO_MATCH
    choose(control, [1, 2], [chain(2, 0.04), None], 2, 2)
    assert control.counts().zero_reason is control.counts(1).zero_reason is ZeroReason.ACCEPTANCE_TOO_LOW
    limits(control, "d", True, [1], 8, 1)
    assert control.counts().zero_reason is control.counts(1).zero_reason is ZeroReason.NO_ROOM
    control = controller(LINEAR)
    limits(control, "d", True, [1], 32, 32)
    assert control.counts(1).zero_reason is ZeroReason.DOES_NOT_PAY
    choose(control, [1], [chain(2, 0.97)], 32, 32)
    assert control.counts(1).zero_reason is ZeroReason.DOES_NOT_PAY


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

"""How much to speculate: against all subsets of small drafts, and what is asked for and learnt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_world import (
    CHEAP,
    LINEAR,
    VERIFY_COST,
    WRONG,
    World,
    chain,
    choose,
    controller,
    limits,
)

from paceline.speculate.acceptance import Acceptance
from paceline.speculate.controller import HIGH_BREAK_EVEN, MIN_SHARE, NUM_WEAK, SMALL_BATCH, Controller
from paceline.speculate.cost import StepCost
from paceline.speculate.draft import Draft
from paceline.speculate.payoff import START_GAIN, STAY_GAIN, Payoff, gains


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
    start_gain, _ = gains(len(drafts))
    if best < start_gain * plain * (1 - 1e-9):
        assert nodes == []
    elif best > start_gain * plain * (1 + 1e-9):
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
    for gain in gains(num_requests):
        pays = [
            k
            for k in range(1, min(64, 120 - num_rows) + 1)
            if (num_requests + k) / cost.seconds(num_rows + k) >= gain * num_requests / cost.seconds(num_rows)
        ]
        most = max(pays, default=0)
        share = most if num_requests <= SMALL_BATCH else min(most, max(MIN_SHARE, 2 * most // num_requests))
        control = Controller(cost, max_rows=120)
        control._is_on = gain == gains(num_requests)[1]
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

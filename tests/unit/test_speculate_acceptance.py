"""Probabilities of drafted tokens and costs of drafting, on outcomes of known law."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculate.acceptance import BOUNDS, CENTRES, MOST, NEGLIGIBLE, Acceptance
from paceline.speculate.draft import Draft
from paceline.speculate.spending import MAX_BACKOFF, DraftCost, Probing


def test_what_is_not_known_is_what_the_drafter_says() -> None:
    acceptance = Acceptance()
    for low, high, centre in zip((0.0, *BOUNDS), (*BOUNDS, 1.0), CENTRES, strict=True):
        assert low < centre < high
        assert acceptance.probability(centre, 3) == pytest.approx(min(centre, MOST), abs=0.03)


def flips(acceptance: Acceptance, rate: float, count: int, *, confidence: float = 0.9, odds: float = 1.0) -> float:
    rng = random.Random(7)
    for _ in range(count):
        odds = acceptance.learn(confidence, 1, rng.random() < rate, odds)
    return odds


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.7, 0.95])
def test_a_bucket_learns_its_rate_and_no_other_does(rate: float) -> None:
    acceptance = Acceptance()
    flips(acceptance, rate, 500)
    assert acceptance.probability(0.9, 2) == pytest.approx(rate, abs=0.1)
    assert acceptance.probability(0.5, 2) == Acceptance().probability(0.5, 2)


def test_depths_that_do_worse_are_learnt() -> None:
    acceptance, rng = Acceptance(), random.Random(3)
    for _ in range(600):
        acceptance.learn(0.9, 1, rng.random() < 0.9, 1.0)
        acceptance.learn(0.9, 2, rng.random() < 0.4, 1.0)
    assert acceptance.probability(0.9, 1) - acceptance.probability(0.9, 2) > 0.3


def test_a_request_differs_at_once_and_the_average_later() -> None:
    acceptance = Acceptance()
    flips(acceptance, 0.8, 300)
    odds = flips(acceptance, 0.0, 4)
    assert acceptance.probability(0.9, 1, odds) < 0.4
    assert acceptance.probability(0.9, 1) > 0.6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(0.001, 1.0)), min_size=1, max_size=20),
    st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 20), st.booleans()), max_size=60),
    st.floats(0.01, 100.0),
)
def test_reach_is_the_product_along_the_path_and_falls(
    nodes: list[tuple[int, float]], outcomes: list[tuple[float, int, bool]], odds: float
) -> None:
    acceptance = Acceptance()
    for confidence, depth, taken in outcomes:
        acceptance.learn(confidence, depth, taken, 1.0)
    parents = tuple(parent % (node + 1) for node, (parent, _) in enumerate(nodes))
    draft = Draft(tuple(range(len(nodes))), parents, tuple(c for _, c in nodes), "d")
    reach = acceptance.reach(draft, odds)
    for row in range(1, len(draft) + 1):
        product, before = 1.0, 1.0
        for depth, at in enumerate(draft.path(row), 1):
            before = product
            product *= acceptance.probability(draft.confidence[at - 1], depth, odds)
        assert reach[row - 1] == pytest.approx(product if before >= NEGLIGIBLE else 0.0)
        parent = draft.parents[row - 1]
        assert parent == 0 or reach[row - 1] < reach[parent - 1] or reach[row - 1] == 0.0


def test_a_chain_that_is_not_drafted_yet_has_the_acceptance_of_its_depths() -> None:
    acceptance, rng = Acceptance(), random.Random(5)
    assert acceptance.chain(3, 1.0) == pytest.approx([0.7, 0.49, 0.343])
    for _ in range(400):
        if acceptance.learn(0.5, 1, rng.random() < 0.8, 1.0):
            acceptance.learn(0.5, 2, rng.random() < 0.3, 1.0)
    first, second, third = acceptance.chain(3, 1.0)
    assert first == pytest.approx(0.8, abs=0.1)
    assert second / first == pytest.approx(0.3, abs=0.12)
    assert third / second == pytest.approx(second / first, abs=0.01), "what is not known is like the depth before"
    for _ in range(400):
        acceptance.fade(2)
    assert acceptance.chain(2, 1.0)[1] == pytest.approx(first * first, abs=0.02)


def test_age_halves_the_weight_but_keeps_some() -> None:
    acceptance = Acceptance()
    flips(acceptance, 0.0, 300)
    known = acceptance.chain(1, 1.0)[0]
    for _ in range(50):
        acceptance.age()
    aged = acceptance.chain(1, 1.0)[0] if acceptance.chain(1, 1.0) else 0.0
    assert known < aged < 0.2
    flips(acceptance, 1.0, 8)
    assert acceptance.chain(1, 1.0)[0] > 0.4


def test_draft_cost_is_a_line() -> None:
    cost = DraftCost()
    for index in range(60):
        length = 1 + index % 8
        cost.observe(length, 2.0 + 0.5 * length)
    assert (cost.fixed_s, cost.per_token_s) == pytest.approx((2.0, 0.5), rel=0.02)
    for index in range(200):
        length = 1 + index % 8
        cost.observe(length, 4.0 + 1.0 * length)
    assert (cost.fixed_s, cost.per_token_s) == pytest.approx((4.0, 1.0), rel=0.02)


def test_draft_cost_of_one_length_is_per_token_and_never_negative() -> None:
    cost = DraftCost()
    cost.observe(4, 8.0)
    assert (cost.fixed_s, cost.per_token_s) == pytest.approx((0.0, 2.0))
    for length in (1, 8):
        cost.observe(length, 10.0 - length)
    assert cost.per_token_s >= 0.0
    assert cost.fixed_s >= 0.0


def test_a_draft_cost_that_was_not_seen_for_long_is_soon_another() -> None:
    cost = DraftCost()
    cost.age()
    for _ in range(50):
        cost.observe(4, 4000.0)
    for _ in range(4):
        cost.age()
        cost.observe(1, 2.0)
    assert cost.fixed_s + cost.per_token_s < 20.0


def due_steps(num_steps: int, went_well: list[bool]) -> list[int]:
    probing, due = Probing(), []
    for step in range(num_steps):
        if probing.is_due():
            due.append(step)
            probing.outcome(went_well.pop(0) if went_well else False)
    return due


def test_gaps_between_probes_double_up_to_their_largest() -> None:
    due = due_steps(5 * 2**MAX_BACKOFF, [])
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert gaps == [min(2 ** (at + 1), 2**MAX_BACKOFF) for at in range(len(gaps))]


def test_a_probe_that_went_well_is_followed_by_another_and_pays_begins_anew() -> None:
    assert due_steps(20, [False, True, True, False]) == [0, 2, 3, 4, 8, 16]
    probing = Probing()
    for _ in range(100):
        probing.is_due()
    probing.pays()
    assert [probing.is_due() for _ in range(4)] == [True, False, True, False]
    probing = Probing()
    due = []
    for step in range(20):
        if probing.is_due(too_dear=True):
            due.append(step)
            probing.outcome(True)
    assert due == [0, 2, 6, 14], "as rarely as if it went badly"

"""What speculation counts and charges: tokens, seconds saved, and why nothing was verified."""

from __future__ import annotations

import numpy as np
import pytest
from speculation_world import (
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
from paceline.speculate.cost import StepCost
from paceline.speculate.counts import DrafterCounts, SpeculationCounts, ZeroReason
from paceline.speculate.draft import Draft

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


# The books of a step


def test_what_a_step_beside_a_prompt_gains_is_charged_by_the_table() -> None:
    control, cost = controller(), StepCost(VERIFY_COST)
    control.begin_step(41, 1, 99)
    (draft,) = control.choose("d", [0], [chain(4, 0.99)], spent_s=5.0, price_s=5.0)
    assert draft is not None
    for _ in range(2):  # the second is a step of prompts alone, which nobody drafted for
        control.observe_step(45, 100, 1e9, teaches=False)
    control.observe(0, draft, draft, [0, 1, 2, 3, WRONG])
    saved_s = 4 * cost.seconds(1) - (cost.seconds(45) - cost.seconds(41)) - 5.0
    assert control.counts(0).saved_s == control.counts().saved_s == pytest.approx(saved_s)
    assert control.counts(0).draft_s == control.counts().draft_s == 5.0
    assert control._cost.drift == 1.0


def test_a_step_of_nobody_charges_nobody() -> None:
    control = controller()
    draft = choose(control, [0], [chain(4, 0.99)], 1, 1)[0]
    assert draft is not None
    control.observe_step(1 + len(draft), 100, StepCost(VERIFY_COST).seconds(1 + len(draft)))
    before = control.counts().saved_s
    limits(control, "d", True, [0], 40, 40)
    control.observe_step(40, 100, 61.0)
    assert control.counts().saved_s == before


def test_two_drafters_share_a_step() -> None:
    control, cost = controller(), StepCost(VERIFY_COST)
    control.begin_step(1, 2, 99)
    (first,) = control.choose("d", [0], [chain(4, 0.99)], spent_s=5.0, price_s=0.0)
    assert first is not None
    (second,) = control.choose("e", [1], [chain(1, 0.02, "e")], spent_s=2.0, price_s=2.0)
    assert second is None
    control.observe_step(1 + len(first), 10, 14.0)
    control.observe(0, first, first, [WRONG])
    longer_s = 14.0 - cost.seconds(1)
    assert control.counts(0).saved_s == pytest.approx(-5.0 - longer_s)
    assert control.counts(1).saved_s == pytest.approx(-2.0)
    assert control.counts().saved_s == pytest.approx(-7.0 - longer_s)
    assert control.counts().zero_reason is control.counts(0).zero_reason is None
    assert control.counts(1).zero_reason is ZeroReason.ACCEPTANCE_TOO_LOW


def test_a_second_drafters_nodes_are_compared_with_what_the_first_gives() -> None:
    weak = chain(1, 0.2, "e")
    control = controller()
    choose(control, [0], [chain(15, 0.99)], 2, 2)  # it goes on
    control.begin_step(16, 2, 99)
    (alone,) = control.choose("e", [1], [weak], spent_s=0.0, price_s=0.0)
    assert alone is weak
    control = controller()
    control.begin_step(2, 2, 99)
    (first,) = control.choose("d", [0], [chain(15, 0.99)], spent_s=0.0, price_s=0.0)
    assert first is not None
    assert len(first) == 14
    assert control.choose("e", [1], [weak], spent_s=0.0, price_s=0.0) == [None]


def test_drafting_that_took_long_makes_no_token_worth_more_than_in_plain_decoding() -> None:
    draft, cost = chain(8, 0.25), StepCost(VERIFY_COST)
    reach = Acceptance().reach(draft, 1.0)
    for price_s in (0.0, 5.0, 20.0, 1000.0):
        (chosen,) = choose(controller(), [0], [draft], 1, 1, price_s)
        assert chosen is not None
        last = len(chosen)
        assert reach[last - 1] * cost.seconds(1) >= cost.seconds(1 + last) - cost.seconds(last)


def test_drawn_drafts_are_taken_whole() -> None:
    q = np.full(4, 0.25)
    drawn = Draft.chain([1, 2, 3], [0.02] * 3, "d", [q] * 3)
    chosen = choose(controller(), [1, 2], [drawn, chain(2, 0.02)], 2, 2)
    assert chosen[0] is drawn
    assert chosen[1] is None

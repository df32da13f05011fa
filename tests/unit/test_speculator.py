"""How the drafts of a step come about: who is asked, for how much, what it costs, and who learns from the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from draft_contexts import FakeContext
from hypothesis import given
from hypothesis import strategies as st
from speculation_world import VERIFY_COST, WRONG

from paceline.speculate.controller import Controller
from paceline.speculate.cost import StepCost
from paceline.speculate.counts import ZeroReason
from paceline.speculate.draft import Context, Draft
from paceline.speculate.policy import FixedPolicy
from paceline.speculate.speculator import Speculator, shared

VOCAB = 2 * WRONG


@dataclass
class Scripted:
    """A drafter whose drafts are a function of the request and the limit; it takes ``cost_s`` a token on ``clock``."""

    name: str
    make: Callable[[Context, int], Draft | None]
    is_free: bool = True
    cost_s: float = 0.0
    now: list[float] = field(default_factory=lambda: [0.0])
    catch_up_s: float = 0.0
    asked: list[list[int]] = field(default_factory=list)

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """By the script."""
        self.asked.append(list(limits))
        drafts = [self.make(context, limit) for context, limit in zip(contexts, limits, strict=True)]
        self.now[0] += self.catch_up_s + self.cost_s * max((len(draft) for draft in drafts if draft), default=0)
        return drafts

    def finish(self, context: Context) -> None:
        """Keeps nothing."""


def truth(position: int) -> int:
    return position % 97


def right_for(name: str, most: int, confidence: float) -> Callable[[Context, int], Draft]:
    """Drafts of which the first ``most`` tokens are right."""

    def make(context: Context, limit: int) -> Draft:
        begin, length = len(context.tokens), min(limit, 16)
        tokens = [truth(begin + k) if k < most else WRONG for k in range(length)]
        return Draft.chain(tokens, [confidence] * length, name)

    return make


def decode(speculator: Speculator, context: FakeContext, num_steps: int, now: list[float]) -> float:
    """Runs steps of one request; returns the speed over plain decoding's."""
    cost = StepCost(VERIFY_COST)
    since, before = now[0], len(context.tokens)
    for _ in range(num_steps):
        (draft,) = speculator.propose([context], num_rows=1, room=64)
        rows = 1 + (0 if draft is None else len(draft))
        tokens: list[int] = []
        for token in () if draft is None else draft.tokens:
            if token != truth(len(context.tokens) + len(tokens)):
                break
            tokens.append(token)
        tokens.append(truth(len(context.tokens) + len(tokens)))
        context.tokens += tokens
        now[0] += cost.seconds(rows)
        speculator.observe(context, draft, tokens)
        speculator.observe_step(rows, len(context.tokens), cost.seconds(rows))
    return (len(context.tokens) - before) * cost.seconds(1) / (now[0] - since)


def test_a_free_drafter_learns_while_the_one_behind_it_is_used() -> None:
    now, most = [0.0], [0]
    free = Scripted("free", lambda context, limit: right_for("free", most[0], 0.6)(context, limit), now=now)
    model = Scripted("model", right_for("model", 2, 0.9), is_free=False, cost_s=0.5, now=now)
    policy = Controller(StepCost(VERIFY_COST), max_rows=256)
    speculator = Speculator([free, model], policy, vocab_size=VOCAB, clock=lambda: now[0])
    context = FakeContext([0])
    decode(speculator, context, 300, now)
    assert policy.counts().drafters["model"].steps > 200
    most[0] = 16
    assert decode(speculator, context, 400, now) > 4.0
    assert policy.counts().drafters["free"].steps > 350


def test_each_proposal_is_compared_with_the_tokens_and_only_what_ran_counts_as_verified() -> None:
    seen: list[tuple[str, str | None]] = []

    class Second(FixedPolicy):
        """Verifies the second drafter's."""

        def choose(
            self,
            drafter: str,
            request_ids: Sequence[int],
            drafts: Sequence[Draft | None],
            *,
            spent_s: float,
            price_s: float,
        ) -> list[Draft | None]:
            return [draft if draft is not None and draft.drafter == "b" else None for draft in drafts]

        def observe(self, request_id: int, proposed: Draft, verified: Draft | None, tokens: Sequence[int]) -> None:
            seen.append((proposed.drafter, None if verified is None else verified.drafter))

    policy = Second(4)
    drafters = [Scripted(name, right_for(name, 1, 0.5)) for name in "ab"]
    speculator = Speculator(drafters, policy, vocab_size=VOCAB)
    context = FakeContext([0])
    (draft,) = speculator.propose([context], num_rows=1, room=9)
    speculator.observe(context, draft, [1, 5])
    speculator.observe(context, None, [1, 5])
    assert seen == [("a", None), ("b", "b")]


def test_catching_up_is_no_price_of_a_draft() -> None:
    now = [0.0]
    model = Scripted("model", right_for("model", 16, 0.9), is_free=False, cost_s=0.5, now=now)
    policy = Controller(StepCost(VERIFY_COST), max_rows=256)
    speculator = Speculator([model], policy, vocab_size=VOCAB, clock=lambda: now[0])
    model.catch_up_s = 500.0
    (draft,) = speculator.propose([FakeContext([0])], num_rows=1, room=64)
    assert draft is not None
    cost = policy._drafter("model").cost
    assert cost.fixed_s + cost.per_token_s * len(draft) < 10.0
    model.catch_up_s = 0.0
    assert decode(speculator, FakeContext([0], request_id=1), 50, now) > 2.0
    assert speculator.draft_s > 500.0, "but it was spent"


def test_what_costs_time_is_not_drafted_beyond_the_room() -> None:
    contexts = [FakeContext([0], request_id=at, max_tokens=4 if at == 0 else 99) for at in range(6)]
    for is_free, limits in ((False, [1, 1, 2, 2, 2, 2]), (True, [2, 8, 8, 8, 8, 8])):
        drafter = Scripted("d", right_for("d", 16, 0.9), is_free=is_free)
        speculator = Speculator([drafter], FixedPolicy(8), vocab_size=VOCAB)
        drafts = speculator.propose(contexts, num_rows=6, room=10)
        assert drafter.asked == [limits]
        assert sum(len(draft) for draft in drafts if draft is not None) == 10


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 40))
def test_sharing_a_room_gives_it_out_evenly(limits: list[int], room: int) -> None:
    shares = shared(limits, room)
    assert sum(shares) == min(room, sum(limits))
    assert all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    cut = [share for share, limit in zip(shares, limits, strict=True) if share < limit]
    assert not cut or max(shares) <= min(cut) + 1


def failing(at: set[int]) -> tuple[Speculator, list[int]]:
    """A drafter that fails when it is asked for the n-th time, n in ``at``; and the steps in which it was asked."""
    steps: list[int] = []

    def make(context: Context, limit: int) -> Draft | None:
        steps.append(speculator._num_steps)
        if len(steps) in at:
            raise ZeroDivisionError("a bug")
        return Draft.chain([1], [0.9], "d")

    speculator = Speculator([Scripted("d", make)], FixedPolicy(8), vocab_size=VOCAB)
    for _ in range(12):
        speculator.propose([FakeContext([0])], num_rows=1, room=9)
        speculator.finish(FakeContext([0], request_id=1))  # that this goes well says nothing of its drafts
    return speculator, steps


def test_a_drafter_that_fails_is_tried_again_and_three_times_in_a_row_is_enough() -> None:
    speculator, steps = failing({1, 2})
    assert steps == [1, 3, 7, 8, 9, 10, 11, 12]
    assert speculator.name == "d"
    assert speculator.counts().failure == "d: ZeroDivisionError('a bug')" == speculator.counts().document()["failure"]
    assert speculator.path() == {"speculation": "d", "speculation_failure": "d: ZeroDivisionError('a bug')"}
    speculator, steps = failing({1, 3, 4, 6})
    assert steps == [1, 3, 4, 6, 10, 11], "what went well in between counts"
    assert speculator.name == "d"
    speculator, steps = failing({1, 2, 3})
    assert steps == [1, 3, 7]
    assert speculator.name == "off"
    assert speculator.path() == {"speculation": "off", "speculation_failure": "d: ZeroDivisionError('a bug')"}
    nobody = Speculator([], FixedPolicy(1), vocab_size=9)
    assert nobody.counts().failure is None
    assert nobody.path() == {"speculation": "off"}


def test_drawn_drafts_are_charged_and_credited_like_others() -> None:
    now, cost, q = [0.0], StepCost(VERIFY_COST), np.full(VOCAB, 1 / VOCAB)

    def make(context: Context, limit: int) -> Draft:
        return Draft.chain([1] * limit, [0.05] * limit, "model", [q] * limit)

    model = Scripted("model", make, is_free=False, cost_s=1.0, now=now, catch_up_s=0.5)
    policy = Controller(cost, max_rows=256)
    speculator = Speculator([model], policy, vocab_size=VOCAB, clock=lambda: now[0])
    context = FakeContext([0])
    for _ in range(30):
        (draft,) = speculator.propose([context], num_rows=1, room=60)
        assert draft is None or len(draft) == model.asked[-1][0], "all of it or nothing"
        num_nodes = 0 if draft is None else len(draft)
        now[0] += cost.seconds(1 + num_nodes)
        tokens = [1] * num_nodes + [2]
        context.tokens += tokens
        speculator.observe_step(1 + num_nodes, 10, cost.seconds(1 + num_nodes))
        speculator.observe(context, draft, tokens)
    counts = policy.counts()
    assert counts.proposed > 20
    assert counts.draft_s == pytest.approx(speculator.draft_s)
    assert counts.saved_s == pytest.approx((len(context.tokens) - 1) * cost.seconds(1) - now[0], abs=1e-6)


def test_no_match_is_a_reason_and_a_drafter_behind_changes_none() -> None:
    policy = Controller(StepCost(VERIFY_COST), max_rows=256)
    nothing = Scripted("nothing", lambda context, limit: None)
    speculator = Speculator([nothing], policy, vocab_size=VOCAB)
    speculator.propose([FakeContext([0])], num_rows=1, room=9)
    assert speculator.finish(FakeContext([0])).zero_reason is ZeroReason.NO_MATCH
    sure = Scripted("sure", right_for("sure", 9, 0.99))
    model = Scripted("model", lambda context, limit: None, is_free=False)
    speculator = Speculator([sure, model], policy, vocab_size=VOCAB)
    assert speculator.propose([FakeContext([0])], num_rows=1, room=9) != [None]
    assert model.asked == []
    assert policy.counts().zero_reason is None

"""How the drafts of a step come about: who is asked, for how much, what it costs, and who learns from the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_contexts import FakeContext
from speculation_world import VERIFY_COST, WRONG

from paceline.speculate.controller import Controller
from paceline.speculate.cost import StepCost
from paceline.speculate.draft import Context, Draft
from paceline.speculate.policy import FixedPolicy
from paceline.speculate.speculator import Speculator

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

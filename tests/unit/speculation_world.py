"""A machine that is a table and a text that is coin flips, to run the controller against: no model and no clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.speculate.controller import Controller
from paceline.speculate.cost import StepCost
from paceline.speculate.draft import Draft

VERIFY_COST = {
    1: 7.0,
    2: 7.5,
    3: 8.3,
    4: 9.0,
    6: 11.7,
    8: 14.4,
    12: 19.3,
    16: 24.8,
    24: 37.0,
    32: 48.6,
    48: 73.0,
    64: 97.0,
}
"""Milliseconds of a pass of a small model on two cores."""

CHEAP = {1: 10.0, 9: 11.0}
LINEAR = {1: 1.0, 64: 64.0}

WRONG = 10**6
"""A token that no draft holds."""


@dataclass
class World:
    """Requests that are drafted for chains of which each token is right with probability ``rate(step)``, whatever
    ``confidence`` says.

    draft_s   fixed part of a drafter's time and part per token of the longest draft; None: a free one
    """

    rate: Callable[[int], float]
    confidence: float = 0.9
    num_requests: int = 1
    draft_s: tuple[float, float] | None = None
    cost: dict[int, float] = field(default_factory=lambda: dict(VERIFY_COST))
    controller: Controller | None = None
    seed: int = 1
    tokens: int = 0
    elapsed_s: float = 0.0
    num_drafted: int = 0
    num_verified: int = 0
    asked_steps: list[int] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.true_cost = StepCost(self.cost)
        self.controller = self.controller or Controller(StepCost(self.cost), max_rows=256)
        self._rng = random.Random(self.seed)

    @property
    def speedup(self) -> float:
        """Of all steps so far over plain decoding."""
        return self.tokens * self.true_cost.seconds(self.num_requests) / (self.num_requests * self.elapsed_s)

    def run(self, num_steps: int) -> World:
        for _ in range(num_steps):
            self._step(len(self.step_times))
        return self

    def _step(self, step: int) -> None:
        controller, count = self.controller, self.num_requests
        assert controller is not None
        ids = list(range(count))
        controller.begin_step(count, count, 256)
        limits = controller.limits("coin", self.draft_s is None, ids)
        drafts = [
            Draft.chain(range(limit), [self.confidence] * limit, "coin") if limit > 0 else None for limit in limits
        ]
        draft_s = 0.0
        num_drafted = sum(limits)
        chosen: Sequence[Draft | None] = drafts
        if num_drafted:
            self.asked_steps.append(step)
            if self.draft_s is not None:
                draft_s = self.draft_s[0] + self.draft_s[1] * max(limits)
                controller.observe_draft_cost("coin", max(limits), draft_s)
            chosen = controller.choose("coin", ids, drafts, spent_s=draft_s, price_s=draft_s)
        num_rows = count + sum(len(draft) for draft in chosen if draft is not None)
        elapsed_s = self.true_cost.seconds(num_rows)
        produced = 0
        for request, draft, verified in zip(ids, drafts, chosen, strict=True):
            if draft is None:
                produced += 1
                continue
            right = 0
            while right < len(draft) and self._rng.random() < self.rate(step):
                right += 1
            accepted = min(right, 0 if verified is None else len(verified))
            tokens = [*draft.tokens[:accepted], draft.tokens[accepted] if accepted < right else WRONG]
            controller.observe(request, draft, verified, tokens)
            produced += len(tokens)
        controller.observe_step(num_rows, 100 * count, elapsed_s)
        self.num_drafted += num_drafted
        self.num_verified += num_rows - count
        self.tokens += produced
        self.elapsed_s += elapsed_s + draft_s
        self.step_tokens.append(produced)
        self.step_times.append(elapsed_s + draft_s)


def best_fixed_speedup(rate: float, cost: StepCost, draft_s: tuple[float, float] = (0.0, 0.0)) -> float:
    """The most that one request gains by drafts of one length, 0 included, if each token is right with ``rate``."""

    def speedup(length: int) -> float:
        tokens = sum(rate**i for i in range(length + 1))
        drafting_s = draft_s[0] + draft_s[1] * length if length else 0.0
        return tokens * cost.seconds(1) / (cost.seconds(1 + length) + drafting_s)

    return max(speedup(length) for length in range(65))


def controller(cost: dict[int, float] | None = None, *, max_rows: int = 256) -> Controller:
    """One that knows nothing but costs."""
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
    """Of tokens 0, 1, ..."""
    return Draft.chain(range(length), [confidence] * length, drafter)

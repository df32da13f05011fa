"""Gives the requests of a step their drafts: asks the drafters, lets a policy choose, learns from the outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from paceline.sampling.constraint import Constraint
from paceline.speculate.counts import SpeculationCounts
from paceline.speculate.draft import MAX_NODES, Context, Draft, Drafter, NeedsStructure
from paceline.speculate.hidden import HiddenObserver, HiddenRows
from paceline.speculate.policy import Policy

_T = TypeVar("_T")

MAX_FAILURES = 3
"""In a row, after which a drafter is not asked again."""


class Speculator:
    """Drafters in the order in which they are asked, and the policy that they share.

    A request whose draft of one drafter does not pay is offered to the next. A drafter that raises is left
    alone for 2, then 4 steps, and is gone when it fails ``MAX_FAILURES`` times in a row; ``failure`` tells what
    happened last. Whatever drafters propose, only sound drafts come out of ``propose``.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        policy: Policy,
        *,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafters = list(drafters)
        # Found once: to ask a protocol takes 50 µs, at every step as much as all else here.
        self._observers = [(drafter, drafter) for drafter in drafters if isinstance(drafter, HiddenObserver)]
        self._for_structures = [drafter.name for drafter in drafters if isinstance(drafter, NeedsStructure)]
        self.policy = policy
        self.failure: str | None = None
        self.draft_s = 0.0
        self._vocab_size = vocab_size
        self._clock = clock
        self._num_steps = 0
        self._failures: dict[str, int] = {}  # in a row, by drafter
        self._wakes: dict[str, int] = {}  # step from which a drafter that failed is asked again
        self._proposed: dict[int, list[Draft]] = {}  # of the step under way, by request

    @property
    def name(self) -> str:
        """The drafters, in order."""
        return "+".join(drafter.name for drafter in self.drafters) or "off"

    def path(self) -> dict[str, str]:
        """Who drafts, and what a drafter raised last, where one did: it may be one that is gone."""
        failure = self.failure
        return {"speculation": self.name} | ({} if failure is None else {"speculation_failure": failure})

    def propose(self, contexts: Sequence[Context], *, num_rows: int, room: int) -> list[Draft | None]:
        """For each decoding request what is to be verified with its next row, or None.

        ``num_rows`` are computed in the step anyway; ``room`` is how many more there may be.
        """
        self._proposed.clear()
        self._num_steps += 1
        chosen: list[Draft | None] = [None] * len(contexts)
        self.policy.begin_step(num_rows, len(contexts), room)
        for drafter in list(self.drafters):
            if self._num_steps < self._wakes.get(drafter.name, 0):
                continue
            open_ = [context for context, draft in zip(contexts, chosen, strict=True) if draft is None]
            if not open_:
                break
            if drafter.name in self._for_structures:
                open_ = [context for context in open_ if context.constraint is not None]
                if not open_:
                    continue
            limits = self._limits(drafter, open_, room)
            asked = [context for context, limit in zip(open_, limits, strict=True) if limit > 0]
            if not asked:
                continue
            ids = [context.request_id for context in asked]
            drafts, spent_s, catch_up_s = self._ask(drafter, asked, [limit for limit in limits if limit > 0])
            price_s = 0.0 if drafter.is_free else max(0.0, spent_s - catch_up_s)
            picked = self.policy.choose(drafter.name, ids, drafts, spent_s=spent_s, price_s=price_s)
            picks: dict[int, Draft] = {}
            for request_id, draft, pick in zip(ids, drafts, picked, strict=True):
                if draft is not None:
                    self._proposed.setdefault(request_id, []).append(draft)
                if pick is not None and len(pick) > room:
                    pick = pick.keep(range(room)) if room else None
                if pick is not None:
                    picks[request_id] = pick
                    room -= len(pick)
            chosen = [draft or picks.get(context.request_id) for draft, context in zip(chosen, contexts, strict=True)]
        return chosen

    def _limits(self, drafter: Drafter, contexts: Sequence[Context], room: int) -> list[int]:
        """How many tokens are worth asking for, for each request. What costs time is not drafted beyond the room."""
        ids = [context.request_id for context in contexts]
        limits = [
            max(0, min(limit, room, MAX_NODES, context.max_tokens - len(context.tokens) - 1))
            for context, limit in zip(contexts, self.policy.limits(drafter.name, drafter.is_free, ids), strict=True)
        ]
        return limits if drafter.is_free else shared(limits, room)

    def observe(self, context: Context, verified: Draft | None, tokens: Sequence[int]) -> None:
        """Learns from the ``tokens`` that a request got in a step in which ``verified`` was its draft.

        All that was proposed for it is compared with them, also by a drafter whose draft did not pay.
        """
        for proposed in self._proposed.pop(context.request_id, ()):
            ran = verified if verified is not None and verified.drafter == proposed.drafter else None
            self.policy.observe(context.request_id, proposed, ran, tokens)

    def observe_step(self, num_rows: int, num_tokens_attended: int, elapsed_s: float, *, teaches: bool = True) -> None:
        """Learns what a step took, every one; see ``Policy``."""
        self.policy.observe_step(num_rows, num_tokens_attended, elapsed_s, teaches=teaches)

    @property
    def observes_hidden(self) -> bool:
        """Whether some drafter wants to know hidden states."""
        return bool(self._observers)

    def observe_hidden(self, step: Sequence[HiddenRows]) -> None:
        """Tells drafters the hidden states that a step left; see ``HiddenObserver``."""
        for drafter, observer in self._observers:
            if drafter in self.drafters:
                self._guard(drafter, partial(observer.observe_hidden, step))

    def finish(self, context: Context) -> SpeculationCounts:
        """Forgets a request that has ended, but for what its output teaches; returns what became of its drafts."""
        self._proposed.pop(context.request_id, None)
        counts = self.policy.finish(context.request_id)
        for drafter in list(self.drafters):
            self._guard(drafter, partial(drafter.finish, context))
        return counts

    def counts(self) -> SpeculationCounts:
        """What became of all drafts. May be called from another thread."""
        return replace(self.policy.counts(), failure=self.failure)

    def _ask(
        self, drafter: Drafter, contexts: list[Context], limits: list[int]
    ) -> tuple[list[Draft | None], float, float]:
        """Sound drafts, the seconds that they took, and those of them that the drafter spent on catching up."""
        since_s = self._clock()
        answered = self._guard(drafter, lambda: self._sound_drafts(drafter.propose(contexts, limits), contexts, limits))
        if answered is not None:
            self._failures[drafter.name] = 0
        drafts: list[Draft | None] = answered if answered is not None else [None] * len(contexts)
        spent_s = self._clock() - since_s
        self.draft_s += spent_s
        longest = max([len(draft) for draft in drafts if draft is not None], default=0)
        if longest and not drafter.is_free:
            self.policy.observe_draft_cost(drafter.name, longest, max(0.0, spent_s - drafter.catch_up_s))
        return drafts, spent_s, drafter.catch_up_s

    def _sound_drafts(
        self, drafts: Sequence[Draft | None], contexts: Sequence[Context], limits: Sequence[int]
    ) -> list[Draft | None]:
        """What of a drafter's answer can be verified. Raises where it is no answer."""
        sound = [
            None if draft is None else self._sound(draft, limit, context)
            for draft, limit, context in zip(drafts, limits, contexts, strict=True)
        ]
        return [
            draft if draft is None or context.constraint is None else _within_structure(draft, context.constraint)
            for draft, context in zip(sound, contexts, strict=True)
        ]

    def _sound(self, draft: Draft, limit: int, context: Context) -> Draft | None:
        """The nodes of a draft that can be verified: tokens of the vocabulary, none twice among siblings, not too many
        and not too deep; and only what follows such nodes."""
        for token, q in zip(draft.tokens, draft.q or (), strict=False):
            if q is not None and not (q.shape == (self._vocab_size,) and q[token] > 0 and math.isfinite(q.sum())):
                raise ValueError(f"token {token} was not drawn from a distribution over {self._vocab_size} tokens")
        deepest = context.max_tokens - len(context.tokens) - 1
        depth = [0] + [deepest + 1] * len(draft)  # of what is not kept: too deep for children
        seen: set[tuple[int, int]] = set()
        kept: list[int] = []
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            is_new = (parent, token) not in seen
            if is_new and 0 <= token < self._vocab_size and depth[parent] < deepest and len(kept) < limit:
                depth[node + 1] = depth[parent] + 1
                seen.add((parent, token))
                kept.append(node)
        if len(kept) == len(draft):
            return draft
        return draft.keep(kept) if kept else None

    def _guard(self, drafter: Drafter, call: Callable[[], _T]) -> _T | None:
        """What ``call`` returns; None where it raises: that must not cost an answer."""
        name = drafter.name
        try:
            return call()
        except Exception as error:
            self.failure = f"{name}: {error!r}"
            count = self._failures[name] = self._failures.get(name, 0) + 1
            self._wakes[name] = self._num_steps + 2**count
            if count >= MAX_FAILURES and drafter in self.drafters:
                self.drafters.remove(drafter)
            return None


def _within_structure(draft: Draft, constraint: Constraint) -> Draft | None:
    """A draft without the nodes that a structure does not let follow.

    One that was drawn stays as it is: a node that is dropped for its own token no longer follows the law that q tells.
    """
    if draft.q is not None:
        return draft
    allowed: set[int] = set()
    for leaf in set(range(1, len(draft) + 1)).difference(draft.parents):  # a chain has one
        path = [row - 1 for row in draft.path(leaf)]
        allowed.update(path[: constraint.num_allowed([draft.tokens[node] for node in path])])
    if len(allowed) == len(draft):
        return draft
    return draft.keep(sorted(allowed)) if allowed else None


def shared(limits: Sequence[int], room: int) -> list[int]:
    """The limits, the largest cut so that together they are within ``room``."""
    shares = list(limits)
    left = room
    for count, which in enumerate(sorted(range(len(limits)), key=lambda which: limits[which])):
        shares[which] = min(limits[which], left // (len(limits) - count))
        left -= shares[which]
    return shares

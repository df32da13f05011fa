"""Drafts what followed the longest suffix of a request the last times, in it or in past outputs of its domain.

Source: SuffixDecoding (Oliaro et al. 2024, 2411.04975): counts give a confidence, past outputs are shared; SAM-Decoding
(Hu et al. 2024, 2411.10666): a suffix automaton finds the match. Prompt lookup is the case of one request.

Notation: a match is a suffix of the request's tokens that occurred before, L its length. Of a continuation that
followed n times out of N, r = (n - 1/2) / (N - n + 1/2). r0 is that after the match, r1 and r2 those of the same
continuation after the next two shorter suffixes that occurred oftener; 1 where there is none.

The confidence c of a node has the odds

    c / (1 - c) = scale * L exp(-1 / (2 L)) * r0^0.65 r1^0.4 r2^0.36    scale: 0.8 in the request's own text, else 0.33

a product of opinions. L grows by one a node. Scale and exponents come from logistic regression over answers of a
135M model to 280 prompts of 13 kinds; they were nearly the same for greedy answers and for those drawn at temperature
0.7. The texts alone decide, not what was accepted lately: with the running rate of hits as one more factor drafts were
ranked worse, because a request that copied well for long is asked again just where that ended.

Departures: one automaton a request and two a domain instead of a global tree. The young one learns outputs until it
is full; then it becomes the old one, and what was the old one is forgotten. A draft follows the most frequent
continuation, of equals the most recent; where the text of the request ends, it goes on after the next shorter suffix,
so a loop is continued round and round. Costs: a token of a request 2 to 7 microseconds when it is next proposed for, a
proposal of 16 nodes some 17. So that no step waits for a long text, a call takes in at most ``CATCH_UP_TOKENS`` of a
request, which gets no draft before its end is reached: any other match would be one of another place. Of a prompt only
the last ``PROMPT_WINDOW`` tokens are taken in at all, of an output ``LEARNT_TOKENS`` are learnt, and the automaton of a
request that has ended is freed in pieces, ``FREED_STATES`` a call.

Checked by: tests/unit/test_suffix.py, tests/property/test_suffix_automaton.py.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.speculate.draft import MAX_NODES, Context, Draft
from paceline.speculate.suffix_automaton import ROOT, SuffixAutomaton

SEPARATOR = -1
"""Stands before each output that a domain has learnt. No request's token equals it, so no match lies over it."""

PROMPT_TOKENS = 8
"""Of the prompt's end, learnt with an output: so that what follows it can be found."""

SEEN_TOKENS = 32
"""Of a request's end, compared anew with the outputs of its domain when there are new ones."""

CATCH_UP_TOKENS = 1024
"""Of a request, taken in by one call at most."""

READY_TOKENS = MAX_NODES + 1
"""A request that has got no more since the last call has not fallen behind: a step can bring as many."""

PROMPT_WINDOW = 32768
"""Of a prompt's end, looked at."""

LEARNT_TOKENS = 2048
"""Of a request's end, learnt for its domain."""

FREED_STATES, MAX_UNUSED = 2048, 8
"""States of automata that are not used any more, freed by one call; how many of them may wait for it."""

OWN_SCALE, SHARED_SCALE = 0.8, 0.33
WEIGHTS = (0.65, 0.4, 0.36)

BRANCH_CONFIDENCE = 0.5
"""Of the first child's confidence, what a second one must have to be proposed beside it."""

MIN_REACH = 0.02
"""A draft ends where the confidences so far multiply to less: what comes after is hardly ever reached."""

_TABLE = 1024  # counts and lengths from here on make no difference


class _Cursor:
    """The longest suffix of a request that occurs in an automaton over other texts, which it does not keep alive: a
    request that is not asked for must not hold outputs that its domain has forgotten."""

    __slots__ = ("automaton", "length", "num_seen", "size", "state")

    def __init__(self) -> None:
        self.automaton: weakref.ref[SuffixAutomaton] | None = None
        self.size = self.num_seen = self.length = 0
        self.state = ROOT

    def move(self, automaton: SuffixAutomaton, tokens: list[int]) -> None:
        """To the end of ``tokens``, which begin with those of the last call."""
        is_known = self.automaton is not None and self.automaton() is automaton and self.size == len(automaton)
        if not is_known or len(tokens) > self.num_seen + SEEN_TOKENS:
            self.automaton, self.size = weakref.ref(automaton), len(automaton)
            self.state, self.length = automaton.find(tokens[-SEEN_TOKENS:])
        else:
            for at in range(self.num_seen, len(tokens)):
                self.state, self.length = automaton.advance(self.state, self.length, tokens[at])
        self.num_seen = len(tokens)


@dataclass(slots=True)
class _Request:
    """``own`` holds the request's tokens from ``begin`` on, as far as they have been taken in."""

    begin: int
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    young: _Cursor = field(default_factory=_Cursor)
    old: _Cursor = field(default_factory=_Cursor)


@dataclass(slots=True)
class _Domain:
    """What the requests of a domain have answered. Each automaton holds at most ``capacity`` tokens."""

    capacity: int
    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    def learn(self, tokens: list[int]) -> SuffixAutomaton | None:
        """Takes in the end of one request; a separator first. Returns what is forgotten for it."""
        tokens = tokens[-(self.capacity - 1) :]
        forgotten = None
        if len(self.young) + 1 + len(tokens) > self.capacity:
            forgotten, self.old, self.young = self.old, self.young, SuffixAutomaton()
        self.young.extend([SEPARATOR, *tokens])
        return forgotten


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a continuation begins: after ``length`` tokens that lead to ``state``.

    is_own   whether the automaton is the request's own
    is_end   whether ``state`` is a suffix of the request's own text: one of its occurrences has no continuation yet
    """

    automaton: SuffixAutomaton
    state: int
    length: int
    is_own: bool
    is_end: bool


@dataclass(slots=True)
class _Chain:
    """Nodes that follow each other. ``others``: index, token, confidence and place after it of second children that may
    stand beside a node."""

    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    others: list[tuple[int, int, float, _Place]] = field(default_factory=list)


class SuffixDrafter:
    """Suffix matching over each request and over the past outputs of its domain.

    max_branches   paths through a draft at most; 1: chains only
    domain_tokens  of past outputs that a domain remembers at most
    max_domains    that are remembered; the least recently used one leaves
    clock          tells seconds

    A token takes 370 to 680 bytes, of text some 480, be it a domain's or, until it ends, a request's. So a request
    takes at most 22 MB and 680 bytes for each token of its output, all domains 90 MB; of requests that have ended up to
    ``MAX_UNUSED`` wait to be freed.
    """

    name = "suffix"
    is_free = True

    def __init__(
        self,
        *,
        max_branches: int = 1,
        domain_tokens: int = 16384,
        max_domains: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert max_branches >= 1
        assert domain_tokens >= 4
        assert max_domains >= 1
        self.catch_up_s = 0.0
        self.max_branches = max_branches
        self.domain_tokens = domain_tokens
        self.max_domains = max_domains
        self._clock = clock
        self._requests: dict[int, _Request] = {}
        self._unused: deque[SuffixAutomaton] = deque()
        self._domains: dict[bytes, _Domain] = {}  # the most recently used last
        self._powers = [[(n + 0.5) ** weight for n in range(_TABLE)] for weight in WEIGHTS]
        self._length_odds = [0.0] + [n * math.exp(-0.5 / n) for n in range(1, _TABLE)]

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """See ``Drafter``."""
        self.catch_up_s = 0.0
        self._free()
        return [self._propose(context, limit) for context, limit in zip(contexts, limits, strict=True)]

    def finish(self, context: Context) -> None:
        """See ``Drafter``."""
        self._free()
        request = self._requests.pop(context.request_id, None)
        if request is not None:
            self._unused.append(request.own)
        tokens, num_prompt = context.tokens, context.num_prompt
        if len(tokens) > num_prompt:
            domain = self._domains.pop(context.domain, None) or _Domain(self.domain_tokens // 2)
            self._domains[context.domain] = domain
            forgotten = domain.learn(tokens[max(0, num_prompt - PROMPT_TOKENS, len(tokens) - LEARNT_TOKENS) :])
            if forgotten is not None:
                self._unused.append(forgotten)
            if len(self._domains) > self.max_domains:
                oldest = self._domains.pop(next(iter(self._domains)))
                self._unused += [oldest.young, oldest.old]

    def _free(self) -> None:
        """Frees a piece of what is not used any more. Where more ends than that, whole automata: memory is bounded."""
        while len(self._unused) > MAX_UNUSED:
            self._unused.popleft()
        if self._unused and not self._unused[0].dismantle(FREED_STATES):
            self._unused.popleft()

    def _propose(self, context: Context, limit: int) -> Draft | None:
        tokens = context.tokens
        limit = min(limit, context.max_tokens - len(tokens) - 1, MAX_NODES)  # the pass itself yields the last token
        if limit < 1:
            return None
        place = self._match(context)
        if place is None:
            return None
        chain = self._follow(place, limit, self.max_branches > 1)
        if chain.others:
            return self._tree(chain, limit)
        return Draft.chain(chain.tokens, chain.confidence, self.name) if chain.tokens else None

    def _match(self, context: Context) -> _Place | None:
        """The longest; of equals the request's own, then that in the young outputs. None while it is behind."""
        tokens = context.tokens
        request = self._requests.get(context.request_id)
        if request is None:
            begin = max(0, context.num_prompt - PROMPT_WINDOW)
            request = self._requests[context.request_id] = _Request(begin)
        own = request.own
        if not self._catch_up(request, tokens):
            return None
        state, longest = own.repeated()
        place = _Place(own, state, longest, True, True) if longest else None
        domain = self._domains.pop(context.domain, None)
        if domain is not None:
            self._domains[context.domain] = domain
            for automaton, cursor in ((domain.young, request.young), (domain.old, request.old)):
                cursor.move(automaton, tokens)
                if cursor.length > longest:
                    longest = cursor.length
                    place = _Place(automaton, cursor.state, longest, False, False)
        return place

    def _catch_up(self, request: _Request, tokens: list[int]) -> bool:
        """Takes in what a request has got; False when that is not all yet."""
        known = request.begin + len(request.own)
        missing = len(tokens) - known
        if missing <= READY_TOKENS:
            request.own.extend(tokens[known:])
            return True
        begun_s = self._clock()
        request.own.extend(tokens[known : known + CATCH_UP_TOKENS])
        self.catch_up_s += self._clock() - begun_s
        return missing <= CATCH_UP_TOKENS

    def _follow(self, place: _Place, limit: int, with_others: bool) -> _Chain:
        """Up to ``limit`` tokens from a place on."""
        automaton, state, length, is_own, is_end = (
            place.automaton,
            place.state,
            place.length,
            place.is_own,
            place.is_end,
        )
        text, link, recent, best, length_odds = (
            automaton.text,
            automaton.link,
            automaton.recent,
            automaton.best,
            self._length_odds,
        )
        scale = OWN_SCALE if is_own else SHARED_SCALE
        chain = _Chain()
        reach = 1.0
        tokens, confidences = chain.tokens, chain.confidence
        for index in range(limit):
            child = best[state]
            while child < 0 and is_own and state > ROOT:
                state, is_end = link[state], True
                child = best[state]
            if child < 0 or state <= ROOT or text[recent[child]] < 0:
                break
            token = text[recent[child]]
            base = scale * length_odds[length if length < _TABLE else -1]
            odds = base * self._odds(automaton, state, child, token, is_end)
            confidence = odds / (1.0 + odds)
            tokens.append(token)
            confidences.append(confidence)
            if with_others and len(automaton.edges[state]) > 1:
                second = self._second(automaton, state, child)
                token = text[recent[second]]
                odds = base * self._odds(automaton, state, second, token, is_end)
                other = min(odds / (1.0 + odds), 1.0 - confidence)  # siblings exclude each other
                if token >= 0 and other >= BRANCH_CONFIDENCE * confidence:
                    chain.others.append((index, token, other, _Place(automaton, second, length + 1, is_own, False)))
            reach *= confidence
            if reach < MIN_REACH:
                break
            state, length, is_end = child, length + 1, False
        return chain

    def _odds(self, automaton: SuffixAutomaton, state: int, child: int, token: int, is_end: bool) -> float:
        """r0^0.65 r1^0.4 r2^0.36 for ``token``, which leads from ``state`` to ``child``.

        ``is_end`` is taken for the shorter suffixes too. Where only they end the text, their N is one too high: to find
        that out would cost more than it tells.
        """
        count, link, edges = automaton.count, automaton.link, automaton.edges
        odds = 1.0
        for power in self._powers:
            n = count[child] - 1
            rest = count[state] - n - 1 - is_end
            if n or rest > 0:  # else r = 1
                odds *= power[n if n < _TABLE else -1] / power[0 if rest < 0 else rest if rest < _TABLE else -1]
            state = link[state]
            if state <= ROOT:
                break
            child = edges[state][token]
        return odds

    @staticmethod
    def _second(automaton: SuffixAutomaton, state: int, first: int) -> int:
        """The likeliest child of ``state`` but ``first``, of several."""
        count, recent = automaton.count, automaton.recent
        others = (child for child in automaton.edges[state].values() if child != first)
        return max(others, key=lambda child: (count[child], recent[child]))

    def _tree(self, chain: _Chain, limit: int) -> Draft:
        """The ``limit`` nodes that are likeliest to be reached, of a chain and of its likeliest branches."""
        nodes: list[tuple[int, int, float]] = []  # row of the parent, token, confidence
        reach = [1.0]  # by row: the probability that all down to it are taken
        for row, (token, confidence) in enumerate(zip(chain.tokens, chain.confidence, strict=True)):
            nodes.append((row, token, confidence))
            reach.append(reach[-1] * confidence)
        branches = sorted(chain.others, key=lambda other: -reach[other[0]] * other[2])
        for parent, token, confidence, place in branches[: self.max_branches - 1]:
            rest = self._follow(place, limit - 1 - parent, False)
            row = parent
            for node in zip([token, *rest.tokens], [confidence, *rest.confidence], strict=True):
                nodes.append((row, *node))
                reach.append(reach[row] * node[1])
                row = len(nodes)
        # Reach never grows on the way down and sorting is stable: a parent is always kept before its child.
        kept = sorted(sorted(range(1, len(reach)), key=lambda row: -reach[row])[:limit])
        row_of = {0: 0} | {row: at + 1 for at, row in enumerate(kept)}
        parents = tuple(row_of[nodes[row - 1][0]] for row in kept)
        return Draft(
            parents=parents,
            tokens=tuple(nodes[row - 1][1] for row in kept),
            confidence=tuple(nodes[row - 1][2] for row in kept),
            drafter=self.name,
        )

"""A suffix automaton that grows token by token and knows how often, and where last, each of its substrings occurred.

Source: Blumer et al. 1985 ("The smallest automaton recognizing the subwords of a text"), online construction; used for
drafting by SAM-Decoding (2411.10666), with the counts of SuffixDecoding (2411.04975).

Notation: a state is a class of substrings that end at the same positions of the text; its longest member has
``length[state]`` tokens, the others are those of its suffixes that are longer than the longest of ``link[state]``.
``count[state]`` is how often they occurred, ``recent[state]`` where they ended last, ``best[state]`` the state after
the likeliest next token: the one with the highest count, of equals the most recent.

Departures: a new token makes each suffix of the text that occurred before occur once more, and a text that repeats one
token has as many states of suffixes as it has tokens. So only the ``COUNTED`` longest are counted, and a token costs
amortised O(1) changes of edges, a copy of the edges of a state that is split, and at most ``COUNTED`` updates. Counts
are exact as long as no suffix of the text had more than ``COUNTED`` states that occurred before (ordinary text has 3 to
6); otherwise short substrings have lower bounds, their ``recent`` is an earlier occurrence, and a continuation may be
counted oftener than what it follows. Long matches, which such a text has, are not affected. A token takes 370 bytes (a
text of one token) to 680 (of two in random order), of text some 480.

Checked by: tests/property/test_suffix_automaton.py against all substrings of small texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT = 0
COUNTED = 16
"""Suffixes whose counts a new token updates."""

_NONE = -1  # instead of None in the flat lists of states


class SuffixAutomaton:
    """All substrings of ``text``. The lists are per state; they are for reading.

    edges  the state after each token that followed;  _NONE stands in ``link`` for the root's and in ``best`` for none
    """

    __slots__ = ("__weakref__", "best", "count", "edges", "last", "length", "link", "recent", "text")

    def __init__(self) -> None:
        self.text: list[int] = []
        self.length = [0]
        self.link = [_NONE]
        self.count = [0]
        self.recent = [_NONE]
        self.best = [_NONE]
        self.edges: list[dict[int, int]] = [{}]
        self.last = ROOT

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        text, length, link, count, recent, best, edges = (
            self.text,
            self.length,
            self.link,
            self.count,
            self.recent,
            self.best,
            self.edges,
        )
        state = self.last
        for token in tokens:
            at = len(text)
            text.append(token)
            new = len(length)
            length.append(at + 1)
            link.append(ROOT)
            count.append(1)
            recent.append(at)
            best.append(_NONE)
            edges.append({})
            while state >= 0 and token not in edges[state]:
                edges[state][token] = new
                old = best[state]
                if old < 0 or count[old] <= 1:
                    best[state] = new
                state = link[state]
            if state >= 0:
                link[new] = self._target(state, token)
                previous = _NONE
                for _ in range(COUNTED):
                    target = edges[state][token]
                    if target != previous:
                        count[target] += 1
                        recent[target] = at
                        previous = target
                    old = best[state]
                    if old != target and count[target] >= count[old]:
                        best[state] = target
                    state = link[state]
                    if state < 0:
                        break
            state = new
        self.last = state

    def dismantle(self, num_states: int) -> bool:
        """Frees up to ``num_states`` states of an automaton that nobody reads any more; whether there are more. As one
        object a long text's automaton takes tens of milliseconds to free."""
        del self.edges[-num_states:]
        return bool(self.edges)

    def _target(self, state: int, token: int) -> int:
        """The state of the longest member of ``state`` with ``token`` after it, split from longer ones if need be."""
        length, link, best, edges = self.length, self.link, self.best, self.edges
        target = edges[state][token]
        if length[state] + 1 == length[target]:
            return target
        split = len(length)
        length.append(length[state] + 1)
        link.append(link[target])
        self.count.append(self.count[target])
        self.recent.append(self.recent[target])
        best.append(best[target])
        edges.append(edges[target].copy())
        link[target] = split
        while state >= 0 and edges[state].get(token) == target:
            edges[state][token] = split
            if best[state] == target:
                best[state] = split
            state = link[state]
        return split

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of a query's match (of ``length`` tokens, in ``state``) and ``token`` that occurs here, as
        its state and length."""
        edges, link = self.edges, self.link
        while token not in edges[state]:
            state = link[state]
            if state < 0:
                return ROOT, 0
            length = self.length[state]
        return edges[state][token], length + 1

    def find(self, query: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of ``query`` that occurs here."""
        state, length = ROOT, 0
        for token in query:
            state, length = self.advance(state, length, token)
        return state, length

    def repeated(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that occurred in it before, maybe overlapping."""
        state = self.link[self.last]
        return (ROOT, 0) if state < 0 else (state, self.length[state])

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """Tokens that followed a state and how often, most frequent first, then most recent."""
        count, recent = self.count, self.recent
        order = sorted(self.edges[state].items(), key=lambda edge: (-count[edge[1]], -recent[edge[1]]))
        return [(token, count[target]) for token, target in order]

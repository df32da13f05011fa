"""The suffix automaton against all substrings of small texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculate.suffix_automaton import COUNTED, ROOT, SuffixAutomaton

STATE_LISTS = ("length", "link", "count", "recent", "best", "edges")


def texts(max_size: int) -> st.SearchStrategy[list[int]]:
    """Texts over one to four tokens."""
    return st.integers(0, 3).flatmap(lambda top: st.lists(st.integers(0, top), max_size=max_size))


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    return automaton


def ends_of(text: list[int], part: list[int]) -> list[int]:
    """Where ``part`` ends in the text, ascending."""
    return [end - 1 for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def longest_suffix(query: list[int], text: list[int]) -> int:
    """Tokens of the longest suffix of the query that occurs in the text."""
    return next(size for size in range(len(query), -1, -1) if size == 0 or ends_of(text, query[len(query) - size :]))


def check(automaton: SuffixAutomaton, text: list[int], *, exact: bool) -> None:
    """Raises AssertionError unless every substring leads to a state that says how often and where it occurred, what
    followed and which suffix comes next. ``exact``: counts may not be lower bounds."""
    assert automaton.text == text
    parts = {tuple(text[begin:end]) for end in range(len(text) + 1) for begin in range(end)}
    assert len(automaton.length) <= max(2, 2 * len(text))
    assert sum(map(len, automaton.edges)) <= max(3, 3 * len(text))
    for part in map(list, parts):
        state = ROOT
        for token in part:
            state = automaton.edges[state][token]
        ends = ends_of(text, part)
        same = [size for size in range(1, ends[0] + 2) if ends_of(text, text[ends[0] + 1 - size : ends[0] + 1]) == ends]
        assert automaton.length[state] == max(same)
        assert automaton.length[automaton.link[state]] == min(same) - 1
        assert automaton.recent[state] in ends
        assert 1 <= automaton.count[state] <= len(ends)
        followers = {text[end + 1] for end in ends if end + 1 < len(text)}
        assert set(automaton.edges[state]) == followers
        assert (automaton.best[state] in automaton.edges[state].values()) == bool(followers)
        if exact:
            assert (automaton.count[state], automaton.recent[state]) == (len(ends), ends[-1])
            following = [
                (len(after), after[-1], token) for token in followers for after in [ends_of(text, [*part, token])]
            ]
            order = sorted(following, reverse=True)
            assert automaton.continuations(state) == [(token, count) for count, _, token in order]
            assert not order or automaton.best[state] == automaton.edges[state][order[0][2]]


@settings(max_examples=150, deadline=None)
@given(texts(COUNTED))
def test_counts_are_exact_where_no_chain_of_suffixes_is_long(text: list[int]) -> None:
    check(automaton_of(text), text, exact=True)


@settings(max_examples=40, deadline=None)
@given(texts(40))
def test_every_substring_is_known(text: list[int]) -> None:
    check(automaton_of(text), text, exact=False)


@settings(max_examples=100, deadline=None)
@given(texts(40))
def test_the_repeated_suffix_is_the_longest_that_occurred_before(text: list[int]) -> None:
    automaton = automaton_of(text)
    state, length = automaton.repeated()
    assert length == next((size for size in range(len(text) - 1, 0, -1) if len(ends_of(text, text[-size:])) > 1), 0)
    assert automaton.find(text[len(text) - length :]) == (state, length)


@settings(max_examples=100, deadline=None)
@given(texts(30), texts(30))
def test_a_query_that_is_moved_along_is_at_its_longest_known_suffix(text: list[int], query: list[int]) -> None:
    automaton = automaton_of(text)
    state, length = ROOT, 0
    for end, token in enumerate(query, 1):
        state, length = automaton.advance(state, length, token)
        assert length == longest_suffix(query[:end], text)
        assert (state, length) == automaton.find(query[:end])
        assert state == ROOT or automaton.length[automaton.link[state]] < length <= automaton.length[state]


@settings(max_examples=50, deadline=None)
@given(texts(40), st.lists(st.integers(0, 40), max_size=5))
def test_growing_in_pieces_is_growing_at_once(text: list[int], cuts: list[int]) -> None:
    pieces, begin = SuffixAutomaton(), 0
    for end in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        pieces.extend(text[begin:end])
        begin = end
    whole = automaton_of(text)
    assert all(getattr(pieces, name) == getattr(whole, name) for name in (*STATE_LISTS, "text", "last"))


def test_a_long_repetition_is_counted_at_its_long_suffixes() -> None:
    automaton = automaton_of([7] * 5000)
    state, length = automaton.repeated()
    assert (length, automaton.count[state]) == (4999, 2)
    assert automaton.count[automaton.edges[ROOT][7]] == 1 + COUNTED, "short suffixes are counted up to the bound only"


def test_a_split_redirects_more_states_than_are_counted() -> None:
    word = list(range(COUNTED + 4))
    suffixes = [token for size in range(1, len(word)) for token in [100 + size, *word[-size:]]]  # a state each
    automaton = automaton_of([*suffixes, 200, *word, 300, 201, *word[1:], 300])
    for best, edges in zip(automaton.best, automaton.edges, strict=True):
        assert (best in edges.values()) == bool(edges)


@pytest.mark.parametrize("name", [name for name in STATE_LISTS if name != "edges"])
def test_the_check_finds_a_wrong_entry(name: str) -> None:
    text = [0, 1, 0, 0, 1, 2, 0, 1]
    automaton = automaton_of(text)
    check(automaton, text, exact=True)
    state, _ = automaton.find([0, 1])
    getattr(automaton, name)[state] -= 1
    with pytest.raises(AssertionError):
        check(automaton, text, exact=True)


def test_the_check_finds_a_missing_edge() -> None:
    text = [0, 1, 0, 0, 1, 2, 0, 1]
    automaton = automaton_of(text)
    del automaton.edges[automaton.find([0, 1])[0]][2]
    with pytest.raises((AssertionError, KeyError)):
        check(automaton, text, exact=True)

"""Drafts of the suffix drafter: what they follow, what they may see, and what is forgotten."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
from draft_contexts import FakeContext, check_draft, ids_of, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculate.draft import MAX_NODES, Draft
from paceline.speculate.suffix import (
    CATCH_UP_TOKENS,
    FREED_STATES,
    LEARNT_TOKENS,
    MAX_UNUSED,
    MIN_REACH,
    PROMPT_TOKENS,
    PROMPT_WINDOW,
    READY_TOKENS,
    SuffixDrafter,
    _Cursor,
)
from paceline.speculate.suffix_automaton import COUNTED, SuffixAutomaton


def occurrences(text: str, part: str) -> int:
    return sum(text.startswith(part, begin) for begin in range(len(text) - len(part) + 1))


def ratio(n: int, total: int) -> float:
    return (n - 0.5) / (total - n + 0.5)


def followed(text: str, limit: int) -> tuple[str, list[float]]:
    """The draft of a request alone, by counting substrings: tokens and confidences, one node after the other."""
    start = next((text[begin:] for begin in range(1, len(text)) if text[begin:] in text[:-1]), "")
    tokens, confidences = "", []
    match, length, unfinished = start, len(start), 1
    while match and len(tokens) < limit and math.prod(confidences) >= MIN_REACH:
        nexts = {letter: occurrences(text, match + letter) for letter in set(text)}
        if not any(nexts.values()):
            match, unfinished = start, 1
            continue
        token = max(nexts, key=lambda letter: (nexts[letter], text.rfind(match + letter)))
        odds = 0.8 * length * math.exp(-0.5 / length)
        shorter: str | None = match
        for weight in (0.65, 0.4, 0.36):
            total = occurrences(text, shorter)
            odds *= ratio(occurrences(text, shorter + token), total - unfinished) ** weight
            cuts = (shorter[begin:] for begin in range(1, len(shorter)))
            shorter = next((cut for cut in cuts if occurrences(text, cut) > total), None)
            if shorter is None:
                break
        tokens += token
        confidences.append(odds / (1 + odds))
        match, length, unfinished = match + token, length + 1, 0
    return tokens, confidences


def proposed(drafter: SuffixDrafter, context: FakeContext, limit: int = 16) -> Draft | None:
    return drafter.propose([context], [limit])[0]


def answered(drafter: SuffixDrafter, text: str, *, domain: bytes = b"", num_prompt: int = 0) -> None:
    """A request that ends without having been asked for."""
    drafter.finish(FakeContext(ids_of(text), num_prompt=num_prompt, domain=domain, request_id=999))


@settings(max_examples=150, deadline=None)
@given(st.text("ab", min_size=1, max_size=COUNTED) | st.text("abcd", min_size=1, max_size=COUNTED), st.integers(1, 20))
def test_it_follows_the_counts_of_the_longest_match(text: str, limit: int) -> None:
    draft = proposed(SuffixDrafter(), FakeContext(ids_of(text)), limit)
    tokens, confidences = followed(text, limit)
    assert text_of(draft) == tokens
    assert draft is None or list(draft.confidence) == pytest.approx(confidences, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a", ""),
        ("abc", ""),
        ("abcxa", "bcxa"),
        ("abab", "abababab"),
        ("aaaa", "aaaaaaaa"),
        ("abx.abx,aby;ab", "x"),  # oftener
        ("abx.aby;ab", "y"),  # as often, more recent
        ("qabx rabx sabx zqab", "x"),  # a longer match
    ],
)
def test_what_is_drafted(text: str, expected: str) -> None:
    assert text_of(proposed(SuffixDrafter(), FakeContext(ids_of(text)), 8))[: len(expected) or None] == expected


def test_a_long_loop_goes_round() -> None:
    text = "abc" * 300 + "ab"
    assert text_of(proposed(SuffixDrafter(), FakeContext(ids_of(text)), 30)) == "cab" * 10


def test_confidence_grows_with_the_match_and_with_agreement() -> None:
    def first(text: str) -> float:
        draft = proposed(SuffixDrafter(), FakeContext(ids_of(text)), 1)
        assert draft is not None
        return draft.confidence[0]

    assert first("axyza") < first("abxyzab") < first("abcxyzabc")
    assert first("ax.ay;a") < first("ax.a") < first("ax.ax;a")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.lists(st.integers(0, 3), min_size=1, max_size=24),
            st.integers(0, 24),
            st.integers(1, 12),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 3),
)
def test_drafts_are_valid_and_domains_never_mix(
    requests: list[tuple[int, list[int], int, int]], max_branches: int
) -> None:
    drafter = SuffixDrafter(max_branches=max_branches, domain_tokens=60)
    seen: dict[bytes, set[int]] = {b"0": set(), b"1": set()}
    for request_id, (domain, letters, num_prompt, limit) in enumerate(requests):
        tokens = [100 + domain if letter == 3 else letter for letter in letters]  # 100 and 101 are in one domain each
        context = FakeContext([], min(num_prompt, len(tokens)), len(tokens) + 4, b"%d" % domain, request_id)
        for end in range(1, len(tokens) + 1, 1 + request_id % 3):
            context.tokens = tokens[:end]
            check_draft(proposed(drafter, context, limit), context, limit, seen[context.domain] | set(tokens[:end]))
        context.tokens = tokens
        seen[context.domain] |= set(tokens)
        drafter.finish(context)
    assert not drafter._requests


def test_an_answer_helps_its_domain_only() -> None:
    drafter = SuffixDrafter()
    answered(drafter, "question: the answer", num_prompt=10, domain=b"a")
    asked = [FakeContext(ids_of("is the a"), domain=domain, request_id=i) for i, domain in enumerate((b"a", b"b", b""))]
    assert [text_of(proposed(drafter, context, 5))[:5] for context in asked] == ["nswer", "", ""]


def test_the_end_of_a_prompt_is_learnt_with_the_answer_and_the_rest_is_not() -> None:
    drafter = SuffixDrafter()
    answered(drafter, "0123456789" + "abcdefghijkl"[-PROMPT_TOKENS:] + "XYZ", num_prompt=10 + PROMPT_TOKENS)
    assert text_of(proposed(drafter, FakeContext(ids_of("?l"), request_id=1), 3)) == "XYZ"
    assert proposed(drafter, FakeContext(ids_of("?5"), request_id=2), 3) is None
    answered(drafter, "only a prompt 7", num_prompt=15)
    assert proposed(drafter, FakeContext(ids_of("?7"), request_id=3), 3) is None


def test_a_draft_ends_with_the_answer_that_it_follows() -> None:
    drafter = SuffixDrafter()
    answered(drafter, "abc")
    answered(drafter, "def")
    assert text_of(proposed(drafter, FakeContext(ids_of("?a"), request_id=1), 8)) == "bc"
    assert proposed(drafter, FakeContext(ids_of("?c"), request_id=2), 8) is None


def test_the_longer_match_wins_and_of_equals_the_own_one() -> None:
    drafter = SuffixDrafter()
    answered(drafter, "xyzA")
    contexts = [
        FakeContext(ids_of(text), request_id=i) for i, text in enumerate(["yzB..xyz", "xyzB..xyz", "!xyzB..!xyz"])
    ]
    assert [text_of(proposed(drafter, context, 1)) for context in contexts] == ["A", "B", "B"]


def test_a_comparable_second_continuation_becomes_a_branch() -> None:
    context = FakeContext(ids_of("abx1.abx1,abx1:aby2;aby2!ab"))
    chain = proposed(SuffixDrafter(), context)
    assert chain is not None
    assert chain.is_chain
    tree = proposed(SuffixDrafter(max_branches=2), context)
    assert tree is not None
    assert [chr(tree.tokens[row - 1]) for row in tree.children(0)] == ["x", "y"]
    assert chr(tree.tokens[tree.children(tree.children(0)[1])[0] - 1]) == "2"
    assert sum(not tree.children(row) for row in range(1, len(tree) + 1)) == 2
    small = proposed(SuffixDrafter(max_branches=2), context, 3)
    check_draft(small, context, 3, set(context.tokens))


@pytest.mark.parametrize(("stem", "branches"), [("q", 2), ("abcdefghq", 1)])
def test_branches_below_the_root_leave_room_for_each_other(stem: str, branches: int) -> None:
    """Of two continuations that are equally frequent, the first after a long match leaves the other too little."""
    text = f"{stem}1x.{stem}1x,{stem}1y;{stem}1y!{stem}"
    context = FakeContext(ids_of(text))
    tree = proposed(SuffixDrafter(max_branches=2), context)
    check_draft(tree, context, 16, set(context.tokens))
    assert tree is not None
    assert [chr(tree.tokens[row - 1]) for row in tree.children(0)] == ["1"]
    assert [chr(tree.tokens[row - 1]) for row in tree.children(1)] == ["y", "x"][:branches]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("abc", min_size=1, max_size=20), max_size=4),
    st.text("abc", min_size=1, max_size=30),
    st.sets(st.integers(1, 29), max_size=8),
)
def test_catching_up_lazily_equals_stepping(past: list[str], text: str, asked: set[int]) -> None:
    drafts = []
    for ends in (asked, set(range(1, len(text)))):
        drafter, learnt = SuffixDrafter(), list(past)
        context = FakeContext([])
        for end in range(1, len(text) + 1):
            if learnt and end % 4 == 0:
                answered(drafter, learnt.pop())
            context.tokens = ids_of(text[:end])
            if end in ends or end == len(text):
                draft = proposed(drafter, context)
        drafts.append(draft)
    assert drafts[0] == drafts[1]


def test_a_cursor_is_where_a_search_ends() -> None:
    automaton, cursor = SuffixAutomaton(), _Cursor()
    tokens = ids_of("abracadabra, abracadabra")
    for end in range(1, len(tokens), 2):
        if end in (5, 11, 12):
            automaton.extend(ids_of("cadab-acabra, a"[: end - 2]))  # outputs come while the request runs
        cursor.move(automaton, tokens[:end])
        assert (cursor.state, cursor.length) == automaton.find(tokens[:end])


def test_a_cursor_finds_what_was_learnt_since() -> None:
    automaton, cursor, tokens = SuffixAutomaton(), _Cursor(), ids_of("xab")
    for learnt, length in (("ab", 2), (".xa", 2), (".xabq", 3)):
        automaton.extend(ids_of(learnt))
        cursor.move(automaton, tokens)
        assert cursor.length == length
        assert (cursor.state, cursor.length) == automaton.find(tokens)


def test_memory_is_bounded_and_old_outputs_leave() -> None:
    drafter = SuffixDrafter(domain_tokens=200, max_domains=4)
    answered(drafter, "early bird", domain=b"0")
    assert text_of(proposed(drafter, FakeContext(ids_of("?early"), domain=b"0", request_id=1))) == " bird"
    for step in range(400):
        answered(drafter, f"{step} output of some {step % 7} length" * (1 + step % 9), domain=b"%d" % (step % 2))
        answered(drafter, "x", domain=b"other %d" % step)
        assert len(drafter._domains) <= 4
        assert all(len(domain.young) + len(domain.old) <= 200 for domain in drafter._domains.values())
    assert {b"0", b"1"} <= set(drafter._domains), "the least recently used leave"
    assert proposed(drafter, FakeContext(ids_of("?early"), domain=b"0", request_id=2)) is None
    assert set(drafter._requests) == {1, 2}


def test_the_old_generation_is_still_matched() -> None:
    drafter = SuffixDrafter(domain_tokens=40)
    answered(drafter, "first answer")
    answered(drafter, "one more that fills")
    assert text_of(proposed(drafter, FakeContext(ids_of("?first"), request_id=1))) == " answer"


def test_a_request_does_not_keep_forgotten_outputs() -> None:
    drafter = SuffixDrafter(domain_tokens=40)
    answered(drafter, "first answer")
    assert text_of(proposed(drafter, FakeContext(ids_of("?first"), request_id=1))) == " answer"
    forgotten = weakref.ref(drafter._domains[b""].young)
    for _ in range(3):
        answered(drafter, "as long as twenty")
    drafter.propose([], [])
    gc.collect()
    assert forgotten() is None


def test_limits_and_unknown_requests() -> None:
    drafter = SuffixDrafter()
    tokens = ids_of("abcabcabcabc")
    for room in range(6):
        context = FakeContext(tokens, max_tokens=len(tokens) + room, request_id=room)
        assert text_of(proposed(drafter, context, 3)) == "abc"[: max(0, room - 1)]
    endless = proposed(drafter, FakeContext(tokens, request_id=9), 1000)
    assert endless is not None
    assert len(endless) <= MAX_NODES
    drafter.finish(FakeContext(tokens, num_prompt=len(tokens), request_id=77))
    drafter.finish(FakeContext([], request_id=78))
    assert drafter._domains == {}


def ramp(count: int) -> list[int]:
    """Tokens that repeat after 500."""
    return [at % 500 for at in range(count)]


def test_a_long_text_is_taken_in_a_piece_a_call() -> None:
    drafter = SuffixDrafter()
    answered(drafter, "zyx" * 4)
    long = FakeContext(ramp(3 * CATCH_UP_TOKENS), num_prompt=3 * CATCH_UP_TOKENS, request_id=1)
    short = FakeContext(ids_of("abcab"), request_id=2)
    for call in range(1, 4):
        drafts = drafter.propose([long, short], [4, 4])
        assert len(drafter._requests[1].own) == call * CATCH_UP_TOKENS
        assert text_of(drafts[1]) == "cabc"
        assert (drafts[0] is None) == (call < 3), "what is not its end matches another place"
    assert drafts[0] == proposed_at_once(long, 4)
    long.tokens += ramp(2 * CATCH_UP_TOKENS)[72:]  # it was not asked for a while
    assert proposed(drafter, long, 4) is None
    assert proposed(drafter, long, 4) == proposed_at_once(long, 4)


def proposed_at_once(context: FakeContext, limit: int) -> Draft | None:
    """What a drafter proposes that knows all of a request."""
    drafter = SuffixDrafter()
    while (draft := proposed(drafter, context, limit)) is None:
        pass
    assert drafter._requests[context.request_id].own.text == context.tokens
    return draft


def test_seconds_of_catching_up_are_told_apart() -> None:
    ticks = iter(range(1000))
    drafter = SuffixDrafter(clock=lambda: float(next(ticks)))
    context, other = (FakeContext(ramp(CATCH_UP_TOKENS + 9), request_id=i) for i in range(2))
    drafter.propose([context, other], [4, 4])
    assert drafter.catch_up_s == 2
    drafter.propose([context], [4])  # nine tokens are no more than a step brings
    assert drafter.catch_up_s == 0
    context.tokens += [1] * READY_TOKENS
    drafter.propose([context], [4])
    assert drafter.catch_up_s == 0
    context.tokens += [1] * (READY_TOKENS + 1)
    drafter.propose([context], [4])
    assert drafter.catch_up_s == 1


def test_of_a_prompt_only_the_end_is_looked_at() -> None:
    drafter = SuffixDrafter()
    begin = [7001, 7002, 7003]
    tokens = begin + [at % 7000 for at in range(PROMPT_WINDOW - 2)] + begin[:2]
    context = FakeContext(tokens, num_prompt=len(tokens))
    for _ in range(PROMPT_WINDOW // CATCH_UP_TOKENS):
        draft = proposed(drafter, context, 4)
    assert drafter._requests[0].own.text == tokens[3:]
    assert draft is None, "what followed is outside"
    context.tokens += [5, 6, 7]
    assert proposed(drafter, context, 2) == Draft.chain([8, 9], proposed_confidence(drafter, context), "suffix")


def proposed_confidence(drafter: SuffixDrafter, context: FakeContext) -> tuple[float, ...]:
    draft = proposed(drafter, context, 2)
    assert draft is not None
    return draft.confidence


def test_of_an_output_only_the_end_is_learnt() -> None:
    drafter = SuffixDrafter()
    tokens = [9000, 9001, *range(LEARNT_TOKENS)]
    drafter.finish(FakeContext(tokens))
    assert len(drafter._domains[b""].young) == 1 + LEARNT_TOKENS
    assert proposed(drafter, FakeContext([8000, 9000], request_id=1)) is None
    draft = proposed(drafter, FakeContext([8000, 100], request_id=2), 3)
    assert draft is not None
    assert draft.tokens[0] == 101


def test_what_has_ended_is_freed_in_pieces() -> None:
    drafter = SuffixDrafter(domain_tokens=4, max_domains=1)
    context = FakeContext(ramp(2 * FREED_STATES), num_prompt=2 * FREED_STATES)
    for _ in range(2 * FREED_STATES // CATCH_UP_TOKENS):
        proposed(drafter, context)
    own = drafter._requests[0].own
    num_states = len(own.edges)
    drafter.finish(context)
    assert len(own.edges) == num_states
    for calls in range(1, 1 + -(-num_states // FREED_STATES)):
        assert drafter._unused
        drafter.propose([], [])
        assert len(own.edges) == max(0, num_states - calls * FREED_STATES)
    assert not drafter._unused
    for request_id in range(3 * MAX_UNUSED):  # more end than calls free
        contexts = [
            FakeContext(ids_of("abc"), domain=b"%d" % request_id, request_id=request_id * 4 + i) for i in range(4)
        ]
        drafter.propose(contexts, [1] * 4)
        for context in contexts:
            drafter.finish(context)
            assert len(drafter._unused) <= MAX_UNUSED + 4

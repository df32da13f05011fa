"""Prompt lookup equals a search through the request, and keeps within it."""

from __future__ import annotations

import pytest
from draft_contexts import FakeContext, check_draft, ids_of, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculate.draft import Draft
from paceline.speculate.ngram import NgramDrafter


def searched(tokens: list[int], max_ngram: int, min_ngram: int, limit: int) -> tuple[list[int], int] | None:
    """Tokens after the most recent earlier occurrence of the longest n-gram at the end, and n."""
    for n in range(min(max_ngram, len(tokens)), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                extended = list(tokens)
                for at in range(end, end + limit):
                    extended.append(extended[at])
                return extended[len(tokens) :], n
    return None


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    cuts=st.sets(st.integers(1, 40)),
    lengths=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    limit=st.integers(1, 12),
)
def test_it_equals_a_search(tokens: list[int], cuts: set[int], lengths: tuple[int, int], limit: int) -> None:
    min_ngram, max_ngram = lengths[0], sum(lengths)
    drafter = NgramDrafter(max_ngram=max_ngram, min_ngram=min_ngram)
    context = FakeContext([])
    for end in sorted({cut for cut in cuts if cut < len(tokens)} | {len(tokens)}):  # asked at some steps only
        context.tokens = tokens[:end]
        draft = drafter.propose([context], [limit])[0]
        expected = searched(tokens[:end], max_ngram, min_ngram, limit)
        check_draft(draft, context, limit, set(tokens[:end]))
        assert (draft and list(draft.tokens)) == (expected and expected[0])
        assert draft is None or draft.is_chain
        if draft and expected:
            assert draft.confidence[0] == pytest.approx(0.65 * expected[1] / (1 + 0.65 * expected[1]), rel=1e-12)


def test_confidence_grows_with_the_match() -> None:
    drafter = NgramDrafter()
    drafts = [
        drafter.propose([FakeContext(ids_of(text), request_id=i)], [3])[0]
        for i, text in enumerate(["axyza", "abxyzab"])
    ]
    assert [text_of(draft) for draft in drafts] == ["xyz", "xyz"]
    assert drafts[0]
    assert drafts[1]
    assert drafts[0].confidence[0] < drafts[0].confidence[1]
    assert drafts[0].confidence[0] < drafts[1].confidence[0]


def test_nothing_is_drafted_beyond_the_end() -> None:
    tokens = ids_of("abcabc")
    drafter = NgramDrafter()
    for room in range(6):
        context = FakeContext(tokens, max_tokens=len(tokens) + room)
        assert text_of(drafter.propose([context], [64])[0]) == "abcabc"[: max(0, room - 1)]


def test_requests_are_apart_and_end() -> None:
    drafter = NgramDrafter()
    known, other = FakeContext(ids_of("abcab"), request_id=1), FakeContext(ids_of("ab"), request_id=2)
    assert [text_of(draft) for draft in drafter.propose([known, other], [1, 1])] == ["c", ""]
    for context in (known, other, FakeContext([], request_id=3)):
        drafter.finish(context)
    assert not drafter._indices


@pytest.mark.parametrize(
    "draft",
    [
        Draft.chain([1, 1, 1, 1], [0.5] * 4, "x"),
        Draft.chain([9], [0.5], "x"),
        Draft.chain([1], [0.0], "x"),
        Draft.chain([1, 1, 1], [0.5] * 3, "x"),
        Draft((1, 1), (0, 0), (0.5, 0.5), "x"),
        Draft((1, 2), (0, 0), (0.7, 0.5), "x"),
        Draft.chain([], [], "x"),
    ],
    ids=["limit", "unseen", "confidence", "end", "siblings", "certainty", "empty"],
)
def test_the_check_of_drafts_finds_faults(draft: Draft) -> None:
    check_draft(Draft.chain([1, 2], [0.5, 1.0], "x"), FakeContext([1, 2, 1], max_tokens=6), 3, {1, 2})
    with pytest.raises(AssertionError):
        check_draft(draft, FakeContext([1, 2, 1], max_tokens=6), 3, {1, 2})

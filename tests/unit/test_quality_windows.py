"""How texts are cut into windows: every token scored once, from as much context as was promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ParameterError
from paceline.measure.quality.windows import Window, chunk_windows, sliding_windows

BOS = 7


def scored_places(windows: list[Window], starts: list[int], num_prefix: int) -> list[int]:
    """Places in the text of all targets, in order."""
    return [
        start + int(target) - num_prefix
        for start, window in zip(starts, windows, strict=True)
        for target in window.targets
    ]


@given(st.integers(1, 60), st.integers(2, 20), st.integers(1, 19), st.booleans(), st.lists(st.booleans(), max_size=60))
@settings(max_examples=300, deadline=None)
def test_sliding_windows_score_each_wanted_token_once(
    length: int, context: int, stride: int, has_bos: bool, mask: list[bool]
) -> None:
    prefix = [BOS] if has_bos else []
    stride = min(stride, context - 1)
    wanted = np.array((mask + [True] * length)[:length])
    text = list(range(100, 100 + length))
    windows = sliding_windows(text, context=context, stride=stride, prefix=prefix, scored=wanted)
    found = []
    for window in windows:
        assert len(window.tokens) <= context
        body = window.tokens[len(prefix) :]
        assert window.tokens[: len(prefix)].tolist() == prefix
        assert body.tolist() == list(range(body[0], body[0] + len(body))), "a piece of the text"
        assert (body[0] - 100) % stride == 0
        for target in window.targets:
            place = int(window.tokens[target]) - 100
            found.append(place)
            before = int(target) - len(prefix)
            assert before >= min(place, context - len(prefix) - stride), "enough of the text stands before it"
    first = 0 if has_bos else 1
    assert found == [place for place in range(first, length) if wanted[place]]


def test_windows_by_hand() -> None:
    windows = sliding_windows(range(10, 20), context=6, stride=3)
    assert [window.tokens.tolist() for window in windows] == [
        [10, 11, 12, 13, 14, 15],
        [13, 14, 15, 16, 17, 18],
        [16, 17, 18, 19],
    ]
    assert [window.targets.tolist() for window in windows] == [[1, 2, 3, 4, 5], [3, 4, 5], [3]]


def test_a_text_shorter_than_a_window_is_one_window() -> None:
    (window,) = sliding_windows([1, 2, 3], context=512, stride=256)
    assert window.tokens.tolist() == [1, 2, 3]
    assert window.targets.tolist() == [1, 2]
    (window,) = sliding_windows([1], context=512, stride=256, prefix=[BOS])
    assert window.targets.tolist() == [1]
    assert sliding_windows([1], context=512, stride=256) == []


def test_chunks_are_those_of_llama_perplexity() -> None:
    windows = chunk_windows(range(100, 121), context=8)
    assert [window.tokens[0] for window in windows] == [100, 108]
    assert all(window.targets.tolist() == [5, 6, 7] for window in windows)
    windows = chunk_windows([BOS, *range(100, 120)], context=8, prefix=[BOS])
    assert [window.tokens.tolist()[:3] for window in windows] == [[BOS, 100, 101], [BOS, 108, 109]]


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda: sliding_windows([1, 2], context=1, stride=1), "at least 2 tokens"),
        (lambda: sliding_windows([1, 2], context=8, stride=8, prefix=[BOS]), "between 1 and 7"),
        (lambda: sliding_windows([1, 2], context=8, stride=8), "between 1 and 7"),
        (lambda: sliding_windows([1, 2], context=8, stride=0), "between 1"),
        (lambda: chunk_windows([1, 2], context=8), "which has 2 tokens"),
        (lambda: chunk_windows([1, 2, 3], context=3), "at least 4 tokens"),
    ],
)
def test_impossible_windows_are_refused(cut: object, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        cut()  # type: ignore[operator]

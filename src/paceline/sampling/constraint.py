"""What a structure allows next in one answer, with the bans that hold beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.sampling.grammar import Matcher
from paceline.sampling.rows import mask_width

Words = NDArray[np.uint32]

FORCED_A_TOKEN = 64
"""Tokens that must follow, spelled anew for each token of the answer, on average: they take some 2.5 µs each, and a
text of 100,000 characters that is forced as a whole, at each step, held up all requests for 70 ms."""


class Constraint:
    """The matcher of an answer and its masks.

    Ends of text and stop tokens are banned until ``min_tokens``, and ends always with ``ignore_eos``; but the structure
    wins: where nothing but them may follow, they may.

    A grammar that exceeds its limits leaves its ``error`` here and lets everything follow: whoever draws a token of the
    answer looks there first.
    """

    def __init__(
        self,
        matcher: Matcher,
        vocab_size: int,
        *,
        ends: Iterable[int],
        stops: Iterable[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        self.error: RequestError | None = None
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._ends = frozenset(ends)
        self._end_words = _words_of(self._ends, vocab_size)
        self._early_bans = _words_of({*self._ends, *stops}, vocab_size)
        self._late_bans = self._end_words if ignore_eos else None
        self._num_tokens = 0
        self._forced: list[int] = []  # what was spelled and has not come yet, the next one last
        self._spell_from = 0  # number of tokens from which more may be spelled

    @property
    def is_done(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self._matcher.is_done

    def advance(self, token: int) -> None:
        """A token of the answer that is here to stay. Raises ``RequestError`` where the grammar cannot follow it."""
        self._num_tokens += 1
        if self._forced and self._forced.pop() != token:
            self._forced = []
        if token not in self._ends:
            self._matcher.advance(token)

    def masks(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> list[Words]:
        """Which tokens may follow the answer (row 0), and each node of a tree of further tokens, depth first: node i,
        row i + 1, follows row ``parents[i]``. Behind a node that cannot follow only ends of text may."""
        try:
            return self._masks(tokens, parents)
        except RequestError as error:
            self.error = error
            return [np.full_like(self._end_words, 2**32 - 1)] * (len(tokens) + 1)

    def _masks(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Words]:
        matcher, masks = self._matcher, [self._mask(0)]
        path = [0]  # rows that the matcher has gone through
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            if parent in path and allows(masks[parent], token) and token not in self._ends:
                behind = len(path) - 1 - path.index(parent)
                matcher.rollback(behind)
                del path[len(path) - behind :]
                matcher.advance(token)
                masks.append(self._mask(len(path)))
                path.append(row)
            else:
                masks.append(self._end_words)
        matcher.rollback(len(path) - 1)
        return masks

    def mask_after(self, path: Sequence[int]) -> Words:
        """Which tokens may follow the answer and a path of further tokens."""
        matcher = self._matcher
        try:
            if not path:
                return self._mask(0)
            if self._ends.intersection(path) or matcher.num_allowed(path) < len(path):
                return self._end_words
            for token in path:
                matcher.advance(token)
            mask = self._mask(len(path))
            matcher.rollback(len(path))
        except RequestError as error:
            self.error = error
            return np.full_like(self._end_words, 2**32 - 1)
        return mask

    def num_allowed(self, path: Sequence[int]) -> int:
        """How many tokens of a path may follow the answer."""
        try:
            return 0 if self.error is not None else self._matcher.num_allowed(path)
        except RequestError as error:
            self.error = error
            return 0

    def forced(self, most: int) -> list[int]:
        """Tokens that spell what must follow, up to ``most``. None now and then where long texts must follow and are
        spelled otherwise."""
        if self.error is None and not self._forced and self._num_tokens >= self._spell_from:
            self._forced = self._matcher.forced()[::-1]
            self._spell_from = self._num_tokens + len(self._forced) // FORCED_A_TOKEN
        return [] if self.error is not None else self._forced[: -most - 1 : -1]

    def _mask(self, depth: int) -> Words:
        words = np.empty_like(self._end_words)
        self._matcher.allowed(words)
        bans = self._early_bans if self._num_tokens + depth < self._min_tokens else self._late_bans
        if bans is not None:
            left = words & ~bans
            if left.any():
                return left
        return words


def allows(words: Words, token: int) -> bool:
    """Whether a mask lets a token follow."""
    return bool(words[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def _words_of(tokens: Iterable[int], vocab_size: int) -> Words:
    words = np.zeros(mask_width(vocab_size), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words

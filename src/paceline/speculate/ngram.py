"""Drafts what followed the last tokens of a request when they occurred in it before: prompt lookup.

Source: Saxena 2023, "Prompt Lookup Decoding"; LLMA (Yang et al. 2023, 2304.04487). The longest n-gram, from
``max_ngram`` down to ``min_ngram`` tokens, that ends the request and occurred before is found in an index from n-grams
to the position after their most recent occurrence, and the tokens from that position on are proposed.

Departures: where the copy reaches the end of the request it goes on with what it has copied, so a loop is continued
round and round.

The confidence of a node has the odds 0.65 (n + k) for the k-th after a match of n tokens, k from 0: what a single
earlier occurrence was worth in answers of a 135M model. A match of ``max_ngram`` may be longer than is known.

Checked by: tests/unit/test_ngram.py against a search through the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculate.draft import MAX_NODES, Context, Draft

ODDS = 0.65


@dataclass(slots=True)
class _Index:
    """``after``: position after the most recent occurrence of each n-gram, of those that end before ``end``, which is
    the last position: something has followed them."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    end: int = 1


class NgramDrafter:
    """Prompt lookup over the request's own tokens, with n-grams of ``min_ngram`` to ``max_ngram`` tokens.

    A token takes an entry of the index for each length, some 150 bytes, until the request ends.
    """

    name = "ngram"
    is_free = True
    catch_up_s = 0.0

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 1) -> None:
        assert 1 <= min_ngram <= max_ngram
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self._indices: dict[int, _Index] = {}
        self._confidence = [ODDS * n / (1 + ODDS * n) for n in range(max_ngram + MAX_NODES)]

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """See ``Drafter``."""
        return [self._propose(context, limit) for context, limit in zip(contexts, limits, strict=True)]

    def finish(self, context: Context) -> None:
        """See ``Drafter``."""
        self._indices.pop(context.request_id, None)

    def _propose(self, context: Context, limit: int) -> Draft | None:
        tokens = context.tokens
        limit = min(limit, context.max_tokens - len(tokens) - 1, MAX_NODES)  # the pass itself yields the last token
        if limit < 1:
            return None
        index = self._indices.setdefault(context.request_id, _Index())
        self._extend(index, tokens)
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            begin = index.after.get(tuple(tokens[-n:]))
            if begin is not None:
                copy = tokens[begin : begin + limit]
                while len(copy) < limit:
                    copy += copy[: limit - len(copy)]
                return Draft.chain(copy, self._confidence[n : n + limit], self.name)
        return None

    def _extend(self, index: _Index, tokens: list[int]) -> None:
        after = index.after
        for end in range(index.end, len(tokens)):
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                after[tuple(tokens[end - n : end])] = end
        index.end = max(index.end, len(tokens))

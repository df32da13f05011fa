"""Log-probabilities as JSON can carry them, in the arrays of plain completions.

Source: OpenAI's API reference ("Completions", ``logprobs``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.engine.detokenize import Utf8Decoder
from paceline.engine.outputs import TokenLogprob
from paceline.serve.spelling import Spelling

NO_PROBABILITY = -9999.0
"""Stands for a logarithm of zero, which JSON does not have."""


def finite(logprob: float) -> float:
    """The same number unless it is none that JSON has."""
    return logprob if math.isfinite(logprob) else NO_PROBABILITY


class TokenArrays:
    """The arrays of one choice, built piece by piece: an entry for each token, and where it begins in the text.

    An offset counts characters of the text before; a token that begins inside a character has that of its first
    character that is complete in none before it.
    """

    def __init__(self, spelling: Spelling, *, offset: int = 0, missing: int = 0) -> None:
        """``offset`` is where the first token begins; ``missing`` continuation bytes complete what came before."""
        self._spelling = spelling
        self._decoder = Utf8Decoder(missing)
        self._offset = offset

    def document(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The arrays of the next tokens."""
        texts, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            texts.append(self._spelling.name_of(entry.token_id))
            logprobs.append(finite(entry.logprob))
            tops.append(self._top(entry))
            offsets.append(self._offset)
            self._offset += len(self._decoder.feed(entry.token_bytes))
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Text -> log-probability of the alternatives and of the token itself. A text that is taken already, by a
        likelier token or by the one that was chosen, is no name for another: that one gets its number."""
        found = {self._spelling.name_of(entry.token_id): finite(entry.logprob)}
        for other in entry.top:
            if other.token_id != entry.token_id:
                text = self._spelling.name_of(other.token_id)
                found[f"token_id:{other.token_id}" if text in found else text] = finite(other.logprob)
        return found


def prompt_arrays(
    spelling: Spelling, tokens: Sequence[int], text: str, logprobs: Sequence[TokenLogprob | None]
) -> dict[str, Any]:
    """The arrays of a prompt whose text is shown. Nothing precedes its first token, which so has no probability.

    What a tokenizer puts before a text (a first token, a blank) is not in ``text`` and has no width.
    """
    pieces = [spelling.bytes_of(token) for token in tokens]
    decoder = Utf8Decoder()
    widths = [len(decoder.feed(piece)) for piece in pieces]
    hidden = max(0, sum(widths) + len(decoder.flush()) - len(text))
    starts = [max(0, sum_before - hidden) for sum_before in _running_sums(widths)]
    document = TokenArrays(spelling).document([entry for entry in logprobs if entry is not None])
    return {
        "tokens": [spelling.name_of(token) for token in tokens],
        "token_logprobs": [None, *document["token_logprobs"]],
        "top_logprobs": [None, *document["top_logprobs"]],
        "text_offset": starts,
    }


def _running_sums(numbers: Sequence[int]) -> list[int]:
    sums = [0]
    for number in numbers:
        sums.append(sums[-1] + number)
    return sums[:-1]


def joined(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Arrays one after the other."""
    return second if first is None else {name: [*first[name], *second[name]] for name in second}

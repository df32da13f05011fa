"""Log-probabilities of chats: each token beside the text that it begins in.

Source: OpenAI's API reference, "Chat completions", ``logprobs``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from paceline.engine.detokenize import Utf8Decoder
from paceline.engine.outputs import TokenLogprob, TopLogprob
from paceline.serve.logprobs import finite


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The ``logprobs`` of a choice or chunk."""
    return {
        "content": [
            {**_token(token), "top_logprobs": [_token(alternative) for alternative in token.top]} for token in tokens
        ],
        "refusal": None,
    }


def _token(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.token_bytes)}


class AlignedLogprobs:
    """Gives out the tokens of one answer together with its text.

    A token belongs to the text that its first character is in; tokens of which no text is seen, because they ended the
    answer or belong to a stop string, are not given out.
    """

    def __init__(self) -> None:
        self._decoder = Utf8Decoder()
        self._num_read = 0  # characters that the tokens so far complete
        self._num_shown = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # with where each begins

    def feed(self, text: str, tokens: Sequence[TokenLogprob], *, is_cut: bool = False) -> list[TokenLogprob]:
        """The tokens that go with ``text``; ``is_cut`` on the last piece of an answer that came to its limit, where
        all that is left was drawn as part of it."""
        for token in tokens:
            self._waiting.append((self._num_read, token))
            self._num_read += len(self._decoder.feed(token.token_bytes))
        self._num_shown += len(text)
        found = []
        while self._waiting and (is_cut or self._waiting[0][0] < self._num_shown):
            found.append(self._waiting.popleft()[1])
        return found

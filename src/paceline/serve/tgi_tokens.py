"""Tokens of an answer as Text Generation Inference shows them: each with the text that it completes.

TGI keeps a stop sequence in the text, and so does this: the texts of all tokens but special ones, joined, are the text
of the answer. What the token that completes the sequence holds beyond it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.engine.detokenize import Utf8Decoder, missing_bytes
from paceline.engine.outputs import Completion, TokenLogprob
from paceline.engine.prompts import PromptTokenizer
from paceline.serve.logprobs import finite
from paceline.serve.spelling import Spelling


class TokenTexts:
    """The text of one answer, a token at a time."""

    def __init__(
        self, tokenizer: PromptTokenizer, spelling: Spelling, prompt: Sequence[int], stop: Sequence[str]
    ) -> None:
        self._spelling = spelling
        self._plain = tokenizer.token_bytes
        self._eos = frozenset(tokenizer.eos_token_ids)
        tail = b"".join(map(self._plain, prompt[-3:]))[-3:]
        self._decoder = Utf8Decoder(missing_bytes(tail))
        self._stop = sorted(stop, key=len)
        self.text = ""

    def feed(self, token: int, completion: Completion | None = None) -> str:
        """The text of the next token; ``completion`` is of the answer that it ends."""
        if self.is_special(token):
            piece = self._spelling.bytes_of(token).decode("utf-8", "replace")
            shown = ""
        else:
            piece = shown = self._decoder.feed(self._plain(token))
        if completion is None:
            self.text += shown
            return piece
        rest = self._decoder.flush()
        before, self.text = self.text, self._cut(self.text + shown + rest, completion)
        return piece if self.is_special(token) else self.text[len(before) :]

    def is_special(self, token: int) -> bool:
        """Whether a token stands for no text but has a name."""
        return not self._plain(token) and bool(self._spelling.bytes_of(token))

    def finish_reason(self, completion: Completion) -> str:
        """TGI's word for why an answer ended."""
        if completion.finish_reason == "length":
            return "length"
        return "eos_token" if completion.token_ids[-1] in self._eos else "stop_sequence"

    def document(self, entry: TokenLogprob, text: str) -> dict[str, Any]:
        """A generated token."""
        return {
            "id": entry.token_id,
            "text": text,
            "logprob": finite(entry.logprob),
            "special": self.is_special(entry.token_id),
        }

    def alternatives(self, entry: TokenLogprob) -> list[dict[str, Any]]:
        """The likeliest tokens in a place."""
        return [
            {
                "id": other.token_id,
                "text": self.name(other.token_id),
                "logprob": finite(other.logprob),
                "special": self.is_special(other.token_id),
            }
            for other in entry.top
        ]

    def name(self, token: int) -> str:
        """A token by itself."""
        return self._spelling.bytes_of(token).decode("utf-8", "replace")

    def _cut(self, text: str, completion: Completion) -> str:
        """Without what follows the stop sequence that ended an answer, if one did: it begins where the engine's text
        ends, and of those that begin there the shortest was complete first."""
        if completion.finish_reason != "stop":
            return text
        start = len(completion.text)
        for stop in self._stop:
            if text.startswith(stop, start):
                return text[: start + len(stop)]
        return text


def prefill_documents(texts: TokenTexts, prompt: Sequence[int], completion: Completion) -> list[dict[str, Any]]:
    """The tokens of a prompt; none when its log-probabilities were not asked for."""
    if completion.prompt_logprobs is None:
        return []
    return [
        {"id": token, "text": texts.name(token), "logprob": None if entry is None else finite(entry.logprob)}
        for token, entry in zip(prompt, completion.prompt_logprobs, strict=True)
    ]

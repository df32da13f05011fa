"""How the tokens of a model are written where a client sees them by themselves.

Source: the spelling ``bytes:\\xNN`` is what OpenAI's service sends.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.prompts import PromptTokenizer


def spelled(token_bytes: bytes) -> str:
    """A token as text; bytes that are no text of their own are named."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class Spelling:
    """The tokens of a vocabulary, special ones spelled out. A tokenizer is asked once for each: it takes 20 µs, and
    the alternatives of a long prompt are tens of thousands. May be used from several threads."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for, or its name."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._tokenizer.token_bytes(token, include_special=True)
        return found

    def name_of(self, token: int) -> str:
        """The same as text."""
        found = self._names.get(token)
        if found is None:
            found = self._names[token] = spelled(self.bytes_of(token))
        return found

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

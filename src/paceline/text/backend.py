"""What a Tokenizer needs to know of a vocabulary, and the `tokenizers` library behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import UnsupportedError

if TYPE_CHECKING:
    import tokenizers


class Backend(Protocol):
    """A vocabulary and the rules by which it cuts texts.

    ``added``: tokens found in a text before anything else, id -> (spelling, whether it stands for no text).
    ``is_byte_level``: tokens are spelled in the alphabet of ``byte_alphabet``, else as SentencePiece does.
    ``strips_first_space``: texts were given a leading space, which decoding takes off again.
    """

    @property
    def added(self) -> Mapping[int, tuple[str, bool]]: ...
    @property
    def is_byte_level(self) -> bool: ...
    @property
    def strips_first_space(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...

    def ids(self, text: str) -> list[int]:
        """The ids of a text; UnicodeEncodeError for lone surrogates."""
        ...

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id that none has."""
        ...


class LibraryBackend:
    """A ``tokenizers`` object."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises UnsupportedError for a decoder whose tokens have no bytes that we know."""
        self._tokenizer = tokenizer
        self.added: Mapping[int, tuple[str, bool]] = {
            token_id: (token.content, token.special) for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder_types = _decoder_steps(tokenizer)
        self.is_byte_level = "ByteLevel" in decoder_types
        self.strips_first_space = decoder_types.get("Strip", False) or decoder_types.get("Metaspace", False)
        self.num_tokens: int = tokenizer.get_vocab_size(with_added_tokens=True)
        if not self.is_byte_level and not {"ByteFallback", "Metaspace"} & decoder_types.keys():
            raise UnsupportedError(
                f"a tokenizer whose decoder is {' + '.join(decoder_types) or 'missing'}; "
                "Paceline has byte-level (ByteLevel) and SentencePiece (ByteFallback, Metaspace) ones"
            )

    def ids(self, text: str) -> list[int]:
        text.encode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> dict[str, bool]:
    """Decoder type -> whether it takes a space from the start of the text, in order."""
    if tokenizer.decoder is None:
        return {}
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return {step["type"]: step.get("start", 0) > 0 or step.get("prepend_scheme", "never") != "never" for step in steps}

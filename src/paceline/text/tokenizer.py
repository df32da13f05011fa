"""Text to token ids and back, and the exact bytes of each token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ParameterError, UnsupportedError
from paceline.text.byte_alphabet import byte_of_character
from paceline.text.gguf_tokenizer import WORD_START, tokenizer_from_metadata
from paceline.text.huggingface_tokenizer import tokenizer_from_directory
from paceline.text.special_tokens import SpecialTokens
from paceline.weights.gguf import GGUFCheckpoint
from paceline.weights.raw import Checkpoint

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads: nothing changes after construction.

    ``vocab_size`` counts tokens; the model's embedding may have more rows (padding), and these ids stand for no bytes.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens, *, num_embeddings: int) -> None:
        """``num_embeddings`` is the number of ids that the model accepts."""
        self._backend = backend
        self._special = special
        self._num_embeddings = num_embeddings
        self._added = {
            token_id: (token.content.encode(), token.special)
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        decoder_types = _decoder_steps(backend)
        self._is_byte_level = "ByteLevel" in decoder_types
        self._strips_first_space = decoder_types.get("Strip", False) or decoder_types.get("Metaspace", False)
        if not self._is_byte_level and not {"ByteFallback", "Metaspace"} & decoder_types.keys():
            raise UnsupportedError(
                f"a tokenizer whose decoder is {' + '.join(decoder_types) or 'missing'}; "
                "Paceline has byte-level (ByteLevel) and SentencePiece (ByteFallback, Metaspace) ones"
            )
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self._special.bos_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer, ends of a turn included."""
        return self._special.eos_ids

    @property
    def add_bos(self) -> bool:
        """Whether ``encode`` begins a text with ``bos_token_id``."""
        return self.bos_token_id is not None and self.bos_token_id in self._special.prefix_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``. Special tokens written out in it are recognised either way.

        ``add_special_tokens=False`` leaves out what the model wants around a whole text: right for the output of a chat
        template, which has it already. Raises ParameterError for a text that is not Unicode.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise ParameterError("prompt", text, "text without lone surrogates") from None
        if ids and max(ids) >= self._num_embeddings:
            allowed = f"the model knows ids below {self._num_embeddings} and this text holds token {max(ids)}"
            raise ParameterError("prompt", text, allowed)
        return [*self._special.prefix_ids, *ids, *self._special.suffix_ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as a whole; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(token_id, include_special=not skip_special_tokens) for token_id in ids)
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def token_bytes(self, token_id: int, include_special: bool = False) -> bytes:
        """The bytes that a token stands for inside a text.

        Nothing for ids that no token has, nor for special tokens unless ``include_special``, which spells them out.
        """
        if token_id in self._added:
            content, is_special = self._added[token_id]
            return content if include_special or not is_special else b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self._is_byte_level:
            return _sentencepiece_bytes(token)
        alphabet = byte_of_character()
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:  # a token outside of the alphabet was added as plain text
            return str(token).encode()

    def token_text(self, token_id: int) -> str:
        """The token as its vocabulary spells it, empty for ids that no token has; for display."""
        return self._backend.id_to_token(token_id) or ""


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that comes with a checkpoint. Raises CheckpointError or UnsupportedError."""
    if isinstance(checkpoint, GGUFCheckpoint):
        backend, special = tokenizer_from_metadata(Path(checkpoint.path), checkpoint.metadata)
    else:
        backend, special = tokenizer_from_directory(Path(checkpoint.path))
    return Tokenizer(backend, special, num_embeddings=checkpoint.config.vocab_size)


def _decoder_steps(backend: tokenizers.Tokenizer) -> dict[str, bool]:
    """Decoder type -> whether it takes a space from the start of the text, in order."""
    if backend.decoder is None:
        return {}
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return {step["type"]: step.get("start", 0) > 0 or step.get("prepend_scheme", "never") != "never" for step in steps}


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(WORD_START, " ").encode()

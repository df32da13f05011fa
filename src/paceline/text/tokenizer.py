"""Text to token ids and back, and the exact bytes of each token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ParameterError
from paceline.text.backend import Backend, LibraryBackend
from paceline.text.byte_alphabet import byte_of_character
from paceline.text.gguf_tokenizer import backend_from_metadata
from paceline.text.huggingface_tokenizer import tokenizer_from_directory
from paceline.text.sentencepiece import WORD_START
from paceline.text.special_tokens import SpecialTokens
from paceline.weights.gguf import GGUFCheckpoint
from paceline.weights.raw import Checkpoint


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads.

    ``vocab_size`` counts tokens; the model's embedding may have more rows (padding), and these ids stand for no bytes.
    """

    def __init__(self, backend: Backend, special: SpecialTokens, *, num_embeddings: int) -> None:
        """``num_embeddings`` is the number of ids that the model accepts."""
        self._backend = backend
        self._special = special
        self._num_embeddings = num_embeddings
        self.vocab_size = backend.num_tokens

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
            ids = self._backend.ids(text)
        except UnicodeEncodeError:
            raise ParameterError("prompt", text, "text without lone surrogates") from None
        if ids and max(ids) >= self._num_embeddings:
            allowed = f"the model knows ids below {self._num_embeddings} and this text holds token {max(ids)}"
            raise ParameterError("prompt", text, allowed)
        return [*self._special.prefix_ids, *ids, *self._special.suffix_ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as a whole; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(token_id, include_special=not skip_special_tokens) for token_id in ids)
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._backend.strips_first_space else text

    def token_bytes(self, token_id: int, include_special: bool = False) -> bytes:
        """The bytes that a token stands for inside a text.

        Nothing for ids that no token has, nor for special tokens unless ``include_special``, which spells them out.
        """
        added, is_special = self._backend.added.get(token_id, (None, False))
        if is_special and not include_special:
            return b""
        token = self._backend.token(token_id) if added is None else added
        if token is None:
            return b""
        if not self._backend.is_byte_level:
            return _sentencepiece_bytes(token)
        if added is not None:
            return added.encode()
        alphabet = byte_of_character()
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:  # a token outside of the alphabet was added as plain text
            return token.encode()

    def token_text(self, token_id: int) -> str:
        """The token as its vocabulary spells it, empty for ids that no token has; for display."""
        return self._backend.token(token_id) or ""


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that comes with a checkpoint. Raises CheckpointError or UnsupportedError."""
    backend: Backend
    if isinstance(checkpoint, GGUFCheckpoint):
        backend, special = backend_from_metadata(Path(checkpoint.path), checkpoint.metadata)
    else:
        library, special = tokenizer_from_directory(Path(checkpoint.path))
        backend = LibraryBackend(library)
    return Tokenizer(backend, special, num_embeddings=checkpoint.config.vocab_size)


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(WORD_START, " ").encode()

"""The tokenizer in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, UnsupportedError
from paceline.text.backend import Backend, LibraryBackend
from paceline.text.pretokenizers import PRETOKENIZERS, PreTokenizer
from paceline.text.sentencepiece import WORD_START, SentencePiece
from paceline.text.special_tokens import SpecialTokens, end_token_ids

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of ``tokenizer.ggml.token_type``; 5 (unused) and 6 (byte) need no treatment."""

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
PHI3_KEEPS_AFTER = ("<unk>", "<s>", "<|endoftext|>")
"""Of Phi-3's added tokens those that leave the white space after them, as in its tokenizer.json and in llama.cpp."""

SENTENCEPIECE_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


class _Vocabulary:
    """The tokenizer's keys, checked; errors name the file."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.model = str(self.get("model"))
        if self.model not in ("gpt2", "llama"):
            raise UnsupportedError(
                f"{path}: tokenizer {self.model!r}; Paceline has gpt2 (byte-level BPE) and llama (SentencePiece BPE)"
            )
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise CheckpointError(path, "metadata lacks tokenizer.ggml.tokens, a list of strings")
        self.pieces: list[str] = tokens
        types = self.get("token_type")
        self.types = np.full(len(tokens), NORMAL) if types is None else self._numbers("token_type")
        if self.is_sentencepiece:
            self.pieces = self._with_word_starts()
        self.added = {
            i: (self.pieces[i], bool(self.types[i] != USER_DEFINED))
            for i in np.flatnonzero(np.isin(self.types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist()
        }
        """Tokens that are found in a text before anything is merged: id -> (spelling, whether it is no text)."""

    @property
    def strips_after(self) -> frozenset[int]:
        """Added tokens after which white space is dropped. No key says it: it is so in Phi-3's files alone."""
        if not self.is_sentencepiece or self.metadata.get("general.architecture") != "phi3":
            return frozenset()
        return frozenset(i for i, (text, _) in self.added.items() if text not in PHI3_KEEPS_AFTER)

    @property
    def is_sentencepiece(self) -> bool:
        return self.model == "llama"

    def _with_word_starts(self) -> list[str]:
        """The tokens with runs of spaces spelled as the vocabulary itself has them: converters write them as text.

        Only runs that merging reaches, all shorter ones being there too; any other stays something to find in a text.
        """
        pieces = list(self.pieces)
        user_defined = np.flatnonzero(self.types == USER_DEFINED).tolist()
        runs = {len(pieces[i]): i for i in user_defined if not pieces[i].strip(" ")}
        length = 2
        while length in runs:
            pieces[runs[length]] = WORD_START * length
            length += 1
        return pieces

    def ids(self) -> dict[str, int]:
        """Spelling -> id; CheckpointError when two tokens are spelled alike."""
        ids = dict(zip(self.pieces, range(len(self.pieces)), strict=True))
        if len(ids) != len(self.pieces):
            raise CheckpointError(self.path, "tokenizer.ggml.tokens holds the same token twice")
        return ids

    def scores(self) -> list[float]:
        """A score for each token. User-defined ones are better than all: SentencePiece merges nothing inside them."""
        scores = self._numbers("scores")
        if np.isnan(scores).any():
            raise CheckpointError(self.path, "tokenizer.ggml.scores holds something that is not a number")
        found: list[float] = np.where(self.types == USER_DEFINED, np.inf, scores).tolist()
        return found

    def _numbers(self, key: str) -> NDArray[Any]:
        """The array under that key, which has a number for each token."""
        values = self.get(key)
        if isinstance(values, list) and all(type(value) in (int, float) for value in values):
            values = np.asarray(values)
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf" or len(values) != len(self.pieces):
            found = "none" if values is None else f"{len(values)} items" if hasattr(values, "__len__") else repr(values)
            problem = f"a number for each of {len(self.pieces)} tokens; the file has {found}"
            raise CheckpointError(self.path, f"tokenizer.ggml.{key} must be {problem}")
        return values

    def flag(self, key: str, default: bool) -> bool:
        """True or false, as the file says, else ``default``."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(self.path, f"tokenizer.ggml.{key} is {value!r}, expected true or false")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def token_id(self, key: str) -> int | None:
        """The id under that key, which must be a token's, else the default of this kind of vocabulary."""
        value = self.get(key, SENTENCEPIECE_DEFAULTS.get(key) if self.model == "llama" else None)
        if value is not None and not (type(value) is int and 0 <= value < len(self.pieces)):
            raise CheckpointError(
                self.path, f"tokenizer.ggml.{key} is {value}, but there are {len(self.pieces)} tokens"
            )
        return value


def backend_from_metadata(path: Path, metadata: Mapping[str, Any]) -> tuple[Backend, SpecialTokens]:
    """What cuts and spells texts, and its special tokens; ``path`` is only for errors.

    Raises CheckpointError for metadata that is missing or contradicts itself, UnsupportedError for a kind not built.
    """
    vocabulary = _Vocabulary(path, metadata)
    if vocabulary.is_sentencepiece:
        return _quick_sentencepiece(vocabulary), _special_tokens(vocabulary)
    return LibraryBackend(_library_tokenizer(vocabulary)), _special_tokens(vocabulary)


def tokenizer_from_metadata(path: Path, metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    """The same as an object of the ``tokenizers`` library, which can be written as tokenizer.json. It takes seconds for
    a large SentencePiece vocabulary.
    """
    vocabulary = _Vocabulary(path, metadata)
    return _library_tokenizer(vocabulary), _special_tokens(vocabulary)


def _library_tokenizer(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken

    if vocabulary.is_sentencepiece:
        backend = _sentencepiece(vocabulary)
    else:
        backend = _byte_level(vocabulary, _pretokenizer(vocabulary))
    strips = vocabulary.strips_after
    backend.add_tokens(
        [
            AddedToken(text, special=special, normalized=False, rstrip=token_id in strips)
            for token_id, (text, special) in vocabulary.added.items()
        ]
    )
    return backend


def _special_tokens(vocabulary: _Vocabulary) -> SpecialTokens:
    bos, eos = vocabulary.token_id("bos_token_id"), vocabulary.token_id("eos_token_id")
    adds_bos = vocabulary.is_sentencepiece or _pretokenizer(vocabulary).add_bos
    prefix = vocabulary.flag("add_bos_token", adds_bos) and bos is not None
    suffix = vocabulary.flag("add_eos_token", False) and eos is not None
    specials = {text: i for i, (text, _) in vocabulary.added.items() if vocabulary.types[i] == CONTROL}
    return SpecialTokens(
        bos_id=bos,
        eos_ids=end_token_ids(map(vocabulary.token_id, END_KEYS), specials.get),
        prefix_ids=(bos,) if prefix and bos is not None else (),
        suffix_ids=(eos,) if suffix and eos is not None else (),
    )


def _pretokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.get("pre")
    if not isinstance(name, str) or name not in PRETOKENIZERS:
        given = "names no pre-tokenizer (tokenizer.ggml.pre)" if name is None else f"pre-tokenizer {name!r}"
        raise UnsupportedError(f"{vocabulary.path}: {given}; Paceline has {', '.join(PRETOKENIZERS)}")
    return PRETOKENIZERS[name]


def _byte_level(vocabulary: _Vocabulary, pretokenizer: PreTokenizer) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    # Built from lists on every start: 0.15 s for 49k tokens. Reading a tokenizer.json kept in the cache takes 0.17 s.
    merges = vocabulary.get("merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise CheckpointError(vocabulary.path, "metadata lacks tokenizer.ggml.merges")
    halves = " ".join(merges).split(" ") if merges else []
    if len(halves) != 2 * len(merges):
        raise CheckpointError(vocabulary.path, "tokenizer.ggml.merges holds something that is not a pair")
    pairs = list(zip(halves[::2], halves[1::2], strict=True))
    try:
        model = BPE(vocab=vocabulary.ids(), merges=pairs, ignore_merges=pretokenizer.ignore_merges)
    except Exception as error:  # the library raises plain Exception for a merge of unknown tokens
        raise CheckpointError(vocabulary.path, f"tokenizer.ggml.merges does not fit the tokens: {error}") from error
    backend = Tokenizer(model)
    if pretokenizer.composes:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pretokenizer.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _quick_sentencepiece(vocabulary: _Vocabulary) -> SentencePiece:
    return SentencePiece(
        vocabulary.ids(),
        vocabulary.scores(),
        added=vocabulary.added,
        unknown_id=vocabulary.token_id("unknown_token_id"),
        add_space_prefix=vocabulary.flag("add_space_prefix", True),
        strips_after=vocabulary.strips_after,
    )


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    ids = vocabulary.ids()
    unknown_id = vocabulary.token_id("unknown_token_id")
    unknown = None if unknown_id is None else vocabulary.pieces[unknown_id]
    merges = merges_by_score(ids, vocabulary.scores())
    backend = Tokenizer(BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", WORD_START)]
    undo: list[Any] = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(WORD_START))
        undo.append(decoders.Strip(content=" ", left=1, right=0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undo)
    return backend


def merges_by_score(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merge list under which BPE gives what SentencePiece's BPE gives: better scores merge first.

    Source: Transformers, convert_slow_tokenizer.generate_merges.
    Departures: where two tokens have one score, or two splits of one token overlap in the text, SentencePiece takes the
    left one and a merge list cannot say so. Trained vocabularies number their scores, so only the second can occur, in
    runs of a repeated pattern; there the longest left part comes first.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in ids and (right := token[cut:]) in ids:
                ranked.append((-scores[token_id], -cut, token_id, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]

"""SentencePiece's BPE over the vocabulary of a GGUF file, ready as soon as that is read.

Source: Kudo and Richardson 2018 (SentencePiece, 1808.06226); sentencepiece, bpe_model.cc. Where two splits of one piece
overlap in a text, the longer left part wins, as in the merge lists that Transformers makes of such vocabularies
(convert_slow_tokenizer.generate_merges); SentencePiece itself takes the left one.

Departures: the `tokenizers` library's BPE would need a list of merges, two a token: 3.5 s for Gemma's 262,144 tokens
(1.8 s from a finished tokenizer.json), against 0.1 s here. Text is cut where no piece can cross, and the ids of short
words are remembered; other text costs a few microseconds a character.

Checked by: tests/unit/test_tokenizer_sentencepiece.py, against that library and a slow BPE;
tests/golden/test_tokenizer_gemma3.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

WORD_START = "▁"
WORD_CHARACTERS, CACHED_WORDS = 32, 1 << 15
"""Words up to so long are remembered, and so many: some 5 MB."""


class SentencePiece:
    """A vocabulary of pieces with scores. Implements ``backend.Backend``; safe to use from several threads."""

    is_byte_level = False

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: Sequence[float],
        *,
        added: Mapping[int, tuple[str, bool]],
        unknown_id: int | None,
        add_space_prefix: bool,
        strips_after: frozenset[int] = frozenset(),
    ) -> None:
        """``ids`` of all pieces, in order; ``scores`` by id, the better one merges first. ``added`` are tokens that are
        found in the text before anything is merged: id -> (its spelling, whether it stands for no text); white space
        that follows one of ``strips_after`` is dropped.
        """
        self.added = added
        self.strips_first_space = add_space_prefix
        self.num_tokens = len(ids)
        self._pieces = pieces = list(ids)
        self._ids = ids
        self._costs = [-score for score in scores]
        self._unknown_id = unknown_id
        self._strips_after = strips_after
        self._byte_ids = [self._ids.get(f"<0x{byte:02X}>") for byte in range(256)]
        spelled = {text: token_id for token_id, (text, _) in added.items() if text}
        self._added_ids = spelled
        self._added_start = re.compile(f"[{re.escape(''.join({text[0] for text in spelled}))}]") if spelled else None
        self._added_lengths = _lengths(spelled)
        # A piece such as ">▁</" goes on over the start of a word: there text is not cut.
        inner = [piece for piece in pieces if WORD_START in piece[1:]]
        joints = {a for piece in inner for a, b in pairwise(piece) if b == WORD_START} | {WORD_START}
        self._word_start = re.compile(f"(?<=[^{re.escape(''.join(sorted(joints)))}])(?={WORD_START})")
        self._remembered = lru_cache(CACHED_WORDS)(self._merge)

    def ids(self, text: str) -> list[int]:
        """The ids of a text, added tokens recognised. Raises UnicodeEncodeError for lone surrogates."""
        text.encode()
        ids: list[int] = []
        start = end = 0
        for match in self._added_start.finditer(text) if self._added_start else ():
            at = match.start()
            if at >= end and (found := self._added_at(text, at)) is not None:
                ids += self._plain(text[start:at])
                ids.append(found)
                start = end = at + len(self.added[found][0])
                if found in self._strips_after:
                    start = len(text) - len(text[end:].lstrip())
        return ids + self._plain(text[start:])

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id that none has."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else None

    def _added_at(self, text: str, at: int) -> int | None:
        """The longest added token that begins there."""
        for length in self._added_lengths[text[at]]:
            token_id = self._added_ids.get(text[at : at + length])
            if token_id is not None:
                return token_id
        return None

    def _plain(self, text: str) -> list[int]:
        """The ids of a text without added tokens."""
        if not text:
            return []
        text = text.replace(" ", WORD_START)
        if self.strips_first_space:
            text = WORD_START + text
        ids: list[int] = []
        for word in self._word_start.split(text):
            ids += self._remembered(word) if len(word) <= WORD_CHARACTERS else self._merge(word)
        return ids if self._unknown_id is None else _without_repeats(ids, self._unknown_id)

    def _merge(self, word: str) -> tuple[int, ...]:
        """Merges neighbours until no union is a piece, the best first, of equals the one with the longest left part."""
        ids, costs = self._ids, self._costs
        texts: list[str | None] = [character if character in ids else None for character in word]
        before, after = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        heap: list[tuple[float, int, int, str]] = []
        for i, (left, right) in enumerate(pairwise(texts)):
            if left is not None and right is not None and (token_id := ids.get(left + right)) is not None:
                heap.append((costs[token_id], -1, i, left + right))
        heapify(heap)
        while heap:
            _, _, i, union = heappop(heap)
            left, j = texts[i], after[i]
            # What was offered may have been merged otherwise since: then its parts are gone or longer.
            if left is None or j == len(word) or (right := texts[j]) is None or left + right != union:
                continue
            texts[i], texts[j], after[i] = union, None, after[j]
            if after[i] < len(word):
                before[after[i]] = i
            for k in (before[i], i):
                if k < 0 or after[k] == len(word):
                    continue
                left, right = texts[k], texts[after[k]]
                if left is not None and right is not None and (token_id := ids.get(left + right)) is not None:
                    heappush(heap, (costs[token_id], -len(left), k, left + right))
        return self._final(word, texts, after)

    def _final(self, word: str, texts: list[str | None], after: list[int]) -> tuple[int, ...]:
        """The ids of what is left; a character without a piece becomes its bytes, or the unknown token."""
        found: list[int] = []
        i = 0
        while i < len(word):
            piece = texts[i]
            if piece is not None:
                found.append(self._ids[piece])
            else:
                byte_ids = [self._byte_ids[byte] for byte in word[i].encode()]
                known = [token_id for token_id in byte_ids if token_id is not None]
                if len(known) == len(byte_ids):
                    found += known
                elif self._unknown_id is not None:
                    found.append(self._unknown_id)
            i = after[i]
        return tuple(found)


def _lengths(spelled: Mapping[str, int]) -> dict[str, list[int]]:
    """First character -> the lengths of the texts that begin with it, longest first."""
    lengths: dict[str, set[int]] = {}
    for text in spelled:
        lengths.setdefault(text[0], set()).add(len(text))
    return {first: sorted(found, reverse=True) for first, found in lengths.items()}


def _without_repeats(ids: list[int], repeated: int) -> list[int]:
    """``ids`` in which runs of one id are one."""
    if repeated not in ids:
        return ids
    return [token_id for i, token_id in enumerate(ids) if token_id != repeated or ids[i - 1 : i] != [repeated]]

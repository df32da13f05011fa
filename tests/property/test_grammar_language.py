"""What answers can be under a regular expression is exactly its language, up to a length: all paths are walked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from grammar_vocabulary import ENDS, VOCAB, GrammarTokenizer, constraint_of
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.params import Structure
from paceline.sampling.constraint import Constraint, allows

LETTERS = "abc"
LONGEST = 4

expressions = st.recursive(
    st.sampled_from([*LETTERS, "[ab]", "[^a]"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


def reachable(constraint: Constraint, tokenizer: GrammarTokenizer) -> Iterator[str]:
    """Texts of the alphabet, up to a length, at which an answer may end: by the masks alone."""
    letters = [token for token in range(VOCAB) if set(tokenizer.token_bytes(token).decode("latin-1")) & set(LETTERS)]
    waiting: list[tuple[list[int], str]] = [([], "")]
    while waiting:
        path, text = waiting.pop()
        mask = constraint.mask_after(path)
        if all(allows(mask, end) for end in ENDS):
            yield text
        for token in letters:
            piece = tokenizer.token_bytes(token).decode("latin-1")
            if set(piece) <= set(LETTERS) and len(text + piece) <= LONGEST and allows(mask, token):
                waiting.append(([*path, token], text + piece))


@settings(max_examples=60, deadline=None)
@given(expression=expressions)
def test_the_texts_that_can_be_are_the_language(expression: str) -> None:
    tokenizer = GrammarTokenizer()
    found = set(reachable(constraint_of(Structure("regex", expression)), tokenizer))
    words = ("".join(word) for length in range(LONGEST + 1) for word in itertools.product(LETTERS, repeat=length))
    assert found == {word for word in words if re.fullmatch(expression, word)}


def test_a_mask_that_lacks_a_token_would_be_seen() -> None:
    """A longer token that is forbidden changes no text, one that is wrongly allowed does."""
    constraint = constraint_of(Structure("regex", "ab|ac"))
    right = constraint.mask_after

    def wrong(path: list[int]):  # type: ignore[no-untyped-def]
        mask = right(path).copy()
        if path == [ord("a")]:
            mask[ord("a") // 32] |= 1 << (ord("a") % 32)
            mask[ENDS[0] // 32] |= 1 << (ENDS[0] % 32)
            mask[ENDS[1] // 32] |= 1 << (ENDS[1] % 32)
        return mask

    constraint.mask_after = wrong  # type: ignore[method-assign, assignment]
    assert set(reachable(constraint, GrammarTokenizer())) > {"ab", "ac", "a"}

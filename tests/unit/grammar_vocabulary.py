"""A small vocabulary for grammars: bytes, some longer tokens, two ends of text, and ids that no answer may hold."""

from __future__ import annotations

from fake_executor import FakeTokenizer

from paceline.params import Structure
from paceline.sampling.constraint import Constraint
from paceline.sampling.grammar import GrammarCompiler

LONGER = [b"ab", b"abc", b"ca", b'{"', b'":', b"true", b"12"]
ENDS = (256 + len(LONGER), 257 + len(LONGER))
VOCAB = ENDS[1] + 31
"""Behind the ends lie control tokens, which stand for no bytes."""


class GrammarTokenizer(FakeTokenizer):
    """Bytes are their own ids."""

    def __init__(self) -> None:
        table = [bytes([byte]) for byte in range(256)] + LONGER
        super().__init__(VOCAB, table=table + [b""] * (VOCAB - len(table)))
        self.eos_token_ids = ENDS  # type: ignore[assignment]


def constraint_of(structure: Structure, **bans: object) -> Constraint:
    """A fresh answer."""
    matcher = GrammarCompiler(GrammarTokenizer(), VOCAB).compile(structure).matcher()
    return Constraint(matcher, VOCAB, ends=ENDS, **bans)  # type: ignore[arg-type]

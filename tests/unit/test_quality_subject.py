"""Models side by side: vocabularies that differ, memory that does not suffice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_checkpoint, tiny_config

from paceline.config import EngineConfig
from paceline.errors import MemoryBudgetError, ParameterError
from paceline.measure.quality import subject
from paceline.measure.quality.subject import Opened, Vocabulary, check_memory, scoring_config


class Words:
    """A tokenizer of these tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.vocab_size = len(tokens)

    def token_text(self, token: int) -> str:
        return self.tokens[token] if token < len(self.tokens) else ""


def opened(name: str, *, vocab_size: int = 75) -> Opened:
    checkpoint = tiny_checkpoint(tiny_config(vocab_size=vocab_size))
    config = scoring_config(checkpoint, EngineConfig(), context=64)
    return Opened(name, Path(name), checkpoint, config)


@pytest.fixture
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Words]:
    """Size of the vocabulary -> its tokenizer."""
    found: dict[int, Words] = {}

    def load(checkpoint: Any) -> Words:
        return found[checkpoint.config.vocab_size]

    monkeypatch.setattr(subject, "load_tokenizer", load)
    return found


WORDS = [f"w{at}" for at in range(75)]


def test_padding_is_tolerated(tokenizers: dict[int, Words]) -> None:
    tokenizers[75] = tokenizers[80] = Words(WORDS)
    vocabulary = Vocabulary(opened("padded", vocab_size=80))
    assert vocabulary.num_shared == 80
    vocabulary.check(opened("plain"))
    assert vocabulary.num_shared == 75


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([*WORDS[:40], "other", *WORDS[41:]], "token 40 is 'other' here and 'w40' there"),
        (WORDS[:70], "token 70 is '' here"),
        ([*WORDS, "more"], "token 75 is 'more' here and '' there"),
    ],
)
def test_another_vocabulary_is_refused(tokenizers: dict[int, Words], theirs: list[str], words: str) -> None:
    tokenizers[75], tokenizers[80] = Words(WORDS), Words(theirs)
    with pytest.raises(ParameterError, match=words) as caught:
        Vocabulary(opened("mine")).check(opened("theirs", vocab_size=80))
    assert caught.value.value == "theirs"


def test_one_file_is_compared_with_itself_unread(tokenizers: dict[int, Words]) -> None:
    tokenizers[75] = Words(WORDS)
    vocabulary = Vocabulary(opened("same"))
    del tokenizers[75]
    vocabulary.check(opened("same"))


def test_models_that_do_not_fit_are_named() -> None:
    models = [opened("first"), opened("second")]
    needed = sum(model.needed_bytes for model in models)
    check_memory(models, needed)
    with pytest.raises(MemoryBudgetError, match=r"side by side.*first .*second .*compare fewer"):
        check_memory(models, needed - 1)

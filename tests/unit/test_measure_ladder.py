"""The ladder: its rows agree on a correct engine, and a technique that changes a token is caught."""

from __future__ import annotations

import pytest
from byte_llm import byte_llm
from fake_executor import reference_tokens

from paceline.cli.demo import ladder_tokens
from paceline.measure import ladder
from paceline.measure.ladder import TECHNIQUES, Climb, Technique, climb_ladder
from paceline.measure.prompts import distinct_prompts, prompt_tokens

PROMPT = list(b"user: Why?\nassistant: ")


def test_all_techniques_give_the_tokens_of_the_definition() -> None:
    expected = tuple(reference_tokens(PROMPT, 9, vocab_size=257))
    with byte_llm() as llm:
        for technique in TECHNIQUES:
            climb = technique.climb(llm, PROMPT, 9)
            assert climb.tokens == expected, technique.name
            assert climb.num_tokens == (9 * ladder.BATCH if technique.climb is ladder.batch_of_eight else 9)


def test_rungs_compare_with_the_first_row_and_with_the_row_above() -> None:
    def fixed(num_tokens: int, *tokens: int) -> Technique:
        return Technique(f"{num_tokens}", lambda llm, prompt, num_new: Climb(num_tokens, 2.0, tokens))

    with byte_llm() as llm:
        rungs = list(climb_ladder(llm, PROMPT, 3, [fixed(4, 1, 2), fixed(20, 1, 2, 3), fixed(40, 1, 2, 4)]))
    assert [rung.technique for rung in rungs] == ["4", "20", "40"]
    assert [rung.tokens_per_s for rung in rungs] == [2.0, 10.0, 20.0]
    assert [rung.times_faster for rung in rungs] == [1.0, 5.0, 10.0]
    assert [rung.equal for rung in rungs] == [None, True, False], (
        "a shorter row counts as far as it goes; a wrong token shows"
    )


def test_row_without_a_cache_stops_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "NO_CACHE_LIMIT_S", 0.0)
    with byte_llm() as llm:
        climb = ladder.without_cache(llm, PROMPT, 50)
    assert climb.num_tokens == len(climb.tokens) == 1


def test_rows_are_shorter_on_a_slow_machine() -> None:
    assert [ladder_tokens(rate) for rate in (0.0, 5.0, 20.0, 400.0)] == [16, 16, 40, 96]


def test_prompts_have_their_length_and_differ() -> None:
    with byte_llm() as llm:
        tokenizer = llm.tokenizer
        assert len(prompt_tokens(tokenizer, 20_000)) == 20_000
        assert prompt_tokens(tokenizer, 30, offset=5) == prompt_tokens(tokenizer, 35)[5:]
        prompts = distinct_prompts(tokenizer, 64, 16)
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {16}

"""The ladder: its rows agree on a correct engine, and a technique that changes a token is caught."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from byte_llm import byte_llm
from fake_executor import reference_tokens

from paceline.cli.demo import equality, ladder_tokens
from paceline.config import KVFormat
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.measure import ladder
from paceline.measure.ladder import TECHNIQUES, Climb, Technique, climb_ladder
from paceline.measure.prompts import distinct_prompts, prompt_tokens

PROMPT = list(b"user: Why?\nassistant: ")


def no_other_engine(kv_dtype: KVFormat) -> LLM:
    raise AssertionError("no technique here has an engine of its own")


def test_all_techniques_give_the_tokens_of_the_definition() -> None:
    short = tuple(reference_tokens(PROMPT, 9, vocab_size=257))
    with byte_llm() as llm:
        text = prompt_tokens(llm.tokenizer, 9 * ladder.TEXT_TIMES)
        long = tuple(reference_tokens([*text, *PROMPT], 9, vocab_size=257))
        again = ladder.repeated(llm, PROMPT, 9).tokens
        expected = short
        for technique in TECHNIQUES:
            climb = technique.climb(llm, PROMPT, 9)
            if technique.climb is ladder.repeated:
                expected = again
            elif technique.starts_anew:
                expected = long
            assert climb.tokens == expected, technique.name
            assert climb.num_tokens == (9 * ladder.BATCH if technique.climb is ladder.batch_of_eight else 9)


def test_only_the_prefix_cache_finds_the_long_text() -> None:
    with byte_llm() as llm:
        ladder.after_long_text(llm, PROMPT, 9)
        ladder.after_long_text(llm, PROMPT, 9)
        assert llm.stats().cache_saved_tokens == 0
        ladder.with_prefix_cache(llm, PROMPT, 9)
        assert llm.stats().cache_saved_tokens == 9 * ladder.TEXT_TIMES


def test_long_text_fits_into_the_context() -> None:
    with byte_llm(context_length=64) as llm:
        assert len(ladder.after_long_text(llm, PROMPT, 9).tokens) == 9
        assert len(ladder.with_prefix_cache(llm, PROMPT, 9).tokens) == 9


def fixed(num_tokens: int, *tokens: int, **fields: Any) -> Technique:
    return Technique(f"{num_tokens}", lambda llm, prompt, num_new: Climb(num_tokens, 2.0, tokens), **fields)


def test_rungs_compare_with_the_first_row_and_with_the_row_above() -> None:
    with byte_llm() as llm:
        techniques = [fixed(4, 1, 2), fixed(20, 1, 2, 3), fixed(40, 1, 2, 4)]
        rungs = list(climb_ladder(llm, PROMPT, 3, techniques, open_llm=no_other_engine))
    assert [rung.technique.name for rung in rungs] == ["4", "20", "40"]
    assert [rung.tokens_per_s for rung in rungs] == [2.0, 10.0, 20.0]
    assert [rung.times_faster for rung in rungs] == [1.0, 5.0, 10.0]
    assert [rung.equal for rung in rungs] == [None, True, False], (
        "a shorter row counts as far as it goes; a wrong token shows"
    )
    assert [(rung.num_equal, rung.num_compared) for rung in rungs] == [(None, 0), (2, 2), (2, 3)]
    assert [equality(rung) for rung in rungs] == ["", "yes", "NO"]


def test_row_that_starts_anew_is_what_those_below_are_compared_with() -> None:
    techniques = [fixed(4, 1, 2), fixed(10, 7, 8, starts_anew=True), fixed(30, 7, 9, exact=False)]
    with byte_llm() as llm:
        rungs = list(climb_ladder(llm, PROMPT, 2, techniques, open_llm=no_other_engine))
    assert [rung.times_faster for rung in rungs] == [1.0, 1.0, 3.0]
    assert [equality(rung) for rung in rungs] == ["", "", "first 1 of 2, by rounding"]


def test_technique_with_another_format_gets_an_engine_of_its_own() -> None:
    opened: list[tuple[KVFormat, LLM]] = []
    used: list[LLM] = []

    def open_llm(kv_dtype: KVFormat) -> LLM:
        opened.append((kv_dtype, byte_llm()))
        return opened[-1][1]

    def climb(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
        used.append(llm)
        return ladder.with_cache(llm, prompt, num_new)

    techniques = [Technique("f16", climb), Technique("int8", climb, kv_dtype="int8")]
    with byte_llm() as llm:
        assert [rung.equal for rung in climb_ladder(llm, PROMPT, 2, techniques, open_llm=open_llm)] == [None, True]
        assert [kv_dtype for kv_dtype, _ in opened] == ["int8"]
        assert used == [llm, opened[0][1]]
        with pytest.raises(PacelineError, match="closed"):
            used[1].generate(PROMPT)


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

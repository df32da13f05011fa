"""The matrix of `paceline verify`: nothing is left out, nothing comes twice, and each request is known by its seed."""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args

import pytest
from byte_llm import VOCAB
from fake_executor import FakeTokenizer

from paceline import _native
from paceline.config import KV_FORMATS, PAGE_TOKENS, SPLIT_TOKENS, EngineConfig
from paceline.measure import cells as matrix
from paceline.measure.cells import (
    NUM_DISTINCT,
    NUM_SHARING,
    SHARED_TOKENS,
    Cache,
    Cell,
    Drafts,
    Host,
    Question,
    cells,
    format_question,
    number_of_requests,
    plain_questions,
    sampling_base,
    sampling_questions,
)
from paceline.measure.verification import QUICK
from paceline.params import SamplingParams

HOST = Host(num_threads=4, isas=("scalar", "avx2"), kv_formats=("bf16", "f32", "int8"))
TOKENIZER = FakeTokenizer(VOCAB, table=[bytes([byte]) for byte in range(256)] + [b""])


def sampling() -> list[Question]:
    return sampling_questions(sampling_base(TOKENIZER, num_new=8), list(range(60, 68)), "abcdefgh", (VOCAB - 1,))


@pytest.mark.parametrize("full", [False, True])
def test_every_value_of_the_issue_is_there_and_none_twice(full: bool) -> None:
    found = [cell for _, cell in cells(HOST, full=full)]
    assert len(set(found)) == len(found)
    assert Cell() in found
    assert {cell.batch for cell in found} >= {1, 2, 7, 32}
    assert {cell.chunk for cell in found} >= {None, 16, 128}
    assert {cell.cache for cell in found} == set(get_args(Cache))
    assert {cell.num_threads for cell in found} == {1, 4}
    assert {cell.isa for cell in found} == {None, "scalar", "avx2"}
    assert {cell.kv_dtype for cell in found} == {None, "bf16", "f32", "int8"}
    assert any(cell.pool_pages is not None for cell in found)
    drafted = {(cell.drafts, cell.batch, cell.cache) for cell in found if cell.drafts is not None}
    drafters = set(get_args(Drafts)) - {"forced"}  # drafts for none of these; ``sampling`` has one with a structure
    assert drafted == set(itertools.product(drafters, [1], ["off"])) | set(itertools.product(drafters, [8], ["hit"]))


def test_full_has_every_combination() -> None:
    found = {cell for _, cell in cells(HOST, full=True)}
    for batch, chunk, cache, threads in itertools.product(
        (1, 2, 7, 32), (None, 16, 128), ("cold", "hit", "partial"), (1, 4)
    ):
        assert Cell(batch=batch, chunk=chunk, cache=cache, num_threads=threads) in found


def test_each_instruction_set_takes_a_request_over_more_than_a_split() -> None:
    """Scalar code only in full, since it is slow."""
    questions = plain_questions(TOKENIZER, num_long=QUICK.num_long, num_new=QUICK.num_new)
    for full, isas in ((False, {"avx2"}), (True, {"avx2", "scalar"})):
        found = [cell for _, cell in cells(HOST, full=full) if cell.isa is not None]
        longest = {cell: max(len(questions[index].prompt) for index in cell.request_indexes) for cell in found}
        assert {cell.isa for cell in found} == {"avx2", "scalar"}
        assert {cell.isa for cell in found if longest[cell] > SPLIT_TOKENS} == isas


def test_other_formats_meet_the_cache_and_int8_shares_a_prefix() -> None:
    found = {(cell.kv_dtype, cell.cache) for _, cell in cells(HOST, full=False) if cell.kv_dtype is not None}
    assert found == {("bf16", "partial"), ("f32", "partial"), ("int8", "partial"), ("int8", "shared")}


def test_what_loads_alike_stands_together() -> None:
    loads = [
        (cell.num_threads, cell.isa, cell.kv_dtype, cell.cache == "disk" or cell.drafts == "self")
        for _, cell in cells(HOST, full=True)
    ]
    assert len([key for key, _ in itertools.groupby(loads)]) == len(set(loads))
    assert loads[0] == (1, None, None, False)


def test_a_dimension_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    table = matrix.dimensions(HOST)
    monkeypatch.setattr(matrix, "dimensions", lambda host: table | {"more": [{"batch": 3}, {"batch": 4}]})
    assert [cell.batch for name, cell in cells(HOST, full=False) if name == "more"] == [3, 4]


def test_cells_say_what_is_varied() -> None:
    assert Cell().varied() == "nothing, once more"
    assert Cell(batch=7, chunk=16, num_threads=2).varied() == "chunk 16 · batch 7 · 2 threads"
    words = [cell.varied() for _, cell in cells(HOST, full=True)]
    assert len(set(words)) == len(words)


def test_host_of_this_machine() -> None:
    host = Host.of(EngineConfig(isa="scalar", num_threads=3, kv_dtype="bf16"))
    assert host.num_threads == 3
    assert set(host.isas) == set(_native.isas()) - {"scalar"}
    assert set(host.kv_formats) == set(KV_FORMATS) - {"bf16"}
    assert Host.of(EngineConfig(num_threads=1)).num_threads == 2


def test_requests_are_told_apart_by_seed_and_begin_differently() -> None:
    questions = plain_questions(TOKENIZER, num_long=70, num_new=6)
    everything = [*questions, *sampling(), format_question(TOKENIZER, num_prompt=40, num_new=6)]
    seeds = [question.seed(choice) for question in everything for choice in range(question.params.n)]
    assert len(set(seeds)) == len(seeds) == number_of_requests(everything)
    assert len({question.prompt[0] for question in questions[:NUM_DISTINCT]}) == NUM_DISTINCT
    sharing = [question.prompt for question in questions[NUM_DISTINCT:]]
    assert len({prompt[:SHARED_TOKENS] for prompt in sharing}) == 1
    assert len({prompt[: SHARED_TOKENS + 1] for prompt in sharing}) == NUM_SHARING
    for question in questions[1:7]:
        assert question.params.max_tokens is not None
        assert len(question.prompt) <= PAGE_TOKENS < len(question.prompt) + question.params.max_tokens


def test_every_sampling_parameter_has_a_question() -> None:
    questions = {question.name: question.params for question in sampling()}
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names < set(questions)
    base = sampling_base(TOKENIZER, num_new=8).params
    for name in names:
        assert getattr(questions[name], name) != getattr(base, name) or name == "ignore_eos"
    assert [name for name, params in questions.items() if params.ignore_eos] == ["ignore_eos"]


def test_short_answers_make_questions_too() -> None:
    """A model may end at once and say nothing."""
    base = sampling_base(TOKENIZER, num_new=1)
    assert len(sampling_questions(base, [VOCAB - 1], "", (VOCAB - 1,))) == len(sampling())

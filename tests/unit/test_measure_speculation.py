"""The benchmark of speculation on an engine without a model: what it compares, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_llm import byte_llm

from paceline.config import parse_speculate
from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.measure.roofline import Peaks, Traffic
from paceline.measure.speculation import (
    BUILT_IN,
    Category,
    Conversation,
    category_rows,
    measure_speculation,
    read_conversations,
)
from paceline.speculate.ngram import NgramDrafter
from paceline.speculate.policy import FixedPolicy
from paceline.speculate.speculator import Speculator

TRAFFIC = Traffic(layer_bytes=1000, head_bytes=1000, kv_bytes=10, layer_operations=1000, head_operations=1000)
CONVERSATIONS = (
    Conversation("one", ("Why?", "And then?")),
    Conversation("two", ("aaaa",)),
    Conversation("one", ("b", "c")),
)
"""Two categories; in the first, two turns each."""


def probe(isa: str, num_threads: int) -> Peaks:
    return Peaks(bandwidth_gb_s=10.0, int8_gops=100.0)


def speculating() -> LLM:
    llm = byte_llm()
    llm._engine.use_speculator(Speculator([NgramDrafter()], FixedPolicy(4), vocab_size=257))
    return llm


@pytest.mark.parametrize("concurrency", [1, 2])
def test_every_answer_is_given_twice_and_is_the_same(concurrency: int) -> None:
    with speculating() as llm:
        measured = measure_speculation(
            llm, TRAFFIC, CONVERSATIONS, num_new=12, concurrency=concurrency, num_runs=2, probe=probe
        )
        stats = llm.stats()
    document = measured.document()
    assert set(document["categories"]) == {"one", "two"}
    assert document["categories"]["one"]["answers"] == 2 * 4
    assert document["categories"]["two"]["answers"] == 2
    for figures in document["categories"].values():
        assert figures["tokens_equal"] is True
        assert figures["speedup"] > 0
        assert 1.0 <= figures["mean_accepted_length"] <= 5.0
    assert document["mean_speedup"] == pytest.approx(sum(measured.runs) / 2)
    assert document["path"]["speculation"] == "ngram"
    assert stats.requests_finished == 1 + 2 * 2 * 5, "a warm-up, then each answer without and with drafts"
    rows = category_rows(document)
    assert [row[0] for row in rows] == ["", "one", "two"]
    assert rows[1][-1] == "yes"


def test_a_conversation_knows_only_itself() -> None:
    """The same prompt again, in a category of its own, must be computed again and find no earlier answer."""
    with speculating() as llm:
        measure_speculation(llm, TRAFFIC, [Conversation("x", ("same",))] * 3, num_new=8, probe=probe)
        assert llm.stats().cache_saved_tokens == 0


def test_what_cannot_be_measured_is_refused() -> None:
    with speculating() as llm, pytest.raises(ParameterError, match="new_tokens"):
        measure_speculation(llm, TRAFFIC, CONVERSATIONS, num_new=1, probe=probe)
    with byte_llm() as llm, pytest.raises(ParameterError, match="speculate"):
        measure_speculation(llm, TRAFFIC, CONVERSATIONS, probe=probe)


def test_an_answer_that_differs_is_seen() -> None:
    sums = Category(
        plain_s=1.0, drafted_s=0.5, plain_tokens=10, drafted_tokens=10, passes=4, num_answers=2, num_equal=1
    )
    sums.plain_all_s = sums.drafted_all_s = 1.0
    document = sums.document(is_random=False)
    assert (document["speedup"], document["mean_accepted_length"], document["tokens_equal"]) == (2.0, 2.5, False)
    assert sums.document(is_random=True)["tokens_equal"] is None


def test_conversations_are_read_by_category(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines = [
        {"category": "a", "turns": ["x"]},
        {"category": "a", "turns": ["y", "z"]},
        {"category": "b", "turns": ["w"]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_conversations(file) == [
        Conversation("a", ("x",)),
        Conversation("a", ("y", "z")),
        Conversation("b", ("w",)),
    ]
    assert read_conversations(file, per_category=1) == [Conversation("a", ("x",)), Conversation("b", ("w",))]


@pytest.mark.parametrize("text", ["", "no json", '{"turns": ["x"]}', '{"category": "a", "turns": []}', "[1]"])
def test_a_file_that_is_none_is_an_error_that_says_what_is_wanted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(ParameterError, match="category"):
        read_conversations(file)
    with pytest.raises(ParameterError, match="category"):
        read_conversations(tmp_path / "missing.jsonl")


def test_built_in_prompts_have_categories_of_their_own() -> None:
    assert len({one.category for one in BUILT_IN}) == len(BUILT_IN)


def test_speculate_is_parsed() -> None:
    assert parse_speculate("off") == ()
    assert [name.kind for name in parse_speculate("auto")] == ["forced", "suffix"]
    assert [(name.kind, name.source) for name in parse_speculate("suffix+draft:self:int4")] == [
        ("suffix", ""),
        ("draft", "self:int4"),
    ]
    for wrong in ("", "medusa", "draft", "draft:", "suffix:x", "suffix+suffix", "off+suffix", "suffix+"):
        with pytest.raises(ParameterError, match="speculate"):
            parse_speculate(wrong)

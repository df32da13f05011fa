"""The prompts, lengths and times of a load."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ParameterError
from paceline.measure.serving.jobs import Job, MadeUp, Sizing, made_up_job, poisson_times, read_jobs, shorter_than


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_prompts_of_every_form_are_read(tmp_path: Path) -> None:
    message = {"role": "user", "content": "a"}
    path = write(
        tmp_path / "data.jsonl",
        {"messages": [message]},
        {"prompt": "b"},
        "",
        {"turns": ["c", "later"]},
        {"question": "d", "answer": "x"},
    )
    assert [job.prompt for job in read_jobs(path)] == [(message,), "b", "c", "d"]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "a"}', '{"prompt": ""}', '{"turns": []}', '{"hash_ids": [1]}'])
def test_a_line_of_no_form_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ParameterError, match="line 2"):
        read_jobs(write(tmp_path / "data.jsonl", {"prompt": "a"}, line))


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="at least one"):
        read_jobs(write(tmp_path / "data.jsonl", ""))


def test_an_azure_trace_is_scaled_in_length_and_rate(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,3",
    )
    first, second = read_jobs(path, length_scale=0.125, rate_scale=0.5)
    assert (first.at_s, first.max_tokens) == (0.0, 6)
    assert second.at_s == pytest.approx(2 * 4.314579)
    assert second.max_tokens == 1, "an answer has a token at least"
    assert isinstance(first.prompt, MadeUp)
    assert isinstance(second.prompt, MadeUp)
    assert (first.prompt.num_tokens, second.prompt.num_tokens) == (47, 50)
    assert first.prompt.blocks != second.prompt.blocks, "nothing is shared that the trace does not share"


def test_a_bad_row_of_an_azure_trace_is_named(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    for row in ("yesterday,1,1", "2023-11-16 18:15:46.6,x,1", "2023-11-16 18:15:46.6"):
        with pytest.raises(ParameterError, match="line 3"):
            read_jobs(write(tmp_path / "trace.csv", header, "2023-11-16 18:15:46,1,1", row))


def test_a_mooncake_trace_shares_the_text_of_shared_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "input_length": 1500, "output_length": 16, "hash_ids": [1, 2, 9]},
        {"timestamp": 1000, "input_length": 1200, "output_length": 8, "hash_ids": [1, 2, 3]},
        {"timestamp": 2000, "input_length": 512, "output_length": 8, "hash_ids": [4]},
    )
    jobs = read_jobs(path, length_scale=0.125, rate_scale=0.1)
    assert [job.at_s for job in jobs] == [0.0, 10.0, 20.0], "in order of arrival, from the first on"
    texts = [job.sized(Sizing()).prompt for job in jobs]
    words = [text.split() for text in texts if isinstance(text, str)]
    assert [len(one) for one in words] == [150, 64, 188]
    assert words[0][:128] == words[2][:128], "two blocks of 512 / 8 tokens"
    assert words[0][128] != words[2][128], "and no word more"
    assert words[0][:4] != words[1][:4]


def test_made_up_prompts_have_the_tokens_that_were_asked_for() -> None:
    sizing = Sizing.between((32, 32 * 2 + 7), (288, 288 * 2 + 7))
    assert (sizing.tokens_per_word, sizing.overhead_tokens) == (2.0, 7.0)
    text = made_up_job(0, 0, 107).sized(sizing).prompt
    assert isinstance(text, str)
    assert len(text.split()) == 50
    assert sizing.words(1) == 1, "no prompt is empty"
    assert Sizing.between((32, 10), (288, 10)) == Sizing(), "a server that counts nothing tells nothing"


def test_made_up_prompts_differ_by_seed_and_index_from_the_start_and_are_repeatable() -> None:
    def beginning(seed: int, index: int) -> str:
        prompt = made_up_job(seed, index, 50).sized(Sizing()).prompt
        assert isinstance(prompt, str)
        return " ".join(prompt.split()[:6])

    beginnings = {beginning(seed, index) for seed in range(3) for index in range(20)}
    assert len(beginnings) == 60
    assert beginning(1, 2) == beginning(1, 2)


def test_longer_prompts_of_a_trace_can_be_left_out() -> None:
    jobs = [made_up_job(0, 0, 10), made_up_job(0, 1, 11), Job("written")]
    assert shorter_than(jobs, 10) == [jobs[0], jobs[2]]


def test_poisson_times_have_exponential_gaps() -> None:
    times = list(itertools.islice(poisson_times(4.0, seed=1), 20_001))
    assert times[0] == 0.0
    assert times == list(itertools.islice(poisson_times(4.0, seed=1), 20_001))
    assert times[:9] != list(itertools.islice(poisson_times(4.0, seed=2), 9))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    # Standard errors with 20,000 gaps: of the mean 0.25 / sqrt(20,000) = 0.0018, of a share below 0.0036.
    assert mean == pytest.approx(0.25, abs=5 * 0.0018)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2.0), abs=5 * 0.0036)

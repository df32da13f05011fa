"""What the tracing executor writes down, and that it changes nothing."""

from __future__ import annotations

import numpy as np
from fake_executor import FakeExecutor, FakeTokenizer, fake_logits, tiny_model

from paceline.config import EngineConfig
from paceline.llm import LLM
from paceline.measure.trace import StepShape, TopTwo, TracingExecutor
from paceline.params import SamplingParams

PROMPTS = [list(range(40)), [3, 1, 4]]
PARAMS = [SamplingParams(max_tokens=3, ignore_eos=True, seed=seed, logprobs=1) for seed in (11, 12)]


def ask(tracing: TracingExecutor, **config: int) -> list[list[int]]:
    with LLM.from_parts(tracing, FakeTokenizer(), config=EngineConfig(prefix_cache=False, **config)) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]


def test_outputs_are_recorded_by_request_and_position() -> None:
    tracing = TracingExecutor(FakeExecutor())
    answers = ask(tracing, max_batch=2, token_budget=64)
    assert set(tracing.trace.outputs) == {(11, 40), (11, 41), (11, 42), (12, 3), (12, 4), (12, 5)}
    for (seed, position), (output,) in tracing.trace.outputs.items():
        tokens = PROMPTS[seed - 11] + answers[seed - 11]
        assert output.top == TopTwo.of(fake_logits(tokens[:position], 97))
        assert output.top.tokens[0] == tokens[position]
        assert output.logits is None
    assert tracing.trace.steps == [StepShape(2, 40), StepShape(2, 1), StepShape(2, 1)]
    assert (tracing.trace.outputs[11, 40][-1].first_position, tracing.trace.outputs[11, 40][-1].num_rows) == (0, 40)
    assert (tracing.trace.outputs[11, 42][-1].first_position, tracing.trace.outputs[11, 42][-1].num_rows) == (41, 1)


def test_chunks_are_seen() -> None:
    tracing = TracingExecutor(FakeExecutor())
    assert ask(tracing, max_batch=1, token_budget=16) == ask(TracingExecutor(FakeExecutor()), max_batch=2)
    assert [step.max_rows for step in tracing.trace.steps[:4]] == [16, 16, 8, 1]
    assert (tracing.trace.outputs[11, 40][-1].first_position, tracing.trace.outputs[11, 40][-1].num_rows) == (32, 8)


def test_rows_of_a_prompt_belong_to_its_request() -> None:
    tracing = TracingExecutor(FakeExecutor())
    tracing.watch(keep_logits=True)
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=7, prompt_logprobs=0)
    with LLM.from_parts(tracing, FakeTokenizer()) as llm:
        llm.generate(PROMPTS[1], params)
    assert set(tracing.trace.outputs) == {(7, position) for position in range(1, 5)}
    logits = tracing.trace.outputs[7, 2][-1].logits
    assert logits is not None
    assert np.array_equal(logits, fake_logits(PROMPTS[1][:2], 97))


def test_watch_starts_a_new_trace() -> None:
    tracing = TracingExecutor(FakeExecutor())
    ask(tracing)
    before = tracing.trace
    trace = tracing.watch()
    assert trace is tracing.trace
    assert not trace.outputs
    assert not trace.steps
    assert before.steps, "the old one stays as it was"


def test_a_smaller_pool() -> None:
    tracing = TracingExecutor(FakeExecutor(num_pages=64), num_pages=3)
    assert (tracing.num_pages, len(tracing.pages)) == (3, 3)
    with LLM.from_parts(tracing, FakeTokenizer()) as llm:
        assert llm.stats().pages_total == 3


def test_top_two() -> None:
    top = TopTwo.of(np.array([1.0, 4.0, 4.0, -2.0], np.float32))
    assert top == TopTwo((1, 2), (4.0, 4.0))
    negative = TopTwo.of(np.array([-3.0, -1.0, -2.0], np.float32))
    assert negative == TopTwo((1, 2), (-1.0, -2.0))
    assert np.isnan(TopTwo.of(np.array([1.0, np.nan, 2.0], np.float32)).logits[0])
    assert tiny_model().vocab_size == 97


def test_pages_that_were_written_are_known() -> None:
    """Those that hold anything: in the fake, which starts with -1 everywhere."""
    executor = FakeExecutor()
    tracing = TracingExecutor(executor)
    ask(tracing, max_batch=2, token_budget=16)
    ask(tracing)
    tracing.watch()
    held = np.flatnonzero((executor.pages.view(np.int64) != -1).any(axis=1))
    assert tracing.written_pages == set(held.tolist())
    assert len(held) > 1

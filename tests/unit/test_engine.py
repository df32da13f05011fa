"""One request's way through the engine: how it ends, what it reports, what it refuses."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from fake_executor import FakeExecutor, FakeTokenizer, fake_logits, log_softmax, reference_tokens, tiny_model

from paceline.config import EngineConfig
from paceline.engine.engine import Engine, Update
from paceline.engine.outputs import Completion, Delta
from paceline.engine.request import TokenCounts, choice_seed, mix_seed
from paceline.errors import ContextLengthError, KVCapacityError, ParameterError, RequestError
from paceline.executors.base import StepPlan, StepResult
from paceline.params import SamplingParams

EOS = 96
PROMPT = [5, 6, 7, 8]


def make_engine(
    executor: FakeExecutor | None = None,
    *,
    tokenizer: FakeTokenizer | None = None,
    max_batch: int = 8,
    budget: int = 32,
) -> Engine:
    config = EngineConfig(max_batch=max_batch, token_budget=budget)
    return Engine(executor or FakeExecutor(), tokenizer or FakeTokenizer(), config)


def run(engine: Engine) -> list[Update]:
    """Steps until there is no work, checking the books after each."""
    updates = []
    for _ in range(10_000):
        if not engine.has_work:
            engine.scheduler.check()
            assert engine.stats().pages_used == 0
            return updates
        updates += engine.step()
        engine.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def answer(params: SamplingParams, prompt: list[int] | None = None, engine: Engine | None = None) -> Completion:
    """The answer to one prompt alone."""
    engine = engine or make_engine()
    engine.add(engine.make_request(prompt or PROMPT, params))
    (update,) = run(engine)
    assert update.completion is not None
    return update.completion


def test_tokens_are_those_of_the_definition() -> None:
    completion = answer(SamplingParams(max_tokens=60, ignore_eos=True))
    assert completion.token_ids == reference_tokens(PROMPT, 60)
    assert completion.text == FakeTokenizer().decode(completion.token_ids)
    assert completion.finish_reason == "length"
    assert (completion.num_prompt_tokens, completion.num_completion_tokens) == (4, 60)


def first_with_eos(limit: int = 400) -> list[int]:
    """A prompt whose greedy answer meets the end of text early."""
    for token in range(90):
        tokens = reference_tokens([token], limit, stop_ids=[EOS])
        if tokens[-1] == EOS and 5 < len(tokens) < 100:
            return [token]
    raise AssertionError


def test_end_of_text_stops_and_is_counted_but_not_shown() -> None:
    prompt = first_with_eos()
    completion = answer(SamplingParams(), prompt)
    assert completion.token_ids == reference_tokens(prompt, 400, stop_ids=[EOS])
    assert completion.finish_reason == "stop"
    assert completion.text == FakeTokenizer().decode(completion.token_ids[:-1])


def test_ignore_eos_goes_on() -> None:
    prompt = first_with_eos()
    stopped = answer(SamplingParams(), prompt)
    completion = answer(SamplingParams(ignore_eos=True, max_tokens=300), prompt)
    assert completion.num_completion_tokens == 300
    assert completion.token_ids[: stopped.num_completion_tokens] == stopped.token_ids


def test_stop_token_ids() -> None:
    free = answer(SamplingParams(max_tokens=30, ignore_eos=True))
    stop = free.token_ids[12]
    completion = answer(SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop,)))
    assert completion.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert completion.finish_reason == "stop"
    assert completion.text == FakeTokenizer().decode(completion.token_ids[:-1])


def test_stop_strings_are_cut_from_the_text() -> None:
    free = answer(SamplingParams(max_tokens=40, ignore_eos=True))
    stop = free.text[20:23]
    completion = answer(SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop, "never there")))
    assert completion.text == free.text[: free.text.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == free.token_ids[: free.text.index(stop) + 3]


def test_min_tokens_bans_the_end_until_it_is_reached() -> None:
    prompt = first_with_eos()
    natural = answer(SamplingParams(), prompt).num_completion_tokens
    for minimum in (natural - 1, natural, natural + 40):
        completion = answer(SamplingParams(min_tokens=minimum, max_tokens=400), prompt)
        assert completion.num_completion_tokens > minimum or completion.finish_reason == "length"
        assert EOS not in completion.token_ids[:minimum]
        assert completion.num_completion_tokens == natural or minimum >= natural


def test_min_tokens_holds_for_stop_strings_and_stop_ids() -> None:
    free = answer(SamplingParams(max_tokens=40, ignore_eos=True))
    stop_id, stop = free.token_ids[3], free.text[3]
    by_text = answer(SamplingParams(max_tokens=40, ignore_eos=True, min_tokens=10, stop=(stop,)))
    at = free.text.find(stop, 10)
    assert by_text.text == (free.text[:at] if at >= 0 else free.text)
    by_id = answer(SamplingParams(max_tokens=40, ignore_eos=True, min_tokens=10, stop_token_ids=(stop_id,)))
    assert stop_id not in by_id.token_ids[:10]
    assert by_id.num_completion_tokens > 10


def test_the_context_ends_an_answer() -> None:
    engine = make_engine(FakeExecutor(model=tiny_model(context_length=50)))
    completion = answer(SamplingParams(ignore_eos=True), engine=engine)
    assert completion.finish_reason == "length"
    assert completion.num_completion_tokens == 46


def test_logprobs_are_those_of_the_raw_logits() -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=3, temperature=0.7, repetition_penalty=1.5, seed=1)
    completion = answer(params)
    assert completion.logprobs is not None
    tokens = list(PROMPT)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        expected = log_softmax(fake_logits(tokens, 97))
        assert entry.token_id == token
        assert entry.logprob == float(expected[token])
        assert entry.text == FakeTokenizer().decode([token])
        best = np.argsort(-expected, kind="stable")[:3]
        assert [top.token_id for top in entry.top] == best.tolist()
        assert [top.logprob for top in entry.top] == expected[best].tolist()
        tokens.append(token)


def test_logprobs_without_alternatives() -> None:
    completion = answer(SamplingParams(max_tokens=2, logprobs=0))
    assert completion.logprobs is not None
    assert all(entry.top == () for entry in completion.logprobs)
    assert answer(SamplingParams(max_tokens=2)).logprobs is None


@pytest.mark.parametrize("max_outputs", [8, 64])
@pytest.mark.parametrize("num_prompt", [1, 2, 33, 100])
def test_prompt_logprobs(max_outputs: int, num_prompt: int) -> None:
    prompt = [(7 * i) % 90 for i in range(num_prompt)]
    engine = make_engine(FakeExecutor(max_outputs=max_outputs))
    completion = answer(SamplingParams(max_tokens=3, prompt_logprobs=2, ignore_eos=True), prompt, engine)
    assert completion.token_ids == reference_tokens(prompt, 3)
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    assert len(completion.prompt_logprobs) == num_prompt
    for position, entry in enumerate(completion.prompt_logprobs[1:], 1):
        expected = log_softmax(fake_logits(prompt[:position], 97))
        assert entry is not None
        assert (entry.token_id, entry.logprob) == (prompt[position], float(expected[prompt[position]]))
        assert [top.token_id for top in entry.top] == np.argsort(-expected, kind="stable")[:2].tolist()


def test_penalties_see_prompt_and_output_as_they_should() -> None:
    params = SamplingParams(
        max_tokens=20, ignore_eos=True, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.4
    )
    tokens = list(PROMPT)
    for _ in range(20):
        x = fake_logits(tokens, 97).astype(np.float64)
        for token in set(tokens):
            x[token] = x[token] / 1.7 if x[token] > 0 else x[token] * 1.7
            count = tokens[len(PROMPT) :].count(token)
            x[token] -= np.float32(0.4) * count + np.float32(0.6) * (count > 0)
        tokens.append(int(np.argmax(x)))
    assert answer(params).token_ids == tokens[len(PROMPT) :]


def test_presence_penalty_alone_does_not_see_the_prompt() -> None:
    first = reference_tokens(PROMPT, 1)[0]
    params = SamplingParams(max_tokens=1, presence_penalty=2.0)
    assert answer(params, [*PROMPT]).token_ids == [first]
    for prefix in range(90):  # a prompt that holds its own continuation
        prompt = [prefix, *PROMPT]
        token = reference_tokens(prompt, 1)[0]
        if token in prompt:
            assert answer(params, prompt).token_ids == [token]


def test_logit_bias_is_added() -> None:
    completion = answer(SamplingParams(max_tokens=4, logit_bias={33: 100.0, 34: -100.0}))
    assert completion.token_ids == [33] * 4


def test_a_seed_decides_the_draws() -> None:
    def drawn(seed: int | None, choice: int = 0) -> list[int]:
        engine = make_engine()
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)
        engine.add(engine.make_request(PROMPT, params, choice=choice))
        (update,) = run(engine)
        assert update.completion is not None
        return update.completion.token_ids

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert drawn(3, choice=1) != drawn(3)
    assert drawn(None) == drawn(None), "without a seed the engine's own decides"
    assert drawn(2**64 - 1) == drawn(2**64 - 1)


def test_requests_without_a_seed_differ() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    for _ in range(2):
        engine.add(engine.make_request(PROMPT, params))
    first, second = (update.completion for update in run(engine))
    assert first is not None
    assert second is not None
    assert first.token_ids != second.token_ids


def test_mixed_seeds_are_splitmix64() -> None:
    # First outputs of the reference implementation (Vigna, splitmix64.c) with state 0 and 1234567.
    assert [mix_seed(0, i) for i in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert [mix_seed(1234567, i) for i in range(2)] == [6457827717110365317, 3203168211198807973]
    assert choice_seed(9, 0) == 9
    assert len({choice_seed(9, i) for i in range(100)}) == 100


def test_token_counts_grow() -> None:
    counts = TokenCounts([1, 2, 1])
    for token in [*range(100), 7, 7]:
        counts.add(token)
    expected = dict.fromkeys(range(100), 1) | {7: 3}
    assert dict(zip(counts.tokens.tolist(), counts.values.tolist(), strict=True)) == expected
    assert counts.tokens[:2].tolist() == [1, 2]


def test_streamed_pieces_join_to_the_completion() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop=("zzz",), logprobs=1)
    engine.add(engine.make_request(PROMPT, params, streaming=True))
    deltas: list[Delta] = [update.delta for update in run(engine) if update.delta is not None]
    completion = deltas[-1].completion
    assert completion is not None
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs or []] == completion.logprobs
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert all(delta.text for delta in deltas[:-1])


def test_a_token_without_text_waits_for_the_next_piece() -> None:
    tokenizer = FakeTokenizer(table=[b"\xe2\x98"] * 96 + [b""])
    engine = make_engine(tokenizer=tokenizer)
    engine.add(engine.make_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), streaming=True))
    deltas = [update.delta for update in run(engine) if update.delta is not None]
    assert [(delta.text, len(delta.token_ids)) for delta in deltas] == [("\ufffd", 2), ("\ufffd\ufffd", 1)]


def test_abort_frees_pages_at_once() -> None:
    engine = make_engine()
    requests = [engine.make_request(PROMPT, SamplingParams()) for _ in range(10)]
    for request in requests:
        engine.add(request)
    engine.step()
    for request in requests[5:]:
        update = engine.abort(request)
        assert update is not None
        assert update.completion is not None
        assert update.completion.finish_reason == "abort"
    engine.scheduler.check()
    assert engine.abort(requests[9]) is None
    assert engine.stats().pages_used == 5
    run(engine)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], ParameterError),
        ([1, 97], ParameterError),
        ([-1], ParameterError),
        ([1, 2.0], ParameterError),
        ([1] * 512, ContextLengthError),
    ],
)
def test_impossible_prompts_are_refused(prompt: list[int], error: type[Exception]) -> None:
    engine = make_engine()
    with pytest.raises(error):
        engine.make_request(prompt, SamplingParams())
    assert not engine.has_work


def test_errors_name_their_numbers() -> None:
    engine = make_engine(FakeExecutor(num_pages=2))
    with pytest.raises(KVCapacityError, match=r"65 tokens.*64"):
        engine.make_request([1] * 65, SamplingParams())
    with pytest.raises(ContextLengthError, match=r"600 tokens.*512"):
        engine.make_request([1] * 600, SamplingParams())
    with pytest.raises(ParameterError, match="logit_bias"):
        engine.make_request([1], SamplingParams(logit_bias={97: 1.0}))


def test_a_prompt_that_fills_the_pool_still_gets_a_token() -> None:
    engine = make_engine(FakeExecutor(num_pages=2))
    completion = answer(SamplingParams(max_tokens=1), [1] * 64, engine)
    assert completion.num_completion_tokens == 1


def test_who_exhausts_the_pool_fails_and_the_others_go_on() -> None:
    engine = make_engine(FakeExecutor(num_pages=3))
    params = [SamplingParams(ignore_eos=True, max_tokens=count) for count in (20, 500, 20, 40)]
    requests = [engine.make_request(PROMPT, each) for each in params]
    for request in requests:
        engine.add(request)
    run(engine)
    assert [request.finish_reason for request in requests] == ["length", "error", "length", "length"]
    assert isinstance(requests[1].error, KVCapacityError)
    assert requests[1].error.num_tokens == 97
    for request in requests:
        assert request.tokens[4:] == reference_tokens(PROMPT, request.num_output)


def test_an_executor_that_fails_ends_the_step_and_not_the_engine() -> None:
    engine = make_engine(FakeExecutor(fail_when=50), max_batch=2)
    bad = engine.make_request([50], SamplingParams(max_tokens=4))
    good = engine.make_request([1], SamplingParams(max_tokens=4))
    engine.add(bad)
    run(engine)
    engine.add(good)
    run(engine)
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert isinstance(bad.error, RuntimeError)
    stats = engine.stats()
    assert (stats.requests_failed, stats.requests_finished) == (1, 1)


def test_a_tokenizer_that_fails_ends_one_request() -> None:
    class Fragile(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            if token_id == bad_token:
                raise KeyError(token_id)
            return super().token_bytes(token_id)

    bad_token = reference_tokens([1], 3)[2]
    engine = make_engine(tokenizer=Fragile())
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    bad, good = engine.make_request([1], params), engine.make_request([2], params)
    engine.add(bad)
    engine.add(good)
    run(engine)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, KeyError)
    assert good.finish_reason == "length"
    assert bad_token not in good.tokens


def test_stats_count_rows_tokens_and_time() -> None:
    ticks = iter(range(10**6))
    engine = Engine(FakeExecutor(), FakeTokenizer(), EngineConfig(max_batch=4), clock=lambda: next(ticks))
    engine.add(engine.make_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True)))
    run(engine)
    stats = engine.stats()
    assert (stats.steps, stats.rows, stats.output_tokens) == (3, 6, 3)
    num_prompt = len(PROMPT)
    assert stats.attended_tokens == num_prompt + (num_prompt + 1) + (num_prompt + 2)
    # Clock readings: made 0; first step 1, run 2-3; second run 4-5; third run 6-7, end 8.
    assert (stats.python_s, stats.executor_s) == (4, 3)
    assert stats.python_share == pytest.approx(4 / 7)


def test_time_without_work_is_not_counted() -> None:
    now = [0.0]
    engine = Engine(FakeExecutor(), FakeTokenizer(), EngineConfig(max_batch=4), clock=lambda: now[0])
    for _ in range(2):
        request = engine.make_request(PROMPT, SamplingParams(ignore_eos=True))
        engine.add(request)
        engine.step()
        engine.abort(request)
        now[0] += 100.0
    assert engine.stats().python_s == 0.0


def test_progress_ages_within_a_step_and_not_without_work() -> None:
    now, ages = [0.0], []
    engine = Engine(FakeExecutor(), FakeTokenizer(), EngineConfig(max_batch=4), clock=lambda: now[0])
    original = engine.executor.run

    def slow(plan):  # type: ignore[no-untyped-def]
        now[0] += 5.0
        ages.append(engine.progress_age_s())
        return original(plan)

    engine.executor.run = slow  # type: ignore[method-assign]
    engine.add(engine.make_request(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True)))
    now[0] = 100.0
    run(engine)
    now[0] = 200.0
    assert ages == [5.0, 5.0], "the first step ages too, and each step begins anew"
    assert engine.progress_age_s() == 0.0


def test_timings_follow_the_definitions() -> None:
    now = [0.0]
    engine = Engine(FakeExecutor(), FakeTokenizer(), EngineConfig(max_batch=4, token_budget=4), clock=lambda: now[0])
    request = engine.make_request([1] * 8, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.add(request)
    now[0] = 1.0  # a second in the queue
    run_step_at = [2.0, 3.0, 4.0, 5.0]
    original = engine.executor.run

    def timed(plan):  # type: ignore[no-untyped-def]
        now[0] = run_step_at.pop(0)
        return original(plan)

    engine.executor.run = timed  # type: ignore[method-assign]
    (update,) = run(engine)
    assert update.completion is not None
    timing = update.completion.timing
    assert (timing.queue_s, timing.ttft_s, timing.tpot_s, timing.e2e_s) == (1.0, 3.0, 1.0, 5.0)
    assert (timing.prefill_tokens_per_s, timing.decode_tokens_per_s) == (8 / 2, 1.0)
    again = engine.make_request([1] * 8, SamplingParams(max_tokens=1))
    engine.add(again)
    now[0], run_step_at = 6.0, [8.0]
    (update,) = run(engine)
    assert update.completion is not None
    assert update.completion.num_cached_tokens == 7
    assert update.completion.timing.prefill_tokens_per_s == 1 / 2, "what was cached was not computed"


def test_a_request_that_comes_between_two_steps_has_not_waited() -> None:
    now = [0.0]
    engine = Engine(FakeExecutor(), FakeTokenizer(), EngineConfig(max_batch=4), clock=lambda: now[0])
    engine.add(engine.make_request(PROMPT, SamplingParams(ignore_eos=True)))
    engine.step()
    now[0] = 1.0  # and the second step counts from the end of the first
    late = engine.make_request(PROMPT, SamplingParams(max_tokens=1))
    engine.add(late)
    engine.step()
    assert late.completion().timing.queue_s == 0.0


@pytest.mark.parametrize("status", [1, 2, 3])
def test_a_row_that_could_not_be_sampled_fails_its_request_alone(status: int) -> None:
    class Troubled(FakeExecutor):
        def run(self, plan: StepPlan) -> StepResult:
            result = super().run(plan)
            troubled = np.isin(plan.tokens[plan.logit_rows], [7]) * np.uint32(status)
            return StepResult(dataclasses.replace(result.sampled, status=troubled))

    engine = make_engine(Troubled())
    bad = engine.make_request([7], SamplingParams(max_tokens=4))
    good = engine.make_request([2, 2], SamplingParams(max_tokens=1))
    engine.add(bad)
    engine.add(good)
    run(engine)
    assert isinstance(bad.error, RequestError)
    assert bad.num_output == 0
    assert good.finish_reason == "length"


def test_a_plan_is_reused_while_the_same_requests_decode_over_the_same_pages() -> None:
    plans: list[int] = []

    class Watching(FakeExecutor):
        def run(self, plan: StepPlan) -> StepResult:
            plans.append(id(plan.samples.rows))
            return super().run(plan)

    engine = make_engine(Watching())
    request = engine.make_request([1] * 10, SamplingParams(max_tokens=70, ignore_eos=True))
    engine.add(request)
    run(engine)
    assert len(plans) == 70
    changes = sum(before != after for before, after in itertools.pairwise(plans))
    assert changes <= 4, "one for the first decode and one for each page"
    assert request.tokens[10:] == reference_tokens([1] * 10, 70)


def test_each_token_is_asked_of_the_tokenizer_once() -> None:
    asked: list[int] = []

    class Counting(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            asked.append(token_id)
            return super().token_bytes(token_id)

    engine = make_engine(tokenizer=Counting())
    answer(SamplingParams(max_tokens=200, ignore_eos=True, logprobs=4), engine=engine)
    assert len(asked) == len(set(asked))

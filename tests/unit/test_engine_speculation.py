"""The engine with drafts: every answer is the one without, whatever is drafted, and the books balance."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from fake_executor import FakeExecutor, FakeTokenizer, reference_tokens, tiny_model
from scripted_drafts import NonsenseDrafter, OracleDrafter, TakeAll

from paceline.config import Acceptance, EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.outputs import Completion
from paceline.engine.request import Request
from paceline.executors.base import StepPlan, StepResult
from paceline.params import SamplingParams
from paceline.speculate.draft import Context, Draft, Drafter
from paceline.speculate.policy import FixedPolicy
from paceline.speculate.speculator import Speculator

VOCAB = 97
EOS = VOCAB - 1
PROMPTS = [[5, 6, 7, 8], [9] * 40, list(range(70)), [1, 2], [50] * 31, [3, 1, 4, 1, 5]]

PARAMS = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2),
    "to the end of text": SamplingParams(max_tokens=200, logprobs=0),
    "temperature": SamplingParams(max_tokens=40, temperature=1.2, seed=7, logprobs=1),
    "repetition_penalty": SamplingParams(max_tokens=40, repetition_penalty=1.7, ignore_eos=True, logprobs=0),
    "frequency_penalty": SamplingParams(max_tokens=40, frequency_penalty=1.5, presence_penalty=0.5, ignore_eos=True),
    "logit_bias": SamplingParams(max_tokens=40, logit_bias={3: 2.5, 4: -3.0}, temperature=0.8, seed=1),
    "min_tokens": SamplingParams(max_tokens=60, min_tokens=25, stop_token_ids=(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)),
    "stop": SamplingParams(max_tokens=200, stop=("Q", "ab"), ignore_eos=True),
    "prompt_logprobs": SamplingParams(max_tokens=20, prompt_logprobs=1, logprobs=1, ignore_eos=True),
    "one token": SamplingParams(max_tokens=1),
    "two tokens": SamplingParams(max_tokens=2, ignore_eos=True),
    "to the end of the context": SamplingParams(ignore_eos=True),
}


def make_engine(
    *, pages: int = 64, max_batch: int = 8, budget: int = 64, window: int | None = None, prefix_cache: bool = True
) -> Engine:
    executor = FakeExecutor(
        model=tiny_model(VOCAB, 160, window), num_pages=pages, max_rows=budget, max_outputs=max(max_batch, budget)
    )
    config = EngineConfig(max_batch=max_batch, token_budget=budget, prefix_cache=prefix_cache)
    return Engine(executor, FakeTokenizer(VOCAB), config)


def run(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """The completions of requests, the books checked after each step."""
    done: dict[Request, Completion] = {}
    for request in requests:
        engine.add(request)
    for _ in range(5000):
        if not engine.has_work:
            break
        for update in engine.step():
            if update.completion is not None:
                done[update.request] = update.completion
        engine.scheduler.check()
    assert engine.stats().pages_used == 0
    return [done[request] for request in requests]


def same(one: Completion, other: Completion) -> bool:
    """Whether two answers are equal in all that does not tell how they were computed."""
    fields = ("text", "token_ids", "finish_reason", "logprobs", "prompt_logprobs")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def plain(params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Completion]:
    """The answers without drafts, each alone."""
    answers = []
    for prompt in prompts:
        engine = make_engine()
        answers += run(engine, [engine.make_request(prompt, params, seed=11)])
    return answers


def speculate(
    engine: Engine, params: SamplingParams, answers: Sequence[Completion], *, seed: int, chains: bool
) -> tuple[list[Completion], TakeAll]:
    """The answers with drafts that are partly right."""
    requests = [engine.make_request(prompt, params, seed=11) for prompt in PROMPTS[: len(answers)]]
    truth = {
        request.request_id: [*prompt, *answer.token_ids]
        for request, prompt, answer in zip(requests, PROMPTS, answers, strict=False)
    }
    policy = TakeAll()
    engine.use_speculator(Speculator([OracleDrafter(truth, VOCAB, seed=seed, chains=chains)], policy, vocab_size=VOCAB))
    return run(engine, requests), policy


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("chains", [True, False], ids=["chains", "trees"])
@pytest.mark.parametrize("max_batch", [1, 8])
def test_answers_are_those_without_drafts(name: str, chains: bool, max_batch: int) -> None:
    params = PARAMS[name]
    answers = plain(params)
    got, policy = speculate(make_engine(max_batch=max_batch), params, answers, seed=3, chains=chains)
    assert all(map(same, got, answers))
    if (params.max_tokens or 100) > 2:
        assert policy.accepted > 20
        assert policy.verified > policy.accepted


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pages", [6, 9, 14])
def test_too_few_pages_shorten_drafts_and_change_nothing(seed: int, pages: int) -> None:
    params = PARAMS["greedy"]
    answers = plain(params)
    engine = make_engine(pages=pages, max_batch=5)
    got, policy = speculate(engine, params, answers, seed=seed, chains=False)
    assert all(map(same, got, answers))
    assert policy.accepted > 0


@pytest.mark.parametrize("window", [20, 50])
def test_a_sliding_window(window: int) -> None:
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    prompts = PROMPTS[:3]
    answers = []
    for prompt in prompts:
        engine = make_engine(window=window)
        answers += run(engine, [engine.make_request(prompt, params, seed=11)])
        assert answers[-1].token_ids == reference_tokens(prompt, 70, window=window)
    got, policy = speculate(make_engine(window=window), params, answers, seed=5, chains=False)
    assert all(map(same, got, answers))
    assert policy.accepted > 50


def test_what_is_cached_after_drafts_is_right() -> None:
    params = PARAMS["greedy"]
    answers = plain(params)
    engine = make_engine()
    speculate(engine, params, answers, seed=9, chains=False)
    prompts = [[*prompt, *answer.token_ids[:-1]] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    engine = make_engine()
    speculate(engine, params, answers, seed=9, chains=False)
    requests = [engine.make_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True)) for prompt in prompts]
    engine.use_speculator(Speculator([], TakeAll(), vocab_size=VOCAB))
    again = run(engine, requests)
    assert [one.token_ids for one in again] == [answer.token_ids[-1:] for answer in answers]
    assert all(one.num_cached_tokens >= len(prompt) - 1 for one, prompt in zip(again, prompts, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_nonsense_changes_nothing(seed: int) -> None:
    params = PARAMS["to the end of text"]
    answers = plain(params)
    engine = make_engine(pages=20)
    engine.use_speculator(Speculator([NonsenseDrafter(VOCAB, seed=seed)], TakeAll(), vocab_size=VOCAB))
    got = run(engine, [engine.make_request(prompt, params, seed=11) for prompt in PROMPTS])
    assert all(map(same, got, answers))


class FixedDrafter:
    """Proposes the same tree at every step."""

    name = "fixed"
    is_free = True
    catch_up_s = 0.0

    def __init__(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
        self._draft = Draft(tokens, parents, (0.5,) * len(tokens), self.name)

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """It."""
        return [self._draft] * len(contexts)

    def finish(self, context: Context) -> None:
        """Keeps nothing."""


class OnceDrafter(FixedDrafter):
    """Proposes once, when a request has so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__((1,) * 12, tuple(range(12)))
        self._num_tokens = num_tokens

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """The chain, or nothing."""
        return [self._draft if len(context.tokens) == self._num_tokens else None for context in contexts]


@pytest.mark.parametrize("num_tokens", [24, 28, 31, 32, 33])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_plain_steps_cross_into_a_page_that_a_draft_has_got(num_tokens: int, num_requests: int) -> None:
    prompts = PROMPTS[3:4] + PROMPTS[:1] + PROMPTS[5:6]
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    engine = make_engine()
    engine.use_speculator(Speculator([OnceDrafter(num_tokens)], TakeAll(), vocab_size=VOCAB))
    got = run(engine, [engine.make_request(prompt, params) for prompt in prompts[:num_requests]])
    assert [one.token_ids for one in got] == [reference_tokens(prompt, 50) for prompt in prompts[:num_requests]]


class EarlyDrafter(FixedDrafter):
    """Proposes as much as it may while requests are short."""

    def __init__(self) -> None:
        super().__init__((1,) * 60, tuple(range(60)))

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """The chain, or nothing."""
        return [self._draft if len(context.tokens) < 24 else None for context in contexts]


@pytest.mark.parametrize("drafts", [False, True])
def test_refused_drafts_hold_no_pages_that_others_wait_for(drafts: bool) -> None:
    executor = FakeExecutor(model=tiny_model(VOCAB, 512), num_pages=12, max_rows=512, max_outputs=512)
    config = EngineConfig(max_batch=8, token_budget=512, prefix_cache=False)
    engine = Engine(executor, FakeTokenizer(VOCAB), config)
    if drafts:
        engine.use_speculator(Speculator([EarlyDrafter()], TakeAll(), vocab_size=VOCAB))
    for first in range(4):
        engine.add(engine.make_request([5 + first] * 20, SamplingParams(max_tokens=400, ignore_eos=True)))
    for _ in range(8):
        engine.step()
    waiting = engine.make_request([50] * 120, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add(waiting)
    engine.step()
    engine.scheduler.check()
    assert waiting.first_token_s is not None


class Undrawable(FakeExecutor):
    """Draws nothing after token 7."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        sampled = super().run(plan).sampled
        status = np.where(plan.tokens[plan.logit_rows] == 7, 1, 0).astype(np.uint32)
        return StepResult(dataclasses.replace(sampled, status=status))


class TreeBesideTruth(FixedDrafter):
    """A branch at which nothing can be drawn, with a node behind it, before the branch that is right."""

    def __init__(self, truth: Sequence[int]) -> None:
        super().__init__((7,), (0,))
        self._truth = truth

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """The tree."""
        (context,) = contexts
        right = self._truth[len(context.tokens)]
        return [Draft((7, 3, right), (0, 1, 0), (0.5,) * 3, self.name)] if right != 7 and limits[0] >= 3 else [None]


def test_exact_acceptance_steps_around_a_branch_at_which_nothing_can_be_drawn() -> None:
    """At so low a temperature the law leaves one answer."""
    params = SamplingParams(max_tokens=30, temperature=1e-3, seed=1, ignore_eos=True)
    answers: list[Completion] = []
    for _ in range(2):
        config = EngineConfig(max_batch=4, token_budget=64, acceptance="exact")
        executor = Undrawable(model=tiny_model(VOCAB, 160), num_pages=64, max_rows=64)
        engine = Engine(executor, FakeTokenizer(VOCAB), config)
        if answers:
            drafter = TreeBesideTruth([1, 2, 3, *answers[0].token_ids])
            engine.use_speculator(Speculator([drafter], TakeAll(), vocab_size=VOCAB))
        answers += run(engine, [engine.make_request([1, 2, 3], params)])
    assert answers[0].finish_reason == answers[1].finish_reason == "length"
    assert answers[0].token_ids == answers[1].token_ids


class BrokenDrafter:
    """Raises."""

    name = "broken"
    is_free = True
    catch_up_s = 0.0

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """Never returns."""
        raise ZeroDivisionError("a bug")

    def finish(self, context: Context) -> None:
        """Keeps nothing."""


def test_a_drafter_that_fails_is_asked_no_more_and_costs_no_answer() -> None:
    params = PARAMS["greedy"]
    engine = make_engine()
    broken: Drafter = BrokenDrafter()
    speculator = Speculator([broken], TakeAll(), vocab_size=VOCAB)
    engine.use_speculator(speculator)
    got = run(engine, [engine.make_request(prompt, params, seed=11) for prompt in PROMPTS])
    assert all(map(same, got, plain(params)))
    assert speculator.drafters == []
    assert speculator.failure is not None
    assert "a bug" in speculator.failure
    assert engine.speculation == {"speculation": "off", "speculation_failure": speculator.failure}


class StepRecorder(TakeAll):
    """Keeps what it is told of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, bool]] = []

    def observe_step(self, num_rows: int, num_tokens_attended: int, elapsed_s: float, *, teaches: bool) -> None:
        """Its rows, and whether it teaches."""
        self.steps.append((num_rows, teaches))


def test_every_step_is_told_and_those_with_prompts_or_a_failure_teach_nothing() -> None:
    engine, policy = make_engine(), StepRecorder()
    engine.use_speculator(Speculator([FixedDrafter((1, 2), (0, 1))], policy, vocab_size=VOCAB))
    engine.add(engine.make_request([1, 2, 3, 4], SamplingParams(max_tokens=60, ignore_eos=True)))
    for step in range(8):
        if step == 4:
            engine.add(engine.make_request([5] * 9, SamplingParams(max_tokens=60, ignore_eos=True)))
        engine.step()
    assert policy.steps == [(4, False), *[(3, True)] * 3, (12, False), *[(6, True)] * 3]
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    executor.fail_when = engine.scheduler.running[0].tokens[-1]
    engine.step()
    assert len(policy.steps) == engine.stats().steps == 9
    assert policy.steps[-1] == (6, False)


@pytest.mark.parametrize(
    "reply",
    [
        [],
        [None, None],
        ["no draft"],
        [Draft.chain(["x"], [1.0], "odd")],  # type: ignore[list-item]
        [Draft.chain([3], [1.0], "odd", [np.ones(5) / 5])],
        [Draft.chain([3], [1.0], "odd", [np.where(np.arange(VOCAB) == 3, 0.0, 1 / (VOCAB - 1))])],
        [Draft.chain([3], [1.0], "odd", [np.full(VOCAB, np.nan)])],
    ],
)
@pytest.mark.parametrize("acceptance", ["coupled", "exact"])
def test_a_drafter_whose_reply_is_none_costs_no_answer(reply: list[Draft | None], acceptance: Acceptance) -> None:
    class OddDrafter(FixedDrafter):
        def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
            return reply

    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True)
    engine = Engine(
        FakeExecutor(model=tiny_model(VOCAB, 160), max_rows=64),
        FakeTokenizer(VOCAB),
        EngineConfig(max_batch=8, token_budget=64, acceptance=acceptance),
    )
    speculator = Speculator([OddDrafter((1,), (0,))], TakeAll(), vocab_size=VOCAB)
    engine.use_speculator(speculator)
    (got,) = run(engine, [engine.make_request(PROMPTS[0], params, seed=11)])
    (expected,) = plain(params, PROMPTS[:1])
    assert same(got, expected)
    assert speculator.failure is not None


def test_an_abort_frees_the_pages_of_drafts() -> None:
    engine = make_engine()
    request = engine.make_request(PROMPTS[0], PARAMS["greedy"], seed=11)
    answers = plain(PARAMS["greedy"])
    policy = TakeAll()
    truth = {request.request_id: [*PROMPTS[0], *answers[0].token_ids]}
    engine.use_speculator(Speculator([OracleDrafter(truth, VOCAB, seed=1, chains=False)], policy, vocab_size=VOCAB))
    engine.add(request)
    for _ in range(4):
        engine.step()
        engine.scheduler.check()
    engine.abort(request)
    engine.scheduler.check()
    assert engine.stats().pages_used == 0
    assert policy.finished == [request.request_id]


def test_a_failing_step_frees_the_pages_of_drafts() -> None:
    answers = plain(PARAMS["greedy"])
    engine = make_engine()
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    request = engine.make_request(PROMPTS[0], PARAMS["greedy"], seed=11)
    truth = {request.request_id: [*PROMPTS[0], *answers[0].token_ids]}
    drafter = OracleDrafter(truth, VOCAB, seed=1, chains=False)
    engine.use_speculator(Speculator([drafter], TakeAll(), vocab_size=VOCAB))
    executor.fail_when = answers[0].token_ids[10]
    (completion,) = run(engine, [request])
    assert completion.finish_reason == "error"
    assert completion.token_ids == answers[0].token_ids[: len(completion.token_ids)]


class ForgetfulExecutor(FakeExecutor):
    """Does not write a trunk's rows to the pages of its branches."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        return super().run(dataclasses.replace(plan, kv_writes=plan.kv_writes[:0]))


def test_answers_differ_where_rows_of_the_trunk_are_not_written_to_branches() -> None:
    """The comparison sees what it is there for."""
    params = PARAMS["greedy"]
    answers = plain(params)
    executor = ForgetfulExecutor(model=tiny_model(VOCAB, 160), num_pages=64, max_rows=64)
    engine = Engine(executor, FakeTokenizer(VOCAB), EngineConfig(max_batch=8, token_budget=64))
    got, _ = speculate(engine, params, answers, seed=3, chains=False)
    assert not all(map(same, got, answers))


def test_exact_acceptance_keeps_the_law() -> None:
    """Frequencies of answers against those without drafts; the bounds are five standard
    deviations wide."""
    vocab, num_seeds = 4, 3000
    params = SamplingParams(max_tokens=3, temperature=1.1, ignore_eos=True, frequency_penalty=0.7, logit_bias={2: 0.5})
    executor = FakeExecutor(model=tiny_model(vocab, 64), num_pages=64, max_rows=64)
    counts: list[Counter[tuple[int, ...]]] = []
    for drafts in (False, True):
        config = EngineConfig(max_batch=8, token_budget=64, acceptance="exact", prefix_cache=False)
        engine = Engine(executor, FakeTokenizer(vocab), config)
        requests = [engine.make_request([1, 2], params, seed=seed) for seed in range(num_seeds)]
        if drafts:
            drafter = FixedDrafter((1, 2, 1, 0), (0, 0, 1, 1))
            engine.use_speculator(Speculator([drafter], TakeAll(), vocab_size=vocab))
        counts.append(Counter(tuple(one.token_ids) for one in run(engine, requests)))
    plain_counts, drafted = counts
    assert len(plain_counts) > 8
    for outcome in plain_counts | drafted:
        share = (plain_counts[outcome] + drafted[outcome]) / (2 * num_seeds)
        deviation = math.sqrt(2 * share * (1 - share) * num_seeds)
        assert abs(plain_counts[outcome] - drafted[outcome]) < 5 * deviation + 1, outcome


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_what_became_output_is_counted_also_where_an_answer_ends_inside_a_draft(at: int) -> None:
    """A pass gives the first token, the next one three that are drafted and one more; token ``at`` ends the answer."""
    answer = reference_tokens(PROMPTS[0], 9)
    params = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(answer[at],))
    engine = make_engine()
    request = engine.make_request(PROMPTS[0], params)
    drafter = RightDrafter([*PROMPTS[0], *answer])
    engine.use_speculator(Speculator([drafter], FixedPolicy(3), vocab_size=VOCAB))
    (completion,) = run(engine, [request])
    assert completion.token_ids == answer[: at + 1]
    assert completion.speculation is not None
    assert (completion.speculation.proposed, completion.speculation.accepted) == (3, min(at, 3))


class RightDrafter(FixedDrafter):
    """Proposes what comes."""

    def __init__(self, truth: Sequence[int]) -> None:
        super().__init__((1,), (0,))
        self._truth = truth

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """As many as are wanted."""
        (context,) = contexts
        right = self._truth[len(context.tokens) :][: limits[0]]
        return [Draft.chain(right, [1.0] * len(right), self.name)]

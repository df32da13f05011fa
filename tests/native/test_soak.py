"""Five times more demand than memory: every request gets the tokens that it would have had alone, and the engine is
afterwards what it was before."""

from __future__ import annotations

import dataclasses

import numpy as np
from fake_executor import FakeTokenizer
from tiny_models import tiny_checkpoint, tiny_config

from paceline.config import PAGE_TOKENS, EngineConfig, ModelConfig
from paceline.engine.engine import Engine
from paceline.engine.outputs import Completion
from paceline.engine.request import Request
from paceline.executors.native import NativeExecutor
from paceline.kv.layout import KVLayout
from paceline.params import SamplingParams

MODEL = tiny_config()
NUM_PAGES = 40
MAX_BATCH = 16


def engine(*, prefix_cache: bool = True) -> Engine:
    config = EngineConfig(
        max_batch=MAX_BATCH,
        token_budget=64,
        kv_memory_bytes=NUM_PAGES * KVLayout.of(MODEL, "f16").page_bytes,
        num_threads=2,
        prefix_cache=prefix_cache,
        max_gap_ms=None,  # so that steps do not depend on the clock
    )
    return Engine(NativeExecutor.load(tiny_checkpoint(MODEL), config), FakeTokenizer(MODEL.vocab_size), config)


def requests(model: ModelConfig) -> list[tuple[list[int], SamplingParams]]:
    """Forty requests of some 170 tokens each; half begin with one of two system prompts."""
    rng = np.random.default_rng(3)
    systems = [rng.integers(0, 74, 70).tolist() for _ in range(2)]
    cases = []
    for at in range(40):
        beginning = systems[at % 4] if at % 4 < 2 else []
        prompt = beginning + rng.integers(0, 74, int(rng.integers(5, 60))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(60, 140)),
            temperature=0.8 if at % 3 else 0.0,
            seed=at,
            ignore_eos=True,
            logprobs=1,
        )
        cases.append((prompt, params))
    return cases


def serve(over: Engine, cases: list[tuple[list[int], SamplingParams]]) -> dict[int, Completion]:
    """All at once; the books are checked at every step."""
    index: dict[Request, int] = {}
    for at, (prompt, params) in enumerate(cases):
        request = over.make_request(prompt, params)
        index[request] = at
        over.add(request)
    answers = {}
    while over.has_work:
        for update in over.step():
            assert update.completion is not None
            answers[index[update.request]] = update.completion
        over.scheduler.check()
    return answers


def test_more_demand_than_memory() -> None:
    cases = requests(MODEL)
    demand = sum(len(prompt) + (params.max_tokens or 0) for prompt, params in cases)
    assert demand > 5 * NUM_PAGES * PAGE_TOKENS
    light = [(prompt, dataclasses.replace(params, max_tokens=20)) for prompt, params in cases[:8]]

    alone = {}
    single = engine(prefix_cache=False)
    for at, case in enumerate(cases):
        alone[at] = serve(single, [case])[0]
    soaked = engine()
    before = serve(soaked, light)
    steps_before = soaked.stats().steps

    answers = serve(soaked, cases)
    assert len(answers) == len(cases)
    for at, answer in answers.items():
        assert answer.error is None
        assert answer.token_ids == alone[at].token_ids, f"request {at}"
        assert answer.logprobs == alone[at].logprobs, f"log-probabilities of request {at}"
    stats = soaked.stats()
    assert stats.preemptions > 0, "memory was never short"
    assert stats.wasted_tokens == sum(answer.num_wasted_tokens for answer in answers.values())
    # No storm: what had to be computed twice is a small part of the work.
    assert stats.wasted_tokens < 0.1 * stats.rows
    assert stats.pages_used == 0

    # Afterwards a light load takes no more steps and no more rows than before it.
    again = serve(soaked, light)
    after = soaked.stats()
    assert {at: answer.token_ids for at, answer in again.items()} == {at: a.token_ids for at, a in before.items()}
    assert after.preemptions == stats.preemptions
    assert steps_before / (after.steps - stats.steps) >= 0.95

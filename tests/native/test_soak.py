"""Five times more demand than memory: every request gets the tokens that it would have had alone, and the engine is
afterwards what it was before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fake_executor import FakeTokenizer
from tiny_models import tiny_checkpoint, tiny_config

from paceline.config import PAGE_TOKENS, EngineConfig, ModelConfig
from paceline.engine.engine import Engine
from paceline.engine.outputs import Completion
from paceline.engine.request import Request
from paceline.engine.scheduler import Schedule
from paceline.executors.base import StepPlan, StepResult
from paceline.executors.native import NativeExecutor
from paceline.kv.layout import KVLayout
from paceline.params import SamplingParams

MODEL = tiny_config()
NUM_PAGES = 40
MAX_BATCH = 16

Case = tuple[list[int], SamplingParams]


class StepClock:
    """Seconds that steps take by their rows alone, so that the size of a chunk does not depend on the machine: within
    20 ms it is smaller than the budget, and found from what was measured."""

    def __init__(self, executor: NativeExecutor) -> None:
        self._now_s = 0.0
        run = executor.run

        def timed(plan: StepPlan) -> StepResult:
            self._now_s += 0.002 + 0.00025 * len(plan.tokens)
            return run(plan)

        executor.run = timed  # type: ignore[method-assign]

    def __call__(self) -> float:
        """Now."""
        return self._now_s


def engine(*, prefix_cache: bool = True) -> Engine:
    config = EngineConfig(
        max_batch=MAX_BATCH,
        token_budget=64,
        kv_memory_bytes=NUM_PAGES * KVLayout.of(MODEL, "f16").page_bytes,
        num_threads=2,
        prefix_cache=prefix_cache,
        max_gap_ms=20.0,
    )
    executor = NativeExecutor.load(tiny_checkpoint(MODEL), config)
    return Engine(executor, FakeTokenizer(MODEL.vocab_size), config, clock=StepClock(executor))


def requests(model: ModelConfig) -> list[Case]:
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


def light_requests() -> list[Case]:
    """As many as the batch holds, in as many pages as there are when one is kept free for each that runs: for want of
    one slot or one page the last would have to wait for the first to end."""
    rng = np.random.default_rng(4)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True)
    two_pages = NUM_PAGES - (MAX_BATCH - 1) - MAX_BATCH
    lengths = [40] * two_pages + [10] * (MAX_BATCH - two_pages)
    # No two begin alike, so that none saves another's work.
    return [([at, *rng.integers(0, 74, length - 1).tolist()], params) for at, length in enumerate(lengths)]


def serve(over: Engine, cases: list[Case], *, domain: str = "", streaming: bool = False) -> dict[int, Completion]:
    """All at once; the books are checked at every step."""
    index: dict[Request, int] = {}
    for at, (prompt, params) in enumerate(cases):
        request = over.make_request(prompt, params, cache_domain=domain, streaming=streaming)
        index[request] = at
        over.add(request)
    answers = {}
    while over.has_work:
        for update in over.step():
            if update.completion is not None:
                answers[index[update.request]] = update.completion
        over.scheduler.check()
    return answers


def light_work(over: Engine, domain: str) -> tuple[int, int, list[list[int]]]:
    """Steps and rows of the light load where nothing of it is cached, and its answers. Streamed, so that chunks are
    paced."""
    before = over.stats()
    answers = serve(over, light_requests(), domain=domain, streaming=True)
    after = over.stats()
    assert after.cache_saved_tokens == before.cache_saved_tokens, f"{domain} is not cold"
    return after.steps - before.steps, after.rows - before.rows, [list(answers[at].token_ids) for at in sorted(answers)]


def assert_as_before(before: tuple[int, int, list[list[int]]], after: tuple[int, int, list[list[int]]]) -> None:
    """At least 95 % as fast, in steps and in rows, and the same answers."""
    assert after[2] == before[2], "an answer has changed"
    assert before[0] / after[0] >= 0.95, f"{after[0]} steps, {before[0]} before"
    assert before[1] / after[1] >= 0.95, f"{after[1]} rows, {before[1]} before"


def test_more_demand_than_memory() -> None:
    cases = requests(MODEL)
    demand = sum(len(prompt) + (params.max_tokens or 0) for prompt, params in cases)
    assert demand > 5 * NUM_PAGES * PAGE_TOKENS

    alone = {}
    single = engine(prefix_cache=False)
    for at, case in enumerate(cases):
        alone[at] = serve(single, [case])[0]
    soaked = engine()
    light_work(soaked, "measures the first chunks")
    before = light_work(soaked, "before")
    rows_before = soaked.stats().rows

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
    assert stats.wasted_tokens < 0.1 * (stats.rows - rows_before)
    assert stats.pages_used == 0

    assert_as_before(before, light_work(soaked, "after"))
    assert soaked.stats().preemptions == stats.preemptions


def lose_page(over: Engine) -> None:
    """An owner that never gives it back."""
    over.scheduler.kv.tree.evict(1)
    assert over.scheduler.kv.pool.allocate() is not None


def lose_slot(over: Engine) -> None:
    """One request fewer at a time."""
    over.scheduler.max_batch -= 1


def keep_chunks_small(over: Engine) -> None:
    """A slow moment that is not forgotten soon."""
    over._pacer.row_s = 1.0


def compute_again(over: Engine) -> None:
    """A request that loses its work each time that it has decoded a little."""
    plan = over.scheduler.plan

    def forgetful(max_prefill_rows: int | None = None) -> Schedule:
        if (stats := over.stats()).steps % 3 == 0 and stats.num_running > 1:
            over.scheduler._preempt(over.scheduler.running[-1])
            over.scheduler.kv.tree.evict(NUM_PAGES)
        return plan(max_prefill_rows)

    over.scheduler.plan = forgetful  # type: ignore[method-assign]


@pytest.mark.parametrize("damage", [lose_page, lose_slot, keep_chunks_small, compute_again])
def test_what_a_soak_might_leave_behind_would_show(damage: Callable[[Engine], None]) -> None:
    damaged = engine()
    light_work(damaged, "measures the first chunks")
    before = light_work(damaged, "before")
    assert_as_before(before, light_work(damaged, "undamaged"))
    damage(damaged)
    damaged.scheduler.check = lambda: None  # type: ignore[method-assign]  # the work alone must show it
    after = light_work(damaged, "after")
    with pytest.raises(AssertionError, match=r"steps|rows"):
        assert_as_before(before, after)

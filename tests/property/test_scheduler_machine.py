"""Requests that come, go, begin alike and compete for pages at random, over an executor that fails at times: the books
balance and every answer is the definition's."""

from __future__ import annotations

from collections.abc import Sequence

from fake_executor import FakeExecutor, FakeTokenizer, reference_tokens, tiny_model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripted_drafts import OracleDrafter, TakeAll

from paceline.config import PAGE_TOKENS, EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.errors import KVCapacityError
from paceline.executors.base import StepPlan, StepResult
from paceline.params import SamplingParams
from paceline.speculate.draft import Context, Draft
from paceline.speculate.speculator import Speculator

VOCAB = 31


class FlakyExecutor(FakeExecutor):
    """Fails when told to, half way: what it was to write is garbage then."""

    fails = False

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        if self.fails:
            self.fails = False
            self._pages[plan.page_table[0, plan.positions[0] // PAGE_TOKENS]] = -7
            raise RuntimeError("told to")
        return super().run(plan)


class DefinitionDrafter(OracleDrafter):
    """Knows what follows by the definition."""

    def __init__(self, window: int | None, *, seed: int, chains: bool) -> None:
        super().__init__({}, VOCAB, seed=seed, chains=chains)
        self._window = window

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """Now and then a draft that is partly right."""
        drafts: list[Draft | None] = []
        for context, limit in zip(contexts, limits, strict=True):
            tokens = list(context.tokens)
            self._answers = {
                context.request_id: tokens + reference_tokens(tokens, 6, vocab_size=VOCAB, window=self._window)
            }
            drafts.append(self._draft(context, limit) if self._random.random() < 0.5 else None)
        return drafts


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps and aborts."""

    engine: Engine

    @initialize(
        pages=st.integers(1, 8),
        max_batch=st.integers(1, 5),
        extra=st.integers(0, 60),
        max_outputs=st.integers(5, 40),
        window=st.sampled_from([None, None, 20, 50]),
        prefix_cache=st.sampled_from([True, True, False]),
        drafts=st.sampled_from(["none", "chains", "trees"]),
        seed=st.integers(0, 100),
    )
    def start(
        self,
        pages: int,
        max_batch: int,
        extra: int,
        max_outputs: int,
        window: int | None,
        prefix_cache: bool,
        drafts: str,
        seed: int,
    ) -> None:
        self.window = window
        self.executor = FlakyExecutor(
            model=tiny_model(VOCAB, 300, window), num_pages=pages, max_outputs=max_outputs, max_rows=max_batch + extra
        )
        config = EngineConfig(max_batch=max_batch, token_budget=max_batch + extra, prefix_cache=prefix_cache)
        self.engine = Engine(self.executor, FakeTokenizer(VOCAB), config)
        if drafts != "none":
            drafter = DefinitionDrafter(window, seed=seed, chains=drafts == "chains")
            self.engine.use_speculator(Speculator([drafter], TakeAll(), vocab_size=VOCAB))
        self.pool_tokens = pages * PAGE_TOKENS
        self.live: list[Request] = []
        self.ended: list[Request] = []

    @rule(
        num_prompt=st.integers(1, 150),
        max_tokens=st.integers(1, 120),
        branch=st.sampled_from([0, 30, 64, 100, 300]),
        prompt=st.sampled_from([False, False, True]),
        domain=st.sampled_from(["", "", "other"]),
        share=st.sampled_from(["", "", "a", "b"]),
    )
    def add(self, num_prompt: int, max_tokens: int, branch: int, prompt: bool, domain: str, share: str) -> None:
        tokens = [(3 if at < branch else branch + 5 * at) % (VOCAB - 1) for at in range(num_prompt)]
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if prompt else None)
        try:
            request = self.engine.make_request(tokens, params, cache_domain=domain, share=share)
        except KVCapacityError:
            assert num_prompt > self.pool_tokens
            return
        assert num_prompt <= self.pool_tokens
        self.engine.add(request)
        self.live.append(request)

    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.take_step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        assert self.engine.abort(request) is not None
        self.live.remove(request)
        self.ended.append(request)

    @rule()
    def fail(self) -> None:
        self.executor.fails = True

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def take_step(self) -> None:
        before = {id(r): (r.num_computed, len(r.tokens)) for r in self.engine.scheduler.running}
        for update in self.engine.step():
            assert update.completion is not None
            self.live.remove(update.request)
            self.ended.append(update.request)
        self.engine.scheduler.check()
        after = {id(r): (r.num_computed, len(r.tokens)) for r in self.engine.scheduler.running}
        assert before != after or self.ended, "a step without progress"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.executor.fails = False
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.take_step()
        assert not self.engine.has_work
        assert not self.live
        assert self.engine.stats().pages_used == 0
        for request in self.ended:
            prompt, output = request.tokens[: request.num_prompt], request.tokens[request.num_prompt :]
            assert output == reference_tokens(
                prompt, len(output), vocab_size=VOCAB, stop_ids=[VOCAB - 1], window=self.window
            )
            if request.finish_reason == "error" and not isinstance(request.error, RuntimeError):
                assert isinstance(request.error, KVCapacityError)
                assert len(request.tokens) == self.pool_tokens + 1, "only who outgrows the whole pool fails"


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)

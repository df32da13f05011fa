"""The step loop: plan, run, commit."""

from __future__ import annotations

import itertools
import operator
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config import EngineConfig
from paceline.engine.detokenize import TokenBytes, TokenText
from paceline.engine.outputs import Completion, Delta, FinishReason, TokenLogprob, TopLogprob
from paceline.engine.pace import ChunkPacer
from paceline.engine.plan import PlanBuilder
from paceline.engine.request import Request, mix_seed
from paceline.engine.scheduler import Schedule, Scheduler
from paceline.engine.stats import EngineStats
from paceline.errors import ContextLengthError, KVCapacityError, OverloadError, ParameterError, RequestError
from paceline.executors.base import Executor, StepPlan, StepResult
from paceline.kv.disk_tier import Store
from paceline.kv.identity import domain_key
from paceline.kv.manager import KVManager
from paceline.params import SamplingParams
from paceline.sampling.rows import SampledRows, SampleRows
from paceline.speculate.chance import PhiloxChance
from paceline.speculate.draft import Draft
from paceline.speculate.speculator import Speculator
from paceline.speculate.verify import accept, accept_drawn

_STATUS = {
    1: "the model gave a logit that is not a finite number: its weights or their quantisation are broken",
    2: "no token is left to choose: logit_bias, stop tokens and min_tokens ban the whole vocabulary",
    3: "a token id of the request lies outside the vocabulary",
}
"""What ``SampledRows.status`` means."""


@dataclass(frozen=True)
class Update:
    """What a step did for a request that somebody waits for: a piece of its stream, or its end, or both."""

    request: Request
    delta: Delta | None
    completion: Completion | None


@dataclass(frozen=True)
class _Step:
    """A step that has run: its plan, its result, the tokens drawn at its outputs, and when it ended."""

    plan: StepPlan
    result: StepResult
    tokens: list[int]
    now_s: float

    def check(self, output: int) -> None:
        """Raises ``RequestError`` when no token could be drawn at an output."""
        status = self.result.sampled.status
        if status is not None and status[output]:
            raise RequestError(_STATUS[int(status[output])])


class Engine:
    """Serves requests over one executor, a step at a time.

    Not thread-safe, but for ``make_request``, which reads only what never changes. A request's tokens and
    log-probabilities depend on its prompt, its parameters and its seed alone. A request without a seed gets one from
    ``config.seed`` and the number of requests made before it, so a program that makes the same requests in the same
    order gets the same answers each time it runs.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: TokenText,
        config: EngineConfig,
        *,
        store: Store | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.executor = executor
        self.config = config
        self.context_length = min(config.context_length or executor.model.context_length, executor.model.context_length)
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        self._clock = clock
        max_batch = min(config.max_batch, executor.max_rows, executor.max_outputs)
        kv = KVManager(
            executor.num_pages,
            max_batch,
            self.context_length,
            prefix_cache=config.prefix_cache,
            window=executor.model.sliding_window,
        )
        if store is not None:
            kv.use_store(store, executor.pages)
        self.scheduler = Scheduler(
            kv,
            max_batch=max_batch,
            token_budget=min(config.token_budget, executor.max_rows),
            max_outputs=executor.max_outputs,
        )
        self._pacer = ChunkPacer(config.max_gap_ms)
        self._builder = PlanBuilder(kv, max_rows=executor.max_rows, max_outputs=executor.max_outputs)
        self._ids = itertools.count()
        self._steps = self._rows = self._output_tokens = self._finished = self._failed = 0
        self._python_s = self._executor_s = 0.0
        self._python_since_s: float | None = None  # None while there is no work
        self._speculator: Speculator | None = None

    def use_speculator(self, speculator: Speculator) -> None:
        """Has decoding requests verify what it proposes."""
        self._speculator = speculator

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def make_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        streaming: bool = False,
        seed: int | None = None,
        cache_domain: str = "",
    ) -> Request:
        """A request for one answer to ``prompt``, not yet queued.

        ``seed`` overrides that of ``params`` (choices of one prompt share it); the draws also depend on ``choice``.
        Cached prefixes are shared with requests of the same ``cache_domain`` only.
        Raises ``ParameterError`` for ids outside the vocabulary or an empty prompt, ``ContextLengthError`` and
        ``KVCapacityError`` for a prompt that can never run.
        """
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise ParameterError("prompt", prompt, "text, or a list of token ids") from None
        vocab_size = self.executor.model.vocab_size
        if not tokens:
            raise ParameterError("prompt", list(prompt), "at least one token")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise ParameterError("prompt", wrong, f"token ids of this model are between 0 and {vocab_size - 1}")
        params.validate_for(vocab_size)
        if len(tokens) >= self.context_length:
            raise ContextLengthError(len(tokens), self.context_length)
        if len(tokens) > self.scheduler.kv.num_pool_tokens:
            raise KVCapacityError(len(tokens), self.scheduler.kv.num_pool_tokens)
        request_id = next(self._ids)
        if seed is None:
            seed = params.seed if params.seed is not None else mix_seed(self.config.seed, request_id)
        return Request(
            request_id,
            tokens,
            params,
            seed=seed,
            context_length=self.context_length,
            eos_token_ids=self._tokenizer.eos_token_ids,
            token_bytes=self._token_bytes,
            choice=choice,
            streaming=streaming,
            domain=domain_key(cache_domain),
            submitted_s=self._clock(),
        )

    def check_room(self, num_open: int, num_new: int) -> None:
        """Raises ``OverloadError`` when so many new requests, with ``num_open`` that have not ended, would make more
        than ``max_queue`` wait behind a full batch. Reads only what never changes."""
        max_queue, max_batch = self.config.max_queue, self.scheduler.max_batch
        if max_queue is not None and num_open + num_new > max_queue + max_batch:
            raise OverloadError(max(0, num_open - max_batch), max_queue)

    def add(self, request: Request) -> None:
        """Queues a request; ``OverloadError`` when the queue is full."""
        self.check_room(len(self.scheduler.running) + len(self.scheduler.waiting), 1)
        self.scheduler.add(request)

    def abort(self, request: Request) -> Update | None:
        """Ends a request now and frees its pages; None when it had ended already."""
        if request.finish_reason is not None:
            return None
        self.scheduler.remove(request)
        if not self.has_work:
            self._python_since_s = None  # what comes until the next request is nobody's time
        return self._end(request, "abort")

    def step(self) -> list[Update]:
        """Plans, runs and commits one step; the updates are those of streaming requests and of requests that ended."""
        since = self._python_since_s if self._python_since_s is not None else self._clock()
        schedule = self.scheduler.plan(self._pacer.max_rows)
        updates = [self._end(request, "error") for request in schedule.failed]
        for request in schedule.admitted:
            self._builder.admit(request)
            if request.started_s is None:
                request.started_s = since
        end = since
        if schedule.requests:
            if self._speculator is not None:
                self._draft(self._speculator, schedule)
            plan = self._builder.build(schedule.requests)
            start = self._clock()
            self._python_s += start - since
            try:
                result = self.executor.run(plan)
            except Exception as error:  # whatever it is, it ends this step's requests and not the engine
                self.scheduler.abandon(schedule)
                for request in schedule.requests:
                    updates.append(self._fail(request, error, keep=False))
                result = None
            end = self._clock()
            self._executor_s += end - start
            self._steps += 1
            self._rows += len(plan.tokens)
            if result is not None:
                if self._speculator is not None and len(plan.logit_rows) == len(plan.tokens):
                    self._speculator.observe_step(len(plan.tokens), end - start)
                self._pacer.observe(len(schedule.requests), len(plan.tokens), end - start)
                updates += self._commit(plan, schedule, result, end)
            self.scheduler.kv.finish_step()
            if result is not None:
                if len(plan.tokens) > len(schedule.requests):  # a page takes a ms: seen beside a decode, not a prompt
                    self.scheduler.kv.persist(1)
        else:
            assert schedule.failed or not self.has_work, "the scheduler is stuck"
        if self.has_work:
            self._python_since_s = end
        else:
            self._python_s += self._clock() - end
            self._python_since_s = None
        return updates

    def _draft(self, speculator: Speculator, schedule: Schedule) -> None:
        """Gives decoding requests of the step drafts to verify."""
        room = self.scheduler.room_for_drafts(schedule)
        requests = [
            request
            for request in schedule.requests
            if request.num_scheduled == 1
            and request.num_computed + 1 == len(request.tokens)
            and request.max_tokens - len(request.tokens) > 1
        ]
        if room > 0 and requests:
            num_rows = sum([request.num_scheduled for request in schedule.requests])
            drafts = speculator.propose(requests, num_rows=num_rows, room=room)
            for request, draft in zip(requests, drafts, strict=True):
                if draft is not None:
                    self.scheduler.add_draft(request, draft)

    def _commit(self, plan: StepPlan, schedule: Schedule, result: StepResult, now_s: float) -> list[Update]:
        """Takes the step's tokens over into the requests."""
        updates: list[Update] = []
        step = _Step(plan, result, result.sampled.tokens.tolist(), now_s)
        output = 0
        for request in schedule.requests:
            first = output
            output += request.num_outputs
            num_before = len(request.tokens)
            try:
                if request.draft is not None:
                    reason = self._take_draft(request, request.draft, step, first)
                else:
                    request.num_computed += request.num_scheduled
                    reason = self._take(request, step, first, output) if request.num_outputs else None
            except Exception as error:  # a tokenizer that fails on one token must not stop the other requests
                updates.append(self._fail(request, error))
                continue
            if self._speculator is not None:
                self._speculator.observe(request, request.draft, request.tokens[num_before:])
            request.draft = None
            request.forks.clear()
            if reason is not None:
                self.scheduler.remove(request)
                updates.append(self._end(request, reason))
            elif request.streaming and request.num_outputs and (text := request.detokenizer.take()):
                updates.append(Update(request, self._delta(request, text), None))
        return updates

    def _take(self, request: Request, step: _Step, first: int, end: int) -> FinishReason | None:
        """Adds outputs first..end-1 of the step to a request; returns why it ended, None when it goes on."""
        for output in range(first, end):
            step.check(output)
        if request.num_computed < len(request.tokens):  # only log-probabilities of the prompt
            self._add_prompt_logprobs(request, step.result, first, end)
            return None
        if end - first > 1:
            self._add_prompt_logprobs(request, step.result, first, end - 1)
        return self._append(request, step.tokens[end - 1], step.result.sampled, end - 1, step.now_s)

    def _take_draft(self, request: Request, draft: Draft, step: _Step, first: int) -> FinishReason | None:
        """Adds what of a draft the target accepts, and the token that it draws after that."""
        num_rows = len(draft) + 1
        sampled = step.result.sampled
        if request.params.temperature > 0 and self.config.acceptance == "exact":
            rows, tokens = self._accept_exact(request, draft, step, first)
            sampled = self._reported(request, tokens, [0, *rows], first)
            outputs = range(len(tokens))
        else:
            drawn = step.tokens[first : first + num_rows]
            rows = accept_drawn(draft, drawn)
            outputs = [first, *(first + row for row in rows)]
            tokens = [step.tokens[output] for output in outputs]
        if rows:
            branch = bisect_right(draft.branch_starts(), rows[-1]) - 1
            if branch > 0:
                self.scheduler.kv.take(request.forks[branch - 1])
        for row, output, token in zip([0, *rows], outputs, tokens, strict=True):
            step.check(first + row)
            request.num_computed += 1
            reason = self._append(request, token, sampled, output, step.now_s)
            if reason is not None:
                return reason
        return None

    def _append(
        self, request: Request, token: int, sampled: SampledRows, output: int, now_s: float
    ) -> FinishReason | None:
        """Adds the token that was drawn at an output; returns why the request ended, None when it goes on."""
        params = request.params
        request.tokens.append(token)
        self._output_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        if request.logprobs is not None:
            request.logprobs.append(self._logprob(sampled, output, params.logprobs or 0))
        num_output = len(request.tokens) - request.num_prompt
        if request.counts is not None:
            request.counts.add(token)
        if request.banned is not None and num_output >= params.min_tokens:
            request.banned = None
        if token in request.stop_ids:
            return "stop"
        request.detokenizer.feed(token, may_stop=num_output > params.min_tokens)
        if request.detokenizer.stopped:
            return "stop"
        return "length" if len(request.tokens) == request.max_tokens else None

    def _accept_exact(self, request: Request, draft: Draft, step: _Step, first: int) -> tuple[list[int], list[int]]:
        """Accepted rows and the tokens that follow row 0 and each of them, by stochastic acceptance."""

        def p(row: int) -> NDArray[np.float64]:
            step.check(first + row)
            distribution: NDArray[np.float64] = self.executor.probabilities(step.plan.samples, [first + row])[0]
            return distribution

        accepted = accept(draft, p, PhiloxChance(int(request.record["seed"][0]), len(request.tokens)))
        rows = list(accepted.rows)
        return rows, [*(draft.tokens[row - 1] for row in rows), accepted.token]

    def _reported(self, request: Request, tokens: Sequence[int], rows: Sequence[int], first: int) -> SampledRows | None:
        """Log-probabilities of tokens that others than native sampling chose, where they are wanted."""
        if request.logprobs is None:
            return None
        forced = np.repeat(request.record, len(tokens))
        forced["forced"] = tokens
        return self.executor.score(SampleRows(forced), [first + row for row in rows])

    def _add_prompt_logprobs(self, request: Request, result: StepResult, first: int, end: int) -> None:
        assert request.prompt_logprobs is not None
        for output in range(first, end):
            assert int(result.sampled.tokens[output]) == request.tokens[len(request.prompt_logprobs)]
            top = request.params.prompt_logprobs or 0
            request.prompt_logprobs.append(self._logprob(result.sampled, output, top))

    def _logprob(self, sampled: SampledRows, output: int, num_top: int) -> TokenLogprob:
        token_bytes = self._token_bytes
        top = tuple(
            TopLogprob(token, logprob, token_bytes[token])
            for token, logprob in zip(
                sampled.top_tokens[output, :num_top].tolist(),
                sampled.top_logprobs[output, :num_top].tolist(),
                strict=True,
            )
            if token >= 0
        )
        token = int(sampled.tokens[output])
        return TokenLogprob(token, float(np.float32(sampled.logprobs[output])), token_bytes[token], top)

    def _delta(self, request: Request, text: str, completion: Completion | None = None) -> Delta:
        """A piece of stream: ``text`` and the tokens since the piece before."""
        first, request.num_streamed = request.num_streamed, len(request.tokens)
        return Delta(
            text,
            request.tokens[first:],
            request.finish_reason,
            request.choice,
            completion,
            None if request.logprobs is None else request.logprobs[first - request.num_prompt :],
        )

    def _end(self, request: Request, reason: FinishReason) -> Update:
        """The last update of a request that the scheduler has forgotten."""
        request.detokenizer.finish()
        if reason == "length" and request.detokenizer.stopped:  # the last, incomplete character completed a stop string
            reason = "stop"
        request.finish_reason = reason
        self._failed += reason == "error"
        self._finished += reason != "error"
        if self._speculator is not None:
            request.speculation = self._speculator.counts(request.request_id)
            self._speculator.finish(request)
        completion = request.completion()
        delta = self._delta(request, request.detokenizer.take(), completion) if request.streaming else None
        return Update(request, delta, completion)

    def _fail(self, request: Request, error: Exception, *, keep: bool = True) -> Update:
        """Ends a running request by an error; ``keep`` says that the keys and values of its tokens are right."""
        request.error = error
        self.scheduler.remove(request, keep=keep)
        return self._end(request, "error")

    def persist(self) -> bool:
        """Writes one page of the prefix cache to its store; whether there are more. For when there is no work."""
        return self.scheduler.kv.persist(1) > 0

    def stats(self) -> EngineStats:
        """Totals and state. May be called from another thread; the numbers are then of about the same moment."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        return EngineStats(
            steps=self._steps,
            rows=self._rows,
            output_tokens=self._output_tokens,
            requests_finished=self._finished,
            requests_failed=self._failed,
            preemptions=scheduler.preemptions,
            wasted_tokens=scheduler.wasted_tokens,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            cache_query_tokens=scheduler.cache.query,
            cache_hit_tokens=scheduler.cache.hit,
            cache_saved_tokens=scheduler.cache.saved,
            pages_used=pool.num_pages - scheduler.kv.num_available,
            pages_cached=scheduler.kv.tree.num_evictable,
            pages_touched=pool.num_touched,
            pages_total=pool.num_pages,
            python_s=self._python_s,
            executor_s=self._executor_s,
        )

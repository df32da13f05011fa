"""The step loop: plan, run, commit."""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.engine.commit import Committer, StepOutputs
from paceline.engine.detokenize import TextPieces, TokenBytes, TokenText
from paceline.engine.outputs import Completion, Delta, FinishReason
from paceline.engine.pace import ChunkPacer
from paceline.engine.plan import PlanBuilder
from paceline.engine.pooling import MeanPool
from paceline.engine.request import Request, mix_seed
from paceline.engine.scheduler import Schedule, Scheduler
from paceline.engine.stats import EngineStats
from paceline.errors import ContextLengthError, KVCapacityError, OverloadError, ParameterError
from paceline.executors.base import Executor, StepPlan, StepResult
from paceline.kv.disk_tier import Store
from paceline.kv.identity import domain_key
from paceline.kv.manager import KVManager
from paceline.params import SamplingParams, Structure
from paceline.sampling.constraint import Constraint
from paceline.sampling.grammar import GrammarCompiler
from paceline.speculate.hidden import HiddenRows
from paceline.speculate.speculator import Speculator


@dataclass(frozen=True)
class Update:
    """What a step did for a request that somebody waits for: a piece of its stream, or its end, or both."""

    request: Request
    delta: Delta | None
    completion: Completion | None


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
        self._grammars = GrammarCompiler(tokenizer, executor.model.vocab_size)
        self._clock = clock
        max_batch = min(config.max_batch, executor.max_rows, executor.max_outputs)
        kv = KVManager(
            executor.num_pages,
            max_batch,
            self.context_length,
            prefix_cache=config.prefix_cache,
            window=executor.model.kv_window,
        )
        if store is not None:
            kv.use_store(store, executor.pages)
        self.scheduler = Scheduler(
            kv,
            max_batch=max_batch,
            token_budget=min(config.token_budget, executor.max_rows),
            max_outputs=executor.max_outputs,
        )
        self.num_shares = 1
        """How many divide the places in the queue."""
        self._committer = Committer(executor, kv, self._token_bytes, exact=config.acceptance == "exact")
        self._pacer = ChunkPacer(config.max_gap_ms)
        self._builder = PlanBuilder(kv, max_rows=executor.max_rows, max_outputs=executor.max_outputs)
        self._ids = itertools.count()
        self._steps = self._rows = self._attended = self._output_tokens = self._finished = self._failed = 0
        self._python_s = self._executor_s = 0.0
        self._python_since_s: float | None = None  # None while there is no work
        self._before: EngineStats | None = None  # of the engines that this one follows
        self._speculator: Speculator | None = None
        self._num_holding_back = 0
        self._hold_lock = threading.Lock()

    def use_speculator(self, speculator: Speculator) -> None:
        """Has decoding requests verify what it proposes."""
        self._speculator = speculator

    def follow(self, other: Engine) -> None:
        """Takes over what must go on when this engine replaces another: the numbers of requests, the shares, the
        totals."""
        self._ids = other._ids
        self._before = other.stats()  # final: it takes no more steps
        self.num_shares = other.num_shares

    def hold_drafts(self, hold: bool) -> None:
        """Has nothing drafted from now on, until as many have said False as have said True. From any thread."""
        with self._hold_lock:
            self._num_holding_back += 1 if hold else -1

    @property
    def max_speculated_rows(self) -> int:
        """Most rows with logits that a step may have."""
        return min(self.scheduler.token_budget, self.scheduler.max_outputs)

    @property
    def speculation(self) -> dict[str, str]:
        """The part of ``LLM.path`` that says who drafts."""
        return {"speculation": "off"} if self._speculator is None else self._speculator.path()

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
        share: str = "",
        embed: bool = False,
    ) -> Request:
        """A request for one answer to ``prompt``, not yet queued.

        ``seed`` overrides that of ``params`` (choices of one prompt share it); the draws also depend on ``choice``.
        Cached prefixes are shared with requests of the same ``cache_domain`` only. Turns go by ``share``.
        With ``embed`` its completion has the mean of the prompt's hidden states, all of which are computed.
        Raises ``ParameterError`` for ids outside the vocabulary, an empty prompt, or a structure that does not compile
        (which takes some milliseconds the first time); ``ContextLengthError`` and ``KVCapacityError`` for a prompt that
        can never run.
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
        constraint = None if params.structure is None else self._constraint(params.structure, params)
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
            share=share,
            pool=MeanPool() if embed else None,
            submitted_s=self._clock(),
            constraint=constraint,
        )

    def prepare_structure(self, structure: Structure) -> None:
        """Compiles a structure, so that requests with it are made quickly. Raises as ``make_request`` does."""
        self._grammars.compile(structure)

    def _constraint(self, structure: Structure, params: SamplingParams) -> Constraint:
        return Constraint(
            self._grammars.compile(structure).matcher(structure.name),
            self.executor.model.vocab_size,
            ends=self._tokenizer.eos_token_ids,
            stops=params.stop_token_ids,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
        )

    def check_room(self, share: str, num_new: int, *, num_open: int, num_open_of_share: int) -> None:
        """Raises ``OverloadError`` when so many new requests of a share, with those that have not ended (of all, and of
        the share alone), would make more of it wait behind a full batch than it has places. From any thread."""
        if self.config.max_queue is None or num_open + num_new <= self.scheduler.max_batch:
            return
        num_places = -(-self.config.max_queue // self.num_shares)
        num_running = sum([request.share == share for request in list(self.scheduler.running)])
        # What has come and is not admitted yet waits for nobody while the batch has room.
        num_waiting = min(num_open - self.scheduler.max_batch, num_open_of_share - num_running)
        if num_waiting + num_new > num_places:
            raise OverloadError(max(0, num_waiting), num_places, is_share=self.num_shares > 1)

    def add(self, request: Request) -> None:
        """Queues a request; ``OverloadError`` when the queue is full."""
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        num_of_share = sum([other.share == request.share for other in requests])
        self.check_room(request.share, 1, num_open=len(requests), num_open_of_share=num_of_share)
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
        if self._python_since_s is None:
            self._python_since_s = self._clock()
        since = self._python_since_s
        schedule = self.scheduler.plan(self._pacer.max_rows)
        updates = [self._end(request, "error") for request in schedule.failed]
        for request in schedule.admitted:
            self._builder.admit(request)
            if request.started_s is None:
                request.started_s = max(since, request.submitted_s)  # it may have come since the last step ended
        end = since
        if schedule.requests:
            if self._speculator is not None and self._num_holding_back == 0:
                since += self._draft(self._speculator, schedule)
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
            num_tokens = sum([len(request.tokens) for request in schedule.requests])
            self._attended += num_tokens
            if self._speculator is not None:
                teaches = result is not None and len(plan.logit_rows) == len(plan.tokens)
                # Planning included: rows of drafts cost Python too. What drafting took is told apart.
                self._speculator.observe_step(len(plan.tokens), num_tokens, end - since, teaches=teaches)
            if result is not None:
                self._pacer.observe(*schedule.decodes_and_prompt_rows(), end - start)
                updates += self._commit(plan, schedule, result, end)
            self.scheduler.kv.finish_step()
            if result is not None and len(plan.logit_rows) < len(plan.tokens):
                self.scheduler.kv.persist(1)  # a page takes a ms: seen beside a decode, not beside a prompt
        else:
            assert schedule.failed or not self.has_work, "the scheduler is stuck"
        if self.has_work:
            self._python_since_s = end
        else:
            self._python_s += self._clock() - end
            self._python_since_s = None
        return updates

    def _draft(self, speculator: Speculator, schedule: Schedule) -> float:
        """Gives decoding requests of the step drafts to verify; returns the seconds that drafting took."""
        room = self.scheduler.room_for_drafts(schedule)
        requests = [
            request
            for request in schedule.requests
            if request.num_scheduled == 1
            and request.num_computed + 1 == len(request.tokens)
            and request.max_tokens - len(request.tokens) > 1
        ]
        before_s = speculator.draft_s
        if room > 0 and requests:
            num_rows = sum([request.num_scheduled for request in schedule.requests])
            drafts = speculator.propose(requests, num_rows=num_rows, room=room)
            for request, draft in zip(requests, drafts, strict=True):
                if draft is not None:
                    self.scheduler.add_draft(request, draft)
        return speculator.draft_s - before_s

    def _commit(self, plan: StepPlan, schedule: Schedule, result: StepResult, now_s: float) -> list[Update]:
        """Takes the step's tokens over into the requests."""
        updates: list[Update] = []
        step = StepOutputs(plan, result, now_s)
        speculator = self._speculator
        observes_hidden = speculator is not None and speculator.observes_hidden
        is_pooled = any(request.pool is not None for request in schedule.requests)
        hidden = self.executor.hidden() if observes_hidden or is_pooled else None
        observed: list[HiddenRows] = []
        row = output = 0
        for request in schedule.requests:
            first, first_row = output, row
            output += request.num_outputs
            row += request.num_scheduled
            position, num_before = request.num_computed, len(request.tokens)
            if request.pool is not None and hidden is not None:
                request.pool.add(position, hidden[first_row:row])
            try:
                reason = self._committer.commit(request, step, first, output)
            except Exception as error:  # a tokenizer that fails on one token must not stop the other requests
                self._output_tokens += len(request.tokens) - num_before
                updates.append(self._fail(request, error))
                continue
            self._output_tokens += len(request.tokens) - num_before
            if speculator is not None:
                new = request.tokens[num_before:]
                speculator.observe(request, request.draft, new)
                if observes_hidden and hidden is not None and reason is None:
                    observed.append(HiddenRows.kept(request, position, hidden[first_row:row], request.draft, new))
            request.draft = None
            request.forks.clear()
            if reason is not None:
                self.scheduler.remove(request)
                updates.append(self._end(request, reason))
            elif request.streaming and request.num_outputs and (pieces := request.detokenizer.take()):
                updates.append(Update(request, self._delta(request, pieces), None))
        if observed and speculator is not None:
            speculator.observe_hidden(observed)
        return updates

    def _delta(self, request: Request, pieces: TextPieces, completion: Completion | None = None) -> Delta:
        """A piece of stream: the text of ``pieces`` and the tokens since the piece before."""
        first, request.num_streamed = request.num_streamed, len(request.tokens)
        return Delta(
            pieces[0][0] if len(pieces) == 1 else "".join([text for text, _ in pieces]),
            request.tokens[first:],
            request.finish_reason,
            request.choice,
            completion,
            None if request.logprobs is None else request.logprobs[first - request.num_prompt :],
            pieces,
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
            request.speculation = self._speculator.finish(request)
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

    def progress_age_s(self) -> float:
        """Seconds since a step ended, or the first one began, while there is work; 0 without work. From any thread."""
        since = self._python_since_s
        return 0.0 if since is None else self._clock() - since

    def stats(self) -> EngineStats:
        """Totals and state. May be called from another thread; the numbers are then of about the same moment."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        own = EngineStats(
            steps=self._steps,
            rows=self._rows,
            attended_tokens=self._attended,
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
            speculation=None if self._speculator is None else self._speculator.counts(),
            draft_s=0.0 if self._speculator is None else self._speculator.draft_s,
            python_s=self._python_s,
            executor_s=self._executor_s,
        )
        return own if self._before is None else own.after(self._before)

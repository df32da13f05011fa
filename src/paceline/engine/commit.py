"""Takes the outputs of a step over into its requests: tokens, log-probabilities, and what ends an answer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.outputs import FinishReason, TokenLogprob, TopLogprob
from paceline.engine.request import Request, mix_seed
from paceline.errors import RequestError
from paceline.executors.base import Executor, StepPlan, StepResult
from paceline.kv.manager import KVManager
from paceline.sampling.rows import SampledRows, SampleRows
from paceline.speculate.chance import PhiloxChance
from paceline.speculate.draft import Draft
from paceline.speculate.verify import accept, accept_drawn

_STATUS = {
    1: "the model gave a logit that is not a finite number: its weights or their quantisation are broken",
    2: "no token is left to choose: logit_bias, stop tokens and min_tokens ban all that may follow",
    3: "a token id of the request lies outside the vocabulary",
}
"""What ``SampledRows.status`` means."""


class StepOutputs:
    """A step that has run: its plan, what was drawn at its outputs, and when it ended."""

    def __init__(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        self.plan = plan
        self.sampled = result.sampled
        self.now_s = now_s
        self.tokens: list[int] = result.sampled.tokens.tolist()
        status = result.sampled.status
        self._status: list[int] | None = status.tolist() if status is not None and status.any() else None

    def is_drawn(self, output: int) -> bool:
        """Whether a token could be drawn at an output."""
        return self._status is None or self._status[output] == 0

    def check(self, output: int) -> None:
        """Raises ``RequestError`` when none could."""
        if self._status is not None and self._status[output]:
            raise RequestError(_STATUS[self._status[output]])


@dataclass(frozen=True)
class _Verified:
    """Of a draft, the accepted rows; the tokens that follow row 0 and each of them; and where these are reported:
    token i at output ``outputs[i]`` of ``sampled``."""

    rows: list[int]
    tokens: list[int]
    sampled: SampledRows
    outputs: Sequence[int]


class Committer:
    """Commits steps of one executor. ``exact``: drafts are accepted by chance where the temperature is above 0."""

    def __init__(
        self, executor: Executor, kv: KVManager, token_bytes: Mapping[int, bytes], *, exact: bool = False
    ) -> None:
        self._executor = executor
        self._kv = kv
        self._token_bytes = token_bytes
        self._exact = exact

    def commit(self, request: Request, step: StepOutputs, first: int, end: int) -> FinishReason | None:
        """Adds outputs first..end-1 of a step to a request; returns why it ended, None when it goes on.

        Raises ``RequestError`` when no token could be drawn; what came before it is in the request then.
        """
        if request.constraint is not None and request.constraint.error is not None:
            raise request.constraint.error  # what was drawn is not what the structure allows
        if request.draft is not None:
            return self._commit_draft(request, request.draft, step, first)
        request.num_computed += request.num_scheduled
        for output in range(first, end):
            step.check(output)
        if request.num_computed < len(request.tokens):  # at most log-probabilities of the prompt
            self._add_prompt_logprobs(request, step, first, end)
            return None
        if end - first > 1:
            self._add_prompt_logprobs(request, step, first, end - 1)
        return self._append(request, step.tokens[end - 1], step.sampled, end - 1, step.now_s)

    def _commit_draft(self, request: Request, draft: Draft, step: StepOutputs, first: int) -> FinishReason | None:
        """Adds what of a draft the target accepts, and the token that it draws after that."""
        if self._exact and request.params.temperature > 0:
            verified = self._accept_exact(request, draft, step, first)
        else:
            rows = accept_drawn(draft, step.tokens[first : first + len(draft) + 1])
            outputs = [first + row for row in [0, *rows]]
            verified = _Verified(rows, [step.tokens[output] for output in outputs], step.sampled, outputs)
        if verified.rows:
            branch = bisect_right(draft.branch_starts(), verified.rows[-1]) - 1
            if branch > 0:
                self._kv.take(request.forks[branch - 1])
        num_drafted = len(verified.rows)  # the token after the last of them is the target's own
        for at, row in enumerate([0, *verified.rows]):
            request.num_computed += 1
            step.check(first + row)
            token, output = verified.tokens[at], verified.outputs[at]
            reason = self._append(request, token, verified.sampled, output, step.now_s, drafted=at < num_drafted)
            if reason is not None:
                return reason
        return None

    def _accept_exact(self, request: Request, draft: Draft, step: StepOutputs, first: int) -> _Verified:
        """Stochastic acceptance."""
        # After a row at which nothing can be drawn there is no distribution: the request fails if it gets there.
        reachable = [True]
        for parent in draft.parents:
            reachable.append(reachable[parent] and step.is_drawn(first + parent))
        rows_of = [row for row, is_reachable in enumerate(reachable) if is_reachable]  # of the draft without the others

        known: dict[int, NDArray[np.float64]] = {}
        if draft.q is not None:  # then nearly all rows are needed, and the executor's threads share them
            drawn = [row for row in range(len(rows_of)) if step.is_drawn(first + rows_of[row])]
            rows = self._executor.probabilities(step.plan.samples, [first + rows_of[row] for row in drawn])
            known = dict(zip(drawn, rows, strict=True))

        def p(row: int) -> NDArray[np.float64]:
            output = first + rows_of[row]
            step.check(output)
            if row not in known:
                known[row] = self._executor.probabilities(step.plan.samples, [output])[0]
            return known[row]

        # Of its own for each request: a drafter may propose what the same seed drew before, by the same numbers.
        seed = mix_seed(int(request.record["seed"][0]), request.request_id)
        chance = PhiloxChance(seed, len(request.tokens))
        accepted = accept(draft.keep([row - 1 for row in rows_of[1:]]), p, chance)
        accepted_rows = [rows_of[row] for row in accepted.rows]
        tokens = [*(draft.tokens[row - 1] for row in accepted_rows), accepted.token]
        sampled = step.sampled
        if request.logprobs is not None:
            forced = np.repeat(request.record, len(tokens))
            forced["forced"] = tokens
            sampled = self._executor.score(SampleRows(forced), [first + row for row in [0, *accepted_rows]])
        return _Verified(accepted_rows, tokens, sampled, range(len(tokens)))

    def _append(
        self, request: Request, token: int, sampled: SampledRows, output: int, now_s: float, *, drafted: bool = False
    ) -> FinishReason | None:
        """Adds a token, reported at an output of ``sampled``."""
        params = request.params
        request.tokens.append(token)
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        if request.logprobs is not None:
            request.logprobs.append(self._logprob(sampled, output, params.logprobs or 0))
        num_output = request.num_output
        if request.counts is not None:
            request.counts.add(token)
        if request.banned is not None and num_output >= params.min_tokens:
            request.banned = None
        if request.constraint is not None:
            request.constraint.advance(token)
        if token in request.stop_ids:
            return "stop"
        request.detokenizer.feed(token, may_stop=num_output > params.min_tokens, drafted=drafted)
        if request.detokenizer.stopped or (request.constraint is not None and request.constraint.is_done):
            return "stop"
        return "length" if len(request.tokens) == request.max_tokens else None

    def _add_prompt_logprobs(self, request: Request, step: StepOutputs, first: int, end: int) -> None:
        for output in range(first, end):
            assert request.prompt_logprobs is not None
            assert step.tokens[output] == request.tokens[len(request.prompt_logprobs)]
            num_top = request.params.prompt_logprobs or 0
            request.prompt_logprobs.append(self._logprob(step.sampled, output, num_top))

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

"""One request: its tokens, how far they are computed, and how its next token is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.engine.detokenize import Detokenizer
from paceline.engine.outputs import Completion, FinishReason, Timing, TokenLogprob
from paceline.engine.pooling import MeanPool
from paceline.kv.manager import Fork, token_key
from paceline.kv.radix import TOKEN_BYTES
from paceline.params import SamplingParams
from paceline.sampling.constraint import Constraint
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import SAMPLE_ROW
from paceline.speculate.counts import SpeculationCounts
from paceline.speculate.draft import Draft

_MASK64 = 2**64 - 1


def mix_seed(seed: int, index: int) -> int:
    """A 64-bit seed for number ``index`` under ``seed``: output index+1 of SplitMix64 (Steele et al. 2014)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice: ``seed`` itself for the first, so that n = 1 gives the first answer of n = 4."""
    return seed if choice == 0 else mix_seed(seed, choice)


class CountedPath(NamedTuple):
    """What the penalties need after some tokens more than a request has; ``new`` are those that it has not."""

    tokens: NDArray[np.int32]
    values: NDArray[np.int32]
    new: tuple[int, ...]


class TokenCounts:
    """Distinct tokens of a request and how often each is in its output: what the penalties need. Grows in place."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._index = {token: at for at, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = np.zeros(max(64, 2 * len(self._index)), np.int32)
        self._tokens[: len(self._index)] = list(self._index)
        self._values = np.zeros_like(self._tokens)

    def add(self, token: int) -> None:
        """Counts one token of the output."""
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = len(self._index)
            if at == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._values = np.concatenate([self._values, np.zeros_like(self._values)])
            self._tokens[at] = token
        self._values[at] += 1

    def after(self, path: Sequence[int]) -> CountedPath:
        """The counts as they were if ``path`` were counted as well. Does not modify them."""
        counted = CountedPath(self.tokens, self.values, ())
        for token in path:
            counted = self.after_next(counted, token)
        return counted

    def after_next(self, counted: CountedPath, token: int) -> CountedPath:
        """The counts of a path and one more token. Does not modify either."""
        tokens, values, new = counted.tokens, counted.values.copy(), counted.new
        at = self._index.get(token)
        if at is None:
            if token not in new:
                tokens, values, new = np.append(tokens, np.int32(token)), np.append(values, np.int32(0)), (*new, token)
            at = len(self._index) + new.index(token)
        values[at] += 1
        return CountedPath(tokens, values, new)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The distinct tokens, in order of appearance."""
        return self._tokens[: len(self._index)]

    @property
    def values(self) -> NDArray[np.int32]:
        """How often each is in the output."""
        return self._values[: len(self._index)]


def sample_record(params: SamplingParams, seed: int) -> NDArray[np.void]:
    """One ``SAMPLE_ROW`` [1] for tokens drawn under ``params``; position and list places are left to the step."""
    record = np.zeros(1, SAMPLE_ROW)
    record["seed"] = seed
    record["temperature"] = params.temperature
    record["top_p"] = params.top_p
    record["min_p"] = params.min_p
    record["repetition_penalty"] = params.repetition_penalty
    record["presence_penalty"] = params.presence_penalty
    record["frequency_penalty"] = params.frequency_penalty
    record["top_k"] = params.top_k
    record["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
    record["forced"] = -1
    record["mask"] = -1
    return record


class Request:
    """State of one request. Made by ``Engine.make_request``; changed by scheduler and engine only.

    tokens         prompt and output; the model has computed the first ``num_computed``, and each step closes the gap
    max_tokens     prompt and output at most
    slot           of its page table, None while it waits
    num_scheduled  rows of the step under way;  num_outputs  of them whose logits are wanted
    domain         whose cached prefixes it may use
    share          who it belongs to, as far as turns are concerned
    pool           takes in the hidden states of all its prompt, None where no embedding is wanted
    num_cached     of its prompt, what it found in the cache when it first ran
    num_lost       computed when it was preempted;  num_wasted  of these, what had to be computed again
    num_passed     requests that were admitted before it though they came later
    num_published  whole pages of its answer that the prefix cache knows, as the scheduler remembers it
    draft          what is verified in the step under way: its rows follow the one of the last token
    forks          a branch of the page table for each of ``draft.branch_starts()`` but the first
    constraint     what its structure allows to follow ``tokens``, whatever of them is computed
    """

    __slots__ = (
        "_key",
        "banned",
        "bias",
        "choice",
        "constraint",
        "counts",
        "detokenizer",
        "domain",
        "draft",
        "error",
        "finish_reason",
        "first_token_s",
        "forks",
        "last_token_s",
        "logprobs",
        "max_tokens",
        "num_cached",
        "num_computed",
        "num_lost",
        "num_outputs",
        "num_passed",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_scheduled",
        "num_streamed",
        "num_wasted",
        "params",
        "pool",
        "prompt_logprobs",
        "record",
        "request_id",
        "share",
        "slot",
        "speculation",
        "started_s",
        "stop_ids",
        "streaming",
        "submitted_s",
        "tokens",
    )

    def __init__(
        self,
        request_id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        context_length: int,
        eos_token_ids: Sequence[int],
        token_bytes: Mapping[int, bytes],
        choice: int = 0,
        streaming: bool = False,
        domain: bytes = b"",
        share: str = "",
        pool: MeanPool | None = None,
        submitted_s: float = 0.0,
        constraint: Constraint | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.choice = choice
        self.streaming = streaming
        self.tokens = list(prompt)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.domain = domain
        self.share = share
        self.pool = pool
        self.num_cached = self.num_lost = self.num_wasted = 0
        self.num_passed = self.num_preemptions = 0
        self._key = b""
        self.max_tokens = context_length
        if params.max_tokens is not None:
            self.max_tokens = min(context_length, self.num_prompt + params.max_tokens)
        self.slot: int | None = None
        self.num_scheduled = 0
        self.num_outputs = 0
        self.num_published = 0
        self.draft: Draft | None = None
        self.forks: list[Fork] = []
        self.speculation: SpeculationCounts | None = None
        self.num_streamed = self.num_prompt
        self.stop_ids = frozenset(params.stop_token_ids)
        self.constraint = constraint
        if not params.ignore_eos or constraint is not None:  # a constraint bans ends itself, while it can
            self.stop_ids |= frozenset(eos_token_ids)
        self.detokenizer = Detokenizer(token_bytes, self.tokens, params.stop)
        self.record = sample_record(params, choice_seed(seed, choice))
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1.0:
            self.counts = TokenCounts(self.tokens)
        elif params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self.counts = TokenCounts(())  # these two look at the output only
        self.bias: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias.items(), strict=True)
            self.bias = (np.array(ids, np.int32), np.array(values, np.float32))
        self.banned: NDArray[np.int32] | None = None
        if params.min_tokens > 0 and self.stop_ids and constraint is None:
            self.banned = np.array(sorted(self.stop_ids), np.int32)
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.submitted_s = submitted_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def num_output(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def key(self) -> bytes:
        """The tokens as the prefix cache compares them."""
        if len(self._key) != TOKEN_BYTES * len(self.tokens):
            self._key = token_key(self.tokens)
        return self._key

    @property
    def is_plain(self) -> bool:
        """Whether a token is drawn from its record alone, without lists of counts, biases or bans, or a mask."""
        return self.counts is None and self.bias is None and self.banned is None and self.constraint is None

    def add_lists(self, lists: ListsBuilder, output: int, path: Sequence[int] = ()) -> None:
        """Adds to ``lists`` what penalises, biases, bans and masks the token after ``tokens`` and ``path``, drawn
        at the step's output number ``output``."""
        if self.counts is not None:
            tokens, values, _ = self.counts.after(path)
            lists.add_counts(output, tokens, values)
        if self.constraint is not None:
            lists.add_mask(output, self.constraint.mask_after(path))
        self._add_fixed_lists(lists, output, len(path))

    def add_draft_lists(self, lists: ListsBuilder, output: int, draft: Draft) -> None:
        """As ``add_lists`` for row 0 of a draft, whose output is number ``output``, and for each of its nodes."""
        counted = [] if self.counts is None else [self.counts.after(())]
        for row, depth in enumerate([0, *draft.depths()]):
            if self.counts is not None:
                if row > 0:
                    counted.append(self.counts.after_next(counted[draft.parents[row - 1]], draft.tokens[row - 1]))
                lists.add_counts(output + row, counted[row].tokens, counted[row].values)
            self._add_fixed_lists(lists, output + row, depth)
        if self.constraint is not None:
            for row, mask in enumerate(self.constraint.masks(draft.tokens, draft.parents)):
                lists.add_mask(output + row, mask)

    def _add_fixed_lists(self, lists: ListsBuilder, output: int, depth: int) -> None:
        """Biases and bans of the token that follows ``depth`` more than there are."""
        if self.bias is not None:
            lists.add_bias(output, *self.bias)
        if self.banned is not None and self.num_output + depth < self.params.min_tokens:
            lists.add_banned(output, self.banned)

    @property
    def next_output_row(self) -> int:
        """Position of the first row whose logits are wanted; so are those of all rows that follow it."""
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt:
            return len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1

    @property
    def num_reusable(self) -> int:
        """Tokens, from the first on, that need not be computed where the cache has them."""
        return self.next_output_row if self.pool is None else 0

    def schedule(self, budget: int, outputs: int) -> int:
        """Sets the rows and outputs of the next step within the given bounds; returns the rows."""
        gap = len(self.tokens) - self.num_computed
        first = self.next_output_row - self.num_computed
        self.num_scheduled = min(gap, budget, first + outputs)
        self.num_outputs = max(0, self.num_scheduled - first)
        return self.num_scheduled

    def completion(self) -> Completion:
        """The answer of a finished request."""
        assert self.finish_reason is not None
        timing = Timing()
        if self.started_s is not None and self.first_token_s is not None and self.last_token_s is not None:
            timing = Timing.of(
                submitted_s=self.submitted_s,
                started_s=self.started_s,
                first_token_s=self.first_token_s,
                last_s=self.last_token_s,
                prompt=self.num_prompt - self.num_cached,
                output=self.num_output,
            )
        return Completion(
            text=self.detokenizer.text,
            token_ids=self.tokens[self.num_prompt :],
            finish_reason=self.finish_reason,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached,
            num_wasted_tokens=self.num_wasted,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            timing=timing,
            error=self.error,
            speculation=self.speculation,
            pooled=self.pool.mean() if self.pool is not None and self.finish_reason == "length" else None,
        )

"""Drafts by real programs: a model with pages of its own says what it would say alone, and one in the target's pages
leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from small_request import SmallRequest, sampling_record
from tiny_models import tiny_checkpoint, tiny_config
from token_sequences import TokenSequence, engine_config, run_step

from paceline.config import PAGE_TOKENS
from paceline.executors.native import NativeExecutor
from paceline.kv.manager import KVManager, token_key
from paceline.sampling.draw import gumbel
from paceline.speculate.draft import Draft
from paceline.speculate.draft_model import DraftModelDrafter, draft_seed
from paceline.speculate.draft_pages import OwnPages, TargetPages

CHECKPOINT = tiny_checkpoint(tiny_config())
SMALLER = tiny_checkpoint(tiny_config(num_layers=1), "Q8_0", seed=5)
VOCAB = CHECKPOINT.config.vocab_size
NUM_PAGES = 24


def load(checkpoint: Any = CHECKPOINT, pages_of: NativeExecutor | None = None, **config: Any) -> NativeExecutor:
    engine = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=64, **config)
    return NativeExecutor.load(checkpoint, engine, pages_of)


def logits_after(executor: NativeExecutor, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits after ``tokens``, all of them computed anew in the first pages."""
    count = len(tokens)
    sequence = TokenSequence(np.array(tokens, np.int32), np.arange(-(-count // PAGE_TOKENS), dtype=np.int32))
    for begin in range(0, count, 64):
        (logits,), _ = run_step(executor, [sequence.part(begin, min(begin + 64, count))])
    return logits[-1]


def greedy(executor: NativeExecutor, tokens: Sequence[int], count: int) -> list[int]:
    said = list(tokens)
    for _ in range(count):
        said.append(int(np.argmax(logits_after(executor, said))))
    return said[len(tokens) :]


def some_tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


def tokens_of(draft: Draft | None) -> list[int]:
    assert draft is not None
    return list(draft.tokens)


def test_a_model_with_its_own_pages_says_what_it_would_say_alone() -> None:
    pages = OwnPages(executor := load(SMALLER), max_sequences=3)
    drafter = DraftModelDrafter(executor, pages, vocab_size=VOCAB, min_confidence=0.0)
    alone = load(SMALLER)
    rng = np.random.default_rng(1)
    requests = [SmallRequest(some_tokens(count, count), request_id=count) for count in (5, 90, 33)]
    for _ in range(5):
        limits = [int(limit) for limit in rng.integers(1, 6, len(requests))]
        drafts = drafter.propose(requests, limits)
        pages.kv.check()
        for request, limit, draft in zip(requests, limits, drafts, strict=True):
            assert tokens_of(draft) == greedy(alone, request.tokens, limit)
            request.tokens += [*tokens_of(draft)[: rng.integers(limit + 1)], int(rng.integers(VOCAB))]
    again = SmallRequest(list(requests[1].tokens), request_id=1000)
    drafter.finish(requests[1])
    (draft,) = drafter.propose([again], [3])
    assert tokens_of(draft) == greedy(alone, again.tokens, 3)


def test_the_same_weights_draw_the_same_tokens() -> None:
    """Coupling: with the target's own model as the draft model every token agrees, at any temperature."""
    pages = OwnPages(executor := load(), max_sequences=1)
    drafter = DraftModelDrafter(executor, pages, vocab_size=VOCAB, min_confidence=0.0)
    request = SmallRequest(some_tokens(40, 1), record=sampling_record(temperature=1.3, seed=99))
    (draft,) = drafter.propose([request], [8])
    alone = load()
    said = list(request.tokens)
    for token in tokens_of(draft):
        scores = logits_after(alone, said) / np.float32(1.3) + gumbel(99, len(said), VOCAB)
        assert token == int(np.argmax(scores))
        said.append(token)


def test_exact_drafts_are_native_draws_from_their_q() -> None:
    pages = OwnPages(executor := load(), max_sequences=1)
    drafter = DraftModelDrafter(executor, pages, vocab_size=VOCAB, min_confidence=0.0, exact=True)
    record = sampling_record(temperature=0.9, seed=4)
    record["top_k"] = 5
    request = SmallRequest(some_tokens(40, 1), record=record)
    (draft,) = drafter.propose([request], [6])
    assert draft is not None
    assert draft.q is not None
    said = list(request.tokens)
    for token, q in zip(draft.tokens, draft.q, strict=True):
        assert q is not None
        assert np.count_nonzero(q) == 5
        with np.errstate(divide="ignore"):
            assert token == int(np.argmax(np.log(q) + gumbel(draft_seed(4, 40), len(said), VOCAB)))
        said.append(token)


@pytest.mark.parametrize("weights", ["native", "int4"])
def test_in_the_targets_pages_nothing_of_the_draft_is_left(weights: str) -> None:
    target, alone = load(), load()
    twin = load(pages_of=target, weights=weights)
    kv = KVManager(NUM_PAGES, 2, CHECKPOINT.config.context_length)
    drafter = DraftModelDrafter(twin, TargetPages(kv), vocab_size=VOCAB, min_confidence=0.0)
    prompt = some_tokens(29, 3)
    request = SmallRequest(prompt[:-1])
    opened = kv.open(b"", token_key(prompt), limit=0)
    assert opened is not None
    request.slot = opened.slot

    def compute(begin: int, tokens: Sequence[int]) -> list[int]:
        """The target's greedy token after each of its tokens from ``begin`` on."""
        sequence = TokenSequence(np.array(tokens, np.int32), kv.table[opened.slot].copy())
        return [int(token) for token in run_step(target, [sequence.part(begin, len(tokens))])[1][0]]

    compute(0, request.tokens)
    request.tokens.append(prompt[-1])
    accepted = 0
    for limit in (5, 3, 7, 4):
        (draft,) = drafter.propose([request], [limit])
        kv.check()
        proposed = tokens_of(draft)[: limit - 1]  # the last one is dropped: what was written for it stays for now
        known = len(request.tokens)
        drawn = compute(known - 1, [*request.tokens, *proposed])
        right = next((at for at, token in enumerate(proposed) if token != drawn[at]), len(proposed))
        accepted += right
        request.tokens += drawn[: right + 1]
    output = request.tokens[len(prompt) :]
    assert output == greedy(alone, prompt, len(output))
    if weights == "native":
        assert accepted == 4 + 2 + 6 + 3, "the same weights over the same keys and values"
    # Keys and values of all but the last token are the target's own, byte for byte where whole pages can be compared.
    logits_after(alone, request.tokens[:-1])
    whole = (len(request.tokens) - 1) // PAGE_TOKENS
    assert whole > 0
    assert np.array_equal(target.pages[kv.table[opened.slot, :whole]], alone.pages[:whole])

"""The EAGLE drafter over a tiny random head: each draft against the head computed anew from all tokens and features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
from draft_contexts import FakeContext, check_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_heads import tiny_head
from tiny_models import MemoryCheckpoint, tiny_checkpoint
from token_sequences import engine_config

from paceline.config import PAGE_TOKENS, ModelConfig
from paceline.executors.base import StepPlan, StepResult
from paceline.executors.native import NativeExecutor, sample_logits
from paceline.sampling.distribution import log_softmax
from paceline.sampling.draw import gumbel, sample_reference
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import greedy_rows
from paceline.speculate.draft import Draft
from paceline.speculate.eagle import EagleDrafter
from paceline.speculate.hidden import HiddenRows, kept_rows

VOCAB, HIDDEN, DRAFT_VOCAB = 75, 64, 41
Floats = NDArray[np.float32]
TARGET_IDS = np.sort(np.random.default_rng(1).choice(VOCAB, DRAFT_VOCAB, replace=False)).astype(np.int32)


@lru_cache
def head() -> MemoryCheckpoint:
    """With a sharp head, so that drafts go on, and logits far enough apart for every instruction set."""
    checkpoint = tiny_checkpoint(tiny_head(draft_vocab_size=DRAFT_VOCAB))
    checkpoint.tensors["output.weight"].data.view(np.float32)[:] *= 3
    return checkpoint


def load(model: ModelConfig | None = None, *, num_pages: int = 64, rows: int = 64) -> NativeExecutor:
    return NativeExecutor.load(head(), engine_config(model or head().config, num_pages=num_pages, rows=rows))


@lru_cache
def scratch() -> NativeExecutor:
    return load(num_pages=16, rows=512)


def hidden_of(tokens: Sequence[int], position: int) -> Floats:
    """The target's hidden state [hidden] of a token: random in all tokens up to it."""
    rng = np.random.default_rng([1, *tokens[: position + 1]])
    return rng.standard_normal(HIDDEN).astype(np.float32)


def hidden_rows(tokens: Sequence[int], begin: int, end: int) -> Floats:
    return np.array([hidden_of(tokens, position) for position in range(begin, end)], np.float32).reshape(-1, HIDDEN)


@dataclass(frozen=True)
class Guess:
    """What the head says at its last row: logits [draft vocab], and its own hidden state."""

    logits: Floats
    hidden: Floats


def computed_anew(tokens: Sequence[int], features: Floats) -> Guess:
    """The head over rows of these tokens and features, all in one step on empty pages."""
    executor = scratch()
    count = len(tokens)
    executor.run(
        StepPlan(
            np.array(tokens, np.int32),
            np.arange(count, dtype=np.int32),
            np.array([0, count], np.int32),
            np.arange(-(-count // PAGE_TOKENS), dtype=np.int32)[None],
            np.array([count - 1], np.int32),
            greedy_rows(1),
            features=features,
        )
    )
    return Guess(executor.logits()[0].copy(), executor.hidden()[count - 1].copy())


@dataclass(frozen=True)
class Expected:
    """A draft by the definition: its chain with confidences, and (token, confidence) of all children of each parent,
    that of the chain first and then the likeliest."""

    tokens: list[int]
    confidence: list[float]
    children: list[list[tuple[int, float]]]


def expected_draft(
    context: FakeContext, first: int, limit: int, *, min_confidence: float, exact: bool = False
) -> Expected:
    """The chain that follows a request whose features begin with token ``first``."""
    known = context.tokens
    tokens = list(known[first + 1 :])
    features = hidden_rows(known, first, len(known) - 1)
    limit = min(limit, context.max_tokens - len(known) - 1)
    drafted = Expected([], [], [])
    product = 1.0
    while len(drafted.tokens) < limit and product >= min_confidence:
        guess = computed_anew(tokens, features)
        logprobs = log_softmax(guess.logits).astype(np.float64)
        scores = logprobs
        temperature = float(context.record["temperature"][0])
        if temperature > 0 and not exact:
            noise = gumbel(int(context.record["seed"][0]), len(known) + len(drafted.tokens), VOCAB)
            scores = logprobs / temperature + noise[TARGET_IDS]
        first_child = int(np.argmax(scores))
        others = [at for at in np.argsort(-logprobs, kind="stable").tolist() if at != first_child]
        order = [first_child, *others]
        drafted.children.append([(int(TARGET_IDS[at]), float(np.exp(logprobs[at]))) for at in order])
        drafted.tokens.append(drafted.children[-1][0][0])
        drafted.confidence.append(drafted.children[-1][0][1])
        product *= drafted.confidence[-1]
        tokens.append(drafted.tokens[-1])
        features = np.concatenate([features, guess.hidden[None]])
    return drafted


def assert_is(draft: Draft | None, expected: Expected) -> None:
    """Raises AssertionError unless a draft is the expected chain."""
    if not expected.tokens:
        assert draft is None
        return
    assert draft is not None
    assert list(draft.tokens) == expected.tokens
    assert draft.is_chain
    assert np.allclose(draft.confidence, expected.confidence, rtol=1e-4)


def known_request(count: int, *, request_id: int = 0, seed: int = 0, **record: Any) -> FakeContext:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, count).tolist()
    context = FakeContext(tokens, request_id=request_id, max_tokens=400, record=greedy_rows(1).rows)
    for name, value in record.items():
        context.record[name] = value
    return context


def drafter_of(executor: Any = None, **options: Any) -> EagleDrafter:
    executor = executor or load()
    sample = partial(sample_logits, executor.program.isa)
    options = {"max_sequences": 4, "min_confidence": 1e-9, "sample": sample} | options
    return EagleDrafter(executor, TARGET_IDS, **options)


def observe(drafter: EagleDrafter, context: FakeContext, begin: int, end: int) -> None:
    drafter.observe_hidden([HiddenRows(context, begin, hidden_rows(context.tokens, begin, end))])


def test_the_chain_of_a_prompt() -> None:
    for count in (2, 3, 31, 33, 34, 100):
        context, drafter = known_request(count, seed=count), drafter_of()
        observe(drafter, context, 0, count - 1)
        (draft,) = drafter.propose([context], [6])
        assert_is(draft, expected_draft(context, 0, 6, min_confidence=1e-9))
        assert draft is not None
        assert len(draft) == 6
        assert set(draft.tokens) <= set(TARGET_IDS.tolist())
        assert draft.drafter == "eagle"


def test_a_wrong_feature_is_found() -> None:
    """The check sees one feature, one token, and one stale row."""
    context = known_request(40)
    features = hidden_rows(context.tokens, 0, 39)
    features[7] *= -1
    drafter = drafter_of()
    drafter.observe_hidden([HiddenRows(context, 0, features)])
    with pytest.raises(AssertionError):
        assert_is(drafter.propose([context], [6])[0], expected_draft(context, 0, 6, min_confidence=1e-9))


def test_it_stops_where_it_is_not_sure() -> None:
    context = known_request(20, seed=4)
    for least in (0.9, 0.5, 0.2, 0.05):
        drafter = drafter_of(min_confidence=least)
        observe(drafter, context, 0, 19)
        (draft,) = drafter.propose([context], [20])
        assert_is(draft, expected_draft(context, 0, 20, min_confidence=least))
        assert draft is not None
        assert np.prod(draft.confidence[:-1]) >= least


def test_it_drafts_no_more_than_can_be_accepted() -> None:
    context, drafter = known_request(10), drafter_of()
    observe(drafter, context, 0, 9)
    for left, length in ((1, 0), (2, 1), (4, 3)):
        context.max_tokens = 10 + left
        (draft,) = drafter.propose([context], [6])
        assert len(draft or ()) == length
    assert drafter_of().propose([context], [6]) == [None]  # without any feature
    context.tokens.append(3)  # its feature has not come yet
    assert drafter.propose([context], [6]) == [None]
    assert known_request(1).tokens
    first = known_request(1, request_id=5)
    drafter.observe_hidden([HiddenRows(first, 0, np.zeros((0, HIDDEN), np.float32))])
    assert drafter.propose([first], [6]) == [None]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_use_the_noise_of_the_target_at_its_own_ids(temperature: float) -> None:
    chains = set()
    for seed in range(16):
        context = known_request(12, temperature=temperature, seed=7)
        context.record["seed"] = seed + 2**40
        drafter = drafter_of()
        observe(drafter, context, 0, 11)
        (draft,) = drafter.propose([context], [5])
        assert_is(draft, expected_draft(context, 0, 5, min_confidence=1e-9))
        assert draft is not None
        chains.add(draft.tokens)
    assert len(chains) > 1
    context = known_request(12, temperature=temperature, seed=7)
    drafter = drafter_of(exact=True)
    observe(drafter, context, 0, 11)
    assert_is(drafter.propose([context], [5])[0], expected_draft(context, 0, 5, min_confidence=1e-9, exact=True))


@dataclass
class Penalised(FakeContext):
    """Bans tokens, every other one after some paths, and counts those of the path."""

    banned: list[int] = field(default_factory=list)

    def add_lists(self, lists: ListsBuilder, output: int, path: Sequence[int]) -> None:
        others = TARGET_IDS[sum(path) % 2 :: 2].tolist() if path else []
        lists.add_banned(output, np.array(sorted({*self.banned, *others}), np.int32))
        ids, counts = np.unique(np.array(path, np.int32), return_counts=True)
        lists.add_counts(output, ids.astype(np.int32), counts.astype(np.int32))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_the_target_penalises_and_bans_is_not_drafted(temperature: float) -> None:
    record = greedy_rows(1).rows
    record["temperature"], record["top_p"], record["frequency_penalty"] = temperature, 0.7, 30.0
    record["seed"] = 3
    context = Penalised(known_request(12, seed=7).tokens, max_tokens=400, record=record)
    for sample in (None, sample_reference):
        drafter = drafter_of(**({} if sample is None else {"sample": sample}))
        observe(drafter, context, 0, 11)
        (draft,) = drafter.propose([context], [6])
        assert draft is not None
        assert len(set(draft.tokens)) == 6  # none twice
        assert set(draft.tokens) <= set(TARGET_IDS.tolist())
        tokens, features = context.tokens[1:], hidden_rows(context.tokens, 0, 11)
        for row, (token, confidence) in enumerate(zip(draft.tokens, draft.confidence, strict=True)):
            guess = computed_anew(tokens, features)
            logits = np.full((1, VOCAB), -1e6, np.float32)
            logits[0, TARGET_IDS] = guess.logits
            rows = record.copy()
            rows["position"] = 12 + row
            lists = ListsBuilder(rows)
            context.add_lists(lists, 0, draft.tokens[:row])
            assert sample_reference(logits, lists.build()).tokens[0] == token
            assert np.isclose(confidence, np.exp(log_softmax(logits[0])[token]), rtol=1e-4, atol=1e-6)
            tokens = [*tokens, token]
            features = np.concatenate([features, guess.hidden[None]])
        context.banned.append(draft.tokens[0])
        (other,) = drafter.propose([context], [6])
        assert other is not None
        assert draft.tokens[0] not in other.tokens
        context.banned = TARGET_IDS.tolist()
        (foreign,) = drafter.propose([context], [1])  # what it does not know is all that is left
        assert foreign is None or foreign.confidence == (1e-6,)
        context.banned = list(range(VOCAB))
        assert drafter.propose([context], [6]) == [None]
        context.banned = []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_leaves_are_the_next_best_children(limit: int, temperature: float) -> None:
    """The nodes with the largest products of confidences, among the chain and two alternatives of each of its nodes."""
    has_leaves = False
    for seed in range(6):
        context = known_request(15, seed=seed, temperature=temperature)
        drafter = drafter_of(max_branches=3)
        observe(drafter, context, 0, 14)
        (draft,) = drafter.propose([context], [limit])
        expected = expected_draft(context, 0, limit, min_confidence=1e-9)
        assert draft is not None
        check_draft(draft, context, limit, set(TARGET_IDS.tolist()))
        products = np.cumprod([1.0, *expected.confidence])
        nodes = {
            (*expected.tokens[:row], token): products[row] * confidence
            for row, children in enumerate(expected.children)
            for token, confidence in children[:3]
        }
        best = sorted(nodes, key=lambda path: -nodes[path])[:limit]
        paths = [tuple(draft.tokens[node - 1] for node in draft.path(row + 1)) for row in range(len(draft))]
        assert set(paths) == set(best)
        for row, path in enumerate(paths):
            above = nodes[path[:-1]] if len(path) > 1 else 1.0
            assert np.isclose(draft.confidence[row] * above, nodes[path], rtol=1e-4)
        has_leaves |= not draft.is_chain
    assert has_leaves == (limit > 1)


def test_a_batch_is_as_each_alone() -> None:
    contexts = [known_request(count, request_id=at, seed=at) for at, count in enumerate((70, 3, 9, 33))]
    drafter = drafter_of(load(rows=16))
    for context in contexts:
        observe(drafter, context, 0, len(context.tokens) - 1)
    drafts = drafter.propose(contexts, [2, 5, 1, 6])
    for context, draft, limit in zip(contexts, drafts, (2, 5, 1, 6), strict=True):
        assert_is(draft, expected_draft(context, 0, limit, min_confidence=1e-9))


def test_rows_of_accepted_drafts_are_computed_again_with_true_features() -> None:
    context, drafter = known_request(30), drafter_of()
    observe(drafter, context, 0, 29)
    for num_accepted in (3, 0, 1, 5, 5, 2):
        (draft,) = drafter.propose([context], [5])
        assert_is(draft, expected_draft(context, 0, 5, min_confidence=1e-9))
        assert draft is not None
        begin = len(context.tokens) - 1
        context.tokens += [*draft.tokens[:num_accepted], 11]
        observe(drafter, context, begin, len(context.tokens) - 1)
    again = drafter.propose([context], [5])
    assert again == drafter.propose([context], [5])  # asked twice for the same tokens


def test_a_gap_begins_anew() -> None:
    """As after a preemption, when tokens are found in the prefix cache."""
    context, drafter = known_request(50), drafter_of()
    observe(drafter, context, 10, 20)
    observe(drafter, context, 32, 40)
    observe(drafter, context, 35, 49)  # some come again
    assert_is(drafter.propose([context], [4])[0], expected_draft(context, 32, 4, min_confidence=1e-9))
    context.tokens += [1, 2, 3]
    observe(drafter, context, 50, 52)
    assert_is(drafter.propose([context], [4])[0], expected_draft(context, 50, 4, min_confidence=1e-9))


def test_few_features_wait() -> None:
    context, drafter = known_request(60), drafter_of(max_waiting=20)
    for begin in range(0, 50, 10):
        observe(drafter, context, begin, begin + 10)
    observe(drafter, context, 50, 59)
    assert_is(drafter.propose([context], [4])[0], expected_draft(context, 40, 4, min_confidence=1e-9))
    for token in range(24):  # that it is not drafted for
        context.tokens.append(token)
        observe(drafter, context, len(context.tokens) - 2, len(context.tokens) - 1)
    assert_is(drafter.propose([context], [4])[0], expected_draft(context, 63, 4, min_confidence=1e-9))
    other = known_request(60, request_id=1, seed=3)
    observe(drafter, other, 0, 59)
    assert_is(drafter.propose([other], [4])[0], expected_draft(other, 39, 4, min_confidence=1e-9))


def test_observed_rows_are_copied() -> None:
    context, drafter = known_request(20), drafter_of()
    rows = hidden_rows(context.tokens, 0, 19)
    rows.flags.writeable = False
    drafter.observe_hidden([HiddenRows(context, 0, rows)])
    rows.flags.writeable = True
    rows[:] = 0
    assert_is(drafter.propose([context], [4])[0], expected_draft(context, 0, 4, min_confidence=1e-9))


def test_pages_go_to_those_that_are_asked_for() -> None:
    contexts = [known_request(64, request_id=at, seed=at) for at in range(3)]
    drafter = drafter_of(load(num_pages=4))  # two requests
    for context in contexts:
        observe(drafter, context, 0, 63)
    assert all(drafter.propose(contexts[:2], [2, 2]))
    assert drafter.kv.num_available == 0
    assert_is(drafter.propose(contexts[2:], [2])[0], expected_draft(contexts[2], 0, 2, min_confidence=1e-9))
    assert drafter.propose(contexts[:1], [2]) == [None]  # it lost its pages
    drafts = drafter.propose(contexts[1:], [2, 2])
    assert all(drafts)
    contexts[1].tokens += [5, 6]
    observe(drafter, contexts[1], 63, 65)
    drafts = drafter.propose(contexts[1:], [2, 2])  # a third page for it cannot be had
    assert drafts[0] is None
    assert drafts[1] is not None
    contexts[1].tokens += [7, 8]
    observe(drafter, contexts[1], 65, 67)
    assert_is(drafter.propose(contexts[1:], [2, 2])[0], expected_draft(contexts[1], 65, 2, min_confidence=1e-9))
    for context in contexts:
        drafter.finish(context)
        drafter.finish(context)
    assert drafter.kv.num_available == 4


def test_slots_run_out() -> None:
    contexts = [known_request(9, request_id=at, seed=at) for at in range(3)]
    drafter = drafter_of(max_sequences=2)
    for context in contexts:
        observe(drafter, context, 0, 8)
    assert [draft is not None for draft in drafter.propose(contexts, [2, 2, 2])] == [True, True, False]
    observe(drafter, contexts[2], 0, 8)
    assert drafter.propose(contexts[2:], [2]) != [None]


def test_a_step_that_fails() -> None:
    class Failing:
        """Fails once."""

        def __init__(self) -> None:
            self.below = load()
            self.fails = True

        def __getattr__(self, name: str) -> Any:
            return getattr(self.below, name)

        def run(self, plan: StepPlan) -> StepResult:
            if self.fails:
                self.fails = False
                raise RuntimeError("broken")
            return self.below.run(plan)

    context, drafter = known_request(20), drafter_of(Failing())
    observe(drafter, context, 0, 19)
    with pytest.raises(RuntimeError, match="broken"):
        drafter.propose([context], [3])
    assert drafter.propose([context], [3]) == [None]
    assert drafter.kv.num_available == 64
    observe(drafter, context, 0, 19)
    assert_is(drafter.propose([context], [3])[0], expected_draft(context, 0, 3, min_confidence=1e-9))


def test_kept_rows() -> None:
    tree = Draft((5, 6, 7, 6, 8), (0, 1, 1, 0, 4), (0.5,) * 5, "eagle")
    assert kept_rows(tree, [9]) == [0]
    assert kept_rows(tree, [5, 9]) == [0, 1]
    assert kept_rows(tree, [5, 7, 9]) == [0, 1, 3]
    assert kept_rows(tree, [6, 8, 9]) == [0, 4, 5]
    with pytest.raises(StopIteration):
        kept_rows(tree, [8, 9])
    hidden = np.arange(6, dtype=np.float32)[:, None]
    rows = HiddenRows.kept(known_request(9), 8, hidden, tree, [6, 8, 9])
    assert (rows.position, rows.hidden[:, 0].tolist()) == (8, [0, 4, 5])
    assert HiddenRows.kept(known_request(9), 0, hidden, None, [9]).hidden is hidden


@dataclass
class _Run:
    """A request while random things happen to it: features begin with ``first`` and reach ``end``."""

    context: FakeContext
    first: int = 0
    end: int = 0
    last: Draft | None = field(default=None)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_anything_in_any_order(data: st.DataObject) -> None:
    """Requests are drafted for at some steps and not at others, alone and together, with any part of the draft accepted
    and the rest replaced; rows come in any pieces, and again."""
    drafter = drafter_of(load(rows=16))
    runs = [
        _Run(known_request(data.draw(st.integers(2, 40)), request_id=at, seed=at, temperature=0.7 * (at % 2)))
        for at in range(3)
    ]
    for _ in range(data.draw(st.integers(3, 8))):
        asked = [run for run in runs if data.draw(st.booleans())]
        for run in asked:
            target = len(run.context.tokens) - 1
            while run.end < target:
                begin = max(run.first, run.end - data.draw(st.integers(0, 3)))
                run.end = min(target, run.end + data.draw(st.integers(1, 40)))
                observe(drafter, run.context, begin, run.end)
        limits = [data.draw(st.integers(1, 6)) for _ in asked]
        for run, limit, draft in zip(
            asked, limits, drafter.propose([run.context for run in asked], limits), strict=True
        ):
            assert_is(draft, expected_draft(run.context, run.first, limit, min_confidence=1e-9))
            assert draft is not None
            num_accepted = data.draw(st.integers(0, len(draft)))
            run.context.tokens += [*draft.tokens[:num_accepted], data.draw(st.integers(0, VOCAB - 1))]

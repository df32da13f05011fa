"""Drafts by a model with pages of its own are what the model alone would say, whatever happens around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_executor import FakeExecutor, FakeTokenizer, fake_logits, tiny_model
from small_request import (
    FlakyExecutor,
    SmallRequest,
    chain_of,
    drafted_alone,
    drafter_of,
    sampling_record,
    some_tokens,
)

from paceline.errors import UnsupportedError
from paceline.executors.base import StepPlan, StepResult
from paceline.sampling.rows import SampledRows
from paceline.speculate.draft import Draft
from paceline.speculate.draft_model import READY_ROWS, check_vocabularies, draft_seed

VOCAB = 97


# What is drafted


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, 64, 150])
def test_drafts_what_the_model_alone_would_say(num_tokens: int) -> None:
    drafter, pages = drafter_of(FakeExecutor(max_rows=40))
    request = SmallRequest(some_tokens(num_tokens))
    (draft,) = drafter.propose([request], [9])
    tokens, confidence = drafted_alone(request, 9)
    assert chain_of(draft) == tokens
    assert draft is not None
    assert draft.confidence == pytest.approx(confidence, rel=1e-5)
    assert draft.q is None
    pages.kv.check()


def test_one_step_drafts_for_all_requests() -> None:
    executor = FakeExecutor()
    drafter, pages = drafter_of(executor)
    requests = [SmallRequest(some_tokens(20 + 13 * i, seed=i), request_id=i) for i in range(4)]
    limits = [1, 3, 6, 2]
    drafts = drafter.propose(requests, limits)
    assert [chain_of(draft) for draft in drafts] == [
        drafted_alone(request, limit)[0] for request, limit in zip(requests, limits, strict=True)
    ]
    prompts = sum(len(request.tokens) for request in requests)
    assert executor.log == [(prompts, 4, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1)]
    pages.kv.check()


def test_after_acceptance_only_what_is_new_is_computed() -> None:
    executor = FakeExecutor()
    drafter, _ = drafter_of(executor)
    request = SmallRequest(some_tokens(50))
    (draft,) = drafter.propose([request], [4])
    request.tokens += [*chain_of(draft)[:2], 5]
    executor.log.clear()
    (draft,) = drafter.propose([request], [3])
    assert chain_of(draft) == drafted_alone(request, 3)[0]
    assert executor.log == [(1, 1, 1)] * 3  # both accepted ones were computed while they were drafted
    request.tokens += [*chain_of(draft), 5]  # of the last one nothing was computed
    executor.log.clear()
    drafter.propose([request], [3])
    assert executor.log == [(2, 1, 1), (1, 1, 1), (1, 1, 1)]


def test_requests_with_one_prompt_compute_its_whole_pages_once() -> None:
    executor = FakeExecutor()
    drafter, pages = drafter_of(executor)
    requests = [SmallRequest(some_tokens(100), request_id=i) for i in range(3)]
    drafts = drafter.propose(requests, [2, 2, 2])
    assert [chain_of(draft) for draft in drafts] == [drafted_alone(requests[0], 2)[0]] * 3
    assert executor.log[0] == (100 + 4 + 4, 3, 3)
    pages.kv.check()


def test_refused_tokens_are_computed_again() -> None:
    drafter, pages = drafter_of(FakeExecutor())
    request = SmallRequest(some_tokens(60))
    (draft,) = drafter.propose([request], [9])
    taken, *refused = chain_of(draft)
    request.tokens += [taken, *((token + 1) % VOCAB for token in refused[:4])]
    (draft,) = drafter.propose([request], [3])
    assert chain_of(draft) == drafted_alone(request, 3)[0]
    pages.kv.check()


def test_a_page_that_is_copied_is_copied_once() -> None:
    drafter, pages = drafter_of(FakeExecutor())
    first = SmallRequest(some_tokens(50))
    drafter.propose([first], [1])
    drafter.finish(first)
    request = SmallRequest(first.tokens[:45], request_id=1)
    (draft,) = drafter.propose([request], [6])
    assert chain_of(draft) == drafted_alone(request, 6)[0]
    pages.kv.check()


def test_a_sliding_window_gives_pages_up_and_no_draft_misses_them() -> None:
    window = 40
    drafter, pages = drafter_of(FakeExecutor(model=tiny_model(VOCAB, 500, window), num_pages=20))
    request = SmallRequest(some_tokens(170))
    for _ in range(12):
        (draft,) = drafter.propose([request], [9])
        assert chain_of(draft) == drafted_alone(request, 9, window=window)[0]
        request.tokens += [*chain_of(draft)[:6], *some_tokens(5)]
        pages.kv.check()
    (slot,) = [slot for slot, capacity in enumerate(pages.kv.capacity) if capacity]
    assert pages.kv.pages(slot)[:4] == (None,) * 4


def test_tokens_that_were_only_drafted_are_not_cached() -> None:
    drafter, _ = drafter_of(FakeExecutor())
    request = SmallRequest(some_tokens(62))
    (draft,) = drafter.propose([request], [9])
    other = SmallRequest([*request.tokens, *chain_of(draft)[:5]], request_id=1)
    request.tokens += [(token + 1) % VOCAB for token in chain_of(draft)[:4]]
    drafter.propose([request], [1])  # overwrites what was drafted, in a page that ``other`` would begin with
    (draft,) = drafter.propose([other], [3])
    assert chain_of(draft) == drafted_alone(other, 3)[0]


def test_nothing_crosses_domains() -> None:
    executor = FakeExecutor()
    drafter, _ = drafter_of(executor)
    for request_id, domain in enumerate([b"one", b"two", b"two"]):
        request = SmallRequest(some_tokens(80), request_id=request_id, domain=domain)
        drafter.propose([request], [1])
        drafter.finish(request)
    assert [rows for rows, _, _ in executor.log] == [80, 80, 1]


def test_few_rows_and_outputs_a_step_change_no_draft() -> None:
    executor = FakeExecutor(max_rows=3, max_outputs=2)
    drafter, pages = drafter_of(executor)
    requests = [SmallRequest(some_tokens(3 + 7 * i, seed=i), request_id=i) for i in range(5)]
    drafts = drafter.propose(requests, [4] * 5)
    assert [chain_of(draft) for draft in drafts] == [drafted_alone(request, 4)[0] for request in requests]
    pages.kv.check()


def test_a_draft_stops_behind_the_token_that_makes_it_unlikely() -> None:
    request = SmallRequest(some_tokens(10))
    _, confidence = drafted_alone(request, 4)
    between = float(np.prod(confidence[:2]) * 1.001)
    drafter, _ = drafter_of(FakeExecutor(), min_confidence=between)
    (draft,) = drafter.propose([request], [4])
    assert chain_of(draft) == drafted_alone(request, 2)[0]


def test_nothing_is_drafted_that_cannot_be_accepted() -> None:
    drafter, _ = drafter_of(FakeExecutor())
    for rest, length in [(1, None), (2, 1), (4, 3), (50, 5)]:
        request = SmallRequest(some_tokens(20), request_id=rest, max_tokens=20 + rest)
        (draft,) = drafter.propose([request], [5])
        assert (None if draft is None else len(draft)) == length


def test_penalties_biases_and_bans_hold_and_noise_is_the_targets() -> None:
    drafter, _ = drafter_of(FakeExecutor())
    plain = SmallRequest(some_tokens(40), request_id=0)
    (first, second), _ = drafted_alone(plain, 2)
    record = sampling_record(temperature=0.8, seed=2**63 + 5)
    requests = [
        plain,
        SmallRequest(plain.tokens, request_id=1, record=sampling_record(repetition_penalty=5.0)),
        SmallRequest(plain.tokens, request_id=2, banned=[first, second]),
        SmallRequest(plain.tokens, request_id=3, bias={11: 99.0}),
        SmallRequest(plain.tokens, request_id=4, record=record, bias={3: 1.0}, banned=[first]),
    ]
    drafts = drafter.propose(requests, [6] * 5)
    chains = [chain_of(draft) for draft in drafts]
    assert chains == [drafted_alone(request, 6)[0] for request in requests]
    assert len({tuple(chain) for chain in chains}) == 5
    assert record["num_logprobs"] == -1, "a context's record is not the drafter's to change"


def test_branches_are_the_next_likeliest_first_tokens() -> None:
    request = SmallRequest(some_tokens(30))
    order = np.argsort(-fake_logits(request.tokens, VOCAB), kind="stable").tolist()
    drafter, _ = drafter_of(FakeExecutor(), max_branches=3)
    (draft,) = drafter.propose([request], [64])
    assert draft is not None
    chain, confidence = drafted_alone(request, 64)
    assert [draft.tokens[row - 1] for row in draft.children(0)] == order[:3]
    assert draft.parents[-2:] == (0, 0)
    assert list(draft.tokens[:-2]) == chain[: len(draft) - 2]
    (few,) = drafter.propose([request], [3])
    assert few is not None
    products = np.cumprod(confidence[:3])
    probability = np.exp(fake_logits(request.tokens, VOCAB)) / np.exp(fake_logits(request.tokens, VOCAB)).sum()
    likely = sorted([*products, *probability[order[1:3]]])[-3:]
    depth_products = [np.prod([few.confidence[row - 1] for row in few.path(node + 1)]) for node in range(3)]
    assert sorted(depth_products) == pytest.approx(likely, rel=1e-4)


def test_exact_drafts_are_drawn_from_the_q_that_they_carry() -> None:
    executor = FakeExecutor()
    drafter, _ = drafter_of(executor, exact=True)
    request = SmallRequest(some_tokens(40), record=sampling_record(temperature=0.7, seed=11), bias={4: 2.0})
    greedy = SmallRequest(some_tokens(40), request_id=1)
    draft, certain = drafter.propose([request, greedy], [3, 3])
    assert draft is not None
    assert draft.q is not None
    assert certain is not None
    assert certain.q is None
    assert chain_of(certain) == drafted_alone(greedy, 3)[0]
    seen = list(request.tokens)
    for token, q, confidence in zip(draft.tokens, draft.q, draft.confidence, strict=True):
        logits = fake_logits(seen, VOCAB).astype(np.float64)
        logits[4] += 2.0
        p = np.exp(logits / np.float32(0.7))
        np.testing.assert_allclose(q, p / p.sum(), rtol=1e-4)
        assert confidence == pytest.approx(float(q.max()))
        seen.append(token)
    keyed = SmallRequest(
        request.tokens, record=sampling_record(temperature=0.7, seed=draft_seed(11, 40)), bias={4: 2.0}
    )
    assert list(draft.tokens) == drafted_alone(keyed, 3)[0]
    assert drafted_alone(keyed, 3) != drafted_alone(request, 3), "the target's own noise"
    assert len({draft_seed(11, count) for count in range(50)} | {draft_seed(12, 40)}) == 51


# Catching up


class TimedExecutor(FakeExecutor):
    """A step takes a second and a quarter more each row, by ``now``."""

    seconds = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        self.seconds += 1 + len(plan.tokens) / 4
        return super().run(plan)

    def now(self) -> float:
        return self.seconds


def long_model() -> FakeExecutor:
    return FakeExecutor(model=tiny_model(VOCAB, 4096), num_pages=200)


def test_a_call_computes_a_bounded_part_of_a_prompt_while_others_draft() -> None:
    executor = long_model()
    drafter, pages = drafter_of(executor, catch_up_rows=100)
    ready = SmallRequest(some_tokens(20), request_id=1)
    drafter.propose([ready], [3])
    new = SmallRequest(some_tokens(330, seed=1), request_id=2)
    for num_left in (230, 130, 30):
        ready.tokens.append(5)
        executor.log.clear()
        drafts = drafter.propose([new, ready], [2, 3])
        assert drafts[0] is None
        assert chain_of(drafts[1]) == drafted_alone(ready, 3)[0]
        assert sum(rows for rows, _, _ in executor.log) == 100 + 3
        assert pages.gap(new) == num_left
        pages.kv.check()
    drafts = drafter.propose([new, ready], [2, 3])
    assert chain_of(drafts[0]) == drafted_alone(new, 2)[0]


def test_who_is_behind_the_longest_goes_first_whatever_the_order_of_the_call() -> None:
    executor = long_model()
    drafter, pages = drafter_of(executor, catch_up_rows=64)
    first = SmallRequest(some_tokens(150), request_id=9)
    assert drafter.propose([first], [1]) == [None]
    for at in range(20):  # others begin at every call
        others = [SmallRequest(some_tokens(100, seed=1 + at), request_id=100 + at)]
        drafts = drafter.propose([*others, first], [1, 1])
        if drafts[1] is not None:
            break
    assert at == 1
    assert pages.gap(others[0]) == 100 - (64 - 22), "what is left when the first one has its last 22 rows"
    assert chain_of(drafts[1]) == drafted_alone(first, 1)[0]
    pages.kv.check()


def test_who_lacks_little_is_never_held_up() -> None:
    drafter, _ = drafter_of(long_model(), catch_up_rows=32)
    requests = [SmallRequest(some_tokens(40, seed=i), request_id=i) for i in range(3)]
    for request in requests:
        while drafter.propose([request], [1]) == [None]:
            pass
    for request in requests:
        request.tokens += some_tokens(READY_ROWS - 1, seed=7)
    long = SmallRequest(some_tokens(900, seed=5), request_id=8)
    drafts = drafter.propose([long, *requests], [1] * 4)
    assert drafts[0] is None
    assert [chain_of(draft) for draft in drafts[1:]] == [drafted_alone(request, 1)[0] for request in requests]


def test_requests_with_one_long_prompt_compute_its_pages_once() -> None:
    executor = long_model()
    drafter, pages = drafter_of(executor, catch_up_rows=100)
    requests = [SmallRequest(some_tokens(640), request_id=i) for i in range(3)]
    drafts: list[Draft | None] = [None]
    for _ in range(9):
        drafts = drafter.propose(requests, [1] * 3)
        pages.kv.check()
    assert [chain_of(draft) for draft in drafts] == [drafted_alone(requests[0], 1)[0]] * 3
    assert sum(rows for rows, _, _ in executor.log) <= 640 + 2 * 32 + 3 * 9


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_the_models_own_however_little_a_call_computes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    executor = FakeExecutor(model=tiny_model(VOCAB, 400), num_pages=24, max_rows=30)
    drafter, pages = drafter_of(executor, max_sequences=3, catch_up_rows=20)
    requests = [SmallRequest(some_tokens(int(rng.integers(1, 120)), seed=i), request_id=i) for i in range(5)]
    num_drafts = 0
    for _ in range(60):
        asked = [request for request in requests if rng.random() < 0.6]
        executor.log.clear()
        drafts = drafter.propose(asked, [3] * len(asked))
        assert sum(rows for rows, _, _ in executor.log) <= 20 + len(asked) * (READY_ROWS + 2)
        for request, draft in zip(asked, drafts, strict=True):
            if draft is not None:
                num_drafts += 1
                assert chain_of(draft) == drafted_alone(request, len(draft))[0]
        for request in requests:
            request.tokens += [*drafted_alone(request, 3)[0][: rng.integers(3)], int(rng.integers(VOCAB))]
        if rng.random() < 0.2:
            request = requests.pop(0)
            drafter.finish(request)
            requests.append(SmallRequest(some_tokens(50, seed=seed), request_id=request.request_id + 5))
        pages.kv.check()
    assert num_drafts > 20
    for request in requests:
        drafter.finish(request)
    assert not drafter._behind


def test_seconds_of_catching_up_are_told_apart_by_rows() -> None:
    executor = TimedExecutor(model=tiny_model(VOCAB, 4096), num_pages=200)
    drafter, _ = drafter_of(executor, clock=executor.now, catch_up_rows=200)
    request = SmallRequest(some_tokens(242))
    assert drafter.propose([request], [2]) == [None]
    assert drafter.catch_up_s == executor.seconds == 51
    drafter.propose([request], [2])  # 42 rows, 40 of them of the prompt but for its end, and one of a draft
    assert drafter.catch_up_s == pytest.approx(11.5 * 40 / 42)
    (draft,) = drafter.propose([request], [2])
    assert drafter.catch_up_s == 0
    request.tokens += [*chain_of(draft), 3]  # all taken: the last one was never computed
    (draft,) = drafter.propose([request], [2])
    assert drafter.catch_up_s == 0
    request.tokens += some_tokens(5)
    other = SmallRequest(request.tokens[:1], request_id=1)
    drafter.propose([request, other], [1, 1])  # 5 rows or more and one of the other
    assert drafter.catch_up_s > 0
    rows = executor.log[-1][0]
    assert drafter.catch_up_s == pytest.approx((1 + rows / 4) * (rows - 3) / rows)


def test_each_token_is_looked_at_once() -> None:
    class Counting(list[int]):
        looked = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            if isinstance(key, slice) and key.stop is None:
                Counting.looked += len(found)
            return found

    drafter, _ = drafter_of(FakeExecutor(model=tiny_model(20)), vocab_size=30)
    request = SmallRequest(Counting(some_tokens(9, vocab_size=20)))
    for _ in range(5):
        assert drafter.propose([request], [1]) != [None]
        request.tokens.append(3)
    assert Counting.looked == 13
    request.tokens.append(25)
    for _ in range(3):
        assert drafter.propose([request], [1]) == [None]
    assert Counting.looked == 15
    drafter.finish(request)
    assert not drafter._num_checked
    again = SmallRequest([1, 2])  # the same id
    assert drafter.propose([again], [1]) != [None]


# Vocabularies and lengths


def test_ids_that_the_target_lacks_are_never_proposed() -> None:
    executor = FakeExecutor(model=tiny_model(VOCAB))
    drafter, _ = drafter_of(executor, vocab_size=20, exact=True)
    surplus = range(20, VOCAB)
    drawn = SmallRequest(some_tokens(9, vocab_size=20), request_id=2, record=sampling_record(temperature=1.0))
    requests = [
        SmallRequest(some_tokens(9, vocab_size=20)),
        SmallRequest(some_tokens(9, vocab_size=20), request_id=1, banned=[1, 2]),
        drawn,
    ]
    drafts = drafter.propose(requests, [8] * 3)
    for request, draft in zip(requests[:2], drafts, strict=False):
        assert chain_of(draft) == drafted_alone(request, 8, banned=surplus)[0]
    assert drafts[2] is not None
    assert max(drafts[2].tokens) < 20
    assert drafts[2].q is not None
    assert all(q.shape == (20,) and q.sum() == pytest.approx(1) for q in drafts[2].q)


def test_a_smaller_draft_vocabulary() -> None:
    executor = FakeExecutor(model=tiny_model(20))
    drafter, pages = drafter_of(executor, vocab_size=30, exact=True)
    known = SmallRequest(some_tokens(9, vocab_size=20), bias={25: 3.0, 7: 50.0}, banned=[28])
    drawn = SmallRequest(some_tokens(9, vocab_size=20), request_id=1, record=sampling_record(temperature=1.0))
    foreign = SmallRequest([3, 25, 4], request_id=2)
    drafts = drafter.propose([known, foreign, drawn], [3] * 3)
    assert chain_of(drafts[0]) == [7, 7, 7]
    assert drafts[1] is None
    assert drafts[2] is not None
    assert drafts[2].q is not None
    assert all(q.shape == (30,) and q[20:].sum() == 0 for q in drafts[2].q)
    known.tokens.append(20)
    assert drafter.propose([known], [3]) == [None]
    drafter.finish(known)
    drafter.finish(drawn)
    drafter.finish(foreign)
    assert not any(pages.kv.capacity)
    pages.kv.check()


def test_vocabularies_are_compared_id_by_id() -> None:
    table = [b"a", b"b", b"", b"d"]
    target = FakeTokenizer(4, table=table)
    check_vocabularies(target, FakeTokenizer(6, table=[*table, b"e", b"f"]))
    check_vocabularies(FakeTokenizer(6, table=[*table, b"e", b"f"]), target)
    check_vocabularies(target, FakeTokenizer(4, table=[b"a", b"b", b"<pad>", b""]))
    with pytest.raises(UnsupportedError, match="token 1 is b'x' there and b'b'"):
        check_vocabularies(target, FakeTokenizer(4, table=[b"a", b"x", b"", b"y"]))


def test_a_context_longer_than_the_models_gets_no_draft() -> None:
    drafter, pages = drafter_of(FakeExecutor(model=tiny_model(context_length=40)))
    request = SmallRequest(some_tokens(38))
    (draft,) = drafter.propose([request], [9])
    assert chain_of(draft) == drafted_alone(request, 3)[0]  # rows at 37, 38 and 39
    request.tokens += [1, 2]
    (draft,) = drafter.propose([request], [9])
    assert chain_of(draft) == drafted_alone(request, 1)[0]
    request.tokens.append(3)
    assert drafter.propose([request], [9]) == [None]
    assert not any(pages.kv.capacity)


# Room and failures


def test_the_request_that_was_not_asked_for_longest_gives_way() -> None:
    executor = FakeExecutor(num_pages=6)
    drafter, pages = drafter_of(executor)
    requests = [SmallRequest(some_tokens(60, seed=i), request_id=i) for i in range(4)]
    for i in (0, 1, 2, 0, 3):  # 3 finds no room, and 1 was asked for before 2 and 0
        (draft,) = drafter.propose([requests[i]], [2])
        assert chain_of(draft) == drafted_alone(requests[i], 2)[0]
        pages.kv.check()
    executor.log.clear()
    drafter.propose([requests[0]], [1])
    drafter.propose([requests[2]], [1])
    drafter.propose([requests[1]], [1])
    assert [rows for rows, _, _ in executor.log[:2]] == [1, 1]
    assert executor.log[2][0] > 1


def test_slots_run_out_and_too_long_ones_get_nothing() -> None:
    executor = FakeExecutor(num_pages=6)
    drafter, pages = drafter_of(executor, max_sequences=2)
    requests = [SmallRequest(some_tokens(20, seed=i), request_id=i) for i in range(3)]
    drafts = drafter.propose(requests, [2] * 3)
    assert [draft is None for draft in drafts] == [False, False, True]
    (draft,) = drafter.propose([requests[2]], [2])
    assert chain_of(draft) == drafted_alone(requests[2], 2)[0]
    assert drafter.propose([SmallRequest(some_tokens(6 * 32 + 1), request_id=9)], [2]) == [None]
    assert sum(map(bool, pages.kv.capacity)) == 2, "one that can never fit costs nobody his pages"
    pages.kv.check()


def test_requests_that_cannot_all_grow_do_not_block_each_other() -> None:
    drafter, pages = drafter_of(FakeExecutor(num_pages=4))
    requests = [SmallRequest(some_tokens(62, seed=i), request_id=i) for i in range(2)]
    drafts = drafter.propose(requests, [2, 2])
    assert all(drafts)
    for i, request in enumerate(requests):
        request.tokens += some_tokens(5, seed=i)
    drafts = drafter.propose(requests, [2, 2])
    assert drafts[0] is None
    assert chain_of(drafts[1]) == drafted_alone(requests[1], 2)[0]
    pages.kv.check()


def test_a_draft_is_as_long_as_its_pages() -> None:
    drafter, pages = drafter_of(FakeExecutor(num_pages=2))
    request = SmallRequest(some_tokens(60))
    (draft,) = drafter.propose([request], [30])
    assert chain_of(draft) == drafted_alone(request, 5)[0]  # the last of them is not computed
    pages.kv.check()


def test_a_failing_step_raises_and_leaves_nothing_wrong() -> None:
    executor = FlakyExecutor()
    drafter, pages = drafter_of(executor)
    one, other = SmallRequest(some_tokens(70), request_id=0), SmallRequest(some_tokens(70, seed=1), request_id=1)
    drafter.propose([one], [3])
    executor.fails = True
    with pytest.raises(RuntimeError, match="told to"):
        drafter.propose([other, one], [3, 3])
    pages.kv.check()
    drafts = drafter.propose([one, other], [3, 3])
    assert [chain_of(draft) for draft in drafts] == [drafted_alone(request, 3)[0] for request in (one, other)]
    drafter.finish(one)
    drafter.finish(other)
    pages.kv.check()


def test_a_token_that_cannot_be_drawn_ends_its_draft_alone() -> None:
    class Broken(FakeExecutor):
        def run(self, plan: StepPlan) -> StepResult:
            sampled = super().run(plan).sampled
            status = np.array([3 if row["seed"] == 13 and row["position"] >= 12 else 0 for row in plan.samples.rows])
            tokens = np.where(status > 0, -1, sampled.tokens).astype(np.int32)
            return StepResult(SampledRows(tokens, sampled.logprobs, sampled.top_tokens, sampled.top_logprobs, status))

    drafter, pages = drafter_of(Broken())
    bad = SmallRequest(some_tokens(10), record=sampling_record(seed=13))
    worse = SmallRequest(some_tokens(12), request_id=1, record=sampling_record(seed=13))
    good = SmallRequest(some_tokens(10, seed=1), request_id=2)
    drafts = drafter.propose([bad, worse, good], [5] * 3)
    assert chain_of(drafts[0]) == drafted_alone(bad, 2)[0]
    assert drafts[1] is None
    assert chain_of(drafts[2]) == drafted_alone(good, 5)[0]
    bad.tokens += [*chain_of(drafts[0]), 3]
    assert drafter.propose([bad], [2]) == [None]
    pages.kv.check()


def test_finish_of_a_request_that_was_never_asked_for() -> None:
    drafter, pages = drafter_of(FakeExecutor())
    drafter.finish(SmallRequest([1, 2, 3]))
    pages.kv.check()

"""Requests that share a draft model: who is behind and who waits for whom, who has room, and what a failure costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_executor import FakeExecutor, tiny_model
from small_request import (
    FlakyExecutor,
    SmallRequest,
    chain_of,
    drafted_alone,
    drafter_of,
    sampling_record,
    some_tokens,
)

from paceline.executors.base import StepPlan, StepResult
from paceline.sampling.rows import SampledRows
from paceline.speculate.draft import Draft
from paceline.speculate.draft_model import READY_ROWS

VOCAB = 97


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

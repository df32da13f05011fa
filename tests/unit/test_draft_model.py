"""Drafts by a model with pages of its own are what the model alone would say, whatever happens around them."""

from __future__ import annotations

import numpy as np
import pytest
from fake_executor import FakeExecutor, FakeTokenizer, fake_logits, tiny_model
from small_request import (
    SmallRequest,
    chain_of,
    drafted_alone,
    drafter_of,
    sampling_record,
    some_tokens,
)

from paceline.errors import UnsupportedError
from paceline.speculate.draft_model import check_vocabularies, draft_seed

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

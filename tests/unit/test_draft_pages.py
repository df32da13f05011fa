"""A draft model in the target's pages: the target reads nothing of what it wrote, and its drafts are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from fake_executor import FakeExecutor, fake_logits, reference_tokens, tiny_model
from numpy.typing import NDArray
from small_request import SmallRequest, drafted_alone, sampling_record

from paceline.config import PAGE_TOKENS
from paceline.executors.base import StepPlan, StepResult
from paceline.kv.layout import pages_for
from paceline.kv.manager import KVManager, token_key
from paceline.sampling.rows import greedy_rows
from paceline.speculate.draft import Draft
from paceline.speculate.draft_model import DraftModelDrafter
from paceline.speculate.draft_pages import OwnPages, TargetPages

VOCAB = 97
MARK = 1000
"""Added to every token that the draft executor writes: whoever reads one sees who wrote it."""


class TwinExecutor(FakeExecutor):
    """Reads and writes the pages of another executor."""

    def __init__(self, target: FakeExecutor) -> None:
        super().__init__(model=target.model, num_pages=target.num_pages)
        self._pages, self.pages = target._pages, target.pages
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        """One step, whose keys and values are marked."""
        self.plans.append(plan)
        return super().run(replace(plan, tokens=plan.tokens + MARK))


def drafted_by_twin(request: SmallRequest, limit: int) -> list[int]:
    """The definition: known tokens as the target wrote them but for the last one, then its own."""
    known = len(request.tokens) - 1

    def logits_after(seen: Sequence[int]) -> NDArray[np.float32]:
        return fake_logits([*seen[:known], *(token + MARK for token in seen[known:])], VOCAB)

    return drafted_alone(request, limit, logits_after=logits_after)[0]


@dataclass
class Target:
    """A target with its pages and requests: what the engine does, without an engine."""

    num_pages: int = 64
    window: int | None = None
    num_computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.executor = FakeExecutor(model=tiny_model(VOCAB, 400, self.window), num_pages=self.num_pages)
        self.kv = KVManager(self.num_pages, 6, 400, window=self.window)
        self.twin = TwinExecutor(self.executor)
        pages = TargetPages(self.kv)
        self.drafter = DraftModelDrafter(self.twin, pages, vocab_size=VOCAB, min_confidence=0.0)

    def open(self, request: SmallRequest) -> bool:
        """Gives a request its pages; what is to be copied for it waits for the next step."""
        opened = self.kv.open(b"", token_key(request.tokens), limit=len(request.tokens) - 1)
        if opened is not None:
            request.slot = opened.slot
            self.num_computed[request.request_id] = opened.num_cached
        return opened is not None

    def propose(self, requests: Sequence[SmallRequest], limits: Sequence[int]) -> list[Draft | None]:
        """Drafts for requests that have pages for their own next token, or get them."""
        for request in requests:
            self.kv.grow(request.slot or 0, len(request.tokens))
        return self.drafter.propose(requests, limits)

    def step(self, request: SmallRequest, draft: Sequence[int] = ()) -> int:
        """Computes all of a request that is not, and a draft; adds what is accepted and one token more."""
        assert request.slot is not None
        start, known = self.num_computed[request.request_id], len(request.tokens)
        tokens = [*request.tokens[start:], *draft]
        num_outputs = len(draft) + 1
        samples = greedy_rows(num_outputs)
        samples.rows["position"] = np.arange(known, known + num_outputs)
        self.kv.slide(request.slot, start)
        self.kv.publish(request.slot, request.tokens, start, is_computed=True)
        plan = StepPlan(
            np.array(tokens, np.int32),
            np.arange(start, start + len(tokens), dtype=np.int32),
            np.array([0, len(tokens)], np.int32),
            self.kv.table[[request.slot], : pages_for(start + len(tokens))],
            np.arange(len(tokens) - num_outputs, len(tokens), dtype=np.int32),
            samples,
            np.array(self.kv.page_copies, np.int32).reshape(-1, 2),
        )
        drawn = self.executor.run(plan).sampled.tokens.tolist()
        self.kv.finish_step()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == drawn[accepted]:
            accepted += 1
        request.tokens += drawn[: accepted + 1]
        self.num_computed[request.request_id] = known + accepted
        return accepted

    def close(self, request: SmallRequest) -> None:
        """Ends a request; what is computed of it is cached."""
        assert request.slot is not None
        self.drafter.finish(request)
        self.kv.close(request.slot, request.tokens, self.num_computed[request.request_id])
        request.slot = None


def tokens_of(draft: Draft | None) -> list[int]:
    return [] if draft is None else list(draft.tokens)


def test_prompts_need_no_pass_of_the_draft_model() -> None:
    target = Target()
    requests = [SmallRequest([7 * i + at for at in range(30 + i)], request_id=i) for i in range(3)]
    for request in requests:
        assert target.open(request)
        target.step(request)
    drafts = target.propose(requests, [4, 2, 4])
    assert [tokens_of(draft) for draft in drafts] == [
        drafted_by_twin(request, limit) for request, limit in zip(requests, [4, 2, 4], strict=True)
    ]
    assert target.twin.log == [(3, 3, 3), (3, 3, 3), (2, 2, 2), (2, 2, 2)]
    for plan in target.twin.plans:
        for sequence, position in enumerate(plan.positions.tolist()):
            assert position >= min(len(request.tokens) - 1 for request in requests)
            page = plan.page_table[sequence, position // PAGE_TOKENS]
            assert target.kv.pool.references(page) == 1
    target.kv.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", [None, 40])
def test_the_target_says_what_it_would_say_alone(seed: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    target = Target(num_pages=int(rng.integers(14, 30)), window=window)
    running: list[SmallRequest] = []
    ended: list[SmallRequest] = []
    prompt_of: dict[int, int] = {}
    num_accepted = num_drafted = 0
    for at in range(70):
        if len(running) < 3 and rng.random() < 0.3:
            past = ended[rng.integers(len(ended))].tokens if ended and rng.random() < 0.7 else []
            prompt = [*past[: rng.integers(80)], *rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()]
            request = SmallRequest(prompt, request_id=at, record=sampling_record())
            prompt_of[at] = len(prompt)
            if target.open(request):
                target.step(request)
                running.append(request)
        drafts = target.propose(running, [int(rng.integers(1, 12)) for _ in running])
        for request, draft in zip(running, drafts, strict=True):
            if window is None:
                assert tokens_of(draft) == drafted_by_twin(request, len(tokens_of(draft)))
            proposed = tokens_of(draft)
            if rng.random() < 0.7:  # a twin is never right here: let the target accept some
                right = reference_tokens(request.tokens, len(proposed), vocab_size=VOCAB, window=window)
                proposed[: rng.integers(len(proposed) + 1)] = right[: rng.integers(len(proposed) + 1)]
            verified = proposed[: rng.integers(len(proposed) + 1)]
            if target.kv.grow(request.slot or 0, len(request.tokens) + len(verified)):
                num_accepted += target.step(request, verified)
                num_drafted += len(verified)
            target.kv.check()
        for request in [request for request in running if len(request.tokens) > 120 or rng.random() < 0.05]:
            running.remove(request)
            target.close(request)
            ended.append(request)
    assert len(ended) > 1
    assert 0 < num_accepted < num_drafted
    for request in ended + running:
        count = prompt_of[request.request_id]
        prompt, output = request.tokens[:count], request.tokens[count:]
        assert output == reference_tokens(prompt, len(output), vocab_size=VOCAB, window=window)


def test_what_the_next_step_would_copy_is_there_for_the_draft() -> None:
    target = Target()
    first = SmallRequest(list(range(50)))
    assert target.open(first)
    target.step(first)
    target.close(first)
    again = SmallRequest(list(range(48)), request_id=1)
    assert target.open(again)
    assert target.kv.page_copies, "its last page is in part that of the other"
    assert target.num_computed[1] == 47
    (draft,) = target.propose([again], [5])
    assert tokens_of(draft) == drafted_by_twin(again, 5)
    target.step(again, tokens_of(draft))
    assert again.tokens[48:] == reference_tokens(list(range(48)), len(again.tokens) - 48)
    target.kv.check()


def test_drafts_take_no_page_that_a_running_request_may_need() -> None:
    target = Target(num_pages=5)
    requests = [SmallRequest([9 * i + at for at in range(60)], request_id=i) for i in range(2)]
    for request in requests:
        assert target.open(request)
        target.step(request)
    drafts = target.propose(requests, [30, 30])  # one page is free, and two requests run
    assert [len(tokens_of(draft)) for draft in drafts] == [4, 4]
    assert target.kv.num_available == 1
    target.close(requests[1])
    (draft,) = target.propose(requests[:1], [30])
    assert len(tokens_of(draft)) == 30
    target.kv.check()


def test_a_request_without_pages_gets_no_draft() -> None:
    target = Target()
    assert target.drafter.propose([SmallRequest([1, 2, 3])], [4]) == [None]


def test_a_page_that_others_read_is_never_drafted_into() -> None:
    target = Target()
    request = SmallRequest(list(range(40)))
    assert target.open(request)
    target.step(request)
    assert request.slot is not None
    target.kv.pool.share(int(target.kv.table[request.slot, 1]))
    with pytest.raises(AssertionError, match="shared page"):
        target.drafter.propose([request], [2])


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    for prefix_cache, rows in ((True, [70, 1]), (False, [70, 70])):
        executor = FakeExecutor()
        pages = OwnPages(executor, max_sequences=2, prefix_cache=prefix_cache)
        drafter = DraftModelDrafter(executor, pages, vocab_size=VOCAB)
        for request_id in range(2):
            request = SmallRequest(list(range(70)), request_id=request_id)
            drafter.propose([request], [1])
            drafter.finish(request)
        assert [step[0] for step in executor.log] == rows
        pages.kv.check()

"""Requests that come, are drafted for, grow and go in any order, over few pages and slots and an executor that fails at
times: the books balance and every draft is what the draft model alone would say."""

from __future__ import annotations

import pytest
from fake_executor import tiny_model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_request import FlakyExecutor, SmallRequest, chain_of, drafted_alone, drafter_of, sampling_record

from paceline.config import PAGE_TOKENS
from paceline.speculate.draft_model import CATCH_UP_ROWS

VOCAB = 97


class DraftMachine(RuleBasedStateMachine):
    """Requests come, are asked for, grow by what was drafted or by something else, and go, in any order."""

    @initialize(
        num_pages=st.sampled_from([3, 6, 10, 200]),
        max_sequences=st.integers(1, 6),
        max_rows=st.integers(1, 80),
        max_outputs=st.integers(1, 6),
        window=st.sampled_from([None, None, 20, 50]),
    )
    def start(self, num_pages: int, max_sequences: int, max_rows: int, max_outputs: int, window: int | None) -> None:
        model = tiny_model(VOCAB, 400, window)
        self.executor = FlakyExecutor(model=model, num_pages=num_pages, max_rows=max_rows, max_outputs=max_outputs)
        self.drafter, self.pages = drafter_of(self.executor, max_sequences=max_sequences)
        self.window = window
        self.is_roomy = num_pages == 200
        self.max_sequences = max_sequences
        self.requests: list[SmallRequest] = []
        self.drafts: dict[int, list[int]] = {}
        self.said: list[list[int]] = []  # everything that was drafted, behind what it followed
        self.num_made = 0

    @rule(
        num_tokens=st.sampled_from([1, 5, 28, 30, 31, 33, 60, 62, 64, 90, 126, 140]),
        branch=st.sampled_from([0, 30, 64, 100, 300]),
        domain=st.sampled_from([b"", b"", b"x"]),
        penalty=st.sampled_from([1.0, 1.0, 3.0]),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def add(self, num_tokens: int, branch: int, domain: bytes, penalty: float, temperature: float) -> None:
        tokens = [(3 if at < branch else branch + 5 * at) % VOCAB for at in range(num_tokens)]
        record = sampling_record(temperature=temperature, seed=self.num_made, repetition_penalty=penalty)
        self.requests.append(SmallRequest(tokens, self.num_made, domain=domain, record=record))
        self.num_made += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        asked = data.draw(st.lists(st.sampled_from(self.requests), unique_by=id, min_size=1, max_size=6))
        limits = [data.draw(st.integers(1, 9)) for _ in asked]
        drafts = self.drafter.propose(asked, limits)
        num_behind = sum(len(request.tokens) for request in asked)  # at most
        if self.is_roomy and num_behind <= CATCH_UP_ROWS:  # else some may have to wait for the next call
            assert sum(draft is not None for draft in drafts) == min(len(asked), self.max_sequences)
        assert any(drafts) or all(len(request.tokens) > PAGE_TOKENS * self.executor.num_pages for request in asked)
        for request, limit, draft in zip(asked, limits, drafts, strict=True):
            self.drafts[request.request_id] = []
            if draft is not None:
                self.drafts[request.request_id] = chain_of(draft)
                self.said.append([*request.tokens, *self.drafts[request.request_id]])
                expected, _ = drafted_alone(request, limit, window=self.window)
                assert chain_of(draft) == expected[: len(draft)]
                assert len(draft) == limit or not self.is_roomy

    @precondition(lambda self: self.said)
    @rule(data=st.data(), token=st.integers(0, VOCAB - 1))
    def add_what_was_drafted(self, data: st.DataObject, token: int) -> None:
        said = self.said.pop(data.draw(st.integers(0, len(self.said) - 1)))
        self.requests.append(SmallRequest([*said, token], self.num_made))
        self.num_made += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_accepted=st.integers(0, 4), more=st.lists(st.integers(0, VOCAB - 1), max_size=6))
    def accept(self, data: st.DataObject, num_accepted: int, more: list[int]) -> None:
        request = data.draw(st.sampled_from(self.requests))
        request.tokens += [*self.drafts.pop(request.request_id, [])[:num_accepted], *more]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.drafter.finish(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.executor.fails = True
        request = data.draw(st.sampled_from(self.requests))
        if len(request.tokens) <= PAGE_TOKENS * self.executor.num_pages:
            with pytest.raises(RuntimeError, match="told to"):
                self.drafter.propose([request], [2])
        self.executor.fails = False

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "pages"):
            self.pages.kv.check()

    def teardown(self) -> None:
        if hasattr(self, "pages"):
            for request in self.requests:
                self.drafter.finish(request)
            self.pages.kv.check()
            assert self.pages.kv.num_available == self.executor.num_pages


TestDrafts = DraftMachine.TestCase
TestDrafts.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)

"""Drafts of what a structure leaves no choice about: the grammar allows nothing else, and answers are those without."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from draft_contexts import FakeContext, check_draft
from grammar_vocabulary import VOCAB, GrammarTokenizer, constraint_of
from scripted_drafts import TakeAll
from test_engine_speculation import run, same
from test_structured_answers import PARAMS, PROMPTS, STRUCTURES, alone, make_engine, with_structure

from paceline.config import Acceptance
from paceline.params import Structure
from paceline.sampling.constraint import FORCED_A_TOKEN, Constraint, allows
from paceline.sampling.grammar import Matcher
from paceline.speculate.draft import Draft
from paceline.speculate.forced import ForcedDrafter
from paceline.speculate.speculator import Speculator

SPELLED = [GrammarTokenizer().token_bytes(token) for token in range(VOCAB)]


def proposed(constraint: Constraint | None, limit: int = 64, room: int = 1000) -> Draft | None:
    context = FakeContext([1, 2], max_tokens=2 + room, constraint=constraint)
    (draft,) = ForcedDrafter().propose([context], [limit])
    check_draft(draft, context, limit, set(range(VOCAB)))
    return draft


def text_of(draft: Draft | None) -> bytes:
    return b"" if draft is None else b"".join(SPELLED[token] for token in draft.tokens)


@pytest.mark.parametrize(
    ("structure", "before", "expected"),
    [
        (Structure("choice", '["abcab12"]'), b"", b"abcab12"),
        (Structure("regex", "xy(c|d)true12"), b"", b"xy"),
        (Structure("regex", "xy(c|d)true12"), b"xyd", b"true12"),
        (Structure("regex", "ab(c|d)true12"), b"", b""),  # "abc" is a token: how "ab" is spelled is still open
        (Structure("regex", "[a-z]+"), b"", b""),
        (Structure("regex", "a?"), b"", b""),
    ],
)
def test_it_proposes_what_must_follow(structure: Structure, before: bytes, expected: bytes) -> None:
    constraint = constraint_of(structure)
    for byte in before:
        constraint.advance(byte)
    assert text_of(proposed(constraint)) == expected


@pytest.mark.parametrize("kind", STRUCTURES)
def test_nothing_else_is_allowed(kind: str) -> None:
    """Along answers drawn at random: what may follow spells the beginning of the draft, or more than it."""
    params = with_structure(PARAMS["drawn"], STRUCTURES[kind])
    num_drafts = 0
    for answer in alone(params, PROMPTS[:2]):
        constraint = constraint_of(STRUCTURES[kind])
        for token in answer.token_ids:
            if constraint.is_done:
                break
            text = text_of(proposed(constraint))
            if text:
                num_drafts += 1
                (mask,) = constraint.masks()
                for other in (other for other in range(VOCAB) if allows(mask, other)):
                    assert text.startswith(SPELLED[other]) or SPELLED[other].startswith(text), (text, SPELLED[other])
            constraint.advance(token)
    assert num_drafts > 0 or kind in ("object", "grammar", "choice")


def test_it_keeps_within_limits() -> None:
    structure = Structure("choice", '["abcab12abcab12"]')
    whole = proposed(constraint_of(structure))
    assert whole is not None
    for limit in range(1, len(whole) + 2):
        short = proposed(constraint_of(structure), limit=limit)
        assert short is not None
        assert short.tokens == whole.tokens[:limit]
    for room in range(3):  # the pass itself yields the last token
        assert len(proposed(constraint_of(structure), room=room) or ()) == max(0, room - 1)
    assert proposed(None) is None


def test_long_texts_are_not_spelled_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all, some times as many tokens as the answer has, whoever spells it."""
    text = b"abcab12" * 200
    spelled: list[int] = []
    forced = Matcher.forced

    def counted(self: Matcher) -> list[int]:
        tokens = forced(self)
        spelled.append(len(tokens))
        return tokens

    monkeypatch.setattr(Matcher, "forced", counted)
    structure = Structure("choice", json.dumps([text.decode()]))
    as_drafted, bytewise = constraint_of(structure), constraint_of(structure)
    written = b""
    while written != text:
        draft = proposed(as_drafted, limit=3)
        assert draft is not None
        assert 1 <= len(draft) <= 3
        as_drafted.advance(draft.tokens[0])
        written += SPELLED[draft.tokens[0]]
    assert len(spelled) == 1
    assert proposed(as_drafted) is None
    spelled.clear()
    num_drafts = 0
    for byte in text:
        num_drafts += proposed(bytewise) is not None
        bytewise.advance(byte)
    assert sum(spelled) <= FORCED_A_TOKEN * 2 * len(text)
    assert num_drafts > 50


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("name", PARAMS)
def test_answers_are_those_without(kind: str, name: str) -> None:
    params = with_structure(PARAMS[name], STRUCTURES[kind])
    answers = alone(params)
    for pages, max_batch in ((64, 8), (7, 8)):
        engine = make_engine(pages=pages, max_batch=max_batch)
        requests = [engine.make_request(prompt, params, seed=11) for prompt in PROMPTS]
        policy = TakeAll()
        engine.use_speculator(Speculator([ForcedDrafter()], policy, vocab_size=VOCAB))
        assert all(map(same, run(engine, requests), answers))
        assert policy.accepted > 0 or kind != "schema"


@pytest.mark.parametrize("acceptance", ["coupled", "exact"])
def test_greedy_answers_are_those_without_however_drafts_are_accepted(acceptance: Acceptance) -> None:
    params = with_structure(PARAMS["greedy"], STRUCTURES["schema"])
    engine = make_engine(acceptance=acceptance)
    requests = [engine.make_request(prompt, params, seed=11) for prompt in PROMPTS]
    engine.use_speculator(Speculator([ForcedDrafter()], TakeAll(), vocab_size=VOCAB))
    assert [answer.token_ids for answer in run(engine, requests)] == [answer.token_ids for answer in alone(params)]


def test_requests_without_a_structure_beside_get_none() -> None:
    engine = make_engine()
    structured = engine.make_request(PROMPTS[0], with_structure(PARAMS["greedy"], STRUCTURES["schema"]), seed=11)
    free = engine.make_request(PROMPTS[1], PARAMS["greedy"], seed=11)
    engine.use_speculator(Speculator([ForcedDrafter()], TakeAll(), vocab_size=VOCAB))
    answers = run(engine, [structured, free])
    assert answers[0].speculation.proposed > 0
    assert answers[1].speculation.proposed == 0
    assert all(map(same, answers[1:], alone(PARAMS["greedy"], PROMPTS[1:2])))


def test_it_is_not_asked_about_requests_without_a_structure() -> None:
    """Nor is the policy: that would cost each step of each request."""

    class Noting(TakeAll):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[int, ...]] = []

        def limits(self, drafter: str, is_free: bool, request_ids: Sequence[int]) -> list[int]:
            self.asked.append(tuple(request_ids))
            return super().limits(drafter, is_free, request_ids)

    policy = Noting()
    speculator = Speculator([ForcedDrafter()], policy, vocab_size=VOCAB)
    constraint = constraint_of(Structure("choice", '["abcab12"]'))
    free = FakeContext([1, 2], max_tokens=100, request_id=1)
    held = FakeContext([1, 2], max_tokens=100, request_id=2, constraint=constraint)
    assert speculator.propose([free], num_rows=1, room=64) == [None]
    assert policy.asked == []
    drafts = speculator.propose([free, held], num_rows=2, room=64)
    assert [text_of(draft) for draft in drafts] == [b"", b"abcab12"]
    assert policy.asked == [(2,)]

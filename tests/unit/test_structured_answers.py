"""Structured answers of the engine: whole, the same on every path, and an error in one is nobody else's."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from fake_executor import FakeExecutor, fake_logits, tiny_model
from grammar_vocabulary import ENDS, VOCAB, GrammarTokenizer, constraint_of
from scripted_drafts import NonsenseDrafter, OracleDrafter, TakeAll
from test_engine_speculation import run, same

from paceline.config import Acceptance, EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.outputs import Completion
from paceline.errors import ParameterError, RequestError
from paceline.params import SamplingParams, Structure
from paceline.sampling import grammar
from paceline.sampling.constraint import Constraint, allows
from paceline.speculate.draft import Context, Draft, Drafter
from paceline.speculate.speculator import Speculator

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "c": {"enum": ["red", "blue"]}, "l": {"items": {"type": "boolean"}}},
    "required": ["n", "c"],
    "additionalProperties": False,
}
STRUCTURES = {
    "schema": Structure("json_schema", json.dumps(SCHEMA)),
    "object": Structure("json_object"),
    "regex": Structure("regex", "(ab|ca|[xyz]{2})+(12)*!"),
    "choice": Structure("choice", '["abc", "abd", "ab", "true"]'),
    "grammar": Structure("grammar", 'start: "(" start? ")" | /[a-c]+/'),
}
PARAMS = {
    "greedy": SamplingParams(max_tokens=45, logprobs=1),
    "drawn": SamplingParams(max_tokens=45, temperature=1.3, seed=5, logprobs=0),
    "penalties": SamplingParams(max_tokens=45, temperature=0.8, seed=2, repetition_penalty=1.2, frequency_penalty=0.3),
    "without an end": SamplingParams(max_tokens=40, ignore_eos=True, min_tokens=20, temperature=0.7, seed=1),
    "stops": SamplingParams(max_tokens=45, stop_token_ids=(ord("2"), ord(")")), min_tokens=3, temperature=1.0, seed=3),
}
PROMPTS = [[5, 6, 7, 8], list(range(70)), [50] * 31, [8, 8]]


def make_engine(*, pages: int = 64, max_batch: int = 8, acceptance: Acceptance = "coupled") -> Engine:
    executor = FakeExecutor(model=tiny_model(VOCAB, 160), num_pages=pages, max_rows=64, max_outputs=64)
    config = EngineConfig(max_batch=max_batch, token_budget=64, acceptance=acceptance)
    return Engine(executor, GrammarTokenizer(), config)


def with_structure(params: SamplingParams, structure: Structure) -> SamplingParams:
    return SamplingParams(**{**vars(params), "structure": structure})


def alone(params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Completion]:
    """Each answer from an engine of its own, without drafts."""
    answers: list[Completion] = []
    for prompt in prompts:
        engine = make_engine()
        answers += run(engine, [engine.make_request(prompt, params, seed=11)])
    return answers


def whole(structure: Structure, text: str) -> bool:
    """Whether a text is an answer, by other means than the grammar."""
    if structure.kind == "choice":
        return text in json.loads(structure.source)
    if structure.kind == "regex":
        return re.fullmatch(structure.source, text) is not None
    if structure.kind == "grammar":
        return re.fullmatch(r"(\(*)([a-c]*)(\)*)", text) is not None and text.count("(") == text.count(")")
    value = json.loads(text)
    if structure.kind == "json_object":
        return isinstance(value, dict)
    flags = value.get("l", [])
    right = type(value["n"]) is int and value["c"] in ("red", "blue") and set(value) <= {"n", "c", "l"}
    return right and (not isinstance(flags, list) or all(type(flag) is bool for flag in flags))


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("name", ["greedy", "drawn"])
def test_answers_that_end_by_themselves_are_whole(kind: str, name: str) -> None:
    structure = STRUCTURES[kind]
    answers = alone(with_structure(PARAMS[name], structure))
    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    assert ended or kind == "object"  # noise seldom closes what it opens
    for answer in ended:
        assert whole(structure, answer.text), answer.text
    for answer in answers:
        assert answer.error is None
        assert answer.finish_reason == "stop" or len(answer.token_ids) == 45


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("name", PARAMS)
def test_answers_do_not_depend_on_drafts_batch_or_room(kind: str, name: str) -> None:
    params = with_structure(PARAMS[name], STRUCTURES[kind])
    answers = alone(params)
    accepted = 0
    for pages, max_batch, chains in ((64, 1, True), (64, 8, False), (7, 8, False)):
        engine = make_engine(pages=pages, max_batch=max_batch)
        requests = [engine.make_request(prompt, params, seed=11) for prompt in PROMPTS]
        truth = {r.request_id: [*r.tokens, *a.token_ids] for r, a in zip(requests, answers, strict=True)}
        policy = TakeAll()
        drafters: list[Drafter] = [
            OracleDrafter(truth, VOCAB, seed=pages + max_batch, chains=chains),
            NonsenseDrafter(VOCAB, seed=3),
        ]
        engine.use_speculator(Speculator(drafters, policy, vocab_size=VOCAB))
        assert all(map(same, run(engine, requests), answers))
        accepted += policy.accepted
    assert accepted > 0 or kind == "choice"


@pytest.mark.parametrize("drafts", [False, True])
def test_an_answer_that_was_preempted_goes_on_where_it_was(drafts: bool) -> None:
    params = SamplingParams(structure=Structure("regex", "([a-c]{3} ){30}!"), temperature=1.0, seed=1)
    prompts = [[number] for number in range(6)]
    answers = alone(params, prompts)
    engine = make_engine(pages=9)
    requests = [engine.make_request(prompt, params, seed=11) for prompt in prompts]
    if drafts:
        truth = {r.request_id: [*r.tokens, *a.token_ids] for r, a in zip(requests, answers, strict=True)}
        oracle = OracleDrafter(truth, VOCAB, seed=1, chains=False)
        engine.use_speculator(Speculator([oracle], TakeAll(), vocab_size=VOCAB))
    assert all(map(same, run(engine, requests), answers))
    assert engine.stats().preemptions > 0
    assert all(whole(params.structure, answer.text) for answer in answers if params.structure is not None)


def test_drafts_lose_what_the_structure_forbids_before_they_are_verified() -> None:
    params = with_structure(PARAMS["greedy"], STRUCTURES["schema"])
    engine, policy = make_engine(), TakeAll()
    engine.use_speculator(Speculator([NonsenseDrafter(VOCAB, seed=3)], policy, vocab_size=VOCAB))
    requests = [engine.make_request(prompt, params, seed=11) for prompt in PROMPTS]
    free = [engine.make_request(prompt, PARAMS["greedy"], seed=11) for prompt in PROMPTS]
    run(engine, requests)
    constrained = policy.verified
    run(engine, free)
    assert constrained * 5 < policy.verified - constrained


class LetterDrafter:
    """Proposes trees or chains of letters at random: now and then one that the structure allows."""

    name = "letters"
    is_free = True
    catch_up_s = 0.0

    def __init__(self, *, chains: bool) -> None:
        self._random = random.Random(1)
        self._chains = chains

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """A draft each."""
        return [self._draft(min(limit, 5)) for limit in limits]

    def _draft(self, count: int) -> Draft:
        parents = [node if self._chains else self._random.randint(0, node) for node in range(count)]
        tokens = [self._random.choice(b"abc") for _ in range(count)]
        return Draft(tuple(tokens), tuple(parents), (0.5,) * count, self.name)

    def finish(self, context: Context) -> None:
        """Keeps nothing."""


def law_of(structure: Structure, prompt: list[int], path: list[int]) -> dict[str, float]:
    """The texts that an answer beginning with ``path`` can be, with their probabilities at temperature 1."""
    mask = constraint_of(structure).mask_after(path)
    allowed = [token for token in range(VOCAB) if allows(mask, token)]
    if path and set(allowed) <= set(ENDS):
        return {b"".join(map(GrammarTokenizer().token_bytes, path)).decode(): 1.0}
    weights = np.exp(fake_logits([*prompt, *path], VOCAB)[allowed].astype(np.float64))
    law: Counter[str] = Counter()
    for token, p in zip(allowed, weights / weights.sum(), strict=True):
        for text, q in law_of(structure, prompt, [*path, token]).items():
            law[text] += p * q
    return law


@pytest.mark.parametrize("chains", [True, False])
def test_exact_acceptance_follows_the_law_of_the_structure(chains: bool) -> None:
    structure, count = Structure("regex", "[ab][ab]c"), 600
    engine, policy = make_engine(acceptance="exact", max_batch=16), TakeAll()
    engine.use_speculator(Speculator([LetterDrafter(chains=chains)], policy, vocab_size=VOCAB))
    params = SamplingParams(structure=structure, temperature=1.0)
    requests = [engine.make_request([1, 2], params, seed=seed) for seed in range(count)]
    found = Counter(answer.text for answer in run(engine, requests))
    assert policy.accepted > count / 4
    law = law_of(structure, [1, 2], [])
    assert set(found) == set(law) == {"aac", "abc", "bac", "bbc"}
    for text, p in law.items():  # five standard deviations
        assert abs(found[text] - count * p) < 5 * math.sqrt(count * p * (1 - p)), (found, law)
    assert max(abs(count / 4 - count * p) for p in law.values()) > 5 * math.sqrt(count / 4), "no test of anything"


def test_the_end_comes_with_the_last_token_whatever_else_is_asked_for() -> None:
    structure = Structure("choice", '["true"]')
    for params in (
        SamplingParams(structure=structure),
        SamplingParams(structure=structure, ignore_eos=True, min_tokens=50),
        SamplingParams(structure=structure, logit_bias={**dict.fromkeys(ENDS, -100.0), 290: 100.0}),
    ):
        (answer,) = alone(params, PROMPTS[:1])
        assert (answer.text, answer.finish_reason, answer.error) == ("true", "stop", None)
        assert not set(answer.token_ids) & set(ENDS)


def test_max_tokens_cuts_an_answer_short() -> None:
    (answer,) = alone(SamplingParams(structure=STRUCTURES["schema"], max_tokens=3), PROMPTS[:1])
    assert answer.finish_reason == "length"
    (answer,) = alone(SamplingParams(structure=Structure("regex", "[ab]{3}"), max_tokens=3), PROMPTS[:1])
    assert (answer.finish_reason, len(answer.text)) == ("stop", 3)


def test_choices_of_one_prompt_have_answers_of_their_own() -> None:
    engine = make_engine()
    params = SamplingParams(structure=STRUCTURES["regex"], temperature=1.5, max_tokens=50)
    requests = [engine.make_request([1, 2], params, seed=11, choice=choice) for choice in range(6)]
    texts = [answer.text for answer in run(engine, requests)]
    assert len(set(texts)) > 3


def test_what_does_not_compile_is_refused_before_anything_is_queued() -> None:
    engine = make_engine()
    with pytest.raises(ParameterError) as error:
        engine.make_request([1], SamplingParams(structure=Structure("regex", "(")))
    assert error.value.field == "structure"
    assert not engine.has_work


def test_a_grammar_that_exceeds_its_limits_in_an_answer_is_told_by_its_callers_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    request = engine.make_request([1], SamplingParams(structure=Structure("regex", "a+", "guided_regex"), max_tokens=4))
    monkeypatch.setattr(grammar, "MAX_TOKEN_S", 0.0)
    (failed,) = run(engine, [request])
    assert isinstance(failed.error, ParameterError)
    assert failed.error.field == "guided_regex"


def test_a_grammar_that_fails_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponentially many states: in 23 letters the automaton has to remember where each "a" was."""
    engine = make_engine()
    params = with_structure(PARAMS["drawn"], STRUCTURES["schema"])
    good = [engine.make_request(prompt, params, seed=11) for prompt in PROMPTS[:3]]
    bad = engine.make_request([1], params, seed=11)
    assert bad.constraint is not None
    original, calls = Constraint._mask, [0]

    def fail(constraint: Constraint, depth: int):  # type: ignore[no-untyped-def]
        if constraint is bad.constraint:
            calls[0] += 1
            if calls[0] == 4:
                raise ParameterError("structure", "a grammar", "a smaller one")
        return original(constraint, depth)

    monkeypatch.setattr(Constraint, "_mask", fail)
    *answers, failed = run(engine, [*good, bad])
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, RequestError)
    assert len(failed.token_ids) == 3
    assert all(map(same, answers, alone(params, PROMPTS[:3])))

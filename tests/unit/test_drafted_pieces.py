"""Which text of a streamed answer was drafted: as much as was accepted, and never the token after a draft."""

from __future__ import annotations

import pytest
from fake_executor import FakeExecutor, FakeTokenizer, tiny_model
from scripted_drafts import OracleDrafter, TakeAll

from paceline.config import Acceptance, EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.outputs import Completion, Delta
from paceline.params import SamplingParams
from paceline.speculate.speculator import Speculator

VOCAB = 97
PROMPT = [5, 6, 7, 8]


def answer(params: SamplingParams, acceptance: Acceptance, truth: list[int] | None) -> tuple[Completion, list[Delta]]:
    """The answer to the prompt and its deltas, with drafts out of ``truth``."""
    executor = FakeExecutor(model=tiny_model(VOCAB, 160), max_rows=64, max_outputs=64)
    config = EngineConfig(max_batch=8, token_budget=64, acceptance=acceptance)
    engine = Engine(executor, FakeTokenizer(VOCAB), config)
    request = engine.make_request(PROMPT, params, seed=11, streaming=True)
    if truth is not None:
        drafter = OracleDrafter({request.request_id: truth}, VOCAB, seed=3, chains=False)
        engine.use_speculator(Speculator([drafter], TakeAll(), vocab_size=VOCAB))
    engine.add(request)
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += [update.delta for update in engine.step() if update.delta is not None]
    completion = deltas[-1].completion
    assert completion is not None
    return completion, deltas


@pytest.mark.parametrize("acceptance", ["coupled", "exact"])
def test_as_much_text_is_drafted_as_was_accepted(acceptance: Acceptance) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={VOCAB - 1: -100.0})  # each token is a character
    plain, deltas = answer(params, acceptance, None)
    assert not any(drafted for delta in deltas for _, drafted in delta.pieces)
    got, deltas = answer(params, acceptance, [*PROMPT, *plain.token_ids])
    assert got.text == plain.text
    for delta in deltas:
        assert "".join(text for text, _ in delta.pieces) == delta.text
        if delta.completion is None:
            assert not delta.pieces[-1][1], "the last token of a step is the target's own"
    assert got.speculation is not None
    drafted = "".join(text for delta in deltas for text, drafted in delta.pieces if drafted)
    assert len(drafted) == got.speculation.accepted > 10

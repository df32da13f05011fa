"""However an answer falls into tokens, steps and readings, its stream joins to its text."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.detokenize import Detokenizer, TextPieces
from paceline.engine.engine import Update
from paceline.engine.outputs import Completion, Delta
from paceline.params import SamplingParams
from paceline.serve.bridge import AnswerStream, Bridge
from paceline.serve.keys import EVERYBODY


@dataclass(frozen=True)
class Answer:
    """``tokens`` as bytes; each of ``steps`` tells how many of them a step adds, and whether it is read from then."""

    tokens: Sequence[bytes]
    stop: tuple[str, ...]
    steps: Sequence[tuple[int, bool]]


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """Texts of few characters, some of four bytes and some none at all, cut anywhere; stop strings from among them."""
    text = draw(st.text("ab é한🙂", max_size=30)).encode() + draw(st.binary(max_size=4))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=20)) | {0, len(text)})
    tokens = [text[start:end] for start, end in itertools.pairwise(cuts)]
    stop = draw(st.lists(st.text("ab é한🙂", min_size=1, max_size=3), max_size=2))
    steps = draw(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=len(tokens), max_size=len(tokens)))
    return Answer(tokens, tuple(stop), steps)


class ScriptedLLM:
    """Has its sink called by the test, with what an engine would say at each step."""

    def submit(self, prompt: Sequence[int], params: SamplingParams, sink: Any, **_: Any) -> Any:
        self.sink = sink
        return SimpleNamespace(abort=lambda: None)


def whole_text(answer: Answer) -> str:
    """What the answer is when nobody streams it."""
    detokenizer = Detokenizer(dict(enumerate(answer.tokens)), (), answer.stop)
    for token in range(len(answer.tokens)):
        detokenizer.feed(token)
        if detokenizer.stopped:
            break
    detokenizer.finish()
    return detokenizer.text


def joined(pieces: TextPieces) -> str:
    """The text of pieces."""
    return "".join(text for text, _ in pieces)


def updates(answer: Answer) -> list[tuple[Update, bool]]:
    """What the engine says step by step, and whether the reader reads then."""
    detokenizer = Detokenizer(dict(enumerate(answer.tokens)), (), answer.stop)
    request: Any = SimpleNamespace(choice=0)
    said: list[tuple[Update, bool]] = []
    token = 0
    for count, is_read in answer.steps:
        for _ in range(count):
            if token < len(answer.tokens) and not detokenizer.stopped:
                detokenizer.feed(token, drafted=token % 3 > 0)
                token += 1
        if pieces := detokenizer.take():
            said.append((Update(request, Delta(joined(pieces), [token], pieces=pieces), None), is_read))
    detokenizer.finish()
    pieces = detokenizer.take()
    completion = Completion(detokenizer.text, [], "stop", 1)
    last = Delta(joined(pieces), [], "stop", 0, completion, pieces=pieces)
    said.append((Update(request, last, completion), True))
    return said


@settings(deadline=None, max_examples=200)
@given(answers(), st.sampled_from([0.0, 1000.0]))
def test_a_stream_joins_to_the_text(answer: Answer, coalesce_s: float) -> None:
    async def scenario() -> tuple[str, str]:
        bridge = Bridge(asyncio.get_running_loop(), coalesce_s=coalesce_s)
        llm: Any = ScriptedLLM()
        stream = AnswerStream(bridge)
        stream.start(llm, [1], SamplingParams(), client=EVERYBODY, streaming=True)
        text = ""
        for update, is_read in updates(answer):
            llm.sink(update)
            if is_read and (coalesce_s == 0.0 or update.completion is not None):
                for delta in await stream.next():
                    assert joined(delta.pieces) == delta.text
                    text += delta.text
        assert update.completion is not None
        assert not stream.is_open
        return text, update.completion.text

    assert asyncio.run(scenario()) == (whole_text(answer),) * 2

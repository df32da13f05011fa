"""Answers on their way to the event loop: merged, at intervals under load, and ended when their time is up."""

from __future__ import annotations

import asyncio

from byte_llm import byte_llm

from paceline.engine.outputs import Delta
from paceline.errors import RequestTimeoutError
from paceline.params import SamplingParams
from paceline.serve.bridge import AnswerStream, Bridge
from paceline.serve.keys import EVERYBODY

PROMPT = list(b"user: x\nassistant: ")


async def read(stream: AnswerStream) -> list[Delta]:
    deltas: list[Delta] = []
    while stream.is_open:
        deltas += await stream.next()
    return deltas


def test_within_the_interval_a_stream_is_its_first_piece_and_its_end() -> None:
    async def scenario() -> None:
        bridge = Bridge(asyncio.get_running_loop(), coalesce_s=1000.0)
        params = SamplingParams(max_tokens=50)
        with byte_llm(text="한국어 hello ") as llm:
            expected = (await llm.agenerate(PROMPT, params)).text
            streams = [AnswerStream(bridge) for _ in range(3)]
            for stream in streams:
                stream.start(llm, PROMPT, params, client=EVERYBODY, streaming=True)
            for deltas in await asyncio.gather(*map(read, streams)):
                assert "".join(delta.text for delta in deltas) == expected
                assert "".join(text for delta in deltas for text, _ in delta.pieces) == expected
                assert len(deltas) <= 3

    asyncio.run(scenario())


def test_an_answer_whose_time_is_up_ends_with_an_error_and_frees_its_pages() -> None:
    async def scenario() -> None:
        bridge = Bridge(asyncio.get_running_loop())
        with byte_llm(text="hello") as llm:
            stream = AnswerStream(bridge, limit_s=0.0)
            stream.start(llm, PROMPT, SamplingParams(n=2), client=EVERYBODY, streaming=True)
            completions = await stream.completions()
            assert [type(completion.error) for completion in completions] == [RequestTimeoutError] * 2
            await llm.agenerate(PROMPT, SamplingParams(max_tokens=1))
            assert llm.stats().pages_used == 0

    asyncio.run(scenario())


def test_an_answer_that_came_in_time_is_one_however_late_it_is_read() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with byte_llm(text="hello") as llm:
            stream = AnswerStream(Bridge(loop), limit_s=60.0)
            stream.start(llm, PROMPT, SamplingParams(max_tokens=20), client=EVERYBODY, streaming=True)
            while not stream._has_end:
                await asyncio.sleep(0.001)
            stream._deadline_s = loop.time() - 1.0
            (completion,) = await stream.completions()
            assert completion.error is None
            assert completion.num_completion_tokens == 20

    asyncio.run(scenario())

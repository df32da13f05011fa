"""The asyncio forms: the same answers, batched together, aborted when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from fake_executor import FakeExecutor, FakeTokenizer, reference_tokens, tiny_model

from paceline.engine.outputs import Delta
from paceline.errors import KVCapacityError, ParameterError
from paceline.llm import LLM
from paceline.params import SamplingParams

FREE = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(ignore_eos=True)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine, a minute at most."""
    return asyncio.run(asyncio.wait_for(main, 60))


def make_llm(num_pages: int = 2000) -> LLM:
    return LLM.from_parts(FakeExecutor(model=tiny_model(context_length=50_000), num_pages=num_pages), FakeTokenizer())


async def idle(llm: LLM) -> None:
    """Returns when the engine has no requests."""
    while llm.stats().num_running or llm.stats().num_waiting:
        await asyncio.sleep(0.001)


def test_agenerate_gives_what_generate_gives() -> None:
    with make_llm() as llm:
        single = run(llm.agenerate("abc", FREE))
        both = run(llm.agenerate(["abc", [1, 2]], FREE))
        assert single.token_ids == llm.generate("abc", FREE).token_ids
        assert [c.token_ids for c in both] == [c.token_ids for c in llm.generate(["abc", [1, 2]], FREE)]
        assert run(llm.agenerate([])) == []


def test_concurrent_calls_batch_together() -> None:
    executor = FakeExecutor()
    with LLM.from_parts(executor, FakeTokenizer()) as llm:

        async def main() -> list[list[int]]:
            calls = [llm.agenerate([token], SamplingParams(max_tokens=300, ignore_eos=True)) for token in range(1, 6)]
            return [completion.token_ids for completion in await asyncio.gather(*calls)]

        assert run(main()) == [reference_tokens([token], 300) for token in range(1, 6)]
    assert max(sequences for _, sequences, _ in executor.log) > 1


def test_astream_pieces_join() -> None:
    with make_llm() as llm:

        async def main() -> list[Delta]:
            return [delta async for delta in llm.astream("abc", FREE)]

        deltas = run(main())
        expected = llm.generate("abc", FREE)
        assert "".join(delta.text for delta in deltas) == expected.text
        assert deltas[-1].completion is not None
        assert deltas[-1].completion.token_ids == expected.token_ids


def test_leaving_an_astream_stops_the_work() -> None:
    with make_llm() as llm:

        async def main() -> None:
            stream = llm.astream("abc", ENDLESS)
            async for delta in stream:
                assert delta.text
                break
            await stream.aclose()  # type: ignore[attr-defined]
            await idle(llm)

        run(main())
        assert llm.stats().pages_used == 0
        assert llm.stats().requests_finished == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_cancelling_a_task_aborts_its_requests(streaming: bool) -> None:
    with make_llm() as llm:

        async def consume() -> None:
            if streaming:
                async for _ in llm.astream("abc", ENDLESS):
                    pass
            else:
                await llm.agenerate(["abc", "def"], ENDLESS)

        async def main() -> None:
            task = asyncio.create_task(consume())
            while not llm.stats().steps:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await idle(llm)

        run(main())
        assert llm.stats().pages_used == 0
        assert llm.generate("abc", FREE).num_completion_tokens == 20


def test_a_loop_that_is_closed_does_not_stop_the_engine() -> None:
    with make_llm() as llm:
        loop = asyncio.new_event_loop()
        stream = llm.astream("abc", ENDLESS)
        loop.run_until_complete(anext(stream))
        loop.close()
        other = llm.generate("abc", FREE)  # served while the engine finds out that nobody listens
        assert other.num_completion_tokens == 20
        run(idle(llm))
        assert llm.stats().pages_used == 0


def test_errors_are_raised_where_they_are_awaited() -> None:
    with make_llm(num_pages=2) as llm:
        with pytest.raises(KVCapacityError):
            run(llm.agenerate("abc", ENDLESS))
        with pytest.raises(ParameterError):
            run(llm.agenerate([1000], FREE))

        async def stream() -> None:
            async for _ in llm.astream("abc", ENDLESS):
                pass

        with pytest.raises(KVCapacityError):
            run(stream())


def test_achat() -> None:
    class Template:
        def render(self, messages: object, add_generation_prompt: bool = True) -> str:
            return "rendered"

    with LLM.from_parts(FakeExecutor(), FakeTokenizer(), chat_template=Template()) as llm:
        messages = [{"role": "user", "content": "hi"}]

        async def main() -> tuple[str, str]:
            whole = await llm.achat(messages, FREE)
            pieces = await llm.achat(messages, FREE, stream=True)
            assert isinstance(pieces, AsyncIterator)
            assert not isinstance(whole, AsyncIterator)
            return whole.text, "".join([delta.text async for delta in pieces])

        whole, joined = run(main())
        assert whole == joined

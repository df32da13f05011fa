"""Plain completions as OpenAI's own client sees them: a real server, the real SmolLM2."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_process import ServerProcess

from paceline.llm import LLM
from paceline.params import SamplingParams

PROMPT = "The capital of Korea is"
KOREAN = "한국의 수도는 서울이고, 😀"


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm(server: ServerProcess) -> Iterator[LLM]:
    """The same model in this process."""
    with LLM(server.model) as loaded:
        yield loaded


def test_answer_is_that_of_the_library_whole_and_streamed(
    client: openai.OpenAI, server: ServerProcess, llm: LLM
) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=24))
    asked: dict[str, Any] = {"model": server.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    answer = client.completions.create(**asked)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.completion_tokens == expected.num_completion_tokens
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected.text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_asynchronous_client_gets_the_same(client: openai.OpenAI, server: ServerProcess) -> None:
    asked: dict[str, Any] = {"model": server.model, "temperature": 0, "max_tokens": 12}
    expected = client.completions.create(prompt=PROMPT, **asked).choices[0].text

    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as made:
            whole = await made.completions.create(prompt=PROMPT, **asked)
            stream = await made.completions.create(prompt=PROMPT, **asked, stream=True)
            return whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(both()) == (expected, expected)


@pytest.mark.parametrize("prompt", [PROMPT, KOREAN])
def test_echoed_logprobs_are_those_of_the_library(
    client: openai.OpenAI, server: ServerProcess, llm: LLM, prompt: str
) -> None:
    params = SamplingParams(max_tokens=4, logprobs=3, prompt_logprobs=3)
    expected = llm.generate(prompt, params)
    assert expected.logprobs is not None
    assert expected.prompt_logprobs is not None
    answer = client.completions.create(
        model=server.model, prompt=prompt, temperature=0, max_tokens=4, echo=True, logprobs=3
    )
    choice = answer.choices[0]
    arrays = choice.logprobs
    assert arrays is not None
    assert choice.text == prompt + expected.text
    assert arrays.token_logprobs is not None
    entries = [*expected.prompt_logprobs, *expected.logprobs]
    assert list(arrays.token_logprobs) == [entry and entry.logprob for entry in entries]
    assert arrays.tokens is not None
    assert arrays.top_logprobs is not None
    for text, logprob, top in list(zip(arrays.tokens, arrays.token_logprobs, arrays.top_logprobs, strict=True))[1:]:
        assert top[text] == logprob
        assert len(top) in (3, 4)
    assert arrays.text_offset is not None
    for text, offset in zip(arrays.tokens, arrays.text_offset, strict=True):
        if not text.startswith(("bytes:", "<|")):
            assert choice.text.startswith(text, offset)
    if prompt == KOREAN:
        assert any(text.startswith("bytes:") for text in arrays.tokens)


def test_prompts_of_every_form_in_one_request(client: openai.OpenAI, server: ServerProcess, llm: LLM) -> None:
    texts = [PROMPT, "One, two, three,", "Water boils at"]
    params = SamplingParams(max_tokens=8)
    expected = [completion.text for completion in llm.generate(texts, params)]
    tokens = [llm.tokenizer.encode(text) for text in texts]
    asked: dict[str, Any] = {"model": server.model, "temperature": 0, "max_tokens": 8}
    for prompt in (texts, tokens):
        answer = client.completions.create(prompt=prompt, **asked)
        assert [choice.text for choice in answer.choices] == expected
        found = ["", "", ""]
        for chunk in client.completions.create(prompt=prompt, **asked, stream=True):
            found[chunk.choices[0].index] += chunk.choices[0].text
        assert found == expected


def test_prompt_that_ends_in_half_a_character(client: openai.OpenAI, server: ServerProcess, llm: LLM) -> None:
    *cut, last = llm.tokenizer.encode(KOREAN)
    assert llm.tokenizer.decode(cut).endswith("\ufffd"), "the last token completes a character"
    asked: dict[str, Any] = {"model": server.model, "prompt": cut, "temperature": 0, "logit_bias": {str(last): 100}}
    whole = client.completions.create(**asked, max_tokens=1, logprobs=0).choices[0]
    assert whole.text == "", "what completes the prompt's character is no text of the answer"
    assert whole.logprobs is not None
    assert whole.logprobs.text_offset == [0]
    for chunk in client.completions.create(**asked, max_tokens=1, stream=True):
        assert chunk.choices[0].text == ""


def test_errors_are_those_of_the_client(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model=server.model, prompt="x", suffix="y")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=server.model, prompt="word " * 9000)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    assert client.models.retrieve(server.model).id == server.model

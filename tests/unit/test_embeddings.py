"""Embeddings: the mean by its definition, to the bit whatever runs beside it; and `/v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import numpy as np
import pytest
from byte_llm import byte_llm
from fake_executor import FakeExecutor, FakeTokenizer, fake_hidden
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from served import served

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.pooling import EMBEDDING_PARAMS, MeanPool
from paceline.engine.request import Request
from paceline.errors import ParameterError
from paceline.params import SamplingParams


def definition(tokens: Sequence[int], width: int = 32) -> NDArray[np.float64]:
    """The mean of the fake executor's hidden states, each divided by its root mean square."""
    rows = [fake_hidden(tokens[: end + 1], width).astype(np.float64) for end in range(len(tokens))]
    return np.mean([row / (np.sqrt(np.mean(row * row)) or 1.0) for row in rows], axis=0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_the_mean_does_not_depend_on_chunks(chunks: list[int], seed: int) -> None:
    hidden = (np.random.default_rng(seed).standard_normal((sum(chunks), 576)) * 50).astype(np.float32)
    whole, pieces = MeanPool(), MeanPool()
    whole.add(0, hidden)
    pieces.add(0, hidden[:1] * 7)  # what was computed before a preemption counts for nothing
    at = 0
    for rows in chunks:
        pieces.add(at, hidden[at : at + rows])
        at += rows
    assert np.array_equal(whole.mean(), pieces.mean())


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


@pytest.mark.parametrize(("budget", "max_batch", "pages"), [(64, 8, 64), (9, 3, 64), (16, 4, 6)])
def test_bits_do_not_depend_on_batch_chunks_cache_or_preemption(budget: int, max_batch: int, pages: int) -> None:
    config = EngineConfig(max_batch=max_batch, token_budget=budget, max_gap_ms=None)
    engine = Engine(FakeExecutor(num_pages=pages, max_rows=budget), FakeTokenizer(), config)
    prompts = [[1 + (3 * at + start) % 90 for at in range(length)] for start, length in enumerate((1, 31, 70, 70, 100))]
    prompts.append(prompts[2][:50])
    requests: list[Request] = []
    for _ in range(2):  # the second time all is cached
        for prompt in prompts:
            requests.append(engine.make_request(prompt, EMBEDDING_PARAMS, embed=True))
            engine.add(requests[-1])
            engine.add(engine.make_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
        run(engine)
    for request in requests:
        pooled = request.completion().pooled
        alone = MeanPool()
        prompt = request.tokens[: request.num_prompt]
        alone.add(0, np.stack([fake_hidden(prompt[: end + 1], 32) for end in range(len(prompt))]))
        assert pooled is not None
        assert np.array_equal(pooled, alone.mean())
        assert np.allclose(pooled, definition(prompt), atol=1e-6)
        assert request.num_cached == 0, "each row is computed"


def test_embed() -> None:
    with byte_llm() as llm:
        first, second = llm.embed(["abc", [1, 2, 3, 4]])
        assert np.allclose(first.vector, definition(list(b"abc")), atol=1e-6)
        assert (first.num_tokens, second.num_tokens) == (3, 4)
        assert first.vector.dtype == np.float32
        (unit,) = llm.embed(["abc"], normalize=True)
        assert np.linalg.norm(unit.vector) == pytest.approx(1)
        assert llm.embed([]) == []
        with pytest.raises(ParameterError, match="prompts"):
            llm.embed("abc")


def test_the_endpoint_takes_all_forms_of_input_and_says_what_it_gives() -> None:
    async def scenario() -> None:
        async with served() as client:
            for given_input, count in (("abc", 1), (["abc", "de"], 2), (list(b"abc"), 1), ([list(b"abc"), [1]], 2)):
                answer = await client.post("/v1/embeddings", json={"input": given_input})
                document = answer.json()
                assert answer.status_code == 200
                assert [item["index"] for item in document["data"]] == list(range(count))
                assert np.allclose(document["data"][0]["embedding"], definition(list(b"abc")), atol=1e-6)
                assert document["pooling"] == "mean-pooled hidden states"
            assert document["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
            plain = document["data"][0]["embedding"]
            fields = {"input": "abc", "encoding_format": "base64"}
            encoded = (await client.post("/v1/embeddings", json=fields)).json()["data"][0]["embedding"]
            assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == plain
            unit = (await client.post("/v1/embeddings", json={"input": "abc", "normalize": True})).json()
            assert np.linalg.norm(unit["data"][0]["embedding"]) == pytest.approx(1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "abc", "dimensions": 8}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a"] * 257}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": "abc", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [100000]}, "input"),
        ({"input": "a" * 5000}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_400_and_named(fields: dict[str, object], param: str) -> None:
    async def scenario() -> None:
        async with served() as client:
            answer = await client.post("/v1/embeddings", json=fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param

    asyncio.run(scenario())

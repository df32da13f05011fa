"""lm-eval's `local-completions` against a real server: its log-likelihoods are those of the library, to the bit.

Installed it takes half a gigabyte, so these tests run only where it is (`pip install "lm-eval[api]"`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server_process import ServerProcess

from paceline.llm import LLM
from paceline.params import SamplingParams

pytest.importorskip("lm_eval")

PAIRS = [
    ("The capital of Korea is", " Seoul."),
    ("The capital of Korea is", " a large sea of green cheese."),
    ("One, two, three,", " four, five, six"),
    ("한국의 수도는", " 서울입니다 😀"),
    ("", "An empty context has the end of text in its place."),
]


@pytest.fixture(scope="module")
def llm(server: ServerProcess) -> Iterator[LLM]:
    """The same model in this process."""
    with LLM(server.model) as loaded:
        yield loaded


def model_of(server: ServerProcess, **options: Any) -> Any:
    """lm-eval's model over the server, with the server's tokenizer."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        model=server.model, base_url=f"{server.v1}/completions", tokenizer_backend="remote", max_retries=1, **options
    )


def instances(pairs: list[tuple[Any, ...]], kind: str = "loglikelihood") -> list[Any]:
    """Requests as a task makes them."""
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=pair, idx=at) for at, pair in enumerate(pairs)]


def expected(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of a continuation and whether it is the greedy one, by the library."""
    tokenizer = llm.tokenizer
    before = tokenizer.encode(context, False) if context else [tokenizer.encode("<|im_start|>", False)[0]]
    whole = (
        tokenizer.encode(context + continuation, False) if context else before + tokenizer.encode(continuation, False)
    )
    completion = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert completion.prompt_logprobs is not None
    entries = [entry for entry in completion.prompt_logprobs[len(before) :] if entry is not None]
    return sum(entry.logprob for entry in entries), all(entry.logprob == entry.top[0].logprob for entry in entries)


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"num_concurrent": 2}])
def test_loglikelihoods_are_those_of_the_library(server: ServerProcess, llm: LLM, options: dict[str, int]) -> None:
    found = model_of(server, **options).loglikelihood(instances(PAIRS))
    assert [tuple(answer) for answer in found] == [expected(llm, *pair) for pair in PAIRS]


def test_remote_tokenizer_is_that_of_the_library(server: ServerProcess, llm: LLM) -> None:
    from lm_eval.utils import check_remote_tokenizer_support

    assert check_remote_tokenizer_support(f"{server.v1}/completions")
    tokenizer = model_of(server).tokenizer
    for context, continuation in PAIRS:
        tokens = tokenizer.encode(context + continuation)
        assert tokens == llm.tokenizer.encode(context + continuation, False)
        assert tokenizer.decode(tokens) == context + continuation
    assert tokenizer.eos_token_id == llm.tokenizer.eos_token_ids[0]
    assert tokenizer.bos_token_id == llm.tokenizer.bos_token_id
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(rendered) == llm.chat_tokens([{"role": "user", "content": "hi"}])


def test_answers_end_where_a_task_says(server: ServerProcess, llm: LLM) -> None:
    requests = instances([(PAIRS[0][0], {"until": ["."], "max_gen_toks": 20})], "generate_until")
    text = model_of(server).generate_until(requests)[0]
    assert text == llm.generate(PAIRS[0][0], SamplingParams(max_tokens=20, stop=(".",))).text

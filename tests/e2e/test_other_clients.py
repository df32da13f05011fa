"""LangChain and LiteLLM against a real server. Each runs where it is installed; LiteLLM takes 200 MB."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from server_process import ServerProcess

QUESTION = "What is the capital of Korea?"


def chat_model(server: ServerProcess, **options: Any) -> Any:
    """LangChain's chat model over the server."""
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        model=server.model,
        base_url=server.v1,
        api_key="none",
        temperature=0,
        max_retries=0,
        **{"max_tokens": 24, **options},
    )


def test_langchain_invokes_and_streams(server: ServerProcess) -> None:
    model = chat_model(server)
    answer = model.invoke(QUESTION)
    assert "Seoul" in answer.content
    assert answer.usage_metadata["output_tokens"] <= 24
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == answer.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(server: ServerProcess, method: str) -> None:
    class City(BaseModel):
        """A city and its country."""

        city: str = Field(max_length=20)
        country: Literal["Korea", "Japan"]

    found = chat_model(server, max_tokens=80).with_structured_output(City, method=method).invoke(QUESTION)
    assert isinstance(found, City)


def test_litellm_completes_and_streams(server: ServerProcess) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {
        "model": f"openai/{server.model}",
        "api_base": server.v1,
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = litellm.completion(**asked)
    text = answer.choices[0].message.content
    assert "Seoul" in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)) == text
    plain = litellm.text_completion(
        model=f"text-completion-openai/{server.model}",
        api_base=server.v1,
        api_key="none",
        prompt="The capital of Korea is",
        max_tokens=8,
        temperature=0,
    )
    assert "Seoul" in plain.choices[0].text

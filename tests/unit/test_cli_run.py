"""`paceline run`: what it prints where, its JSON document, and how it ends."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from byte_llm import byte_llm

from paceline.cli import run
from paceline.cli.main import main
from paceline.engine.outputs import Completion, Delta, Timing, TokenLogprob, TopLogprob
from paceline.llm import LLM


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command opens: ``llm`` is given out, and what was asked for is kept."""
    kept: dict[str, Any] = {"llm": byte_llm(text="Hello there.\0")}

    def open_model(name: str, config: object, *, verbose: bool = False) -> tuple[LLM, float]:
        kept.update(name=name, config=config)
        return kept["llm"], 0.25

    monkeypatch.setattr(run, "open_model", open_model)
    return kept


def test_streams_the_answer_and_figures_apart(opened: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "some-model", "-p", "Hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello there.\n"
    assert captured.err.count("\n") == 1
    assert "TTFT" in captured.err
    assert "tok/s" in captured.err
    assert "fake, 1 thread" in captured.err
    assert "\x1b" not in captured.out + captured.err
    assert opened["name"] == "some-model"


def test_default_model(opened: dict[str, Any]) -> None:
    assert main(["run", "-p", "Hi"]) == 0
    assert opened["name"] == "smollm2-135m"


def test_json_document(opened: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "Hi", "--json", "--logprobs", "2", "--prompt-logprobs", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document = json.loads(captured.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(document) == {
        "model",
        "text",
        "token_ids",
        "finish_reason",
        "logprobs",
        "prompt_logprobs",
        "usage",
        "timing",
        "path",
    }
    assert document["text"] == "Hello there."
    assert document["finish_reason"] == "stop"
    prompt_tokens = len("user: Hi\nassistant: ")
    completion_tokens = len("Hello there.") + 1
    assert document["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": 0,
    }
    assert len(document["token_ids"]) == document["usage"]["completion_tokens"]
    assert set(document["timing"]) == {"load_s", "ttft_s", "tpot_s", "prefill_tokens_per_s", "decode_tokens_per_s"}
    assert document["timing"]["load_s"] == 0.25
    assert all(value > 0 for value in document["timing"].values())
    assert set(document["path"]) == {"isa", "threads", "weights", "kv_dtype", "speculation"}
    assert [entry["token_id"] for entry in document["logprobs"]] == document["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in document["logprobs"])
    assert document["prompt_logprobs"][0] is None
    assert len(document["prompt_logprobs"]) == prompt_tokens


def test_tokens_found_in_the_cache_are_told(opened: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    llm = byte_llm(text="Hello there.\0")
    prompt = "user: Hi\nassistant: "
    first, second = llm.generate(prompt), llm.generate(prompt)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(prompt) - 1
    assert run.document("m", second, 0.1, {})["usage"]["cached_tokens"] == len(prompt) - 1
    assert run.figures_line(first, {}).startswith(f"{len(prompt)} + 13 tokens")
    assert run.figures_line(second, {}).startswith(f"{len(prompt)} ({len(prompt) - 1} cached) + 13 tokens")


def test_json_has_no_number_that_json_does_not_know() -> None:
    entry = TokenLogprob(1, -math.inf, b"a", (TopLogprob(2, math.nan, b"b"),))
    completion = Completion("a", [1], "length", 3, logprobs=[entry], timing=Timing())
    result = run.document("m", completion, 0.1, {"isa": "x"})
    assert result["logprobs"] == [
        {"token_id": 1, "text": "a", "logprob": None, "top": [{"token_id": 2, "text": "b", "logprob": None}]}
    ]
    json.dumps(result, allow_nan=False)


def test_several_answers(opened: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "Hi", "--json", "--n", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [choice["text"] for choice in document["choices"]] == ["Hello there."] * 3
    assert document["usage"]["completion_tokens"] == 3 * 13
    opened["llm"] = byte_llm(text="Hello there.\0")
    assert main(["run", "-p", "Hi", "--n", "2"]) == 0
    assert capsys.readouterr().out == "[1] Hello there.\n[2] Hello there.\n"


def test_raw_continues_the_prompt_as_it_is(opened: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "Hi", "--raw", "--json", "--max-tokens", "4"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "cached_tokens": 0}
    assert document["finish_reason"] == "length"


def test_model_without_template_continues_the_prompt(
    opened: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    opened["llm"] = byte_llm(chat=False)
    assert main(["run", "-p", "Hi", "--json", "--max-tokens", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"] == 2


def test_chat_needs_a_template(opened: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    opened["llm"] = byte_llm(chat=False)
    assert main(["run", "-p", "Hi", "--chat"]) == 1
    assert "template" in capsys.readouterr().err


def test_system_message(opened: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "Hi", "--system", "Be kind.", "--json"]) == 0
    expected = len("system: Be kind.\nuser: Hi\nassistant: ")
    assert json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"] == expected
    assert main(["run", "-p", "Hi", "--system", "Be kind.", "--raw"]) == 2
    assert "system" in capsys.readouterr().err


def test_prompt_from_standard_input(
    opened: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi"))
    assert main(["run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"] == len("user: Hi\nassistant: ")


def test_prompt_beyond_the_context_says_both_numbers(
    opened: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    opened["llm"] = byte_llm(text="x", context_length=64)
    assert main(["run", "-p", "y" * 100, "--raw"]) == 1
    error = capsys.readouterr().err
    assert "100" in error
    assert "64" in error
    assert error.count("\n") == 1


def test_interrupt_aborts_the_request(
    opened: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened["llm"] = byte_llm(text="Hello there. ")
    write = run.sys.stdout.write

    def interrupted(text: str) -> int:
        if text == "r":
            raise KeyboardInterrupt
        return write(text)

    monkeypatch.setattr(run.sys.stdout, "write", interrupted)
    assert main(["run", "-p", "Hi"]) == 130
    assert "r" not in capsys.readouterr().out
    assert llm.stats().num_running == 0


class Closing(Iterator[Delta]):
    """A stream that counts how often it is closed."""

    def __init__(self, deltas: list[Delta | BaseException]) -> None:
        self._deltas = iter(deltas)
        self.closed = 0

    def __next__(self) -> Delta:
        delta = next(self._deltas)
        if isinstance(delta, BaseException):
            raise delta
        return delta

    def close(self) -> None:
        self.closed += 1


def test_print_stream_keeps_what_was_said_before_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    stream, said = Closing([Delta("a", [1]), Delta("b", [2]), KeyboardInterrupt()]), list[str]()
    with pytest.raises(KeyboardInterrupt):
        run.print_stream(stream, said)
    assert said == ["a", "b"]
    assert stream.closed == 1
    assert capsys.readouterr().out == "ab"


@pytest.mark.parametrize(("pieces", "printed"), [(["a", "b"], "ab\n"), (["a\n"], "a\n"), ([""], "\n")])
def test_print_stream_ends_the_line(pieces: list[str], printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    deltas: list[Delta | BaseException] = [Delta(piece, [1]) for piece in pieces]
    completion = Completion("".join(pieces), [1], "stop", 1)
    assert run.print_stream(Closing([*deltas, Delta("", [], "stop", completion=completion)]), []) is completion
    assert capsys.readouterr().out == printed


def test_the_path_in_words_says_that_a_drafter_failed() -> None:
    path = {"isa": "avx2", "threads": 2, "weights": "native", "kv_dtype": "f16", "speculation": "off"}
    assert run.path_text(path) == "avx2, 2 threads, native weights, f16 KV"
    failed = run.path_text({**path, "speculation_failure": "draft: RuntimeError('no')"})
    assert failed.endswith("f16 KV, a drafter failed (draft: RuntimeError('no'))")

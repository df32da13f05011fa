"""`paceline chat`: the conversation it keeps, what stops an answer, and what it says when the context is full."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from byte_llm import byte_llm

from paceline.cli import chat
from paceline.cli.chat import Conversation
from paceline.cli.main import main
from paceline.llm import LLM
from paceline.params import SamplingParams


def script(*lines: str | type[BaseException]) -> Callable[[], str]:
    """A reader that gives these lines, or raises, and then the end of input."""
    left = iter(lines)

    def read() -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


def talk(llm: LLM, *lines: str | type[BaseException], **params: Any) -> Conversation:
    conversation = Conversation(llm, SamplingParams(**params))
    with llm:
        conversation.run(script(*lines))
    return conversation


def test_a_conversation_is_kept_and_sent_whole(capsys: pytest.CaptureFixture[str]) -> None:
    llm = byte_llm(text="Yes.\0")
    conversation = talk(llm, "One?", "", "  Two? ", "/exit", "Never read")
    assert conversation.messages == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Yes."},
    ]
    rendered = len("user: One?\nassistant: Yes.\nuser: Two?\nassistant: ")
    cached = len("user: One?\nassistant: Yes.")
    assert f"{rendered} ({cached} cached) + 5 tokens" in capsys.readouterr().out


def test_system_message_stays_when_the_conversation_is_cleared() -> None:
    conversation = Conversation(byte_llm(text="Yes.\0"), SamplingParams(), system="Be brief.")
    conversation.run(script("One?", "/clear", "Two?"))
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Yes."},
    ]


def test_undo(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk(byte_llm(text="Yes.\0"), "One?", "Two?", "/undo", "/undo", "/undo")
    assert conversation.messages == []
    assert "nothing to take back" in capsys.readouterr().out


def test_commands_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    talk(byte_llm(text="Yes.\0"), "/help", "/fly away")
    shown = capsys.readouterr().out
    assert all(name in shown for name in chat.COMMANDS)
    assert "There is no command /fly" in shown


def test_interrupt_at_the_prompt_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk(byte_llm(text="Yes.\0"), KeyboardInterrupt, "One?")
    assert len(conversation.messages) == 2
    assert "Ctrl-D" in capsys.readouterr().out


def test_interrupt_stops_the_answer_and_keeps_what_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = byte_llm(text="Yes, and no. ")
    write = sys.stdout.write
    written: list[str] = []

    def interrupted(text: str) -> int:
        written.append(text)
        if len(written) == 6:
            raise KeyboardInterrupt
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", interrupted)
    conversation = talk(llm, "One?", "/help")
    assert conversation.messages == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes, a"},
    ]
    shown = capsys.readouterr().out
    assert "[stopped]" in shown
    assert shown.index("[stopped]") < shown.index("/exit"), "the program went on"
    assert llm.stats().num_running == 0


def test_full_context_is_said_and_nothing_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    llm = byte_llm(text="Yes.\0", context_length=64)
    conversation = talk(llm, "One?", "x" * 60)
    assert conversation.messages == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
    ]
    shown = capsys.readouterr().out
    assert "no longer fits" in shown
    assert "64" in shown
    assert str(len("user: One?\nassistant: Yes.\nuser: " + "x" * 60 + "\nassistant: ")) in shown


def test_answer_cut_by_the_context_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    talk(byte_llm(text="on and ", context_length=64), "One?")
    assert "The context is full (64 tokens)" in capsys.readouterr().out
    talk(byte_llm(text="on and ", context_length=64), "One?", max_tokens=4)
    assert "context is full" not in capsys.readouterr().out


def test_command_greets_and_needs_a_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llms = [byte_llm(text="Yes.\0"), byte_llm(chat=False)]
    monkeypatch.setattr(chat, "open_model", lambda name, config, verbose: (llms.pop(0), 0.1))
    monkeypatch.setattr(chat, "_line_reader", lambda: script("One?"))
    assert main(["chat"]) == 0
    shown = capsys.readouterr().out
    assert "smollm2-135m" in shown
    assert "/help" in shown
    assert "Yes." in shown
    assert main(["chat"]) == 1
    assert "no chat template" in capsys.readouterr().err

"""A real LLM over the fake executor: one token a byte, so that any text goes in and comes out; and a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fake_executor import FakeExecutor, FakeTokenizer, tiny_model

from paceline.config import PAGE_TOKENS, EngineConfig
from paceline.executors.base import StepPlan, StepResult
from paceline.llm import LLM

VOCAB = 257


class PlainTemplate:
    """Each message as "role: content", a line each; knows no tools."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt."""
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return lines + ("assistant: " if add_generation_prompt else "")


class RecitingExecutor(FakeExecutor):
    """Answers a chat with ``text``, over and over; a NUL in it is the end of text, a blank where that is banned."""

    def __init__(self, text: str, *, context_length: int) -> None:
        super().__init__(model=tiny_model(VOCAB, context_length), num_pages=256)
        self._text = [VOCAB - 1 if byte == 0 else byte for byte in text.encode()]

    def run(self, plan: StepPlan) -> StepResult:
        """The fake's checks and log-probabilities; the token follows from what stands behind the last "assistant: "."""
        result = super().run(plan)
        sequence_of = np.repeat(np.arange(len(plan.row_starts) - 1), np.diff(plan.row_starts))
        tokens = result.sampled.tokens.copy()
        for output, row in enumerate(plan.logit_rows.tolist()):
            length = int(plan.positions[row]) + 1
            pages = plan.page_table[sequence_of[row], : -(-length // PAGE_TOKENS)]
            context = bytes(min(token, 255) for token in self._pages[pages].reshape(-1)[:length].tolist())
            said = context.rpartition(b"assistant: ")[2]
            if plan.samples.rows["forced"][output] < 0:
                token = self._text[len(said) % len(self._text)]
                first = plan.samples.rows["banned_start"][output]
                banned = plan.samples.banned_tokens[first : first + plan.samples.rows["banned_len"][output]]
                tokens[output] = ord(" ") if token in banned else token
        return replace(result, sampled=replace(result.sampled, tokens=tokens))


def byte_llm(
    *, text: str | None = None, chat: bool = True, context_length: int = 4096, config: EngineConfig | None = None
) -> LLM:
    """An LLM that answers with ``text`` (or with noise), with or without a chat template."""
    table = [bytes([byte]) for byte in range(256)] + [b""]
    executor = (
        FakeExecutor(model=tiny_model(VOCAB, context_length), num_pages=256)
        if text is None
        else RecitingExecutor(text, context_length=context_length)
    )
    return LLM.from_parts(
        executor, FakeTokenizer(VOCAB, table=table), config=config, chat_template=PlainTemplate() if chat else None
    )

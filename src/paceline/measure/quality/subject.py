"""The models that are compared: each loaded with just the pages that one window needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import EngineConfig
from paceline.engine.memory import weight_bytes, workspace_bytes
from paceline.errors import MemoryBudgetError, ParameterError
from paceline.executors.base import Executor
from paceline.kv.layout import KVLayout, format_bytes, pages_for
from paceline.machine import detect_machine
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.packing import is_matrix
from paceline.weights.raw import Checkpoint

if TYPE_CHECKING:
    from paceline.measure.quality.choice import ModelChoice
    from paceline.text.chat import ChatTemplate

STEP_ROWS = 128
"""Rows of one step, all of which may have logits: 25 MB of them for a vocabulary of 49k."""


@dataclass(frozen=True)
class Subject:
    """A loaded model.

    num_bytes       its weights in memory, packed: what a token's pass reads
    file_bytes      the files it came from
    num_parameters  numbers in its tensors
    head            format of its output matrix
    context_length  tokens of a window, which its pages hold
    """

    name: str
    executor: Executor
    num_bytes: int
    file_bytes: int
    num_parameters: int
    head: str
    context_length: int


@dataclass(frozen=True)
class Opened:
    """A model whose header is read; nothing is loaded yet. ``config`` names threads and instruction set."""

    name: str
    path: Path
    checkpoint: Checkpoint
    config: EngineConfig

    @property
    def needed_bytes(self) -> int:
        """Memory that loading it takes."""
        pages = self.config.kv_memory_bytes or 0
        return weight_bytes(self.checkpoint, self.config) + workspace_bytes(self.checkpoint.config, self.config) + pages

    def load(self) -> Subject:
        """The model, ready to score."""
        return load_subject(self.name, self.checkpoint, self.config)


def open_choice(choice: ModelChoice, base: EngineConfig, *, context: int, path: Path | None = None) -> Opened:
    """The model of a choice, for windows of ``context`` tokens; ``path`` where it is known already."""
    path = path or resolve_model(choice.model)
    checkpoint = open_checkpoint(path)
    return Opened(choice.text, path, checkpoint, scoring_config(checkpoint, choice.config(base), context=context))


def scoring_config(checkpoint: Checkpoint, config: EngineConfig, *, context: int) -> EngineConfig:
    """``config`` with the rows and pages that scoring needs. Raises ``ParameterError`` for a context that the model
    does not have."""
    if context > checkpoint.config.context_length:
        allowed = f"at most what {checkpoint.path} was made for ({checkpoint.config.context_length})"
        raise ParameterError("context", context, allowed)
    config = config.resolve(detect_machine(config.isa))
    page_bytes = KVLayout.of(checkpoint.config, config.kv_dtype).page_bytes
    return dataclasses.replace(
        config,
        context_length=context,
        max_batch=STEP_ROWS,
        token_budget=STEP_ROWS,
        kv_memory_bytes=pages_for(context) * page_bytes,
        speculate="off",
    )


def load_subject(name: str, checkpoint: Checkpoint, config: EngineConfig) -> Subject:
    """The native executor over a checkpoint, on disk or in memory; ``config`` is one of ``scoring_config``."""
    from paceline.executors.native import NativeExecutor

    executor = NativeExecutor.load(checkpoint, config)
    shapes = {tensor: checkpoint.header(tensor).shape for tensor in checkpoint.names()}
    vectors = (shape for tensor, shape in shapes.items() if not is_matrix(tensor, shape))
    tied = checkpoint.config.tie_embeddings
    head = "token_embd.weight" if tied else "output.weight"
    return Subject(
        name=name,
        executor=executor,
        num_bytes=executor.weight_bytes + sum(4 * math.prod(shape) for shape in vectors),
        file_bytes=sum(path.stat().st_size for path in checkpoint.files),
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        head=config.weights_of(head, tied_embeddings=tied),
        context_length=config.context_length or checkpoint.config.context_length,
    )


def check_memory(models: Sequence[Opened], available_bytes: int) -> None:
    """Raises ``MemoryBudgetError`` where the models do not fit side by side."""
    needed = [model.needed_bytes for model in models]
    if sum(needed) > available_bytes:
        each = ", ".join(f"{model.name} {format_bytes(num)}" for model, num in zip(models, needed, strict=True))
        raise MemoryBudgetError(
            f"{format_bytes(available_bytes)} of memory are available and the models, which are loaded side by side, "
            f"take {format_bytes(sum(needed))} ({each}): compare fewer at a time, or use --reference with smaller "
            "weights (MODEL:bf16)"
        )


class Vocabulary:
    """The tokenizer and chat template of the first model; the others must agree with it on every id that both know."""

    def __init__(self, model: Opened) -> None:
        self._of = model
        self.tokenizer = self._tokenizer(model)
        self.num_shared = model.checkpoint.config.num_logits

    def template(self) -> ChatTemplate:
        """Raises ``ParameterError`` for a model without one."""
        from paceline.text.chat import load_chat_template

        template = load_chat_template(self._of.checkpoint)
        if template is None:
            raise ParameterError("chat", self._of.name, "a model with a chat template")
        return template

    def check(self, other: Opened) -> None:
        """Raises ``ParameterError`` for a model with another vocabulary. Ids that pad the larger of two are no tokens,
        and nobody's scores see them (``num_shared``)."""
        num_logits = other.checkpoint.config.num_logits
        if other.path != self._of.path:
            theirs = self._tokenizer(other)
            for token in range(max(self.tokenizer.vocab_size, theirs.vocab_size)):
                mine, its = self.tokenizer.token_text(token), theirs.token_text(token)
                if mine != its:
                    allowed = (
                        f"a model with the vocabulary of {self._of.name}, since probabilities are compared token by "
                        f"token; token {token} is {its!r} here and {mine!r} there"
                    )
                    raise ParameterError("model", other.name, allowed)
        self.num_shared = min(self.num_shared, num_logits)

    @staticmethod
    def _tokenizer(model: Opened) -> Tokenizer:
        return load_tokenizer(model.checkpoint)

"""From the name of a model to what an engine is made of."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from paceline.config import EngineConfig
from paceline.engine.eagle_head import find_eagle_head
from paceline.engine.executor_choice import ExecutorChoice
from paceline.engine.memory import workspace_bytes
from paceline.engine.parts import EngineParts
from paceline.engine.persistence import store_opener
from paceline.engine.speculation import find_draft_model, identity_of, use_speculation
from paceline.errors import ParameterError
from paceline.executors.base import Executor
from paceline.kv.layout import KVLayout, MemoryPlan, plan_memory
from paceline.machine import detect_machine
from paceline.text.chat import ChatTemplate, load_chat_template
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint


@dataclass(frozen=True)
class Loaded:
    """A model that is loaded; ``memory`` as it was planned before."""

    parts: EngineParts
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    memory: MemoryPlan


def load_model(
    model: str, config: EngineConfig, executor: ExecutorChoice, wrap: Callable[[Executor], Executor] | None = None
) -> Loaded:
    """Loads a model, as ``LLM`` describes.

    Raises ``ModelError``, ``MemoryBudgetError``, ``CacheDirectoryError``, and ``ParameterError`` for what ``config``
    asks and this model cannot have.
    """
    with _no_garbage_collection():
        return _load(model, config, executor, wrap)


def _load(
    model: str, config: EngineConfig, executor: ExecutorChoice, wrap: Callable[[Executor], Executor] | None
) -> Loaded:
    executor.check(config)
    checkpoint = open_checkpoint(resolve_model(model))
    machine = detect_machine(config.isa)
    config = config.resolve(machine)
    context_length = config.context_length or checkpoint.config.context_length
    if context_length > checkpoint.config.context_length:
        allowed = f"at most what the model was made for ({checkpoint.config.context_length})"
        raise ParameterError("context_length", context_length, allowed)
    if config.speculate in (None, "auto"):
        config = replace(config, speculate="off" if executor.name == "reference" else "auto")
    available_bytes = executor.available_bytes(machine)
    draft_model = find_draft_model(checkpoint, config, context_length, available_bytes, executor)
    shares_embedding = executor.name == "native"
    eagle_head = find_eagle_head(checkpoint, config, context_length, available_bytes, shares_embedding=shares_embedding)
    draft_bytes = sum(part.num_bytes for part in (draft_model, eagle_head) if part is not None)
    memory = plan_memory(
        KVLayout.of(checkpoint.config, config.kv_dtype),
        available_bytes=available_bytes - draft_bytes,
        weight_bytes=executor.weight_bytes(checkpoint, config),
        workspace_bytes=workspace_bytes(checkpoint.config, config),
        max_batch=config.max_batch,
        context_length=context_length,
        kv_memory_bytes=config.kv_memory_bytes,
    )
    config = replace(config, context_length=context_length, kv_memory_bytes=memory.kv_bytes)
    # One after the other: side by side, the packer waits for the interpreter's lock after each of its many calls,
    # and both together take twice as long.
    tokenizer = load_tokenizer(checkpoint)
    loaded = executor.load(checkpoint, config, num_pages=memory.num_pages)
    parts = EngineParts(
        loaded if wrap is None else wrap(loaded),
        tokenizer,
        config,
        partial(
            use_speculation,
            config=config,
            tokenizer=tokenizer,
            draft_model=draft_model,
            eagle_head=eagle_head,
            target=loaded,
            choice=executor,
            model_identity=identity_of(checkpoint.files),
        ),
        store_opener(checkpoint, config, executor=executor.key, page_bytes=loaded.pages.shape[1]),
    )
    return Loaded(parts, tokenizer, load_chat_template(checkpoint), memory)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A vocabulary is a hundred thousand new objects, none of them garbage: looking for cycles among them costs a
    quarter of the load."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

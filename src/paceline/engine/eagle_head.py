"""The EAGLE head that a configuration names: found before anything is loaded, opened beside its target."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from paceline.config import EngineConfig, parse_speculate
from paceline.engine.memory import draft_kv_bytes, tensor_bytes, weight_bytes
from paceline.errors import ParameterError
from paceline.executors.base import Executor
from paceline.kv.layout import KVLayout
from paceline.speculate.eagle import EagleDrafter
from paceline.weights.eagle_checkpoint import EMBEDDING, EagleCheckpoint
from paceline.weights.raw import Checkpoint


@dataclasses.dataclass(frozen=True)
class EagleHead:
    """A head, and how it is loaded: natively, with the embedding of its target where it has none itself and
    ``shares_embedding``. It changes no token, so it is int8 whatever the target is: for SmolLM2-135M in Q4_1 a row of
    the head, with 4,096 tokens, takes 4.8 % of the target's time on one thread; 3.7 % in int4, 7.7 % in bf16.
    """

    checkpoint: EagleCheckpoint
    config: EngineConfig
    shares_embedding: bool = True

    @property
    def num_bytes(self) -> int:
        """What it takes of the memory: weights, keys and values."""
        weights = self.config.weights_of(EMBEDDING, tied_embeddings=False)
        embedding = tensor_bytes(EMBEDDING, self.checkpoint.header(EMBEDDING), weights)
        shared = embedding if self.shares_embedding and not self.checkpoint.has_embeddings else 0
        return weight_bytes(self.checkpoint, self.config) - shared + (self.config.kv_memory_bytes or 0)

    def open(self, target: Executor, *, exact: bool) -> EagleDrafter:
        """The drafter for ``target``, whose hidden states it must be told."""
        from paceline.executors.native import NativeExecutor, sample_logits

        assert target.model.hidden_size == self.checkpoint.config.hidden_size
        owner = target if isinstance(target, NativeExecutor) and not self.checkpoint.has_embeddings else None
        executor = NativeExecutor.load(self.checkpoint, self.config, embedding_of=owner)
        return EagleDrafter(
            executor,
            self.checkpoint.target_ids,
            max_sequences=self.config.max_batch,
            context_length=self.config.context_length,
            exact=exact,
            sample=partial(sample_logits, executor.program.isa),
        )


def find_eagle_head(
    target: Checkpoint,
    config: EngineConfig,
    context_length: int,
    available_bytes: int,
    *,
    shares_embedding: bool = True,
) -> EagleHead | None:
    """The head that ``config.speculate`` names for ``target``, not loaded yet; None without one. Its
    keys and values get a part of ``available_bytes``, but room for one whole context.

    Raises ``ParameterError`` for more than one, and what reading a head raises.
    """
    names = [name.source for name in parse_speculate(config.speculate or "off") if name.kind == "eagle"]
    if not names:
        return None
    if len(names) > 1:
        raise ParameterError("speculate", config.speculate, "one eagle head")
    checkpoint = EagleCheckpoint(Path(names[0]), target)
    own = dataclasses.replace(
        config,
        weights="int8",
        head_bits=None,
        context_length=context_length,
        kv_memory_bytes=draft_kv_bytes(
            KVLayout.of(checkpoint.config, config.kv_dtype).page_bytes,
            context_length=context_length,
            max_batch=config.max_batch,
            available_bytes=available_bytes,
        ),
    )
    return EagleHead(checkpoint, own, shares_embedding)

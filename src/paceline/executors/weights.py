"""The weights that a graph reads, packed for the kernels, from any checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.config import EngineConfig, ModelConfig
from paceline.errors import CheckpointError
from paceline.ops.graph import Graph, WeightSpec
from paceline.ops.reference import Rounding
from paceline.weights.blocks import dequantize
from paceline.weights.packed import PackedMatrix
from paceline.weights.packing import WeightArena, pack_tensors, rope_permutation
from paceline.weights.raw import Checkpoint, RawTensor


def rounding_for(matrix: PackedMatrix) -> Rounding | None:
    """How activations are rounded to int8 for that matrix; None where it is multiplied as floats."""
    if not matrix.format.group:
        return None
    return Rounding(matrix.format.per_token, matrix.order)


class WeightLoader:
    """Packs matrices and widens vectors of one checkpoint, checking names and shapes against the graph."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        graph: Graph,
        config: EngineConfig,
        *,
        num_threads: int,
        embedding: PackedMatrix | None = None,
    ) -> None:
        """With ``embedding`` that is the embedding matrix, and the checkpoint's is not read."""
        self._checkpoint = checkpoint
        self._graph = graph
        self._config = config
        self._num_threads = num_threads
        self._arena = WeightArena()
        self._model: ModelConfig = checkpoint.config
        self._tied_head: PackedMatrix | None = None
        self._embedding = embedding

    @property
    def packed_bytes(self) -> int:
        """Bytes of all matrices packed so far."""
        return self._arena.taken_bytes

    def matrices(self, names: Sequence[str]) -> list[PackedMatrix]:
        """The matrices, neighbours of one format and order merged along their outputs; see
        ``weights.packing.pack_tensors``.
        """
        specs = [self._graph.weights[name] for name in names]
        if self._embedding is not None and specs[0].role == "embedding":
            assert specs[0].shape == (self._embedding.num_outputs, self._embedding.num_inputs)
            return [self._embedding]
        for spec in specs:
            self._check(spec)
        if specs[0].role in ("embedding", "head"):
            assert len(names) == 1, "embedding and head are matrices of their own"
            return [self._embedding_or_head(specs[0])]
        permutations = {spec.name: order for spec in specs if (order := self._rope_order(spec)) is not None}
        return pack_tensors(
            self._checkpoint,
            names,
            self._config.weights_of(names[0], tied_embeddings=self._model.tie_embeddings),
            permutations=permutations,
            num_threads=self._num_threads,
            arena=self._arena,
        )

    def vector(self, name: str) -> NDArray[np.float32]:
        """The vector as float32, in rope order where it has one; vectors of experts one after the other."""
        spec = self._graph.weights[name]
        self._check(spec)
        raw = self._checkpoint.tensor(name)
        values = dequantize(RawTensor(raw.name, (1, math.prod(raw.shape)), raw.kind, raw.data))[0]
        if not np.isfinite(values).all():
            raise CheckpointError(self._checkpoint.path, "a value is infinite or not a number", tensor=name)
        order = self._rope_order(spec)
        return np.ascontiguousarray(values if order is None else values[order], np.float32)

    def _embedding_or_head(self, spec: WeightSpec) -> PackedMatrix:
        """Tied embeddings are packed once and serve as both."""
        tied = self._model.tie_embeddings
        if tied and self._tied_head is not None:
            return self._tied_head
        weights = self._config.weights_of(spec.name, tied_embeddings=tied)
        (matrix,) = pack_tensors(
            self._checkpoint, [spec.name], weights, num_threads=self._num_threads, arena=self._arena
        )
        if tied:
            self._tied_head = matrix
        return matrix

    def _check(self, spec: WeightSpec) -> None:
        shape = self._checkpoint.header(spec.name).shape
        if shape != spec.shape:
            problem = f"has shape {shape} where the configuration asks for {spec.shape}"
            raise CheckpointError(self._checkpoint.path, problem, tensor=spec.name)

    def _rope_order(self, spec: WeightSpec) -> NDArray[np.int32] | None:
        if spec.rope_heads == 0 or self._checkpoint.interleaved_rope:
            return None
        return rope_permutation(spec.rope_heads, self._model.head_dim, self._model.rope.dim)

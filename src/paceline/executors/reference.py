"""The reference executor: every op in plain numpy, one node after the other. It is the definition that other executors
are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS, EngineConfig, ModelConfig
from paceline.executors.base import StepPlan, StepResult
from paceline.executors.weights import WeightLoader, rounding_for
from paceline.models.registry import build_graph
from paceline.ops.graph import Graph, Node
from paceline.ops.reference import KeyValues, Rounding, Step, Table
from paceline.ops.spec import OPS
from paceline.sampling.distribution import probabilities
from paceline.sampling.draw import sample_reference
from paceline.sampling.rows import SampledRows, SampleRows
from paceline.weights.packed import TILE, PackedMatrix
from paceline.weights.packing import is_matrix
from paceline.weights.raw import Checkpoint
from paceline.weights.tiling import unpack


class UnpackedWeights:
    """The packed weights of a graph as float32, unpacked when first read."""

    def __init__(self, graph: Graph, loader: WeightLoader) -> None:
        self._graph = graph
        self._loader = loader
        self._packed: dict[str, PackedMatrix] = {}
        self._values: dict[str, Table] = {}

    def values(self, name: str) -> Table:
        """The matrix [outputs, inputs] or vector; of experts one after the other."""
        if name not in self._values:
            shape = self._graph.weights[name].shape
            values = unpack(self._matrix(name)) if is_matrix(name, shape) else self._loader.vector(name)
            self._values[name] = values.reshape(shape)
        return self._values[name]

    def magnitudes(self, name: str) -> Table:
        """|scale * q| + |minimum| of each weight; |weight| where no minimum is stored: zero points come off exactly."""
        matrix = self._matrix(name)
        if matrix.format.offset != "min":
            return np.abs(self.values(name))
        data = matrix.data.copy()
        data.reshape(-1, matrix.format.group_bytes)[:, -2 * TILE :] = 0  # the minima
        products = unpack(replace(matrix, data=data))
        products = products.reshape(self.values(name).shape)
        return np.asarray(np.abs(products) + np.abs(self.values(name) - products), np.float32)

    def rounding(self, name: str) -> Rounding | None:
        """How activations are rounded for it; None for float formats."""
        return rounding_for(self._matrix(name))

    def _matrix(self, name: str) -> PackedMatrix:
        if name not in self._packed:
            (self._packed[name],) = self._loader.matrices([name])
        return self._packed[name]


class ReferenceExecutor:
    """Runs steps in numpy. Slow; for tests, debugging and as the quality reference.

    ``activations`` "int8" rounds what integer weights are multiplied with, as the native executor does; "float" does
    not, and is what quality is measured against.
    """

    def __init__(
        self,
        graph: Graph,
        model: ModelConfig,
        config: EngineConfig,
        weights: UnpackedWeights,
        *,
        num_pages: int,
        activations: Literal["int8", "float"],
    ) -> None:
        self.graph = graph
        self.model = model
        self.num_pages = num_pages
        self.max_rows = config.token_budget
        self.max_outputs = config.max_outputs
        pool = np.zeros((num_pages, 2, model.num_layers, model.num_kv_heads, PAGE_TOKENS, model.head_dim), np.float32)
        self.pages = pool.reshape(num_pages, -1).view(np.uint8)
        self.kv = KeyValues(pool[:, 0].swapaxes(0, 1), pool[:, 1].swapaxes(0, 1), config.kv_dtype)
        self._weights = weights
        self._config = config
        self._activations: Literal["int8", "float"] = activations
        self._logits: Table = np.zeros((0, model.num_logits), np.float32)
        self._hidden: Table = np.zeros((0, model.hidden_size), np.float32)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig,
        *,
        num_pages: int,
        activations: Literal["int8", "float"] = "int8",
    ) -> ReferenceExecutor:
        """The checkpoint in the formats that ``config`` asks for, unpacked to float32."""
        model = checkpoint.config.at_context(config.context_length or checkpoint.config.context_length)
        graph = build_graph(model)
        weights = UnpackedWeights(graph, WeightLoader(checkpoint, graph, config, num_threads=1))
        return cls(graph, model, config, weights, num_pages=num_pages, activations=activations)

    def step_of(self, plan: StepPlan) -> Step:
        """What the ops read of a plan; pages that it wants copied are copied."""
        for source, destination in plan.page_copies:
            self.kv.keys[:, destination] = self.kv.keys[:, source]
            self.kv.values[:, destination] = self.kv.values[:, source]
        sequence_of_row = np.repeat(np.arange(len(plan.row_starts) - 1, dtype=np.int32), np.diff(plan.row_starts))
        return Step(
            self.model,
            self._weights,
            self.kv,
            plan.tokens,
            plan.positions,
            sequence_of_row,
            plan.page_table,
            plan.logit_rows,
            self._activations,
            plan.kv_writes,
            plan.features,
        )

    @staticmethod
    def apply(node: Node, values: dict[str, Table], step: Step) -> list[Table]:
        """The outputs of one node."""
        return OPS[node.op].reference(node, [values[value.name] for value in node.inputs], step)

    def run(self, plan: StepPlan) -> StepResult:
        """One step; see ``Executor.run``."""
        step = self.step_of(plan)
        values: dict[str, Table] = {}
        for node in self.graph.nodes:
            for value, table in zip(node.outputs, self.apply(node, values, step), strict=True):
                values[value.name] = table
        self._logits = values[self.graph.logits.name]
        self._hidden = values[self.graph.hidden.name]
        return StepResult(sample_reference(self._logits, plan.samples))

    def logits(self) -> NDArray[np.float32]:
        """Logits [outputs, vocab] of the last step."""
        return self._logits

    def hidden(self) -> NDArray[np.float32]:
        """See ``Executor.hidden``."""
        return self._hidden

    def probabilities(self, samples: SampleRows, outputs: Sequence[int]) -> NDArray[np.float64]:
        """See ``Executor.probabilities``."""
        p = np.empty((len(outputs), self.model.num_logits))
        for found, output in zip(p, outputs, strict=True):
            found[:] = probabilities(self._logits[output], samples.rows[output], samples)
        return p

    def score(self, samples: SampleRows, outputs: Sequence[int]) -> SampledRows:
        """See ``Executor.score``."""
        return sample_reference(self._logits[list(outputs)], samples)

    def path(self) -> dict[str, str | int]:
        """The path that really runs."""
        return {
            "isa": "numpy",
            "threads": 1,
            "weights": self._config.weights,
            "kv_dtype": self._config.kv_dtype,
        }

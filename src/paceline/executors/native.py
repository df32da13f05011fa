"""The native executor: a model lowered once to a program that runs a whole step in one call, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import _native
from paceline.config import EngineConfig, ModelConfig
from paceline.errors import ParameterError, UnsupportedError
from paceline.executors.base import StepPlan, StepResult
from paceline.executors.lowering import Lowering
from paceline.executors.placement import NONE, Lowered
from paceline.executors.weights import WeightLoader
from paceline.kv.layout import KVLayout
from paceline.models.registry import build_graph
from paceline.ops.graph import Graph
from paceline.sampling.distribution import NoTokenError
from paceline.sampling.rows import BAD_TOKEN, NOT_FINITE, NOTHING_LEFT, SampledRows, SampleRows
from paceline.weights.raw import Checkpoint

_REASONS = {
    NOT_FINITE: "a logit is not finite",
    NOTHING_LEFT: "every token is banned or masked, or a logit overflows",
    BAD_TOKEN: "a list reaches outside the vocabulary or its array",
}


class NativeExecutor:
    """Runs steps on the CPU. Owns the packed weights, and the KV pool unless it uses that of another executor."""

    def __init__(
        self,
        program: _native.Program,
        graph: Graph,
        model: ModelConfig,
        config: EngineConfig,
        lowered: Lowered,
        weight_bytes: int,
    ) -> None:
        self.program = program
        self.graph = graph
        self.model = model
        self.lowered = lowered
        self.num_pages = program.num_pages
        self.max_rows = program.max_rows
        self.max_outputs = program.max_outputs
        self.pages = program.kv()
        self.weight_bytes = weight_bytes
        self._config = config
        self._num_rows = self._num_outputs = 0
        self._page_table = np.zeros((1, 1), np.int32)
        self._tokens = np.zeros(self.max_outputs, np.int32)
        self._status = np.zeros(self.max_outputs, np.uint32)
        self._logprobs = np.zeros(self.max_outputs, np.float32)
        self._no_top_tokens = np.zeros((self.max_outputs, 0), np.int32)
        self._no_top_logprobs = np.zeros((self.max_outputs, 0), np.float32)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig,
        pages_of: NativeExecutor | None = None,
        embedding_of: NativeExecutor | None = None,
    ) -> NativeExecutor:
        """The checkpoint packed and lowered; ``config`` must name threads and KV memory (the pool takes whole pages of
        it).

        With ``pages_of`` it reads and writes the pool of that executor, which it keeps alive: keys and values of either
        are a context for the other. Only one of the two may run at a time. Raises ``UnsupportedError`` where their
        pages differ. With ``embedding_of`` its embedding matrix is that executor's, in whatever format.
        """
        model = checkpoint.config.at_context(config.context_length or checkpoint.config.context_length)
        _check_supported(model)
        isa = config.isa or _native.best_isa()
        if isa not in _native.isas():
            raise ParameterError("isa", isa, f"this processor runs {', '.join(_native.isas())}")
        num_threads = config.num_threads or 1
        graph = build_graph(model)
        page_bytes = KVLayout.of(model, config.kv_dtype).page_bytes
        num_pages = max(1, (config.kv_memory_bytes or page_bytes) // page_bytes)
        if pages_of is not None:
            _check_same_pages(model, config, num_pages, pages_of)
        program = _native.Program(
            isa=isa,
            num_threads=num_threads,
            max_rows=config.token_budget,
            max_outputs=config.max_outputs,
            vocab_size=model.vocab_size,
            num_pages=num_pages,
            context_length=config.context_length or model.context_length,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            num_layers=model.num_layers,
            kv_kind=config.kv_dtype,
            pages_of=None if pages_of is None else pages_of.program,
            num_logits=model.num_logits,
        )
        embedding = None if embedding_of is None else embedding_of.lowered.embedding
        loader = WeightLoader(checkpoint, graph, config, num_threads=num_threads, embedding=embedding)
        lowered = Lowering(program, graph, model, loader).run()
        return cls(program, graph, model, config, lowered, loader.packed_bytes)

    def run(self, plan: StepPlan) -> StepResult:
        """One step; see ``Executor.run``. Results are copies, except ``logits``."""
        samples = plan.samples
        count = len(plan.logit_rows)
        top = int(samples.rows["num_logprobs"].max()) if count else 0
        if top > 0:
            top_tokens = np.full((count, top), -1, np.int32)
            top_logprobs = np.full((count, top), -np.inf, np.float32)
        else:
            top_tokens, top_logprobs = self._no_top_tokens[:count], self._no_top_logprobs[:count]
        self.set_step(plan, top_tokens, top_logprobs)
        self.program.run()
        self.program.results(self._tokens, self._status, self._logprobs)
        self._num_rows, self._num_outputs = len(plan.tokens), count
        return StepResult(
            SampledRows(
                self._tokens[:count].copy(),
                self._logprobs[:count].copy(),
                top_tokens,
                top_logprobs,
                self._status[:count].copy(),
            )
        )

    def set_step(self, plan: StepPlan, top_tokens: NDArray[np.int32], top_logprobs: NDArray[np.float32]) -> None:
        """Hands the step's arrays to the program, which keeps references until it has run."""
        samples = plan.samples
        page_table = np.ascontiguousarray(plan.page_table)
        self.program.set_step(
            plan.tokens,
            plan.positions,
            plan.row_starts,
            page_table,
            plan.logit_rows,
            plan.page_copies,
            plan.kv_writes,
            *_arrays(samples),
            top_tokens,
            top_logprobs,
        )
        self._page_table = page_table  # only now: a refused step leaves the one before as it was
        self._set_features(plan)

    def _set_features(self, plan: StepPlan) -> None:
        buffer, features = self.lowered.features_buffer, plan.features
        assert (buffer == NONE) == (features is None), "a plan has features where the graph reads them"
        if features is not None:
            rows, width = len(plan.tokens), self.model.hidden_size
            assert features.shape == (rows, width), "a row of features for each token"
            self.program.buffer(buffer, rows)[:, :width] = features

    def logits(self) -> NDArray[np.float32]:
        """Logits [outputs, vocab] of the last step, valid until the next."""
        return self.program.buffer(self.lowered.logits_buffer, self._num_outputs)[:, : self.model.num_logits]

    def hidden(self) -> NDArray[np.float32]:
        """See ``Executor.hidden``: a view."""
        return self.program.buffer(self.lowered.hidden_buffer, self._num_rows)[:, : self.model.hidden_size]

    def probabilities(self, samples: SampleRows, outputs: Sequence[int]) -> NDArray[np.float64]:
        """See ``Executor.probabilities``. The definition is ``sampling.distribution``; a weight is rounded to float32:
        ``csrc/kernels/distribution-inl.h`` has the bound. What is kept is what the native draw keeps.
        """
        p = np.empty((len(outputs), self.model.num_logits))
        status = np.zeros(len(outputs), np.uint32)
        self.program.distributions(
            self.lowered.logits_buffer,
            np.array(outputs, np.int32),
            *_arrays(samples),
            p,
            status,
        )
        for output, code in zip(outputs, status.tolist(), strict=True):
            if code:
                raise NoTokenError(f"output {output}: {_REASONS[code]}", code)
        return p

    def score(self, samples: SampleRows, outputs: Sequence[int]) -> SampledRows:
        """See ``Executor.score``."""
        return sample_logits(self.program.isa, np.ascontiguousarray(self.logits()[list(outputs)]), samples)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of buffers and scratch; pages of it that no step reached are not resident."""
        return self.program.workspace_bytes

    @property
    def shared_splits(self) -> int:
        """Splits of keys that sequences of the last step did not read since another's rows had them, in each layer."""
        return self.program.shared_splits

    def path(self) -> dict[str, str | int]:
        """The path that really runs."""
        return {
            "isa": self.program.isa,
            "threads": self.program.num_threads,
            "weights": self._config.weights,
            "kv_dtype": self.program.kv_kind,
        }


def sample_logits(isa: str, logits: NDArray[np.float32], samples: SampleRows) -> SampledRows:
    """What the records of ``samples`` choose and report from logits [outputs, vocab], one output after the other."""
    count, top = len(logits), max(0, int(samples.rows["num_logprobs"].max(initial=0)))
    sampled = SampledRows(
        np.zeros(count, np.int32),
        np.zeros(count, np.float32),
        np.zeros((count, top), np.int32),
        np.zeros((count, top), np.float32),
        np.zeros(count, np.uint32),
    )
    _native.sample(
        isa,
        logits,
        *_arrays(samples),
        sampled.tokens,
        sampled.logprobs,
        sampled.top_tokens,
        sampled.top_logprobs,
        sampled.status,
    )
    return sampled


def _arrays(samples: SampleRows) -> tuple[NDArray[Any], ...]:
    """Records and lists in the order in which the native side takes them."""
    return (
        samples.rows.view(np.uint8),
        samples.count_tokens,
        samples.count_values,
        samples.bias_tokens,
        samples.bias_values,
        samples.banned_tokens,
        samples.mask_words,
    )


def _check_supported(model: ModelConfig) -> None:
    if model.head_dim % 16 or model.head_dim > 256:
        raise UnsupportedError(f"head_dim {model.head_dim}: the attention kernel takes multiples of 16 up to 256")
    if model.rope.dim % 2 or model.rope.dim > model.head_dim:
        raise UnsupportedError(f"rotary dimension {model.rope.dim} of heads of {model.head_dim}")


def _check_same_pages(model: ModelConfig, config: EngineConfig, num_pages: int, owner: NativeExecutor) -> None:
    theirs = owner.model
    num_layers = min(model.num_layers, theirs.num_layers)
    pairs = {
        "layers": (model.num_layers, theirs.num_layers),
        "KV heads": (model.num_kv_heads, theirs.num_kv_heads),
        "head_dim": (model.head_dim, theirs.head_dim),
        "rope": tuple([each.rope_of(layer) for layer in range(num_layers)] for each in (model, theirs)),
        "kv_dtype": (config.kv_dtype, owner.program.kv_kind),
        "pages": (num_pages, owner.num_pages),
    }
    differences = [f"{name} {mine} and {other}" for name, (mine, other) in pairs.items() if mine != other]
    if differences:
        raise UnsupportedError(f"pages are shared by executors of one shape; here differ {', '.join(differences)}")

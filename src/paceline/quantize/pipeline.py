"""Layer by layer through a model: look at the inputs, quantise, go on with what the matrices have become.

Two passes over the calibration tokens run beside each other where the method wants it: the original's, and that of the
model as quantised so far. In memory are one stage's weights, the values that cross from stage to stage, and nothing of
what is finished: that lies in the work directory, and a later run with the same key takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.ops.reference import Table
from paceline.quantize.folding import Producer, can_divide_rows, divide_quantized_rows, divide_rows, producer_of
from paceline.quantize.forward import Observer, SequenceForward, Stage, Values, checkpoint_values
from paceline.quantize.input_scaling import InputStatistics, quantize_awq, quantize_smoothquant
from paceline.quantize.moments import AsymmetricMoments, Moments, input_moments
from paceline.quantize.recipe import Quantised, Recipe, quantize_rounding, quantize_together
from paceline.quantize.scheme import Scheme
from paceline.quantize.work import Arrays, WorkDirectory
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import Checkpoint

Progress = Callable[[int, int], None]
"""Called with the number of matrices that are finished and of all of them."""

Seen = TypeVar("Seen", Moments, InputStatistics)

WORK_VERSION = 2
"""Goes into every key: raised whenever the same settings give other bytes."""

DIVISOR = "divisor"
"""Of a part's arrays the one that whoever makes the stage's inputs is to be divided by."""


@dataclass(frozen=True)
class Settings:
    """All that the codes depend on besides the model. ``tokens`` [sequences, length] i32, None for rounding."""

    scheme: Scheme
    recipe: Recipe
    tokens: NDArray[np.int32] | None = None

    def key(self, model_digest: bytes) -> str:
        """Hex digest of the settings and the model's files."""
        state = blake2b(digest_size=32)
        for part in (
            f"{WORK_VERSION} {np.__version__}".encode(),
            model_digest,
            repr(sorted(asdict(self.scheme).items())).encode(),
            repr(sorted(asdict(self.recipe).items())).encode(),
            b"" if self.tokens is None else repr(self.tokens.shape).encode() + self.tokens.tobytes(),
        ):
            state.update(len(part).to_bytes(8, "little") + part)
        return state.hexdigest()


class FinishedModel:
    """A ``QuantizedModel`` that lies in a work directory; keeps the part that was read last."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        scheme: Scheme,
        work: WorkDirectory,
        parts: dict[str, str],
        divisors: dict[str, Table],
    ) -> None:
        """``parts`` says in which part of ``work`` a tensor is; others are the checkpoint's. ``divisors`` are what the
        rows of some tensors are to be divided by, because what reads them was made for that."""
        self.checkpoint = checkpoint
        self.scheme = scheme
        self._work = work
        self._parts = parts
        self._divisors = divisors
        self._last: tuple[str, Arrays] | None = None

    def matrix(self, name: str) -> QuantizedMatrix | None:
        """See ``QuantizedModel``."""
        arrays = self._arrays(name)
        if arrays is None or f"{name}/codes" not in arrays:
            return None
        matrix = _matrix(name, arrays, self.scheme)
        return divide_quantized_rows(matrix, self._divisors[name]) if name in self._divisors else matrix

    def error(self, name: str) -> float:
        """How far a quantised matrix is off, as in ``Quantised``."""
        arrays = self._arrays(name)
        assert arrays is not None, name
        return float(arrays[f"{name}/error"][0])

    def values(self, name: str) -> Table:
        """See ``QuantizedModel``."""
        values = checkpoint_values(self.checkpoint, name)
        return divide_rows(values, self._divisors[name]) if name in self._divisors else values

    def _arrays(self, name: str) -> Arrays | None:
        part = self._parts.get(name)
        if part is None:
            return None
        if self._last is None or self._last[0] != part:
            arrays = self._work.load(part)
            assert arrays is not None, f"{part} was finished and is gone"
            self._last = part, arrays
        return self._last[1]


def quantize_model(
    checkpoint: Checkpoint, settings: Settings, work: WorkDirectory, *, progress: Progress = lambda done, total: None
) -> FinishedModel:
    """All layers' matrices, quantised. Raises CheckpointError for values that are not finite, in the file or on the way
    through the model, ParameterError for a group that does not divide a matrix."""
    run = _Run(checkpoint, settings, work)
    total = sum(len(stage.matrices) for stage in run.forward.stages)
    done = 0
    progress(done, total)
    for index, stage in enumerate(run.forward.stages):
        run.do(index, stage)
        done += len(stage.matrices)
        progress(done, total)
    return FinishedModel(checkpoint, settings.scheme, work, run.parts, run.divisors)


class _Run:
    """The state of a walk over the stages."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, work: WorkDirectory) -> None:
        self._checkpoint = checkpoint
        self._settings = settings
        self._work = work
        self._changed: dict[str, Table] = {}
        self.forward = SequenceForward(checkpoint)
        self._quantised_forward = SequenceForward(checkpoint, self._changed.get)
        self._original: Values = {}
        self._quantised: Values = {}
        self.parts: dict[str, str] = {}
        self.divisors: dict[str, Table] = {}
        method = settings.scheme.method
        has_tokens = settings.tokens is not None
        self._scales_inputs = method in ("awq", "smoothquant")
        self._runs_original = has_tokens and (settings.recipe.asymmetric or self._scales_inputs)
        self._runs_quantised = has_tokens and not self._scales_inputs
        for stage in self.forward.stages:
            for name in stage.matrices:
                settings.scheme.group_of(self.forward.graph.weights[name].shape[1], tensor=name)

    def do(self, index: int, stage: Stage) -> None:
        """Quantises a stage's matrices and goes through it."""
        part = f"stage-{index:04d}"
        arrays = self._work.load(part) if stage.matrices else {}
        if arrays is None:
            arrays = self._scale_inputs(stage) if self._scales_inputs else _arrays(self._quantise(stage))
            self._work.save(part, arrays)
        else:
            self._run_original(stage, None)
        self.parts.update(dict.fromkeys(stage.matrices, part))
        producer = self._producer(stage)
        if producer is not None and DIVISOR in arrays:
            self.divisors.update(dict.fromkeys(producer.tensors, np.asarray(arrays[DIVISOR], np.float32)))
        if not self._runs_quantised:
            return
        assert self._settings.tokens is not None
        self._changed.clear()
        self._changed.update((name, _matrix(name, arrays, self._settings.scheme).values()) for name in stage.matrices)
        self._quantised_forward.run(stage, self._quantised, self._settings.tokens)

    def _look_at(self, stage: Stage) -> Moments | None:
        """What the method needs to know; takes the original through the stage, where it runs at all."""
        recipe, tokens = self._settings.recipe, self._settings.tokens
        if tokens is None:
            return None
        if not recipe.asymmetric:
            return self._finite(stage, input_moments(stage, self._quantised, tokens))
        observer = AsymmetricMoments(
            self.forward,
            stage,
            self._quantised,
            follow_residual=recipe.follow_residual,
            weigh_tokens=recipe.weigh_tokens,
        )
        self._run_original(stage, observer)
        return self._finite(stage, self._in_file_order(observer.moments))

    def _finite(self, stage: Stage, seen: Seen) -> Seen:
        """``seen``; CheckpointError when the model's values have left the range of float32 on their way here."""
        if not np.isfinite(seen.H).all():
            problem = "its inputs over the calibration text are infinite or not numbers"
            raise CheckpointError(self._checkpoint.path, problem, tensor=stage.matrices[0])
        return seen

    def _run_original(self, stage: Stage, observe: Observer | None) -> None:
        if self._runs_original:
            assert self._settings.tokens is not None
            self.forward.run(stage, self._original, self._settings.tokens, observe=observe)

    def _producer(self, stage: Stage) -> Producer | None:
        if stage.linear is None:
            return None
        return producer_of(self.forward.graph, stage.linear, self._checkpoint.config)

    def _scale_inputs(self, stage: Stage) -> Arrays:
        """What AWQ or SmoothQuant make of a stage; takes the original through it."""
        scheme, tokens = self._settings.scheme, self._settings.tokens
        assert tokens is not None, "they look at tokens"
        seen = InputStatistics(stage, (tokens.shape[0], tokens.shape[1]))
        self._run_original(stage, seen)
        self._finite(stage, seen)
        tables = {name: checkpoint_values(self._checkpoint, name) for name in stage.matrices}
        quantize = quantize_awq if scheme.method == "awq" else quantize_smoothquant
        producer = self._producer(stage)
        found = quantize(tables, seen, scheme, producer)
        if producer is not None and found.divisor is not None and not self._can_divide(producer.weight, found.divisor):
            found = quantize(tables, seen, scheme, None)
        arrays = _arrays(found.quantised)
        return arrays if found.divisor is None else {**arrays, DIVISOR: found.divisor}

    def _can_divide(self, name: str, divisor: Table) -> bool:
        """Whether a tensor that is finished can absorb a scale."""
        part = self.parts.get(name)
        arrays = None if part is None else self._work.load(part)
        return arrays is None or can_divide_rows(_matrix(name, arrays, self._settings.scheme), divisor)

    def _quantise(self, stage: Stage) -> dict[str, Quantised]:
        moments = self._look_at(stage)
        tables = {name: checkpoint_values(self._checkpoint, name) for name in stage.matrices}
        if moments is None:
            return quantize_rounding(tables, self._settings.scheme)
        return quantize_together(tables, moments, self._settings.scheme, self._settings.recipe)

    def _in_file_order(self, moments: Moments) -> Moments:
        """Rows of YX as the checkpoint has those of the matrix."""
        return Moments(moments.H, {name: self.forward.weights.file_order(name, YX) for name, YX in moments.YX.items()})


def _arrays(quantised: dict[str, Quantised]) -> Arrays:
    arrays: Arrays = {}
    for name, found in quantised.items():
        matrix = found.matrix
        arrays |= {f"{name}/codes": matrix.codes, f"{name}/scale": matrix.scale, f"{name}/zero": matrix.zero}
        arrays[f"{name}/error"] = np.array([found.error])
    return arrays


def _matrix(name: str, arrays: Arrays, scheme: Scheme) -> QuantizedMatrix:
    codes, scale, zero = (arrays[f"{name}/{plane}"] for plane in ("codes", "scale", "zero"))
    group = codes.shape[1] // scale.shape[1]
    return QuantizedMatrix(codes, scale, zero, scheme.bits, group, scheme.per_token)

"""What each op means, in plain numpy: the definition that every executor must agree with.

Notation: x [rows, width] f32. Sums are taken in float64 where that costs little and rounded once to float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS, KVFormat, ModelConfig, RopeConfig
from paceline.ops.graph import Node

Table = NDArray[np.float32]
ACTIVATION_GROUP = 32


@dataclass(frozen=True)
class Rounding:
    """How activations are rounded to int8: in groups of 32 inputs, or a whole row with one scale (``per_token``).

    ``order`` [inputs] i32: groups are made of the inputs in that order; None: as they lie.
    """

    per_token: bool = False
    order: NDArray[np.int32] | None = None

    @property
    def key(self) -> tuple[bool, bytes]:
        """Equal for roundings that are alike."""
        return self.per_token, b"" if self.order is None else self.order.tobytes()

    @property
    def is_plain(self) -> bool:
        """Whether it is the form that norms and activations are fused with."""
        return not self.per_token and self.order is None


class Weights(Protocol):
    """Weights by name: values as float32, the sum of the magnitudes of the terms that each is made of (|scale q| +
    |min|, which bounds rounding), and how activations are rounded where the kernels multiply them as integers (None
    where they do not)."""

    def values(self, name: str) -> Table: ...

    def magnitudes(self, name: str) -> Table: ...

    def rounding(self, name: str) -> Rounding | None: ...


@dataclass
class KeyValues:
    """The pages: keys and values [layers, pages, kv_heads, PAGE_TOKENS, head_dim] f32, rounded to the KV format when
    written.
    """

    keys: Table
    values: Table
    format: KVFormat

    def round(self, x: Table) -> Table:
        """x [..., head_dim] as the format holds it; f16 stores magnitudes beyond its largest finite one as that."""
        if self.format == "f16":
            return np.clip(x, -65504.0, 65504.0).astype(np.float16).astype(np.float32)
        if self.format == "f32":
            return x
        if self.format == "int8":
            codes, scale = quantise_vectors(x)
            return codes * scale
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32)


def quantise_vectors(x: Table) -> tuple[NDArray[np.int8], Table]:
    """int8 codes [..., head_dim] and scales [..., 1] of vectors: scale = max|x| / 127 rounded up to bf16, so that no
    code passes 127; code = rint(x * (1 / scale)).

    Vectors whose largest magnitude is below 2^-119, where scales would be subnormal, become zeros. A vector that is not
    finite has the scale NaN.
    """
    largest = np.abs(x).max(axis=-1, keepdims=True)
    finite = np.isfinite(largest)
    live = finite & (largest >= np.float32(2.0**-119))
    ratio = np.where(live, largest, np.float32(127.0)) / np.float32(127.0)
    scale = ((ratio.view(np.uint32) + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
    codes = np.rint(np.where(live, x, np.float32(0.0)) * (np.float32(1.0) / scale)).astype(np.int8)
    return codes, np.where(live, scale, np.where(finite, np.float32(0.0), np.float32(np.nan)))


@dataclass
class Step:
    """What the ops of one step read besides their inputs; ``rope_write`` modifies ``kv``."""

    model: ModelConfig
    weights: Weights
    kv: KeyValues
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequence_of_row: NDArray[np.int32]
    page_table: NDArray[np.int32]
    logit_rows: NDArray[np.int32]
    activations: Literal["int8", "float"] = "int8"
    kv_writes: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    features: Table | None = None

    def written(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """Where keys and values go, in order: rows, pages and places in a page. Each row to its own sequence, then
        those of ``kv_writes`` (row, sequence) to further ones.
        """
        rows = np.concatenate([np.arange(len(self.positions)), self.kv_writes[:, 0]])
        sequences = np.concatenate([self.sequence_of_row, self.kv_writes[:, 1]])
        positions = self.positions[rows]
        return rows, self.page_table[sequences, positions // PAGE_TOKENS], positions % PAGE_TOKENS


def quantise_activations(x: Table, *, group: int = ACTIVATION_GROUP) -> tuple[NDArray[np.int8], Table]:
    """int8 values [rows, width] and scales [rows, groups] of groups of inputs: scale = max|x| / 127, q = rint(x * (127
    / max|x|)).

    The last group may be short. Groups whose largest magnitude is below 1e-36 become zeros.
    """
    rows, width = x.shape
    groups = -(-width // group)
    padded = np.zeros((rows, groups * group), np.float32)
    padded[:, :width] = x
    grouped = padded.reshape(rows, groups, group)
    largest = np.abs(grouped).max(axis=2)
    live = ~(largest < np.float32(1e-36))
    inverse = np.divide(np.float32(127.0), largest, out=np.zeros_like(largest), where=live)
    q = np.rint(grouped * inverse[:, :, None]).astype(np.int8).reshape(rows, groups * group)[:, :width]
    scale = np.where(live, largest / np.float32(127.0), np.float32(0.0)).astype(np.float32)
    return q, scale


def rounded_activations(x: Table, rounding: Rounding) -> Table:
    """x [rows, width] as its int8 form holds it, scale * q as float32; columns stay in their places."""
    ordered = x if rounding.order is None else x[:, rounding.order]
    group = x.shape[1] if rounding.per_token else ACTIVATION_GROUP
    q, scale = quantise_activations(ordered, group=group)
    values = np.asarray(q * np.repeat(scale, group, axis=1)[:, : q.shape[1]], np.float32)
    if rounding.order is None:
        return values
    restored = np.empty_like(values)
    restored[:, rounding.order] = values
    return restored


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """Radians a position for each pair of a head [head_dim / 2], scaling applied; pairs past ``rope.dim`` do not
    rotate.

    Source: Su et al. 2104.09864; the "llama3" scaling from the Llama 3.1 release.
    """
    frequencies = np.zeros(head_dim // 2)
    pairs = rope.dim // 2
    frequencies[:pairs] = rope.theta ** (-np.arange(pairs) * 2.0 / rope.dim)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        frequencies[:pairs] /= np.asarray(scaling.factors)
        return frequencies
    wavelengths = np.divide(2 * np.pi, frequencies, out=np.full_like(frequencies, np.inf), where=frequencies > 0)
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def rotate(x: Table, positions: NDArray[np.int32], frequencies: NDArray[np.float64]) -> Table:
    """Rotates the pairs (2i, 2i+1) of x [rows, heads, head_dim] by position * frequency."""
    angles = positions[:, None] * frequencies[None, :]
    cos = np.cos(angles).astype(np.float32)[:, None, :]
    sin = np.sin(angles).astype(np.float32)[:, None, :]
    even, odd = x[:, :, 0::2], x[:, :, 1::2]
    out = np.empty_like(x)
    out[:, :, 0::2] = even * cos - odd * sin
    out[:, :, 1::2] = odd * cos + even * sin
    return out


def embed(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """Rows of the matrix for the step's tokens."""
    return [step.weights.values(node.weights[0])[step.tokens]]


def features(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """The rows that the plan brings."""
    assert step.features is not None, "the plan brings no features"
    assert step.features.shape == (len(step.tokens), node.outputs[0].width), "a row of features for each token"
    return [step.features]


def _normalise(x: Table, weight: Table, eps: float) -> Table:
    mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + eps) * weight, np.float32)


def rms_norm(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return [_normalise(inputs[0], step.weights.values(node.weights[0]), node.attributes["eps"])]


def linear(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """x W^T + b for each weight; x is rounded to int8 as the weight asks first, where weights are integers and the
    step says so.
    """
    num_outputs = len(node.outputs)
    exact = inputs[0]
    rounded: dict[tuple[bool, bytes], Table] = {}
    results = []
    for index, name in enumerate(node.weights[:num_outputs]):
        x = exact
        rounding = step.weights.rounding(name) if step.activations == "int8" else None
        if rounding is not None:
            if rounding.key not in rounded:
                rounded[rounding.key] = rounded_activations(exact, rounding)
            x = rounded[rounding.key]
        y = x @ step.weights.values(name).T
        if node.attributes["num_biases"]:
            y = y + step.weights.values(node.weights[num_outputs + index])
        results.append(y.astype(np.float32))
    return results


def rope_write(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """Norms and rotates the heads of q and k, writes k and v to the pages that ``written`` names, returns q /
    sqrt(head_dim).
    """
    model, kv, layer = step.model, step.kv, node.attributes["layer"]
    rows = len(step.positions)
    q, k, v = (x.reshape(rows, -1, model.head_dim) for x in inputs)
    if node.weights:
        q = _normalise(q, step.weights.values(node.weights[0]), node.attributes["eps"])
        k = _normalise(k, step.weights.values(node.weights[1]), node.attributes["eps"])
    frequencies = inverse_frequencies(model.rope, model.head_dim)
    q = rotate(q, step.positions, frequencies) * np.float32(1.0 / np.sqrt(np.float32(model.head_dim)))
    k = rotate(k, step.positions, frequencies)
    written, pages, slots = step.written()
    kv.keys[layer, pages, :, slots] = kv.round(k[written])
    kv.values[layer, pages, :, slots] = kv.round(v[written])
    return [q.reshape(rows, -1)]


def attention(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """Each row attends to the positions up to its own, at most the latest ``sliding_window`` of them."""
    model, layer = step.model, node.attributes["layer"]
    group = model.num_heads // model.num_kv_heads
    out = np.empty_like(inputs[0])
    for row, position in enumerate(step.positions):
        first = 0 if model.sliding_window is None else max(0, int(position) - model.sliding_window + 1)
        seen = np.arange(first, position + 1)
        pages = step.page_table[step.sequence_of_row[row], seen // PAGE_TOKENS]
        keys = step.kv.keys[layer, pages, :, seen % PAGE_TOKENS].astype(np.float64)
        values = step.kv.values[layer, pages, :, seen % PAGE_TOKENS].astype(np.float64)
        q = inputs[0][row].reshape(model.num_kv_heads, group, model.head_dim).astype(np.float64)
        scores = np.einsum("hgd,thd->hgt", q, keys)
        scores = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights = scores / scores.sum(axis=2, keepdims=True)
        out[row] = np.einsum("hgt,thd->hgd", weights, values).reshape(-1).astype(np.float32)
    return [out]


def silu_mul(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """gate / (1 + exp(-gate)) * up."""
    gate, up = inputs
    with np.errstate(over="ignore"):
        return [(gate.astype(np.float64) / (1.0 + np.exp(-gate.astype(np.float64))) * up).astype(np.float32)]


def add(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """x + y."""
    return [inputs[0] + inputs[1]]


def select_outputs(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """The rows whose logits are wanted."""
    return [inputs[0][step.logit_rows]]

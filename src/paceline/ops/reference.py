"""What each op means, in plain numpy: the definition that every executor must agree with.

Notation: x [rows, width] f32. Sums are taken in float64 where that costs little and rounded once to float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS, Activation, KVFormat, ModelConfig, RopeConfig
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
    if scaling.kind == "yarn":
        frequencies[:pairs] *= 1 - _interpolated(rope) * (1 - 1 / scaling.factor)
        return frequencies
    assert scaling.kind == "llama3", f"{scaling.kind}: the context that is served decides, see ModelConfig.at_context"
    wavelengths = np.divide(2 * np.pi, frequencies, out=np.full_like(frequencies, np.inf), where=frequencies > 0)
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _interpolated(rope: RopeConfig) -> NDArray[np.float64]:
    """YaRN's ramp [dim / 2]: 0 where a frequency stays, 1 where it is divided by the factor (2309.00071, 3.2)."""
    scaling = rope.scaling
    assert scaling is not None, "there is no ramp without scaling"

    def pair_of(turns: float) -> float:
        """The pair that turns so often in the trained context."""
        wavelengths = scaling.original_context / (turns * 2 * math.pi)
        return rope.dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (np.arange(rope.dim // 2) - low) / (high - low if high > low else 1e-3)
    return np.clip(ramp, 0.0, 1.0)


def rotate(x: Table, positions: NDArray[np.int32], frequencies: NDArray[np.float64], *, factor: float = 1.0) -> Table:
    """Rotates the pairs (2i, 2i+1) of x [rows, heads, head_dim] by position * frequency and stretches them by
    ``factor``, those of frequency 0 not at all.
    """
    angles = positions[:, None] * frequencies[None, :]
    stretch = np.where(frequencies > 0, factor, 1.0)
    cos = (np.cos(angles) * stretch).astype(np.float32)[:, None, :]
    sin = (np.sin(angles) * stretch).astype(np.float32)[:, None, :]
    even, odd = x[:, :, 0::2], x[:, :, 1::2]
    out = np.empty_like(x)
    out[:, :, 0::2] = even * cos - odd * sin
    out[:, :, 1::2] = odd * cos + even * sin
    return out


def embed(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """Rows of the matrix for the step's tokens, times the node's scale."""
    return [step.weights.values(node.weights[0])[step.tokens] * np.float32(node.attributes["scale"])]


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
    """(x W^T + b) * scale for each weight; x is rounded to int8 as the weight asks first, where weights are integers
    and the step says so.
    """
    num_outputs = len(node.outputs)
    results = []
    for index, name in enumerate(node.weights[:num_outputs]):
        y = input_of(name, inputs[0], step) @ step.weights.values(name).T
        if node.attributes["num_biases"]:
            y = y + step.weights.values(node.weights[num_outputs + index])
        results.append((y * np.float32(node.attributes["scale"])).astype(np.float32))
    return results


def input_of(weight: str, x: Table, step: Step) -> Table:
    """x as the product with that matrix reads it."""
    rounding = step.weights.rounding(weight) if step.activations == "int8" else None
    return x if rounding is None else rounded_activations(x, rounding)


def rope_write(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """Norms and rotates the heads of q and k, writes k and v to the pages that ``written`` names, returns q * scale."""
    model, kv, layer = step.model, step.kv, node.attributes["layer"]
    rope: RopeConfig | None = node.attributes["rope"]
    rows = len(step.positions)
    q, k, v = (x.reshape(rows, -1, model.head_dim) for x in inputs)
    if node.weights:
        q = _normalise(q, step.weights.values(node.weights[0]), node.attributes["eps"])
        k = _normalise(k, step.weights.values(node.weights[1]), node.attributes["eps"])
    if rope is not None:
        frequencies = inverse_frequencies(rope, model.head_dim)
        q = rotate(q, step.positions, frequencies, factor=rope.attention_factor)
        k = rotate(k, step.positions, frequencies, factor=rope.attention_factor)
    q = q * np.float32(node.attributes["scale"])
    written, pages, slots = step.written()
    kv.keys[layer, pages, :, slots] = kv.round(k[written])
    kv.values[layer, pages, :, slots] = kv.round(v[written])
    return [q.reshape(rows, -1)]


def attention(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """Each row attends to the positions up to its own, at most the latest ``window`` of them; a sink is one more score
    of each head, without a value.
    """
    model, layer = step.model, node.attributes["layer"]
    window, cap = node.attributes["window"], node.attributes["softcap"]
    shape = (model.num_kv_heads, model.num_heads // model.num_kv_heads, -1)
    sinks = np.zeros((*shape[:2], 0))
    if node.weights:
        sinks = step.weights.values(node.weights[0]).astype(np.float64).reshape(shape)
    out = np.empty_like(inputs[0])
    for row, position in enumerate(step.positions):
        first = 0 if window is None else max(0, int(position) - window + 1)
        seen = np.arange(first, position + 1)
        pages = step.page_table[step.sequence_of_row[row], seen // PAGE_TOKENS]
        keys = step.kv.keys[layer, pages, :, seen % PAGE_TOKENS].astype(np.float64)
        values = step.kv.values[layer, pages, :, seen % PAGE_TOKENS].astype(np.float64)
        q = inputs[0][row].reshape(shape).astype(np.float64)
        scores = np.einsum("hgd,thd->hgt", q, keys)
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        scores = np.concatenate([scores, sinks], axis=2)
        scores = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights = scores / scores.sum(axis=2, keepdims=True)
        out[row] = np.einsum("hgt,thd->hgd", weights[:, :, : len(seen)], values).reshape(-1).astype(np.float32)
    return [out]


def activated(gate: Table, up: Table, activation: Activation) -> Table:
    """act(gate) * up.

    "silu" is gate / (1 + exp(-gate)); "gelu_tanh" the tanh form of Hendrycks and Gimpel 1606.08415,
    g (1 + tanh t) / 2, as g / (1 + exp(-2 t)), which is the same and does not cancel; "swiglu_oai" that
    of gpt-oss: gates at most 7, ups between -7 and 7 and one more, and 1.702 in the sigmoid.
    """
    g, u = gate.astype(np.float64), up.astype(np.float64)
    with np.errstate(over="ignore"):
        if activation == "silu":
            return np.asarray(g / (1.0 + np.exp(-g)) * u, np.float32)
        if activation == "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
            return np.asarray(g / (1.0 + np.exp(-2 * inner)) * u, np.float32)
        g, u = np.minimum(g, 7.0), np.clip(u, -7.0, 7.0)
        return np.asarray(g / (1.0 + np.exp(-1.702 * g)) * (u + 1.0), np.float32)


def glu(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """act(gate) * up."""
    return [activated(inputs[0], inputs[1], node.attributes["activation"])]


def softcap(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """cap * tanh(x / cap)."""
    cap = node.attributes["cap"]
    return [np.asarray(cap * np.tanh(inputs[0].astype(np.float64) / cap), np.float32)]


def route(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """The experts of the largest logits, the largest first and of equals the lower one, then their weights."""
    count, logits = node.attributes["num_chosen"], inputs[0].astype(np.float64)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights = np.take_along_axis(scores, chosen, axis=1)
    weights /= (weights if node.attributes["normalise"] else scores).sum(axis=1, keepdims=True)
    return [np.concatenate([chosen, weights], axis=1).astype(np.float32)]


def expert_products(name: str, bias: str | None, x: Table, experts: NDArray[np.int64], step: Step) -> Table:
    """W_e x + b_e [rows, outputs], each row by the expert that ``experts`` [rows] names."""
    x, matrices = input_of(name, x, step), step.weights.values(name)
    y = np.empty((len(x), matrices.shape[1]), np.float32)
    for expert in np.unique(experts):
        rows = experts == expert
        y[rows] = x[rows] @ matrices[expert].T
        if bias is not None:
            y[rows] += step.weights.values(bias)[expert]
    return y


def experts_glu(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """act(gate_e x) * up_e x for each chosen expert, side by side."""
    x, routing = inputs
    parts = []
    for experts in routing[:, : node.attributes["num_chosen"]].T.astype(np.int64):
        gate_bias, up_bias = node.weights[2:] if node.attributes["num_biases"] else (None, None)
        gate = expert_products(node.weights[0], gate_bias, x, experts, step)
        up = expert_products(node.weights[1], up_bias, x, experts, step)
        parts.append(activated(gate, up, node.attributes["activation"]))
    return [np.concatenate(parts, axis=1)]


def experts_down(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """The sum over the chosen experts of weight * (W_e h_e + b_e)."""
    h, routing = inputs
    count = node.attributes["num_chosen"]
    bias = node.weights[1] if node.attributes["num_biases"] else None
    total = np.zeros((len(h), node.outputs[0].width), np.float32)
    for slot, part in enumerate(np.split(h, count, axis=1)):
        y = expert_products(node.weights[0], bias, part, routing[:, slot].astype(np.int64), step)
        total += routing[:, count + slot, None] * y
    return [total]


def add(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """x + y."""
    return [inputs[0] + inputs[1]]


def select_outputs(node: Node, inputs: list[Table], step: Step) -> list[Table]:
    """The rows whose logits are wanted."""
    return [inputs[0][step.logit_rows]]

"""Debugging: run a native step one record at a time and compare every value with the reference. The first node that
differs is the bug.

Each reference node is given the native executor's own inputs, so errors do not add up: what is compared is one node's
arithmetic, and the bound follows from that node alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS, SPLIT_TOKENS
from paceline.executors.base import StepPlan
from paceline.executors.expert_bounds import (
    EPSILON,
    experts_down_bound,
    experts_glu_bound,
    gated_bound,
    route_bound,
    slots_as_rows,
)
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.ops.graph import Node, Value
from paceline.ops.reference import Step, Table, quantise_activations, rounded_activations

ROUNDING = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": EPSILON}
"""Step of a floating-point KV format, relative to a value."""


@dataclass(frozen=True)
class Difference:
    """How far one value is from the reference: the largest error, and that error in units of its bound (a defect
    unless it is at most 1; it may be NaN)."""

    value: str
    op: str
    largest_error: float
    bound_ratio: float


def compare_step(native: NativeExecutor, reference: ReferenceExecutor, plan: StepPlan) -> list[Difference]:
    """Runs the plan on both; one entry a value that the native program leaves in memory, in the order they are made.

    Modifies the pages of both; the reference's pages are first set to the native ones.
    """
    step = reference.step_of(plan)
    _copy_pages(native, step)
    native.set_step(
        plan, np.zeros((len(plan.logit_rows), 0), np.int32), np.zeros((len(plan.logit_rows), 0), np.float32)
    )
    native.program.begin_step()
    values: dict[str, Table] = {}
    bounds: dict[str, Table] = {}
    differences = []
    done = 0
    for node in reference.graph.nodes:
        for value, table in zip(node.outputs, reference.apply(node, values, step), strict=True):
            values[value.name] = table
            bounds[value.name] = _bound(node, value, values, bounds, step)
        for value in node.outputs:
            if value.name not in native.lowered.made_by:
                continue  # fused into a later record
            end = native.lowered.made_by[value.name] + 1
            native.program.run_records(done, max(done, end))
            done = max(done, end)
            found, rounding = _native_value(native, value, values[value.name])
            error = np.abs(found - values[value.name])
            wrong = ~(error <= 0)  # so is what is not a number; its ratio is none, and no ratio that is at most 1
            with np.errstate(divide="ignore"):
                ratio = np.divide(error, bounds[value.name] + rounding, out=np.zeros_like(error), where=wrong)
            differences.append(
                Difference(value.name, node.op, float(error.max(initial=0.0)), float(ratio.max(initial=0.0)))
            )
            values[value.name] = found
            bounds[value.name] = np.zeros_like(found)
        if node.op == "rope_write":
            differences.append(_compare_pages(native, reference, node, values, step))
    native.program.run_records(done, native.program.num_records)
    return differences


def _native_value(native: NativeExecutor, value: Value, expected: Table) -> tuple[Table, Table]:
    """The value as the native program holds it, and the error that its int8 form may add: half a step, and a step where
    scales differ.
    """
    place = native.lowered.places[value.name]
    shape = expected.shape
    if place.num_chosen:  # a table of slots
        expected = expected.reshape(len(expected) * place.num_chosen, -1)
    rows, width = expected.shape
    rounding = np.zeros_like(expected)
    if place.buffer >= 0:
        found = native.program.buffer(place.buffer, rows)[:, place.column : place.column + width].copy()
    else:
        found = native.program.dequantised(place.activations, rows)[:, :width].copy()
        _, scale = quantise_activations(expected)
        rounding = 0.5001 * np.repeat(scale, 32, axis=1)[:, :width]
    if place.num_chosen:
        routing = native.program.buffer(place.routing, shape[0])
        found = slots_as_rows(found, routing[:, : place.num_chosen].astype(np.int64))
    return found, rounding.reshape(shape)


def _bound(node: Node, value: Value, values: dict[str, Table], bounds: dict[str, Table], step: Step) -> Table:
    """Largest error that float32 arithmetic in any order may leave in each element, given exact inputs; zero-input
    bounds add up.

    Sums of n products: n * eps * sum |x||w| (Higham 2002, 3.1, first order). Elementwise functions: a few eps of their
    value.
    """
    table = values[value.name]
    inherited = sum(
        (np.abs(bounds[source.name]) for source in node.inputs if bounds[source.name].shape == table.shape),
        np.zeros_like(table),
    )
    if node.op == "linear":
        index = node.outputs.index(value)
        name = node.weights[index]
        x = values[node.inputs[0].name]
        slack = bounds[node.inputs[0].name]
        rounding = step.weights.rounding(name)
        if rounding is not None and step.activations == "int8":
            x = rounded_activations(x, rounding)
        terms = step.weights.magnitudes(name)
        sums = (x.shape[1] + 3) * EPSILON * (np.abs(x) @ terms.T) + slack @ np.abs(step.weights.values(name)).T
        scaled = abs(node.attributes["scale"]) * sums
        return np.asarray(scaled + 2 * EPSILON * np.abs(table) + 1e-30, np.float32)
    if node.op == "glu":
        gate, up = (values[source.name] for source in node.inputs)
        gate_bound, up_bound = (bounds[source.name] for source in node.inputs)
        return gated_bound(node.attributes["activation"], gate, up, gate_bound, up_bound, table)
    if node.op == "softcap":  # a slope of at most 1; a quotient, a tanh within 2 ulp, a product
        return np.asarray(inherited + 8 * EPSILON * np.abs(table) + 1e-30, np.float32)
    if node.op == "attention":
        return _attention_bound(node, values[node.inputs[0].name], step)
    if node.op == "route":
        return route_bound(node, values[node.inputs[0].name], table)
    if node.op in ("experts_glu", "experts_down"):
        x, routing = (values[source.name] for source in node.inputs)
        if node.op == "experts_down":
            return experts_down_bound(node, x, routing, step)
        return experts_glu_bound(node, x, routing, table, step)
    if node.op in ("embed", "features", "select_outputs"):
        return inherited
    width = values[node.inputs[0].name].shape[1]
    scale = np.abs(table) + (np.abs(table).max(axis=1, keepdims=True) if node.op == "rope_write" else 0.0)
    return np.asarray(inherited + (width / 16 + 16) * EPSILON * scale + 1e-30, np.float32)


def _attention_bound(node: Node, q: Table, step: Step) -> Table:
    """A score is off by at most head_dim * eps * sum |q||k|, so a weight by that relative to itself; the weighted sum
    adds as many roundings as there are keys. |k| is bounded by the largest of the layer, component by component.

    A softcap has a slope of at most 1 and 8 eps of its own, relative to scores that are at most its cap. A sink counts
    as a key whose score is known: its distance to the largest score is rounded once.

    Over int8 pages queries and weights are rounded as well. A query component is off by half a step, max|q| / 65534,
    which moves a score by at most e = max|q| / 65534 * sum |k|; both a numerator and their sum then change by a factor
    within exp(+-e), a weight within exp(+-2e), so the output by at most (exp(2e) - 1) * max|v|. A numerator times its
    value's scale is rounded to steps of P / 32767, P the largest of its split; with codes up to 127, n keys of a split
    add n * P / 65534 * 127. P * 127 is at most max|v| but for the scale's rounding up (2^-7), and numerators sum to at
    least 1 (the largest is exp(0)), so normalised that is n / 65534 * max|v|; folding splits averages their errors.
    Numerators below 2^-108 / max may vanish.
    """
    model, layer = step.model, node.attributes["layer"]
    largest = np.abs(step.kv.keys[layer]).max(axis=(0, 2))
    heads = np.abs(q).reshape(len(q), model.num_kv_heads, -1, model.head_dim)
    scores = np.einsum("rhgd,hd->rhg", heads, largest).max(axis=(1, 2))
    num_keys = int(step.positions.max()) + 1
    relative = 4 * EPSILON * (num_keys + model.head_dim * (1 + scores))
    relative += 16 * EPSILON * (node.attributes["softcap"] or 0.0)
    if node.weights:
        relative += 4 * EPSILON * np.abs(step.weights.values(node.weights[0])).max()
    reach = np.abs(step.kv.values[layer]).max()
    if step.kv.format == "int8":
        moved = np.abs(heads).max(axis=-1) / 65534 * largest.sum(axis=-1)[None, :, None]
        relative += np.expm1(2 * moved).max(axis=(1, 2))
        relative += min(num_keys, SPLIT_TOKENS) * (1 + 2.0**-6) / 65534
    return np.asarray(np.broadcast_to((relative * reach + 1e-30)[:, None], q.shape), np.float32)


def pages_of(native: NativeExecutor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The native pool as the reference lays it out: keys and values [layers, pages, heads, tokens, head_dim]."""
    model, kind = native.model, native.path()["kv_dtype"]
    shape = (native.num_pages, model.num_layers, model.num_kv_heads)
    pages = native.pages.reshape(*shape, -1)
    pair = 2 if kind == "int8" else 1  # inputs of the product that lie side by side
    if kind == "int8":
        scales, pages = np.split(pages, [4 * PAGE_TOKENS], axis=-1)
    stored = {"f16": np.float16, "f32": np.float32, "int8": np.int8}
    numbers = _from_bf16(pages) if kind == "bf16" else pages.view(stored[str(kind)]).astype(np.float32)
    halves = numbers.reshape(*shape, 2, -1)
    keys = halves[..., 0, :].reshape(*shape, PAGE_TOKENS // 16, model.head_dim // pair, 16, pair).swapaxes(-3, -2)
    values = halves[..., 1, :].reshape(*shape, PAGE_TOKENS // pair, model.head_dim, pair).swapaxes(-2, -1)
    keys, values = (x.reshape(*shape, PAGE_TOKENS, model.head_dim) for x in (keys, values))
    if kind == "int8":
        factors = _from_bf16(scales)[..., None]
        keys, values = keys * factors[..., :PAGE_TOKENS, :], values * factors[..., PAGE_TOKENS:, :]
    return keys.swapaxes(0, 1), values.swapaxes(0, 1)


def _from_bf16(stored: NDArray[np.uint8]) -> Table:
    return (np.ascontiguousarray(stored).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _copy_pages(native: NativeExecutor, step: Step) -> None:
    step.kv.keys[:], step.kv.values[:] = pages_of(native)


def _compare_pages(
    native: NativeExecutor, reference: ReferenceExecutor, node: Node, values: dict[str, Table], step: Step
) -> Difference:
    """Stored keys and values of the step's rows, wherever they go. Values are rounded from the same floats, so they are
    equal; keys may be one rounding step of the KV format apart, since their rotation is rounded in another order. A
    step of int8 is its vector's scale, at most max|x| / 126; rounded to neighbouring scales (2^-7), two codes differ by
    little more."""
    layer = node.attributes["layer"]
    keys, stored = pages_of(native)
    _, pages, slots = step.written()
    theirs = reference.kv.keys[layer, pages, :, slots]
    key_error = np.abs(keys[layer, pages, :, slots] - theirs)
    value_error = np.abs(stored[layer, pages, :, slots] - reference.kv.values[layer, pages, :, slots])
    largest = np.abs(theirs).max(axis=-1, keepdims=True)
    if reference.kv.format == "int8":
        step_size = largest * 1.01 / 126
    else:
        step_size = ROUNDING[reference.kv.format] * np.abs(theirs)
    ratio = (key_error / (step_size + 64 * EPSILON * largest + 1e-7)).max()
    _copy_pages(native, step)
    error = max(float(key_error.max()), float(value_error.max()))
    return Difference(f"{node.name}.pages", "rope_write", error, float(ratio) if not value_error.any() else np.inf)

"""What each op of the table does in PyTorch; ``ops.reference`` has the definitions.

Tables are [rows, width] f32 between nodes, whatever type products run in. Activations are built of ``exp`` and
``tanh``, which torch computes alike wherever an element lies; its ``silu``, ``sigmoid`` and ``gelu`` have another form
for the last elements of an array, whose bits would then depend on the number of rows. With gradients ``sigmoid`` is
taken all the same: the derivative of 1 / (1 + exp(-x)) is not a number where exp overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline.config import Activation, RopeConfig
from paceline.executors.torch.rotation import RotationTable, Turn, rotate
from paceline.ops.graph import Node


class Weights(Protocol):
    """Weights by name."""

    def vector(self, name: str) -> Tensor:
        """A vector, or the vectors of all experts."""
        ...

    def rows_of(self, name: str, tokens: Tensor) -> Tensor:
        """Rows of the embedding matrix, f32."""
        ...

    def linear(self, node: Node, x: Tensor) -> Sequence[Tensor]:
        """x W^T + b of a ``linear`` node's matrices."""
        ...

    def expert(self, name: str, index: int) -> Callable[[Tensor], Tensor]:
        """The product with one expert's matrix."""
        ...


class Context(Protocol):
    """Keys and values that the rows of a pass see."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keeps keys and values [rows, kv_heads, head_dim] of the rows."""
        ...

    def attend(
        self, layer: int, q: Tensor, *, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """softmax(q K^T) V [rows, heads, head_dim] of scaled queries q [rows, heads, head_dim]."""
        ...


@dataclass
class Pass:
    """What the ops of one pass read besides their inputs.

    tokens, positions  [rows] i64; positions are below ``end``
    logit_rows         [outputs] i64, None for all rows
    """

    weights: Weights
    context: Context
    rotations: dict[RopeConfig, RotationTable]
    head_dim: int
    tokens: Tensor
    positions: Tensor
    end: int
    logit_rows: Tensor | None = None
    features: Tensor | None = None
    turns: dict[RopeConfig, Turn] = field(default_factory=dict)

    def turn(self, rope: RopeConfig) -> Turn:
        """That of the rows."""
        if rope not in self.turns:
            self.turns[rope] = self.rotations[rope].turn(self.positions, self.end)
        return self.turns[rope]


Inputs = Sequence[Tensor]


def embed(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """Rows of the matrix, times the scale."""
    x = step.weights.rows_of(node.weights[0], step.tokens)
    scale = node.attributes["scale"]
    return [x if scale == 1.0 else x * scale]


def features(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """The rows that the plan brings."""
    assert step.features is not None, "the plan brings no features"
    return [step.features]


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # A quarter of the time of torch's own, which takes a dozen operations on a CPU.
    norm = torch.linalg.vector_norm(x.contiguous(), dim=-1, keepdim=True)
    scale = 1.0 / x.shape[-1]
    if torch.is_grad_enabled():
        return x * torch.rsqrt(norm * norm * scale + eps) * weight
    return (x * norm.mul_(norm).mul_(scale).add_(eps).rsqrt_()).mul_(weight)


def rms_norm(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return [_normalise(inputs[0], step.weights.vector(node.weights[0]), node.attributes["eps"])]


def linear(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """(x W^T + b) * scale for each weight."""
    results, scale = step.weights.linear(node, inputs[0]), node.attributes["scale"]
    return results if scale == 1.0 else [y * scale for y in results]


def rope_write(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """Norms and rotates heads, hands keys and values to the context, returns the scaled queries."""
    rope, eps = node.attributes["rope"], node.attributes["eps"]
    q, k, v = (x.view(len(x), -1, step.head_dim) for x in inputs)
    if node.weights:
        q = _normalise(q, step.weights.vector(node.weights[0]), eps)
        k = _normalise(k, step.weights.vector(node.weights[1]), eps)
    if rope is not None:
        heads = q.shape[1]
        both = rotate(torch.cat((q, k), dim=1), step.turn(rope))  # together: half as many calls
        q, k = both[:, :heads], both[:, heads:]
    step.context.write(node.attributes["layer"], k, v)
    return [(q * node.attributes["scale"]).view(len(q), -1)]


def attention(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """softmax(q K^T) V."""
    out = step.context.attend(
        node.attributes["layer"],
        inputs[0].view(len(inputs[0]), -1, step.head_dim),
        window=node.attributes["window"],
        softcap=node.attributes["softcap"],
        sinks=step.weights.vector(node.weights[0]) if node.weights else None,
    )
    return [out.flatten(-2)]


def activated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up."""
    if activation == "silu":
        return swish(gate, 1.0) * up
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1.0 + torch.tanh(inner)) * up
    assert activation == "swiglu_oai", activation
    return swish(gate.clamp(max=7.0), 1.702) * (up.clamp(-7.0, 7.0) + 1.0)


def swish(x: Tensor, slope: float) -> Tensor:
    """x / (1 + exp(-slope x)); see the module for the two forms."""
    if torch.is_grad_enabled():
        return x * torch.sigmoid(slope * x)
    return x / torch.mul(x, -slope).exp_().add_(1.0)


def glu(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """act(gate) * up."""
    return [activated(inputs[0], inputs[1], node.attributes["activation"])]


def softcap(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """cap * tanh(x / cap)."""
    return [capped(inputs[0], node.attributes["cap"])]


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return cap * torch.tanh(x / cap)


def route(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """The experts of the largest logits, of equals the lower one first, then their weights."""
    logits, count = inputs[0], node.attributes["num_chosen"]
    chosen = torch.argsort(logits, dim=1, descending=True, stable=True)[:, :count]
    scores = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    weights = scores.gather(1, chosen)
    total = (weights if node.attributes["normalise"] else scores).sum(dim=1, keepdim=True)
    return [torch.cat([chosen.to(weights.dtype), weights / total], dim=1)]


def _expert_products(name: str, bias: str | None, x: Tensor, experts: Tensor, step: Pass) -> Tensor:
    """W_e x + b_e [rows, outputs], each row by the expert that ``experts`` [rows] names; only those are read."""
    order = torch.argsort(experts, stable=True)
    used, counts = torch.unique_consecutive(experts[order], return_counts=True)
    parts = x[order].split(counts.tolist())
    y = torch.cat([step.weights.expert(name, expert)(part) for expert, part in zip(used.tolist(), parts, strict=True)])
    y = y[torch.argsort(order)]
    return y if bias is None else y + step.weights.vector(bias)[experts]


def experts_glu(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """act(gate_e x) * up_e x for each chosen expert, side by side."""
    x, routing = inputs
    count = node.attributes["num_chosen"]
    experts = routing[:, :count].long().flatten()
    each = x.repeat_interleave(count, dim=0)
    gate_bias, up_bias = node.weights[2:] if node.attributes["num_biases"] else (None, None)
    gate = _expert_products(node.weights[0], gate_bias, each, experts, step)
    up = _expert_products(node.weights[1], up_bias, each, experts, step)
    return [activated(gate, up, node.attributes["activation"]).reshape(len(x), -1)]


def experts_down(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """The sum over the chosen experts, in their order, of weight * (W_e h_e + b_e)."""
    h, routing = inputs
    count = node.attributes["num_chosen"]
    experts = routing[:, :count].long().flatten()
    bias = node.weights[1] if node.attributes["num_biases"] else None
    y = _expert_products(node.weights[0], bias, h.reshape(len(h) * count, -1), experts, step)
    slots = (y.reshape(len(h), count, -1) * routing[:, count:, None]).unbind(1)
    total = slots[0]
    for slot in slots[1:]:
        total = total + slot
    return [total]


def add(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """x + y."""
    return [inputs[0] + inputs[1]]


def select_outputs(node: Node, inputs: Inputs, step: Pass) -> Inputs:
    """The rows whose logits are wanted."""
    return [inputs[0] if step.logit_rows is None else inputs[0][step.logit_rows]]


OPERATIONS: dict[str, Callable[[Node, Inputs, Pass], Inputs]] = {
    function.__name__: function
    for function in (
        embed,
        features,
        rms_norm,
        linear,
        rope_write,
        attention,
        glu,
        softcap,
        route,
        experts_glu,
        experts_down,
        add,
        select_outputs,
    )
}

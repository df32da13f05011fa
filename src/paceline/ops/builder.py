"""The vocabulary that model files are written in: each method appends one node of the op table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.config import Activation, RopeConfig
from paceline.ops.graph import Graph, Node, Rows, Value, WeightSpec
from paceline.ops.spec import OPS


class GraphBuilder:
    """Collects nodes; every method returns the value or values that the new node makes."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._weights: dict[str, WeightSpec] = {}

    def embed(self, weight: str, *, vocab_size: int, width: int, scale: float = 1.0) -> Value:
        """Rows of the embedding matrix for the step's tokens, times ``scale``."""
        self._weight(WeightSpec(weight, (vocab_size, width), role="embedding"))
        return self._append("embed", (), [("x", width)], weights=(weight,), scale=scale)[0]

    def features(self, width: int) -> Value:
        """A row of numbers for each of the step's tokens, which the plan brings."""
        return self._append("features", (), [("features", width)])[0]

    def rms_norm(self, x: Value, weight: str, *, eps: float, rope_heads: int = 0) -> Value:
        """x / sqrt(mean(x^2) + eps) * weight; ``rope_heads`` where x is queries or keys that rotate later."""
        self._weight(WeightSpec(weight, (x.width,), rope_heads))
        return self._append("rms_norm", (x,), [(weight, x.width)], weights=(weight,), eps=eps)[0]

    def linear(
        self,
        x: Value,
        weights: Sequence[tuple[str, int]],
        *,
        biases: Sequence[str] = (),
        rope_heads: Sequence[int] = (),
        role: Literal["layer", "head", "router"] = "layer",
        scale: float = 1.0,
    ) -> tuple[Value, ...]:
        """(x W^T + b) * scale for each (weight, outputs); the products share their input and run together."""
        for index, (name, outputs) in enumerate(weights):
            heads = rope_heads[index] if rope_heads else 0
            self._weight(WeightSpec(name, (outputs, x.width), heads, role))
            if biases:
                self._weight(WeightSpec(biases[index], (outputs,), heads))
        names = tuple(name for name, _ in weights)
        return self._append(
            "linear", (x,), list(weights), weights=names + tuple(biases), num_biases=len(biases), scale=scale
        )

    def rope_write(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        rope: RopeConfig | None,
        scale: float,
        q_norm: str | None = None,
        k_norm: str | None = None,
        eps: float = 0.0,
    ) -> Value:
        """Rotates q and k (after an optional RMS norm of each head; not at all without ``rope``), stores k and v in the
        pages, returns q * scale.
        """
        norms = tuple(name for name in (q_norm, k_norm) if name is not None)
        outputs = [(f"blk.{layer}.q", q.width)]
        return self._append(
            "rope_write", (q, k, v), outputs, weights=norms, layer=layer, eps=eps, rope=rope, scale=scale
        )[0]

    def head_norm_weight(self, name: str, head_dim: int) -> str:
        """Declares the weight of a per-head norm and returns its name."""
        self._weight(WeightSpec(name, (head_dim,), rope_heads=1))
        return name

    def attention(
        self, q: Value, *, layer: int, window: int | None = None, softcap: float | None = None, sinks: str | None = None
    ) -> Value:
        """softmax(q K^T) V over the positions that each row may see: the latest ``window``, or all.

        With ``softcap`` c scores are c tanh(score / c); ``sinks`` names one number a query head, a score without a
        value.
        """
        weights = () if sinks is None else (sinks,)
        outputs = [(f"blk.{layer}.attention", q.width)]
        return self._append("attention", (q,), outputs, weights=weights, layer=layer, window=window, softcap=softcap)[0]

    def vector(self, name: str, length: int) -> str:
        """Declares a vector and returns its name."""
        self._weight(WeightSpec(name, (length,)))
        return name

    def glu(self, gate: Value, up: Value, *, activation: Activation) -> Value:
        """act(gate) * up."""
        return self._append("glu", (gate, up), [(gate.name + ".glu", gate.width)], activation=activation)[0]

    def softcap(self, x: Value, *, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        return self._append("softcap", (x,), [(x.name + ".softcap", x.width)], cap=cap)[0]

    def route(self, logits: Value, *, num_chosen: int, normalise: bool) -> Value:
        """For each row the experts of the ``num_chosen`` largest logits, then their weights: a softmax over the chosen
        logits (``normalise``), or over all.
        """
        outputs = [(logits.name + ".routing", 2 * num_chosen)]
        return self._append("route", (logits,), outputs, num_chosen=num_chosen, normalise=normalise)[0]

    def experts_glu(
        self,
        x: Value,
        routing: Value,
        weights: tuple[str, str],
        *,
        num_experts: int,
        width: int,
        activation: Activation,
        biases: tuple[str, str] | None = None,
    ) -> Value:
        """act(gate_e x) * up_e x of each chosen expert e, side by side in the order of the routing."""
        for name in weights:
            self._weight(WeightSpec(name, (num_experts, width, x.width), role="experts"))
        for name in biases or ():
            self._weight(WeightSpec(name, (num_experts, width), role="experts"))
        num_chosen = routing.width // 2
        return self._append(
            "experts_glu",
            (x, routing),
            [(weights[0] + ".glu", num_chosen * width)],
            weights=weights + (biases or ()),
            num_biases=len(biases or ()),
            num_chosen=num_chosen,
            activation=activation,
        )[0]

    def experts_down(
        self, h: Value, routing: Value, weight: str, *, num_experts: int, outputs: int, bias: str | None = None
    ) -> Value:
        """The sum over the chosen experts e, in the order of the routing, of weight_e (down_e h_e + b_e)."""
        num_chosen = routing.width // 2
        self._weight(WeightSpec(weight, (num_experts, outputs, h.width // num_chosen), role="experts"))
        if bias is not None:
            self._weight(WeightSpec(bias, (num_experts, outputs), role="experts"))
        biases = () if bias is None else (bias,)
        return self._append(
            "experts_down",
            (h, routing),
            [(weight, outputs)],
            weights=(weight, *biases),
            num_biases=len(biases),
            num_chosen=num_chosen,
        )[0]

    def add(self, x: Value, y: Value) -> Value:
        """x + y, the residual connection."""
        return self._append("add", (x, y), [(y.name + ".residual", x.width)])[0]

    def select_outputs(self, x: Value) -> Value:
        """The rows whose logits are wanted."""
        return self._append("select_outputs", (x,), [("selected", x.width)], rows="outputs")[0]

    def finish(self, logits: Value) -> Graph:
        """The graph, with the value that holds its result."""
        return Graph(tuple(self._nodes), dict(self._weights), logits)

    def _weight(self, spec: WeightSpec) -> None:
        known = self._weights.setdefault(spec.name, spec)
        assert known.shape == spec.shape, f"{spec.name} is used with shapes {known.shape} and {spec.shape}"

    def _append(
        self,
        op: str,
        inputs: tuple[Value, ...],
        outputs: Sequence[tuple[str, int]],
        *,
        weights: tuple[str, ...] = (),
        rows: Rows | None = None,
        **attributes: object,
    ) -> tuple[Value, ...]:
        assert op in OPS, f"{op} is not in the op table"
        domain: Rows = rows or (inputs[0].rows if inputs else "step")
        values = tuple(Value(name, width, domain) for name, width in outputs)
        self._nodes.append(Node(op, inputs, values, weights, dict(attributes)))
        return values

"""The vocabulary that model files are written in: each method appends one node of the op table."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.ops.graph import Graph, Node, Rows, Value, WeightSpec
from paceline.ops.spec import OPS


class GraphBuilder:
    """Collects nodes; every method returns the value or values that the new node makes."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._weights: dict[str, WeightSpec] = {}

    def embed(self, weight: str, *, vocab_size: int, width: int) -> Value:
        """Rows of the embedding matrix for the step's tokens."""
        self._weight(WeightSpec(weight, (vocab_size, width), role="embedding"))
        return self._append("embed", (), [("x", width)], weights=(weight,))[0]

    def features(self, width: int) -> Value:
        """A row of numbers for each of the step's tokens, which the plan brings."""
        return self._append("features", (), [("features", width)])[0]

    def rms_norm(self, x: Value, weight: str, *, eps: float) -> Value:
        """x / sqrt(mean(x^2) + eps) * weight."""
        self._weight(WeightSpec(weight, (x.width,)))
        return self._append("rms_norm", (x,), [(weight, x.width)], weights=(weight,), eps=eps)[0]

    def linear(
        self,
        x: Value,
        weights: Sequence[tuple[str, int]],
        *,
        biases: Sequence[str] = (),
        rope_heads: Sequence[int] = (),
        head: bool = False,
    ) -> tuple[Value, ...]:
        """x W^T + b for each (weight, outputs); the products share their input and run together."""
        for index, (name, outputs) in enumerate(weights):
            heads = rope_heads[index] if rope_heads else 0
            self._weight(WeightSpec(name, (outputs, x.width), heads, "head" if head else "layer"))
            if biases:
                self._weight(WeightSpec(biases[index], (outputs,), heads))
        names = tuple(name for name, _ in weights)
        return self._append("linear", (x,), list(weights), weights=names + tuple(biases), num_biases=len(biases))

    def rope_write(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        q_norm: str | None = None,
        k_norm: str | None = None,
        eps: float = 0.0,
    ) -> Value:
        """Rotates q and k (after an optional RMS norm of each head), stores k and v in the pages, returns q /
        sqrt(head_dim).
        """
        norms = tuple(name for name in (q_norm, k_norm) if name is not None)
        return self._append(
            "rope_write", (q, k, v), [(f"blk.{layer}.q", q.width)], weights=norms, layer=layer, eps=eps
        )[0]

    def head_norm_weight(self, name: str, head_dim: int) -> str:
        """Declares the weight of a per-head norm and returns its name."""
        self._weight(WeightSpec(name, (head_dim,), rope_heads=1))
        return name

    def attention(self, q: Value, *, layer: int) -> Value:
        """softmax(q K^T) V over the positions that each row may see."""
        return self._append("attention", (q,), [(f"blk.{layer}.attention", q.width)], layer=layer)[0]

    def silu_mul(self, gate: Value, up: Value) -> Value:
        """silu(gate) * up."""
        return self._append("silu_mul", (gate, up), [(gate.name + ".silu", gate.width)])[0]

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

"""A pass from tokens to logits with gradients: what training and other PyTorch code call.

Keys and values stay in tensors of the pass, and attention is ``scaled_dot_product_attention`` wherever a layer asks for
nothing that it lacks (a cap on scores, sinks). Bits may depend on the shape of the batch; to serve is ``executor``'s.

Checked by: tests/unit/test_torch_forward.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from paceline.config import EngineConfig, ModelConfig
from paceline.executors.torch.executor import find_device, rotation_tables
from paceline.executors.torch.operations import Pass, capped
from paceline.executors.torch.walk import Walk
from paceline.executors.torch.weights import Parameters, TensorReader
from paceline.executors.weights import WeightLoader
from paceline.models.registry import build_graph
from paceline.ops.graph import Graph
from paceline.weights.raw import Checkpoint


class TorchModel:
    """A graph and its parameters.

    parameters  {name: tensor} with the canonical names; any of them may be replaced, by another leaf or by a tensor
                that is computed from one
    """

    def __init__(self, graph: Graph, model: ModelConfig, parameters: dict[str, Tensor]) -> None:
        self.graph = graph
        self.model = model
        self.parameters = parameters
        self._walk = Walk(graph, (graph.logits.name, graph.hidden.name))

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig | None = None,
        *,
        device: str = "cpu",
        requires_grad: bool = False,
    ) -> TorchModel:
        """The checkpoint in the formats that ``config`` asks for, as plain tensors."""
        config, place = config or EngineConfig(), find_device(device)
        model = checkpoint.config.at_context(config.context_length or checkpoint.config.context_length)
        graph = build_graph(model)
        loader = WeightLoader(checkpoint, graph, config, num_threads=config.num_threads or 1)
        reader = TensorReader(graph, model, config, loader, place)
        return cls(graph, model, Parameters.read(reader, requires_grad=requires_grad).tensors)

    def logits(self, tokens: Tensor, features: Tensor | None = None) -> Tensor:
        """Logits [batch, length, vocab] f32 after each token of ``tokens`` [batch, length] i64."""
        return self.outputs(tokens, features)[0]

    def outputs(self, tokens: Tensor, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits, and the residual stream [batch, length, hidden] before the final norm; ``features`` [batch, length,
        width] is for graphs that read such."""
        batch, length = tokens.shape
        step = Pass(
            Parameters(self.parameters),
            BatchContext(batch, length),
            rotation_tables(self.graph, self.model, tokens.device),
            self.model.head_dim,
            tokens.flatten(),
            torch.arange(length, device=tokens.device).repeat(batch),
            length,
            features=None if features is None else features.flatten(0, 1),
        )
        values = self._walk.run(step)
        logits, hidden = (values[value.name] for value in (self.graph.logits, self.graph.hidden))
        return logits.unflatten(0, (batch, length)), hidden.unflatten(0, (batch, length))


class BatchContext:
    """``Context`` of sequences of one length that are seen whole."""

    def __init__(self, batch: int, length: int) -> None:
        self._shape = (batch, length)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See ``Context``."""
        self._kept[layer] = (k, v)

    def attend(
        self, layer: int, q: Tensor, *, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """See ``Context``."""
        # [batch, heads, length, head_dim]
        queries, keys, values = (x.unflatten(0, self._shape).transpose(1, 2) for x in (q, *self._kept.pop(layer)))
        length = self._shape[1]
        shares = queries.shape[1] // keys.shape[1]
        if softcap is None and sinks is None:
            is_causal = window is None or window >= length
            mask = None if is_causal else ~_hidden(length, window, q.device)
            out = functional.scaled_dot_product_attention(
                queries, keys, values, mask, is_causal=is_causal, scale=1.0, enable_gqa=shares > 1
            )
        else:
            keys, values = (x.repeat_interleave(shares, dim=1) for x in (keys, values))
            out = _attend(queries, keys, values, _hidden(length, window, q.device), softcap, sinks)
        return out.transpose(1, 2).flatten(0, 1)


def _hidden(length: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys [length, length] a row does not see."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    scores = queries @ keys.transpose(-1, -2)
    if softcap is not None:
        scores = capped(scores, softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        each = sinks[None, :, None, None].expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, each], dim=-1)
    return torch.softmax(scores, dim=-1)[..., : keys.shape[2]] @ values

"""The weights of a graph as tensors: packed into products to serve, or plain, to be trained.

Both read a checkpoint as the other executors do, so every number is the one that the packed form means. A matrix is
bfloat16 where ``--weights bf16`` makes it that, float32 in every other format: a quantised one takes the memory of
float32 here, and multiplies activations that are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paceline.config import EngineConfig, ModelConfig
from paceline.executors.reference import UnpackedWeights
from paceline.executors.torch.products import MakeProduct, Product, ProductMaker
from paceline.executors.weights import WeightLoader
from paceline.ops.graph import Graph, Node


class TensorReader:
    """Tensors of one checkpoint by name."""

    def __init__(
        self, graph: Graph, model: ModelConfig, config: EngineConfig, loader: WeightLoader, device: torch.device
    ) -> None:
        self.graph = graph
        self.loader = loader
        self.device = device
        self._model = model
        self._config = config

    def dtype(self, name: str) -> torch.dtype:
        """The type that a matrix is multiplied in."""
        role = self.graph.weights[name].role
        weights = self._config.weights_of(name, tied_embeddings=self._model.tie_embeddings)
        return torch.bfloat16 if weights == "bf16" and role != "router" else torch.float32

    def vector(self, name: str) -> Tensor:
        """A vector, or those of all experts, f32."""
        values = UnpackedWeights(self.graph, self.loader).values(name)
        return torch.from_numpy(values if values.flags.writeable else values.copy()).to(self.device)

    def matrix(self, name: str) -> Tensor:
        """A matrix, or those of all experts, in its type."""
        return self.vector(name).to(self.dtype(name))


class ServedWeights:
    """``operations.Weights`` for steps without gradients: the matrices of a node are one product."""

    def __init__(self, reader: TensorReader, make_product: MakeProduct) -> None:
        self._vectors: dict[str, Tensor] = {}
        self._tables: dict[str, Tensor] = {}
        self._products: dict[str, tuple[Product, Tensor | None, list[int]]] = {}
        self._experts: dict[str, list[Product]] = {}
        graph = reader.graph
        maker = ProductMaker(reader.device)
        for node in graph.nodes:
            if node.op == "linear":
                self._products[node.name] = self._product(node, reader, make_product)
            elif node.op == "embed":
                self._tables[node.weights[0]] = reader.matrix(node.weights[0])
            else:
                for name in node.weights:
                    if len(graph.weights[name].shape) == 3:
                        values = UnpackedWeights(graph, reader.loader).values(name)
                        self._experts[name] = [maker.of_values(one, reader.dtype(name)) for one in values]
                    else:
                        self._vectors[name] = reader.vector(name)

    @staticmethod
    def _product(
        node: Node, reader: TensorReader, make_product: MakeProduct
    ) -> tuple[Product, Tensor | None, list[int]]:
        count = len(node.outputs)
        names, biases = node.weights[:count], node.weights[count:]
        product = make_product(reader.loader.matrices(names), reader.dtype(names[0]))
        bias = torch.cat([reader.vector(name) for name in biases]) if biases else None
        return product, bias, [value.width for value in node.outputs]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; a tied embedding that is packed as head counts twice, for it is held twice."""
        products = [product for product, _, _ in self._products.values()]
        products += [product for experts in self._experts.values() for product in experts]
        tensors = [*self._vectors.values(), *self._tables.values()]
        tensors += [bias for _, bias, _ in self._products.values() if bias is not None]
        tensor_bytes: int = sum(x.numel() * x.element_size() for x in tensors)
        return tensor_bytes + sum(product.num_bytes for product in products)

    def vector(self, name: str) -> Tensor:
        """See ``Weights``."""
        return self._vectors[name]

    def rows_of(self, name: str, tokens: Tensor) -> Tensor:
        """See ``Weights``."""
        return self._tables[name][tokens].float()

    def linear(self, node: Node, x: Tensor) -> Sequence[Tensor]:
        """See ``Weights``."""
        product, bias, widths = self._products[node.name]
        y = product(x)
        if bias is not None:
            y = y + bias
        return [y] if len(widths) == 1 else torch.split_with_sizes(y, widths, dim=-1)

    def expert(self, name: str, index: int) -> Callable[[Tensor], Tensor]:
        """See ``Weights``."""
        return self._experts[name][index]


class Parameters:
    """``operations.Weights`` over plain tensors, which may require gradients.

    ``tensors`` has one for each of ``Graph.weights``, by name. A product runs in the type of its matrix.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    @classmethod
    def read(cls, reader: TensorReader, *, requires_grad: bool = False) -> Parameters:
        """All weights of the graph, matrices in their type and vectors in f32."""
        specs = reader.graph.weights.values()
        tensors = {
            spec.name: reader.vector(spec.name) if len(spec.shape) == 1 else reader.matrix(spec.name) for spec in specs
        }
        return cls({name: tensor.requires_grad_(requires_grad) for name, tensor in tensors.items()})

    def vector(self, name: str) -> Tensor:
        """See ``Weights``."""
        return self.tensors[name]

    def rows_of(self, name: str, tokens: Tensor) -> Tensor:
        """See ``Weights``."""
        return functional.embedding(tokens, self.tensors[name]).float()

    def linear(self, node: Node, x: Tensor) -> Sequence[Tensor]:
        """See ``Weights``."""
        count = len(node.outputs)
        results = [self._multiply(x, self.tensors[name]) for name in node.weights[:count]]
        biases = node.weights[count:]
        return [y + self.tensors[name] for y, name in zip(results, biases, strict=True)] if biases else results

    def expert(self, name: str, index: int) -> Callable[[Tensor], Tensor]:
        """See ``Weights``."""
        matrix = self.tensors[name][index]
        return lambda x: self._multiply(x, matrix)

    @staticmethod
    def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
        return functional.linear(x.to(matrix.dtype), matrix).to(x.dtype)

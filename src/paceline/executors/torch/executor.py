"""The torch executor: steps of an engine in PyTorch, on a CPU or a CUDA GPU.

It computes what the reference executor does with activations "float": no activation is rounded to int8. Between nodes
everything is float32; ``--weights bf16`` multiplies in bfloat16. On a CPU a row has the same bits on every path
(``rows`` and ``attention`` say how); on CUDA that is not promised.

``Kernels`` are replaceable, for those that torch does not have: the product with the matrices of a node, attention over
pages, and how decode steps are recorded (``cuda_graphs``).

Checked by: tests/native/test_torch_executor.py, tests/golden/test_transformers_families.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline import _native
from paceline.config import EngineConfig, ModelConfig, RopeConfig
from paceline.errors import ParameterError, UnsupportedError
from paceline.executors.base import StepPlan, StepResult
from paceline.executors.native import sample_logits
from paceline.executors.torch.attention import PagedContext
from paceline.executors.torch.cuda_graphs import DecodeGraphs
from paceline.executors.torch.host_copy import HostCopy
from paceline.executors.torch.kernels import Kernels, has_triton_kernels
from paceline.executors.torch.operations import Context, Pass
from paceline.executors.torch.pages import DevicePages, PagePool
from paceline.executors.torch.rotation import RotationTable
from paceline.executors.torch.walk import Walk
from paceline.executors.torch.weights import ServedWeights, TensorReader
from paceline.executors.weights import WeightLoader
from paceline.kv.layout import KVLayout
from paceline.models.registry import build_graph
from paceline.ops.graph import Graph
from paceline.sampling.distribution import probabilities
from paceline.sampling.rows import SampledRows, SampleRows
from paceline.weights.raw import Checkpoint


class TorchExecutor:
    """Runs steps in PyTorch. Owns the weights, and the KV pool unless it uses that of another executor.

    A step sets the number of threads that torch has in the thread that runs it: torch has no other way to be told.
    """

    def __init__(
        self,
        graph: Graph,
        model: ModelConfig,
        config: EngineConfig,
        weights: ServedWeights,
        pool: PagePool,
        kernels: Kernels,
    ) -> None:
        self.graph = graph
        self.model = model
        self.pool = pool
        self.num_pages = pool.num_pages
        self.max_rows = config.token_budget
        self.max_outputs = config.max_outputs
        on_cpu = pool.device.type == "cpu"
        self.pages = pool.bytes.numpy() if on_cpu else cast("NDArray[np.uint8]", DevicePages(pool.bytes))
        self.weight_bytes = weights.num_bytes
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._rotations = rotation_tables(graph, model, pool.device)
        self._walk = Walk(graph, (graph.logits.name, graph.hidden.name))
        self._context_length = config.context_length or model.context_length
        self.graphs: DecodeGraphs | None = None
        if kernels.recording is not None and DecodeGraphs.are_possible(graph, pool):
            rows = min(config.max_batch, self.max_rows, self.max_outputs)
            context = self._context_length
            self.graphs = DecodeGraphs(kernels.recording, self._decode, pool, max_rows=rows, context_length=context)
        self._to_host = HostCopy()
        self._logits: NDArray[np.float32] = np.zeros((0, model.num_logits), np.float32)
        self._hidden: Tensor = torch.zeros((0, model.hidden_size))

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig,
        *,
        device: str = "cpu",
        pages_of: TorchExecutor | None = None,
        kernels: Kernels | None = None,
    ) -> TorchExecutor:
        """The checkpoint on ``device``; ``config`` must name the KV memory (the pool takes whole pages of it).

        With ``pages_of`` it reads and writes the pool of that executor, as ``NativeExecutor.load`` has it. Raises
        ``ParameterError`` for a device that is not there.
        """
        place = find_device(device)
        model = checkpoint.config.at_context(config.context_length or checkpoint.config.context_length)
        graph = build_graph(model)
        num_threads = config.num_threads or 1
        torch.set_num_threads(num_threads)
        if pages_of is None:
            page_bytes = KVLayout.of(model, config.kv_dtype).page_bytes
            pool = PagePool(model, config.kv_dtype, max(1, (config.kv_memory_bytes or page_bytes) // page_bytes), place)
        else:
            pool = pages_of.pool
            _check_same_pages(model, config, pages_of)
        kernels = kernels or Kernels.of_device(model, place)
        loader = WeightLoader(checkpoint, graph, config, num_threads=num_threads)
        with torch.inference_mode():
            weights = ServedWeights(TensorReader(graph, model, config, loader, place), kernels.make_product)
        return cls(graph, model, config, weights, pool, kernels)

    @staticmethod
    def check_device(name: str) -> None:
        """Raises ``ParameterError`` for a device that is not there."""
        find_device(name)

    @staticmethod
    def version() -> str:
        """What bits depend on besides the model and its configuration: the build of torch, and the processor's part."""
        return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"

    @staticmethod
    def free_bytes(name: str) -> int:
        """Memory of a GPU that is free."""
        free, _ = torch.cuda.mem_get_info(find_device(name))
        return int(free)

    @staticmethod
    def keeps_4_bit_codes(name: str) -> bool:
        """Whether matrices of 4-bit codes take no more memory than that on a device."""
        return has_triton_kernels(find_device(name))

    def run(self, plan: StepPlan) -> StepResult:
        """One step; see ``Executor.run``."""
        num_threads = self._config.num_threads or 1
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        with torch.inference_mode(), self._device():
            self.pool.copy(plan.page_copies)
            values = None if self.graphs is None else self.graphs.run(plan)
            if values is None:
                values = self._walk.run(self.step_of(plan))
            self._hidden = values[self.graph.hidden.name]
            self._logits = self._to_host(values[self.graph.logits.name])
        return StepResult(sample_logits(self._isa, self._logits, plan.samples))

    def _device(self) -> AbstractContextManager[object]:
        """Makes the GPU the current one of this thread: Triton launches on that, wherever its tensors are."""
        device = self.pool.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _decode(self, context: Context, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """A step of rows that are all outputs, over a context that is there already."""
        end = self._context_length
        step = Pass(self._weights, context, self._rotations, self.model.head_dim, tokens, positions, end)
        return self._walk.run(step)

    def step_of(self, plan: StepPlan) -> Pass:
        """What the ops read of a plan."""
        device = self.pool.device

        def on_device(x: NDArray[np.int32]) -> Tensor:
            return torch.from_numpy(x.astype(np.int64)).to(device)

        all_are_outputs = len(plan.logit_rows) == len(plan.tokens)
        return Pass(
            self._weights,
            PagedContext(self.pool, self._kernels.attention, plan),
            self._rotations,
            self.model.head_dim,
            on_device(plan.tokens),
            on_device(plan.positions),
            int(plan.positions.max()) + 1,
            None if all_are_outputs else on_device(plan.logit_rows),
            None if plan.features is None else torch.from_numpy(plan.features).to(device),
        )

    def logits(self) -> NDArray[np.float32]:
        """Logits [outputs, vocab] of the last step."""
        return self._logits

    def hidden(self) -> NDArray[np.float32]:
        """See ``Executor.hidden``."""
        found: NDArray[np.float32] = self._hidden.cpu().numpy()
        return found

    def probabilities(self, samples: SampleRows, outputs: Sequence[int]) -> NDArray[np.float64]:
        """See ``Executor.probabilities``."""
        p = np.empty((len(outputs), self.model.num_logits))
        for found, output in zip(p, outputs, strict=True):
            found[:] = probabilities(self._logits[output], samples.rows[output], samples)
        return p

    def score(self, samples: SampleRows, outputs: Sequence[int]) -> SampledRows:
        """See ``Executor.score``."""
        return sample_logits(self._isa, np.ascontiguousarray(self._logits[list(outputs)]), samples)

    @property
    def _isa(self) -> str:
        """Of the native code that draws tokens from logits; it changes no bit."""
        return self._config.isa or _native.best_isa()

    def path(self) -> dict[str, str | int]:
        """The path that really runs. Weights that are not bfloat16 are multiplied as float32; codes of 4 bits as they
        are by Triton's kernels."""
        weights: str = self._config.weights
        kernels = self._kernels.name
        if weights not in ("f32", "bf16"):
            weights += " as f32" if kernels == "torch" else " (4 bits as they are, others as f32)"
        return {
            "isa": f"torch {self.pool.device.type}" + ("" if kernels == "torch" else f", {kernels}"),
            "threads": self._config.num_threads or 1,
            "weights": weights,
            "kv_dtype": self.pool.format,
        }


def find_device(name: str) -> torch.device:
    """The device of that name. Raises ``ParameterError`` where torch has none."""
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if name not in (*devices, *(["cuda"] if len(devices) > 1 else [])):
        allowed = f"one of {', '.join(devices)}" if len(devices) > 1 else "cpu: this PyTorch sees no CUDA GPU"
        raise ParameterError("device", name, allowed)
    return torch.device(name)


def rotation_tables(graph: Graph, model: ModelConfig, device: torch.device) -> dict[RopeConfig, RotationTable]:
    """A table for each way in which a layer of the graph rotates."""
    ropes = {node.attributes["rope"] for node in graph.nodes if node.op == "rope_write"}
    return {rope: RotationTable(rope, model.head_dim, device) for rope in ropes if rope is not None}


def _check_same_pages(model: ModelConfig, config: EngineConfig, owner: TorchExecutor) -> None:
    def ropes(of: ModelConfig) -> list[RopeConfig | None]:
        return [of.rope_of(layer) for layer in range(of.num_layers)]  # keys are stored rotated

    theirs = owner.model
    mine = (model.num_layers, model.num_kv_heads, model.head_dim, ropes(model), config.kv_dtype)
    if mine != (theirs.num_layers, theirs.num_kv_heads, theirs.head_dim, ropes(theirs), owner.pool.format):
        raise UnsupportedError("pages are shared by executors of one shape: layers, KV heads, RoPE and kv_dtype")

"""What ``gpu.py`` measures: the torch executor, Transformers and vLLM over random weights that are made on the device.

Each engine has ``decode``, ``batch`` and ``prefill``: tokens a second of one run, whose prompts follow from its number.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from synthetic import Dimensions
from torch import Tensor

from paceline.config import PAGE_TOKENS, EngineConfig, ModelConfig
from paceline.executors.base import StepPlan
from paceline.executors.torch.executor import TorchExecutor
from paceline.executors.torch.kernels import Kernels
from paceline.executors.torch.pages import PagePool
from paceline.executors.torch.products import Product, plain_product
from paceline.executors.torch.rows import Rows
from paceline.models.registry import build_graph
from paceline.ops.graph import Graph, Node
from paceline.sampling.rows import greedy_rows
from paceline.weights.inventory import expected_shapes

GROUP = 128
"""Inputs that share a scale of int4 weights."""
SPARE = 1.3
"""Memory that an engine may need for each byte of its weights."""


class LeftOutError(Exception):
    """An engine cannot do it here; the text says why."""


@dataclass(frozen=True)
class Job:
    """Tokens before decoding, tokens decoded, sequences of a batch, and tokens of a prompt."""

    depth: int
    new: int
    batch: int
    prompt: int


class Engine(Protocol):
    """One engine with its weights. ``weight_bytes`` are those that a step reads, ``path`` says what runs."""

    weight_bytes: int
    path: dict[str, Any]

    def decode(self, run: int) -> float: ...

    def batch(self, run: int) -> float: ...

    def prefill(self, run: int) -> float: ...

    def close(self) -> None: ...


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Memory that is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_weights(config: ModelConfig) -> int:
    """Numbers of all matrices but a table of embeddings, of which a step reads a few rows."""
    shapes = expected_shapes(config)
    unread = 0 if config.tie_embeddings else math.prod(shapes["token_embd.weight"])
    return sum(math.prod(shape) for shape in shapes.values()) - unread


def require_memory(num_bytes: float, device: torch.device) -> None:
    """Raises ``LeftOutError`` where the weights would not fit."""
    if num_bytes * SPARE > free_bytes(device):
        free = free_bytes(device) / 1e9
        raise LeftOutError(f"needs {num_bytes * SPARE / 1e9:.1f} GB of memory, {free:.1f} GB are free")


def prompts(run: int, count: int, length: int, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Random tokens [count, length]."""
    return np.random.default_rng((run, count, length)).integers(0, vocab_size, (count, length), np.int32)


class RandomWeights:
    """``operations.Weights`` with numbers of deviation 1 / sqrt(inputs), made on the device: bf16 or, as int4, codes
    with a scale for each 128 inputs (on a CPU, which multiplies none, f32 numbers of 16 values). Tables are bf16.
    """

    def __init__(self, graph: Graph, device: torch.device, weights: str) -> None:
        self._device = device
        self._weights = weights
        self._shapes = {name: spec.shape for name, spec in graph.weights.items()}
        self._vectors = {
            name: torch.ones(shape, device=device) for name, shape in self._shapes.items() if len(shape) == 1
        }
        self._tables: dict[str, Tensor] = {}
        self._products: dict[str, Product] = {}
        for node in graph.nodes:
            if node.op == "embed":
                self._tables[node.weights[0]] = self._numbers(self._shapes[node.weights[0]], 1.0)
            elif node.op == "linear":
                assert not node.attributes["num_biases"], "Llama has none"
                outputs, inputs = sum(value.width for value in node.outputs), node.inputs[0].width
                self._products[node.name] = self._product(node.weights[0], outputs, inputs)

    @property
    def num_bytes(self) -> int:
        """That a step reads."""
        return sum(product.num_bytes for product in self._products.values())

    def _numbers(self, shape: Sequence[int], deviation: float) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=self._device).normal_(0, deviation)

    def _product(self, name: str, outputs: int, inputs: int) -> Product:
        if self._weights == "bf16":
            tied = self._tables.get(name)
            matrix = self._numbers((outputs, inputs), inputs**-0.5) if tied is None else tied
            return Product(plain_product(matrix), 2 * matrix.numel(), Rows())
        scale = 1 / math.sqrt(inputs * 255 / 12)  # of a uniform code
        if self._device.type == "cpu":
            codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
            matrix = codes.float().sub_(8).mul_(scale)
            return Product(plain_product(matrix), 4 * matrix.numel(), Rows())
        from paceline.executors.triton.gemv_int4 import Int4Matrix, gemv_int4
        from paceline.executors.triton.int4_layout import BLOCK_INPUTS, WORDS

        assert inputs % BLOCK_INPUTS == 0, inputs
        words = torch.randint(
            -(2**31), 2**31, (inputs // BLOCK_INPUTS, outputs, WORDS), dtype=torch.int32, device=self._device
        )
        scales = torch.full((inputs // GROUP, outputs), scale, dtype=torch.float16, device=self._device)
        packed = Int4Matrix(words, scales, None, "middle", GROUP, outputs, inputs)
        return Product(lambda x: gemv_int4(x, packed), packed.num_bytes, Rows())

    def vector(self, name: str) -> Tensor:
        """See ``Weights``."""
        return self._vectors[name]

    def rows_of(self, name: str, tokens: Tensor) -> Tensor:
        """See ``Weights``."""
        return self._tables[name][tokens].float()

    def linear(self, node: Node, x: Tensor) -> Sequence[Tensor]:
        """See ``Weights``."""
        return self._products[node.name](x).split([value.width for value in node.outputs], dim=-1)

    def expert(self, name: str, index: int) -> Callable[[Tensor], Tensor]:
        """See ``Weights``."""
        raise AssertionError("Llama has no experts")


class Paceline:
    """Steps of the torch executor as its engine would plan them, with sampled tokens fed back; pages in bf16."""

    def __init__(self, dimensions: Dimensions, weights: str, job: Job, device: torch.device) -> None:
        model = dimensions.config()
        bytes_each = {"bf16": 2.0, "int4": 4.0 if device.type == "cpu" else 0.52}[weights]
        require_memory(bytes_each * num_weights(model) + 2 * model.vocab_size * model.hidden_size, device)
        graph = build_graph(model)
        self._job, self._device, self._model = job, device, model
        longest = max(job.depth + job.new, job.prompt + 1)
        self._pages_each = -(-longest // PAGE_TOKENS)
        config = EngineConfig(
            weights="bf16",
            kv_dtype="bf16",
            max_batch=max(2, job.batch),
            token_budget=max(job.prompt, job.depth, job.batch),
            context_length=longest,
            num_threads=torch.get_num_threads(),
        )
        pool = PagePool(model, config.kv_dtype, self._pages_each * job.batch, device)
        with torch.inference_mode():
            held = RandomWeights(graph, device, weights)
        kernels = Kernels.of_device(model, device)
        self._executor: TorchExecutor | None = TorchExecutor(graph, model, config, held, pool, kernels)  # type: ignore[arg-type]
        self.weight_bytes = held.num_bytes
        self.path = self._executor.path() | {"weights": weights, "graphs": str(self._executor.graphs is not None)}

    def decode(self, run: int) -> float:
        """One sequence."""
        return self._generate(run, 1)

    def batch(self, run: int) -> float:
        """All of them."""
        return self._generate(run, self._job.batch)

    def prefill(self, run: int) -> float:
        """One prompt, to its first token."""
        tokens = prompts(run, 1, self._job.prompt, self._model.vocab_size)
        start = time.perf_counter()
        self._step(tokens, np.zeros(1, np.int32))
        return self._job.prompt / (time.perf_counter() - start)

    def _generate(self, run: int, count: int) -> float:
        job = self._job
        tokens = prompts(run, count, job.depth, self._model.vocab_size)
        last = np.concatenate(
            [self._step(row[None], np.zeros(1, np.int32), first=index) for index, row in enumerate(tokens)]
        )
        start = time.perf_counter()
        for at in range(job.depth, job.depth + job.new):
            last = self._step(last[:, None], np.full(count, at, np.int32))
        return count * job.new / (time.perf_counter() - start)

    def _step(
        self, tokens: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], *, first: int = 0
    ) -> np.ndarray[Any, Any]:
        """The next token of sequences ``first`` and on, each given [rows] tokens from a position on."""
        assert self._executor is not None
        count, rows = tokens.shape
        table = (first + np.arange(count))[:, None] * self._pages_each + np.arange(self._pages_each)
        plan = StepPlan(
            tokens=tokens.reshape(-1).astype(np.int32),
            positions=(positions[:, None] + np.arange(rows)).reshape(-1).astype(np.int32),
            row_starts=np.arange(count + 1, dtype=np.int32) * rows,
            page_table=table.astype(np.int32),
            logit_rows=(np.arange(1, count + 1, dtype=np.int32) * rows - 1).astype(np.int32),
            samples=greedy_rows(count),
        )
        return self._executor.run(plan).sampled.tokens

    def close(self) -> None:
        """Gives the memory back."""
        self._executor = None
        release(self._device)


def release(device: torch.device) -> None:
    """Hands memory that nobody holds back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Transformers:
    """``generate`` of Transformers over bf16 weights, with its own cache; what it takes for one new token is not
    counted as decoding."""

    def __init__(self, dimensions: Dimensions, weights: str, job: Job, device: torch.device) -> None:
        if weights != "bf16":
            raise LeftOutError("has no 4-bit weights without another library")
        try:
            from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise LeftOutError(f"not installed: {error}") from error
        model = dimensions.config()
        require_memory(2.0 * num_weights(model) + 2 * model.vocab_size * model.hidden_size, device)
        self._job, self._device, self._vocab_size = job, device, model.vocab_size
        config = LlamaConfig(**llama_config(model), attn_implementation="sdpa")
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                self._llama: Any = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        self._options: Callable[[int], Any] = lambda new: GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        self.weight_bytes = 2 * num_weights(model)
        self.path = {"weights": "bf16", "attention": "sdpa"}

    def decode(self, run: int) -> float:
        """One sequence."""
        return self._rate(run, 1)

    def batch(self, run: int) -> float:
        """All of them, as one static batch."""
        return self._rate(run, self._job.batch)

    def prefill(self, run: int) -> float:
        """One prompt, to its first token."""
        tokens = prompts(run, 1, self._job.prompt, self._vocab_size)
        return self._job.prompt / self._seconds(tokens, 1)

    def _rate(self, run: int, count: int) -> float:
        tokens = prompts(run, count, self._job.depth, self._vocab_size)
        one, all_ = self._seconds(tokens, 1), self._seconds(tokens, self._job.new + 1)
        return count * self._job.new / max(all_ - one, 1e-9)

    def _seconds(self, tokens: np.ndarray[Any, Any], new: int) -> float:
        given = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
        synchronize(self._device)
        start = time.perf_counter()
        with torch.inference_mode():
            self._llama.generate(given, attention_mask=torch.ones_like(given), generation_config=self._options(new))
        synchronize(self._device)
        return time.perf_counter() - start

    def close(self) -> None:
        """Gives the memory back."""
        self._llama = None
        release(self._device)


def llama_config(model: ModelConfig) -> dict[str, Any]:
    """As Transformers names it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": "bfloat16",
    }


class VLLM:
    """vLLM over a directory that has a configuration only: it makes the weights itself (``load_format="dummy"``)."""

    def __init__(self, dimensions: Dimensions, weights: str, job: Job, device: torch.device) -> None:
        if weights != "bf16":
            raise LeftOutError("makes no random 4-bit weights")
        if device.type != "cuda":
            raise LeftOutError("is measured on CUDA only")
        try:
            import vllm
        except ImportError as error:
            raise LeftOutError(f"not installed: {error}") from error
        model = dimensions.config()
        self._job, self._vocab_size = job, model.vocab_size
        self._folder = tempfile.TemporaryDirectory()
        (Path(self._folder.name) / "config.json").write_text(json.dumps(llama_config(model)))
        self._llm: Any = vllm.LLM(
            self._folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max(job.depth + job.new + 1, job.prompt + 1),
            enable_prefix_caching=False,
            seed=0,
        )
        self._options: Callable[[int], Any] = lambda new: vllm.SamplingParams(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        self.weight_bytes = 2 * num_weights(model)
        self.path = {"weights": "bf16", "vllm": vllm.__version__}

    def decode(self, run: int) -> float:
        """One sequence."""
        return self._rate(run, 1)

    def batch(self, run: int) -> float:
        """All of them."""
        return self._rate(run, self._job.batch)

    def prefill(self, run: int) -> float:
        """One prompt, to its first token."""
        return self._job.prompt / self._seconds(prompts(run, 1, self._job.prompt, self._vocab_size), 1)

    def _rate(self, run: int, count: int) -> float:
        tokens = prompts(run, count, self._job.depth, self._vocab_size)
        one, all_ = self._seconds(tokens, 1), self._seconds(tokens, self._job.new + 1)
        return count * self._job.new / max(all_ - one, 1e-9)

    def _seconds(self, tokens: np.ndarray[Any, Any], new: int) -> float:
        given = [{"prompt_token_ids": row.tolist()} for row in tokens]
        start = time.perf_counter()
        self._llm.generate(given, self._options(new), use_tqdm=False)
        return time.perf_counter() - start

    def close(self) -> None:
        """Gives the memory back."""
        self._llm = None
        self._folder.cleanup()
        release(torch.device("cuda"))


ENGINES: dict[str, Callable[[Dimensions, str, Job, torch.device], Engine]] = {
    "paceline": Paceline,
    "transformers": Transformers,
    "vllm": VLLM,
}

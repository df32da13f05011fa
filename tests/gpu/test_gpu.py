"""The torch executor on a CUDA GPU: the reference's logits, recorded steps like ordinary ones, and an LLM that serves.

Kernels by themselves are tested by tests/triton, which `make test-gpu` runs on the GPU as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config
from token_sequences import TokenSequence, engine_config, random_sequences, run_chunks, run_step

from paceline.executors.base import Executor
from paceline.executors.reference import ReferenceExecutor
from paceline.executors.torch.executor import TorchExecutor
from paceline.executors.torch.gpu_kernels import triton_kernels
from paceline.executors.torch.host_copy import HostCopy
from paceline.executors.torch.kernels import Kernels
from paceline.llm import LLM
from paceline.params import SamplingParams

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
NUM_PAGES = 24
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"architecture": "qwen2", "attention_bias": True, "sliding_window": 9},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "num_kv_heads": 4},
}


def load(checkpoint: MemoryCheckpoint, kernels: Kernels, **changes: Any) -> TorchExecutor:
    config = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=330, num_threads=1, **changes)
    return TorchExecutor.load(checkpoint, config, device=str(DEVICE), kernels=kernels)


def relative_error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(found - expected).max() / np.sqrt(np.mean(expected**2)))


@pytest.mark.parametrize("kernels", [Kernels.of_torch, triton_kernels])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q8_0"])
def test_logits_are_those_of_the_reference(kernels: Any, model: str, kind: str) -> None:
    """Pages in float32, activations not rounded: only the order of sums differs."""
    checkpoint = tiny_checkpoint(tiny_config(context_length=256, **MODELS[model]), kind)
    executor = load(checkpoint, kernels(checkpoint.config, DEVICE), kv_dtype="f32")
    engine = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=330, kv_dtype="f32")
    reference = ReferenceExecutor.load(checkpoint, engine, num_pages=NUM_PAGES, activations="float")
    (sequence,) = random_sequences([150], checkpoint.config.vocab_size)
    assert relative_error(*(run_chunks(one, sequence, 150) for one in (executor, reference))) < 1e-4


def decode(executor: TorchExecutor, sequences: list[TokenSequence], at: int) -> np.ndarray[Any, Any]:
    """Logits [sequences, vocab] of the token at ``at`` of each."""
    return np.concatenate(run_step(executor, [sequence.part(at, at + 1) for sequence in sequences])[0])


@pytest.mark.parametrize(("kind", "weights"), [("Q4_0", "native"), ("BF16", "bf16")])
@pytest.mark.parametrize("kv_dtype", ["f16", "bf16"])
def test_a_recorded_step_is_the_ordinary_one(kind: str, weights: str, kv_dtype: str) -> None:
    """The same kernels run, over as many rows where none are filled up: to the bit. Three rows in a graph of four may
    be multiplied by another kernel of cuBLAS: then the answer is near."""
    checkpoint = tiny_checkpoint(tiny_config(context_length=256), kind)
    kernels = triton_kernels(checkpoint.config, DEVICE)
    recorded = load(checkpoint, kernels, weights=weights, kv_dtype=kv_dtype)
    ordinary = load(checkpoint, replace(kernels, recording=None), weights=weights, kv_dtype=kv_dtype)
    assert recorded.graphs is not None
    assert ordinary.graphs is None
    sequences = random_sequences([60, 45, 42, 41], checkpoint.config.vocab_size)
    for executor in (recorded, ordinary):
        run_step(executor, [sequence.part(0, 30) for sequence in sequences])
    for at, count in ((30, 4), (31, 2), (31, 4), (32, 1), (33, 1)):
        found, expected = (decode(executor, sequences[:count], at) for executor in (recorded, ordinary))
        assert np.array_equal(found, expected)
        assert np.array_equal(recorded.hidden(), ordinary.hidden())
    assert recorded.graphs.recorded == (1, 2, 4)
    found, expected = (decode(executor, sequences[:3], 32) for executor in (recorded, ordinary))
    assert relative_error(found, expected) < 1e-2


def test_logits_of_many_rows_and_few() -> None:
    """The copy on the host grows, and holds what the last step computed."""
    copy = HostCopy()
    for rows in (3, 40, 2):
        x = torch.randn(rows, 75, device=DEVICE)
        assert np.array_equal(copy(x), x.cpu().numpy())


def test_an_llm_serves() -> None:
    """A batch over the packaged model, in bf16, with recorded steps."""
    prompts = ["The capital of France is", "Water boils at", "The capital of France is Paris. The capital of Italy is"]
    loaded: list[Executor] = []

    def watch(executor: Executor) -> Executor:
        loaded.append(executor)
        return executor

    with LLM("smollm2-135m", executor="torch", device=str(DEVICE), weights="bf16", wrap=watch) as llm:
        answers = [answer.text for answer in llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0))]
    (executor,) = loaded
    assert isinstance(executor, TorchExecutor)
    assert "Paris" in answers[0]
    assert "Rome" in answers[2]
    assert answers[1]
    assert executor.path()["isa"] == f"torch {DEVICE.type}, triton"
    assert executor.graphs is not None
    assert executor.graphs.recorded

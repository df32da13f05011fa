"""The torch executor: the reference's logits, the same bits on every path, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from graph_variants import FAMILIES, VARIANTS
from numpy.typing import NDArray
from tiny_heads import tiny_head
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, run_chunks, run_step, step_plan
from token_trees import SHAPES, TokenTree, decode_path, run_tree, tree_step

from paceline.config import Experts
from paceline.engine.executor_choice import ExecutorChoice
from paceline.errors import ParameterError, UnsupportedError
from paceline.executors.reference import ReferenceExecutor
from paceline.executors.torch.executor import TorchExecutor
from paceline.llm import LLM
from paceline.models import registry

NUM_PAGES = 24
LENGTH = 300
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "one head": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "hidden_size": 80, "intermediate_size": 52},
    "qwen2": {"architecture": "qwen2", "attention_bias": True, "sliding_window": 9},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "num_kv_heads": 4},
    "mixtral": {"architecture": "mixtral", "experts": Experts(6, 3, 64)},
    "gpt-oss": {
        "architecture": "gpt-oss",
        "experts": Experts(5, 2, 48, biases=True),
        "activation": "swiglu_oai",
        "attention_sinks": True,
        "attention_bias": True,
        "output_bias": True,
        "tie_embeddings": False,
    },
    **VARIANTS,
}


@pytest.fixture(autouse=True)
def _variants_are_families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "FAMILIES", registry.FAMILIES + FAMILIES)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def checkpoint_of(name: str, kind: str = "F32") -> MemoryCheckpoint:
    config = tiny_config(**CONFIGS[name])
    if name == "one head":
        config = replace(config, rope=replace(config.rope, dim=64))
    return tiny_checkpoint(config, kind)


def load(checkpoint: MemoryCheckpoint, **changes: Any) -> TorchExecutor:
    changes = {"rows": 330, "num_threads": 1} | changes
    return TorchExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=NUM_PAGES, **changes))


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(found - expected).max() / np.sqrt(np.mean(expected**2)))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_reference(name: str) -> None:
    """Pages in float32, activations not rounded: only the order of sums differs, and 20 of at most 96 terms in a row
    leave 1e-5 of the logits' root mean square."""
    assert error_against_reference(checkpoint_of(name)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "weights"), [("Q8_0", "native"), ("Q4_0", "native"), ("BF16", "int4"), ("F32", "int8")]
)
def test_quantised_weights_are_dequantised_to_the_same_numbers(kind: str, weights: str) -> None:
    assert error_against_reference(checkpoint_of("llama", kind), weights=weights) < 1e-4


def error_against_reference(checkpoint: MemoryCheckpoint, **changes: Any) -> float:
    executor = load(checkpoint, kv_dtype="f32", **changes)
    engine = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=330, kv_dtype="f32", **changes)
    reference = ReferenceExecutor.load(checkpoint, engine, num_pages=NUM_PAGES, activations="float")
    (sequence,) = random_sequences([150], checkpoint.config.vocab_size)
    logits = [run_chunks(one, sequence, 150) for one in (executor, reference)]
    return max(relative_error(*logits), relative_error(executor.hidden(), reference.hidden()))


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "f32", "int8"])
def test_what_is_left_in_pages_is_not_read(kv_dtype: str) -> None:
    """Not even where it is no number: a request that overflowed must not spoil the next one that gets its pages."""
    checkpoint = checkpoint_of("gemma")
    (sequence,) = random_sequences([150], checkpoint.config.vocab_size)
    clean, dirty = (load(checkpoint, kv_dtype=kv_dtype) for _ in range(2))
    dirty.pages[:] = 0xFF  # in each format, or in its scales, not a number
    for chunk in (150, 7):
        assert np.array_equal(run_chunks(dirty, sequence, chunk), run_chunks(clean, sequence, chunk))


PATHS = [(name, "f16", "native") for name in CONFIGS]
PATHS += [("gemma", kv_dtype, "native") for kv_dtype in ("bf16", "f32", "int8")]
PATHS += [("llama", "f16", "bf16"), ("oss", "int8", "bf16")]


@pytest.mark.parametrize(("name", "kv_dtype", "weights"), PATHS)
def test_a_row_has_the_same_bits_on_every_path(name: str, kv_dtype: str, weights: str) -> None:
    """Whole, in chunks, row by row over the end of a split, among others, on one thread and on two."""
    checkpoint = checkpoint_of(name)
    first, *others = random_sequences([LENGTH, 40, 140, 8], checkpoint.config.vocab_size)
    executor = load(checkpoint, kv_dtype=kv_dtype, weights=weights)
    whole = run_chunks(executor, first, LENGTH)
    hidden = executor.hidden().copy()
    for chunk in (7, 128):
        assert np.array_equal(run_chunks(executor, first, chunk), whole)
    for at in range(250, 262):
        assert np.array_equal(run_step(executor, [first.part(at, at + 1)])[0][0][0], whole[at])
    more = load(checkpoint, kv_dtype=kv_dtype, weights=weights, num_threads=2)
    for step, (begin, end) in enumerate([(0, 100), (100, 101), (101, 260), (260, LENGTH)]):
        before, *after = [
            other.part(step * len(other.tokens) // 4, (step + 1) * len(other.tokens) // 4) for other in others
        ]
        logits, _ = run_step(more, [before, first.part(begin, end), *after])
        assert np.array_equal(logits[1], whole[begin:end])
        rows = slice(len(logits[0]), len(logits[0]) + end - begin)
        assert np.array_equal(more.hidden()[rows], hidden[begin:end])
    assert (np.ptp(whole, axis=0) > 0).all(), "rows differ, else equality would say little"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_every_node_of_a_tree_is_as_in_its_own_sequence(name: str, shape: str) -> None:
    checkpoint = checkpoint_of(name)
    for share_written in (False, True):
        tree = TokenTree.random(shape, 30, checkpoint.config.vocab_size)
        step, executor = tree_step(tree, share_written=share_written), load(checkpoint)
        logits = run_tree(executor, tree, step)
        for path, sequence in step.branches:
            plain = decode_path(load(checkpoint), tree, path)
            assert np.array_equal(np.stack([logits[node] for node in path]), plain.logits)
            assert np.array_equal(executor.pages[sequence.pages], plain.pages)


@pytest.mark.parametrize("normed", [False, True])
def test_features_are_read_from_the_plan(normed: bool) -> None:
    checkpoint = tiny_checkpoint(tiny_head(input_norms=normed))
    (sequence,) = random_sequences([20], checkpoint.config.vocab_size)
    features = np.random.default_rng(0).standard_normal((20, checkpoint.config.hidden_size)).astype(np.float32)
    plan = replace(step_plan([sequence.part(0, 20)]), features=features)
    engine = engine_config(checkpoint.config, num_pages=2, kv_dtype="f32")
    reference = ReferenceExecutor.load(checkpoint, engine, num_pages=2, activations="float")
    executor = load(checkpoint, kv_dtype="f32")
    reference.run(plan)
    executor.run(plan)
    assert relative_error(executor.logits(), reference.logits()) < 1e-4


def test_bfloat16_products_are_near_float32_ones() -> None:
    """Each of some twenty products in a row rounds its input, its weights and its result to 2^-9 of their size."""
    checkpoint = checkpoint_of("llama")
    (sequence,) = random_sequences([60], checkpoint.config.vocab_size)
    exact = run_chunks(load(checkpoint, kv_dtype="f32"), sequence, 60)
    executor = load(checkpoint, kv_dtype="f32", weights="bf16")
    assert 1e-4 < relative_error(run_chunks(executor, sequence, 60), exact) < 0.1
    assert executor.weight_bytes < 0.6 * load(checkpoint).weight_bytes
    assert executor.path()["weights"] == "bf16"


@pytest.mark.parametrize("name", ["llama", "untied", "oss"])
@pytest.mark.parametrize("weights", ["native", "bf16", "int4"])
@pytest.mark.parametrize("head_bits", [None, "int8"])
def test_the_memory_of_weights_is_known_before(name: str, weights: Any, head_bits: Any) -> None:
    checkpoint = checkpoint_of(name, "Q8_0") if name != "untied" else tiny_checkpoint(tiny_config(tie_embeddings=False))
    changes = {"weights": weights, "head_bits": head_bits}
    planned = ExecutorChoice("torch").weight_bytes(
        checkpoint, engine_config(checkpoint.config, num_pages=NUM_PAGES, **changes)
    )
    assert planned == load(checkpoint, **changes).weight_bytes


def test_two_executors_may_share_pages() -> None:
    checkpoint = checkpoint_of("llama")
    (sequence,) = random_sequences([90], checkpoint.config.vocab_size)
    first, engine = load(checkpoint), engine_config(checkpoint.config, num_pages=NUM_PAGES, num_threads=1)
    second = TorchExecutor.load(checkpoint, engine, pages_of=first)
    run_step(first, [sequence.part(0, 80)])
    logits, _ = run_step(second, [sequence.part(80, 90)])
    assert np.array_equal(logits[0], run_chunks(load(checkpoint), sequence, 90)[80:])
    with pytest.raises(UnsupportedError, match="one shape"):
        TorchExecutor.load(checkpoint, replace(engine, kv_dtype="f32"), pages_of=first)
    with pytest.raises(UnsupportedError, match="one kind"):
        ExecutorChoice("native").load(checkpoint, engine, num_pages=NUM_PAGES, pages_of=first)


def test_the_path_says_what_runs() -> None:
    executor = load(checkpoint_of("llama"), num_threads=2, kv_dtype="int8")
    run_step(executor, [random_sequences([3], 75)[0].part(0, 3)])
    assert executor.path() == {"isa": "torch cpu", "threads": 2, "weights": "native as f32", "kv_dtype": "int8"}
    assert torch.get_num_threads() == 2


def test_pages_on_disk_are_kept_apart_by_what_computed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [ExecutorChoice(name).key for name in ("native", "reference", "torch")]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NEON")
    keys.append(ExecutorChoice("torch").key)
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    keys.append(ExecutorChoice("torch").key)
    assert len(set(keys)) == 5
    assert keys[0] == "native"


def test_what_is_not_there_is_an_error() -> None:
    with pytest.raises(ParameterError, match="device='tpu'"):
        LLM("nowhere", executor="torch", device="tpu")
    with pytest.raises(ParameterError, match=r"device='cuda'.*torch has others"):
        LLM("nowhere", device="cuda")
    with pytest.raises(ParameterError, match=r"executor='jax'.*native, torch, reference"):
        LLM("nowhere", executor="jax")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"isa='avx2'.*PyTorch chooses"):
        LLM("nowhere", executor="torch", isa="avx2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ParameterError, match=r"device='cuda'.*sees no CUDA GPU"):
        ExecutorChoice("torch", "cuda")


def test_without_pytorch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("paceline.executors.torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ParameterError, match=r"pip install 'paceline\[torch\]'"):
        ExecutorChoice("torch")

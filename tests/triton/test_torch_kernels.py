"""The torch executor with Triton's kernels: the reference's logits, and pieces that change no bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, run_chunks, run_step

from paceline.engine.memory import torch_weight_bytes
from paceline.executors.reference import ReferenceExecutor
from paceline.executors.torch import gpu_kernels
from paceline.executors.torch.executor import TorchExecutor
from paceline.executors.torch.gpu_kernels import triton_kernels

NUM_PAGES = 12


def load(checkpoint: MemoryCheckpoint, device: torch.device, **changes: Any) -> TorchExecutor:
    config = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=160, num_threads=1, **changes)
    kernels = triton_kernels(checkpoint.config, device)
    return TorchExecutor.load(checkpoint, config, device=str(device), kernels=kernels)


@pytest.mark.parametrize(
    ("kind", "kinds", "weights"),
    [
        ("Q4_0", {}, "native"),
        ("Q4G64", {"attn_v.weight": "Q4G64Z", "ffn_down.weight": "Q8_0"}, "native"),
        ("F32", {}, "int4"),
    ],
)
def test_logits_are_those_of_the_reference(
    device: torch.device, kind: str, kinds: dict[str, str], weights: str
) -> None:
    """Codes are multiplied as they are and activations are not rounded: only the order of sums differs."""
    checkpoint = tiny_checkpoint(tiny_config(intermediate_size=128), kind, kinds=kinds)
    executor = load(checkpoint, device, weights=weights, kv_dtype="f32")
    engine = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=160, weights=weights, kv_dtype="f32")
    reference = ReferenceExecutor.load(checkpoint, engine, num_pages=NUM_PAGES, activations="float")
    (sequence,) = random_sequences([20], checkpoint.config.vocab_size)
    found, expected = (run_chunks(one, sequence, 20) for one in (executor, reference))
    assert np.abs(found - expected).max() < 1e-4 * np.sqrt(np.mean(expected**2))
    assert executor.path()["isa"] == f"torch {device.type}, triton"


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "int8"])
def test_pages_of_16_bits_and_less(device: torch.device, kv_dtype: str) -> None:
    """Against attention in torch over the same pages; numerators are rounded to 16 bits where pages are bf16, which the
    interpreter cuts off."""
    checkpoint = tiny_checkpoint(tiny_config(sliding_window=30))
    config = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=160, num_threads=1, kv_dtype=kv_dtype)
    plain = TorchExecutor.load(checkpoint, config, device=str(device))
    (sequence,) = random_sequences([40], checkpoint.config.vocab_size)
    found, expected = (run_chunks(one, sequence, 40) for one in (load(checkpoint, device, kv_dtype=kv_dtype), plain))
    bound = 1e-3 if kv_dtype == "bf16" else 1e-4
    assert np.abs(found - expected).max() < bound * np.sqrt(np.mean(expected**2))


def test_a_row_has_the_same_bits_on_every_path(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in chunks, among others, and where scratch is short; products in torch are those of float32 matrices only,
    which a GPU's library may sum in another order."""
    config = tiny_config(num_layers=1, hidden_size=32, intermediate_size=32, tie_embeddings=False, vocab_size=32)
    executor = load(tiny_checkpoint(config, "Q4_0"), device, kv_dtype="bf16")
    first, second, third = random_sequences([18, 20, 5], config.vocab_size)
    whole = run_chunks(executor, first, 18)
    assert np.array_equal(run_chunks(executor, first, 7), whole)
    parts = [second.part(0, 20), first.part(0, 18), third.part(0, 5)]
    together, _ = run_step(executor, parts)
    assert np.array_equal(together[1], whole)
    monkeypatch.setattr(gpu_kernels, "SCRATCH_BYTES", 11 * 4 * 4 * 16)
    cut, _ = run_step(executor, parts)
    assert np.array_equal(np.concatenate(cut), np.concatenate(together))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "weights"), [("Q4_0", "native"), ("Q8_0", "native"), ("BF16", "int4")])
def test_the_memory_of_weights_is_known_before(device: torch.device, kind: str, weights: str, tied: bool) -> None:
    """Codes of 4 bits are held as they are, other matrices and the table of embeddings in f32."""
    config = tiny_config(hidden_size=128, intermediate_size=256, num_heads=8, tie_embeddings=tied, vocab_size=256)
    checkpoint = tiny_checkpoint(config, kind)
    executor = load(checkpoint, device, weights=weights)
    engine = engine_config(config, num_pages=NUM_PAGES, weights=weights)
    assert torch_weight_bytes(checkpoint, engine, keeps_4_bits=True) == pytest.approx(executor.weight_bytes, rel=0.01)

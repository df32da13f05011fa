"""The limits: traffic of a tiny checkpoint counted by hand, and work against a plain simulation of every pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from fake_executor import tiny_model

from paceline.config import EngineConfig, ModelConfig
from paceline.measure.roofline import (
    Peaks,
    Traffic,
    Work,
    batch_work,
    decode_work,
    model_traffic,
    prefill_work,
    shared_prefix_work,
)
from paceline.weights.raw import BLOCK_KINDS, RawTensor, TensorHeader

TRAFFIC = Traffic(layer_bytes=1000, head_bytes=300, kv_bytes=8, layer_operations=4000, head_operations=900)


@dataclass
class TinyCheckpoint:
    """Names, shapes and kinds; no values."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    config: ModelConfig = field(default_factory=tiny_model)
    interleaved_rope: bool = True
    path: str = "tiny"

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def header(self, name: str) -> TensorHeader:
        return TensorHeader(*self.tensors[name])

    def tensor(self, name: str) -> RawTensor:
        shape, kind = self.tensors[name]
        block, num_bytes = BLOCK_KINDS[kind]
        return RawTensor(name, shape, kind, np.zeros(math.prod(shape) // block * num_bytes, np.uint8))


TIED = TinyCheckpoint(
    {
        "token_embd.weight": ((96, 32), "Q8_0"),
        "blk.0.attn_norm.weight": ((32,), "F32"),
        "blk.0.attn_q.weight": ((32, 32), "Q4_1"),
        "blk.0.ffn_down.weight": ((48, 64), "Q4_0"),
    }
)


def test_traffic_of_a_tied_model_counted_by_hand() -> None:
    traffic = model_traffic(TIED, EngineConfig())
    # A tile is 16 outputs. Q4_1: 256 bytes of nibbles, 32 of scales, 32 of minima per 32 inputs; Q4_0 has no minima.
    assert traffic.layer_bytes == 2 * (256 + 32 + 32) + 3 * 2 * (256 + 32)
    assert traffic.head_bytes == 6 * (32 * 16 + 32)
    assert traffic.layer_operations == 2 * (32 * 32 + 48 * 64)
    assert traffic.head_operations == 2 * 96 * 32
    assert traffic.kv_bytes == 2 * 2 * 32
    assert model_traffic(TIED, EngineConfig(kv_dtype="f32")).kv_bytes == 2 * 4 * 32


def test_own_head_leaves_the_embedding_out() -> None:
    checkpoint = TinyCheckpoint({**TIED.tensors, "output.weight": ((96, 32), "F16")})
    traffic = model_traffic(checkpoint, EngineConfig())
    assert traffic.head_bytes == 96 * 32 * 2
    assert traffic.head_operations == 0, "a float matrix does no int8 operations"
    assert traffic.layer_bytes == model_traffic(TIED, EngineConfig()).layer_bytes


def test_chosen_formats_count() -> None:
    as_int8 = model_traffic(TIED, EngineConfig(weights="int8", head_bits="bf16"))
    assert as_int8.layer_bytes == 2 * (32 * 16 + 32) + 3 * 2 * (32 * 16 + 32)
    assert as_int8.head_bytes == 96 * 32 * 2
    assert as_int8.head_operations == 0


def test_decode_work_equals_the_sum_over_passes() -> None:
    depth, num_new, sequences = 10, 6, 4
    num_bytes = sum(1000 + 300 + 8 * sequences * (depth + step + 0.5) for step in range(num_new))
    work = decode_work(TRAFFIC, depth=depth, num_new=num_new, num_sequences=sequences)
    assert work.bytes_per_token == pytest.approx(num_bytes / (num_new * sequences))
    assert work.operations_per_token == 4900


@pytest.mark.parametrize("num_cached", [0, 50])
@pytest.mark.parametrize(("num_tokens", "chunk"), [(1, 8), (8, 8), (9, 8), (64, 16), (100, 7)])
def test_prefill_work_equals_the_sum_over_chunks(num_tokens: int, chunk: int, num_cached: int) -> None:
    num_bytes, operations, start = 0, 0, num_cached
    while start < num_cached + num_tokens:
        rows = min(chunk, num_cached + num_tokens - start)
        num_bytes += 1000 + 8 * start
        operations += rows * 4000
        start += rows
    num_bytes, operations = num_bytes + 300, operations + 900
    work = prefill_work(TRAFFIC, num_tokens=num_tokens, chunk=chunk, num_cached=num_cached)
    assert work.bytes_per_token == pytest.approx(num_bytes / num_tokens)
    assert work.operations_per_token == pytest.approx(operations / num_tokens)


def test_batch_work_adds_the_prompts_operations() -> None:
    work = batch_work(TRAFFIC, num_prompt=12, num_new=6, concurrency=4)
    alone = decode_work(TRAFFIC, depth=12, num_new=6, num_sequences=4)
    assert work.bytes_per_token == alone.bytes_per_token
    assert work.operations_per_token == 4900 + 4000 * 12 / 6


def test_shared_prefix_work_equals_the_sum_over_passes() -> None:
    num_prefix, num_tail, num_new, num_requests, concurrency = 64, 5, 6, 8, 4
    num_bytes, num_outputs, operations = 0.0, 0, num_prefix * 4000
    for _ in range(num_requests // concurrency):
        operations += concurrency * num_tail * 4000
        for step in range(num_new):
            num_bytes += 1000 + 300 + 8 * (num_prefix + concurrency * (num_tail + step + 0.5))
            operations += concurrency * (4000 + 900)
            num_outputs += concurrency
    sizes = {"num_prefix": num_prefix, "num_tail": num_tail, "num_new": num_new}
    work = shared_prefix_work(TRAFFIC, **sizes, num_requests=num_requests, concurrency=concurrency)
    assert work.bytes_per_token == pytest.approx(num_bytes / num_outputs)
    assert work.operations_per_token == pytest.approx(operations / num_outputs)


def test_the_slower_of_memory_and_arithmetic_limits() -> None:
    peaks = Peaks(bandwidth_gb_s=10.0, int8_gops=100.0)
    assert peaks.tokens_per_s(Work(1e9, 1e9)) == pytest.approx(10.0)
    assert peaks.tokens_per_s(Work(1e6, 1e9)) == pytest.approx(100.0)
    assert peaks.tokens_per_s(Work(1e9, 0.0)) == pytest.approx(10.0)

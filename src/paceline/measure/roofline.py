"""The limit of a workload on this machine: bytes over the measured bandwidth, or operations over the measured int8
peak.

Source: Williams, Waterman, Patterson (2009), the roofline model.

Notation: W bytes of weights that a pass reads, k bytes of keys and values that a cached token keeps, n rows of a pass,
o of them with logits, d cached tokens in front of them. A pass must move W + k·d bytes and do n·a + o·h operations: a
are the int8 operations of all layers for one row, h those of the output matrix. Matrices in a float format do no int8
operations: only memory bounds them here. Of a mixture's experts, X bytes, each row reads a share s = chosen / experts,
and n rows that choose independently X (1 - (1 - s)^n) in expectation.

Departures: norms, activations and the embedding's one row are left out; they are far below one per cent. Rows do not
choose independently, and neighbours read less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.kv.layout import KVLayout
from paceline.weights.packing import is_matrix, matrix_shape, target_format
from paceline.weights.raw import Checkpoint


@dataclass(frozen=True)
class Traffic:
    """What one pass through a model must move and compute.

    layer_bytes, head_bytes            weights of all layers but for experts, of the output matrix
    kv_bytes                           keys and values of one cached token
    layer_operations, head_operations  int8 multiplications and additions for one row
    expert_bytes, expert_share         weights of all experts, and the share of them that one row reads
    """

    layer_bytes: int
    head_bytes: int
    kv_bytes: int
    layer_operations: int
    head_operations: int
    expert_bytes: int = 0
    expert_share: float = 1.0

    def pass_bytes(self, num_cached: float, *, num_rows: int, with_head: bool = True) -> float:
        """Bytes that one pass of so many rows reads, over ``num_cached`` cached tokens of all its sequences
        together.
        """
        experts = self.expert_bytes * (1 - (1 - self.expert_share) ** num_rows)
        return self.layer_bytes + experts + (self.head_bytes if with_head else 0) + self.kv_bytes * num_cached


@dataclass(frozen=True)
class Work:
    """What a workload must move and compute for each token that it counts."""

    bytes_per_token: float
    operations_per_token: float


@dataclass(frozen=True)
class Peaks:
    """What this machine reached in the same run: bytes read from memory, int8 operations, both in 10^9 a second."""

    bandwidth_gb_s: float
    int8_gops: float

    def tokens_per_s(self, work: Work) -> float:
        """The most tokens a second that memory and arithmetic allow."""
        memory_s = work.bytes_per_token / (self.bandwidth_gb_s * 1e9)
        arithmetic_s = work.operations_per_token / (self.int8_gops * 1e9)
        return 1.0 / max(memory_s, arithmetic_s)


def model_traffic(checkpoint: Checkpoint, config: EngineConfig) -> Traffic:
    """The traffic of a model whose weights are brought into the formats that ``config`` asks for."""
    head = "output.weight" if "output.weight" in checkpoint.names() else "token_embd.weight"
    experts = checkpoint.config.experts
    share = 1.0 if experts is None else experts.num_chosen / experts.num_experts
    layer_bytes = head_bytes = head_operations = expert_bytes = 0
    layer_operations = 0.0
    for name in checkpoint.names():
        tensor = checkpoint.header(name)
        if not is_matrix(name, tensor.shape) or (name == "token_embd.weight" and name != head):
            continue
        packed = target_format(tensor.kind, config.weights_of(name, tied_embeddings=checkpoint.config.tie_embeddings))
        num_bytes = packed.matrix_bytes(*matrix_shape(tensor.shape))
        operations = 2 * math.prod(tensor.shape) if packed.group else 0
        if name == head:
            head_bytes, head_operations = num_bytes, operations
        elif len(tensor.shape) == 3:
            expert_bytes += num_bytes
            layer_operations += share * operations
        else:
            layer_bytes += num_bytes
            layer_operations += operations
    kv_bytes = KVLayout.of(checkpoint.config, config.kv_dtype).bytes_per_token
    return Traffic(layer_bytes, head_bytes, kv_bytes, round(layer_operations), head_operations, expert_bytes, share)


def decode_work(traffic: Traffic, *, depth: int, num_new: int, num_sequences: int = 1) -> Work:
    """Per token of ``num_new`` decode passes after ``depth`` tokens, ``num_sequences`` sequences sharing each pass."""
    mean_cached = depth + num_new / 2
    return Work(
        bytes_per_token=traffic.pass_bytes(num_sequences * mean_cached, num_rows=num_sequences) / num_sequences,
        operations_per_token=traffic.layer_operations + traffic.head_operations,
    )


def prefill_work(traffic: Traffic, *, num_tokens: int, chunk: int, num_cached: int = 0) -> Work:
    """Per prompt token of a prefill in chunks, behind ``num_cached`` cached tokens: each chunk reads the layers and the
    tokens before it, the last one the head."""
    starts = range(num_cached, num_cached + num_tokens, chunk)
    num_bytes = sum(
        traffic.pass_bytes(start, num_rows=min(chunk, starts.stop - start), with_head=start == starts[-1])
        for start in starts
    )
    operations = num_tokens * traffic.layer_operations + traffic.head_operations
    return Work(num_bytes / num_tokens, operations / num_tokens)


def batch_work(traffic: Traffic, *, num_prompt: int, num_new: int, concurrency: int) -> Work:
    """Per output token of a closed loop: prompts ride along with the decode passes, so they add operations and no
    reading of weights."""
    decode = decode_work(traffic, depth=num_prompt, num_new=num_new, num_sequences=concurrency)
    return Work(decode.bytes_per_token, decode.operations_per_token + traffic.layer_operations * num_prompt / num_new)


def shared_prefix_work(
    traffic: Traffic, *, num_prefix: int, num_tail: int, num_new: int, num_requests: int, concurrency: int
) -> Work:
    """Per output token of a closed loop whose prompts share ``num_prefix`` tokens: those are computed once, and a pass
    reads their keys and values once for all its sequences. Prompts ride along with the decode passes."""
    num_cached = num_prefix + concurrency * (num_tail + num_new / 2)
    num_prompt = num_prefix / num_requests + num_tail
    operations = traffic.layer_operations * (1 + num_prompt / num_new) + traffic.head_operations
    return Work(traffic.pass_bytes(num_cached, num_rows=concurrency) / concurrency, operations)


def measure_peaks(isa: str, num_threads: int) -> Peaks:
    """Memory bandwidth and int8 peak of this machine, measured now with the engine's own instruction set and
    threads."""
    from paceline import _native

    return Peaks(float(_native.measure_bandwidth(num_threads)), float(_native.measure_int8_peak(isa, num_threads)))


PeaksProbe = Callable[[str, int], Peaks]

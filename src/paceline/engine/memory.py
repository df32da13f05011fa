"""What weights and workspace will take, from the checkpoint alone: the KV pool is sized before anything is loaded."""

from __future__ import annotations

import math

from paceline.config import EngineConfig, ModelConfig, WeightFormat
from paceline.kv.layout import pages_for
from paceline.weights.packed import NATIVE_FORMATS
from paceline.weights.packing import is_matrix, matrix_shape, target_format
from paceline.weights.raw import Checkpoint, TensorHeader

DRAFT_KV_SHARE = 8
"""Part of the available memory that a drafter's keys and values may take: one of so many."""

FULL_CONTEXTS = 8
"""More whole contexts than these are seldom used at a time."""


def weight_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Bytes of all weights in the formats that ``config`` chooses; vectors are held in f32."""
    tied = checkpoint.config.tie_embeddings
    return sum(
        tensor_bytes(name, checkpoint.header(name), config.weights_of(name, tied_embeddings=tied))
        for name in checkpoint.names()
    )


def torch_weight_bytes(checkpoint: Checkpoint, config: EngineConfig, *, keeps_4_bits: bool) -> int:
    """Bytes of all weights in PyTorch: matrices in bf16 where ``config`` makes them that, else in f32, and with
    ``keeps_4_bits`` codes of 4 bits that are multiplied as they are. A tied matrix is held twice, as table and as head.
    """
    tied = checkpoint.config.tie_embeddings
    total = 0
    for name in checkpoint.names():
        tensor, weights = checkpoint.header(name), config.weights_of(name, tied_embeddings=tied)
        if is_matrix(name, tensor.shape) and tensor.kind not in NATIVE_FORMATS:  # see tensor_bytes
            continue
        is_half = is_matrix(name, tensor.shape) and weights == "bf16"
        plain_bytes = (2 if is_half else 4) * math.prod(tensor.shape)
        is_table = name == "token_embd.weight"
        if is_table:
            total += plain_bytes
        if not is_table or tied:
            has_codes = len(tensor.shape) == 2 and target_format(tensor.kind, weights).kind == "u4"
            total += tensor_bytes(name, tensor, weights) if keeps_4_bits and has_codes else plain_bytes
    return total


def tensor_bytes(name: str, tensor: TensorHeader, weights: WeightFormat) -> int:
    """Bytes of one tensor in the format that ``weights`` makes of its kind."""
    if not is_matrix(name, tensor.shape):
        return 4 * math.prod(tensor.shape)
    if tensor.kind not in NATIVE_FORMATS:  # the loader will say what is wrong with this kind
        return 0
    return target_format(tensor.kind, weights).matrix_bytes(*matrix_shape(tensor.shape))


def workspace_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of one step's activations, rounded up: all rows in f32 and int8, and logits of ``max_outputs`` outputs."""
    row = 4 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size)
    if model.experts is None or model.experts.dense_layers:
        row += 3 * model.intermediate_size
    if model.experts is not None:  # hidden values of every choice
        row += model.experts.num_experts + 2 * model.experts.num_chosen * model.experts.width
    return 5 * row * config.token_budget + 4 * model.vocab_size * config.max_outputs


def draft_kv_bytes(page_bytes: int, *, context_length: int, max_batch: int, available_bytes: int) -> int:
    """What keys and values of a drafter with pages of its own get: room for as many whole contexts as are used at a
    time, within its share of the memory, but for one in any case."""
    one = pages_for(context_length)
    most = available_bytes // DRAFT_KV_SHARE // page_bytes
    return max(one, min(most, one * min(max_batch, FULL_CONTEXTS))) * page_bytes

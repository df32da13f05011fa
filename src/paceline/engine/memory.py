"""What weights and workspace will take, from the checkpoint alone: the KV pool is sized before anything is loaded."""

from __future__ import annotations

import math

from paceline.config import EngineConfig, ModelConfig, WeightFormat
from paceline.weights.packed import NATIVE_FORMATS
from paceline.weights.packing import is_matrix, matrix_shape, target_format
from paceline.weights.raw import Checkpoint, TensorHeader


def weight_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Bytes of all weights in the formats that ``config`` chooses; vectors are held in f32."""
    tied = checkpoint.config.tie_embeddings
    return sum(
        tensor_bytes(name, checkpoint.header(name), config.weights_of(name, tied_embeddings=tied))
        for name in checkpoint.names()
    )


def gpu_weight_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Bytes of all weights on a GPU where Triton multiplies 4-bit codes as they are: everything else is held in f32,
    also the table of embeddings and the experts of a mixture."""
    tied = checkpoint.config.tie_embeddings
    total = 0
    for name in checkpoint.names():
        tensor, weights = checkpoint.header(name), config.weights_of(name, tied_embeddings=tied)
        is_product = is_matrix(name, tensor.shape) and len(tensor.shape) == 2 and name != "token_embd.weight"
        known = is_product and tensor.kind in NATIVE_FORMATS
        stays = known and target_format(tensor.kind, weights).kind == "u4"
        total += tensor_bytes(name, tensor, weights if stays else "f32")
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

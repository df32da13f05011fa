"""The tensors that a configuration needs, and the check that a file has these and no others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.config import ModelConfig
from paceline.errors import CheckpointError, UnsupportedError

Shape = tuple[int, ...]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape (outputs, inputs) or (length,) of every tensor of such a model."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    block: dict[str, Shape] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (config.q_size, hidden),
        "attn_k.weight": (config.kv_size, hidden),
        "attn_v.weight": (config.kv_size, hidden),
        "attn_output.weight": (hidden, config.q_size),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
    }
    if config.attention_bias:
        block |= {
            "attn_q.bias": (config.q_size,),
            "attn_k.bias": (config.kv_size,),
            "attn_v.bias": (config.kv_size,),
        }
    if config.qk_norm:
        block |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    shapes: dict[str, Shape] = {"token_embd.weight": (config.vocab_size, hidden), "output_norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes["output.weight"] = (config.num_logits, hidden)
    if config.architecture == "eagle":
        shapes |= {"fc_embed.weight": (hidden, hidden), "fc_feature.weight": (hidden, hidden)}
    if config.input_norms:
        shapes |= {"embed_norm.weight": (hidden,), "feature_norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def check_layers(path: Path, config: ModelConfig, num_tensors: int) -> None:
    """Raises CheckpointError for more layers than a file with so many tensors can have. Before ``expected_shapes``: its
    answer grows with the layers, whatever a damaged configuration says.
    """
    if config.num_layers > num_tensors:
        raise CheckpointError(path, f"says it has {config.num_layers} layers but holds only {num_tensors} tensors")


def check_inventory(path: Path, config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError for a tensor that is missing or has another shape, UnsupportedError for one left over.

    A tensor that nothing reads (a bias, a scale, an expert) would have changed the result: it is not passed over.
    """
    check_layers(path, config, len(shapes))
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in shapes:
            raise CheckpointError(path, "missing", tensor=name)
        if shapes[name] != shape:
            raise CheckpointError(path, f"has shape {shapes[name]}, expected {shape}", tensor=name)
    for name in shapes:
        if name not in expected:
            raise UnsupportedError(f"{path}: tensor {name!r} has no place in the {config.architecture} architecture")

"""Writes models of real shapes with random weights: for speed and memory, not for sense.

A GGUF file holds random blocks of Q4_0, Q4_1 or Q8_0; a Hugging Face directory holds sharded safetensors in bf16. One
tensor is in memory at a time. Weights have standard deviation 1 / sqrt(inputs), so activations and logits stay finite.
The tokenizer is a byte-level BPE with a few merges, padded with dummy tokens to the vocabulary's size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.config import Experts, ModelConfig, RopeConfig
from paceline.models.family import BLOCK_NAMES, TOP_NAMES
from paceline.text.byte_alphabet import byte_of_character
from paceline.text.pretokenizers import LLAMA3
from paceline.weights.inventory import Shape, expected_shapes
from paceline.weights.raw import BLOCK_KINDS

KINDS = ("Q4_0", "Q4_1", "Q8_0")
FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
"""Values of general.file_type."""

MERGES = ("Ġ t", "h e", "Ġt he", "i n", "Ġ a", "r e", "o n", "Ġ s")
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
NORMAL, CONTROL, UNUSED = 1, 3, 5
"""Values of tokenizer.ggml.token_type."""


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a Llama model; with ``experts`` of a Qwen3-MoE model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_length: int
    tie_embeddings: bool
    head_dim: int | None = None
    experts: Experts | None = None

    def config(self) -> ModelConfig:
        """As the configuration that loading the files gives."""
        head_dim = self.head_dim or self.hidden_size // self.num_heads
        return ModelConfig(
            architecture="llama" if self.experts is None else "qwen3moe",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            rms_norm_eps=float(np.float32(1e-5)),  # what GGUF's f32 holds
            rope=RopeConfig(theta=500000.0, dim=head_dim),
            tie_embeddings=self.tie_embeddings,
            qk_norm=self.experts is not None,
            experts=self.experts,
        )


SHAPES = {
    "tiny": Dimensions(2, 128, 256, 4, 2, 512, 512, True),
    "1b": Dimensions(16, 2048, 8192, 32, 8, 128256, 8192, True),
    "3b": Dimensions(28, 3072, 8192, 24, 8, 128256, 8192, True),
    "8b": Dimensions(32, 4096, 14336, 32, 8, 128256, 8192, False),
    "tiny-moe": Dimensions(2, 128, 256, 4, 2, 512, 512, False, 64, Experts(8, 2, 96)),
    "30b-a3b": Dimensions(48, 2048, 6144, 32, 4, 151936, 40960, False, 128, Experts(128, 8, 768)),
}
"""Llama 3.2 1B and 3B, Llama 3 8B, Qwen3 30B-A3B, and two for tests."""


def random_blocks(kind: str, shape: Shape, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Bytes of a matrix [outputs, inputs] of that kind: uniform codes, scales within a quarter of their mean."""
    weights, num_bytes = BLOCK_KINDS[kind]
    count = math.prod(shape) // weights
    blocks = random_bytes(count * num_bytes, rng).reshape(count, num_bytes)
    levels = 256 if kind == "Q8_0" else 16
    deviation = math.sqrt((levels**2 - 1) / 12)  # of a uniform code
    scale = rng.random(count, np.float32)
    sign = np.sign(scale - np.float32(0.5))  # codes have a mean of -1/2, which would add up over inputs and layers
    scale = sign * (np.abs(scale - np.float32(0.5)) + np.float32(0.75)) / np.float32(deviation * math.sqrt(shape[-1]))
    blocks[:, :2] = scale.astype("<f2")[:, None].view(np.uint8)
    if kind == "Q4_1":
        blocks[:, 2:4] = (-7.5 * scale).astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(-1)


def random_bf16(shape: Shape, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Bytes of a matrix in bf16: any sign and mantissa, one of two neighbouring exponents."""
    # The mean square of a magnitude uniform in [1, 2) is 7/3, in either of two octaves 1, 2: 35/6 of the lower 1.
    lowest = math.sqrt(6 / 35 / shape[-1])
    exponent = 2 * round((math.log2(lowest) + 127) / 2)  # even: its last bit is random
    bits = random_bytes(2 * math.prod(shape), rng).view("<u2")
    bits &= np.uint16(0x80FF)
    bits |= np.uint16(exponent << 7)
    return bits.view(np.uint8)


def random_bytes(count: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """That many, writable without another copy."""
    return rng.integers(0, 2**64 - 1, -(-count // 8), np.uint64, endpoint=True).view(np.uint8)[:count]


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Tokens and their types: 256 bytes, the merged ones, begin and end of text, and dummies."""
    tokens = [*byte_of_character(), *(merge.replace(" ", "") for merge in MERGES), BEGIN, END]
    assert len(tokens) <= size, f"a vocabulary of {size} has no room for {len(tokens)} tokens"
    types = [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2
    dummies = range(size - len(tokens))
    return tokens + [f"<dummy_{index}>" for index in dummies], types + [UNUSED] * len(dummies)


def write_gguf(path: Path, dimensions: Dimensions, kind: str, *, seed: int = 0) -> None:
    """Writes a model of that shape, all matrices of that kind but for routers, which are f32."""
    import gguf

    config = dimensions.config()
    writer = gguf.GGUFWriter(path, config.architecture)
    writer.add_name(f"synthetic {kind}")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if config.experts is not None:
        writer.add_expert_count(config.experts.num_experts)
        writer.add_expert_used_count(config.experts.num_chosen)
        writer.add_expert_feed_forward_length(config.experts.width)
    writer.add_rope_dimension_count(config.rope.dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens, types = vocabulary(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index(BEGIN))
    writer.add_eos_token_id(tokens.index(END))
    tensors = expected_shapes(config)
    block_weights, block_bytes = BLOCK_KINDS[kind]
    for name, size in tensors.items():
        if _is_f32(name, size):
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * math.prod(size))
        else:
            row = (*size[:-1], size[-1] // block_weights * block_bytes)
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(name, row, np.dtype(np.uint8), math.prod(row), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for index, (name, size) in enumerate(tensors.items()):
        writer.write_tensor_data(_f32(size, rng) if _is_f32(name, size) else random_blocks(kind, size, rng))
        report(index + 1, len(tensors))
    writer.close()


def _is_f32(name: str, shape: Shape) -> bool:
    return len(shape) == 1 or name.endswith("ffn_gate_inp.weight")


def _f32(shape: Shape, rng: np.random.Generator) -> NDArray[np.float32]:
    """A norm of ones, or a router."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[-1]))


def huggingface_name(name: str) -> str:
    """The Hugging Face name of a canonical tensor."""
    top = {ours: theirs for theirs, ours in TOP_NAMES.items()}
    if name in top:
        return top[name]
    modules = {ours: theirs for theirs, ours in BLOCK_NAMES.items()}
    _, layer, module, parameter = name.split(".")
    return f"model.layers.{layer}.{modules[module]}.{parameter}"


def shards(shapes: dict[str, Shape], shard_bytes: int) -> Iterator[dict[str, Shape]]:
    """The tensors in order, in groups of at most that many bytes in bf16 (or one tensor)."""
    group: dict[str, Shape] = {}
    used = 0
    for name, shape in shapes.items():
        num_bytes = 2 * math.prod(shape)
        if group and used + num_bytes > shard_bytes:
            yield group
            group, used = {}, 0
        group[name] = shape
        used += num_bytes
    yield group


def write_safetensors(directory: Path, dimensions: Dimensions, *, seed: int = 0, shard_bytes: int = 2 << 30) -> None:
    """Writes a Hugging Face directory: configuration, tokenizer, shards and their index."""
    config = dimensions.config()
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {huggingface_name(name): size for name, size in expected_shapes(config).items()}
    parts = list(shards(tensors, shard_bytes))
    names = [f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors" for index in range(len(parts))]
    rng = np.random.default_rng(seed)
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        with (directory / name).open("wb") as file:
            _write_shard(file, part, rng)
        report(index + 1, len(parts))
    index_document = {
        "metadata": {"total_size": sum(2 * math.prod(size) for size in tensors.values())},
        "weight_map": {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part},
    }
    _write_json(directory / "model.safetensors.index.json", index_document)
    tokens, types = vocabulary(config.vocab_size)
    _write_json(directory / "config.json", _huggingface_config(config, tokens))
    _write_json(directory / "tokenizer_config.json", {"bos_token": BEGIN, "eos_token": END, "add_bos_token": True})
    _write_tokenizer(directory / "tokenizer.json", tokens, types)


def _write_shard(file: BinaryIO, tensors: dict[str, Shape], rng: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors.items():
        start, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    ones = np.uint16(0x3F80)
    for size in tensors.values():
        data = np.full(size, ones, "<u2").view(np.uint8) if len(size) == 1 else random_bf16(size, rng)
        data.tofile(file)


def _huggingface_config(config: ModelConfig, tokens: list[str]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": tokens.index(BEGIN),
        "eos_token_id": tokens.index(END),
    }


def _write_tokenizer(path: Path, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(path))


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def report(done: int, total: int) -> None:
    """A line that counts, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Writes a model of real shapes with random weights.")
    parser.add_argument("output", type=Path, help="a .gguf file, or a directory for safetensors")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, metavar="N", help="so many instead of the shape's")
    parser.add_argument("--kind", choices=KINDS, help="of a GGUF file's matrices (default Q4_0)")
    parser.add_argument(
        "--shard-mb", type=int, default=2048, metavar="N", help="largest safetensors file (default 2048)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.shard_mb < 1:
        parser.error("--shard-mb must be positive")
    if args.layers is not None and args.layers < 1:
        parser.error("--layers must be positive")
    dimensions = SHAPES[args.shape]
    dimensions = dataclasses.replace(dimensions, num_layers=args.layers or dimensions.num_layers)
    if args.output.suffix == ".gguf":
        write_gguf(args.output, dimensions, args.kind or "Q4_0", seed=args.seed)
    elif args.kind is not None:
        parser.error("--kind is for an output whose name ends in .gguf; safetensors are written in bf16")
    elif dimensions.experts is not None:
        parser.error("models with experts are written as GGUF: name the output with .gguf")
    else:
        write_safetensors(args.output, dimensions, seed=args.seed, shard_bytes=args.shard_mb << 20)
    return 0


if __name__ == "__main__":
    sys.exit(main())

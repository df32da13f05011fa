"""GPTQ and AWQ directories, packed here from the formats' definitions: the weights, bit for bit, and greedy tokens of
Transformers with these weights.

The packers share nothing with ours: a row of codes is one large integer, cut into words. What GPTQModel's and AutoAWQ's
own layers pack is compared in test_gptq_awq_packers.py, where they are installed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from token_sequences import TokenSequence, engine_config, random_sequences, run_chunks
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.executors.native import NativeExecutor
from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.safetensors import canonical_name

VOCAB, GROUP, NUM_PROMPT, NUM_NEW = 160, 32, 20, 12
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
F32, Ints = NDArray[np.float32], NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """A configuration, bits of a code, and whether inputs of a group are spread over the matrix."""

    config: dict[str, Any]
    bits: int = 4
    spread: bool = False


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False}
CASES = {
    "gptq v1": Case(GPTQ | {"bits": 4, "checkpoint_format": "gptq"}),
    "gptq v1, act-order": Case(GPTQ | {"bits": 4, "checkpoint_format": "gptq", "desc_act": True}, spread=True),
    "gptq v2, 3 bits": Case(GPTQ | {"bits": 3, "checkpoint_format": "gptq_v2"}, bits=3),
    "gptq v2, 8 bits": Case(GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, bits=8),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
}


def words_of(row: Ints, bits: int) -> list[int]:
    """One large integer of all codes, the first one lowest, cut into words."""
    whole = sum(int(code) << (at * bits) for at, code in enumerate(row))
    return [whole >> (32 * at) & 0xFFFFFFFF for at in range(len(row) * bits // 32)]


def as_i32(words: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32).copy())


def gptq_planes(q: Ints, s: F32, z: Ints, g_idx: Ints, case: Case) -> dict[str, torch.Tensor]:
    """q [N, K], s and z [N, groups]."""
    zeros = [words_of(row, case.bits) for row in z.T]
    if case.config["checkpoint_format"] == "gptq":
        zeros = [[(word - 0x11111111) % 2**32 for word in row] for row in zeros]
    columns = as_i32([words_of(row, case.bits) for row in q])
    return {
        "qweight": columns.T.contiguous(),
        "qzeros": as_i32(zeros),
        "scales": torch.tensor(s.T).half().contiguous(),
        "g_idx": torch.tensor(g_idx, dtype=torch.int32),
    }


def awq_planes(q: Ints, s: F32, z: Ints) -> dict[str, torch.Tensor]:
    def rows(codes: Ints) -> torch.Tensor:
        place = np.arange(codes.shape[0]).reshape(-1, 8)[:, AWQ_NIBBLES].reshape(-1)
        return as_i32([words_of(row[place], 4) for row in codes.T])

    return {"qweight": rows(q), "qzeros": rows(z), "scales": torch.tensor(s.T).half().contiguous()}


def quantise(weight: F32, case: Case, seed: int) -> tuple[dict[str, torch.Tensor], F32]:
    """The planes of a matrix [N, K], and its weights s (q - z)."""
    num_inputs = weight.shape[1]
    g_idx = np.arange(num_inputs) // GROUP
    if case.spread:
        g_idx = np.random.default_rng(seed).permutation(g_idx)
    parts = np.stack([weight[:, g_idx == group] for group in range(num_inputs // GROUP)], axis=1)
    highest = (1 << case.bits) - 1
    low, high = np.minimum(parts.min(2), 0), np.maximum(parts.max(2), 0)
    s = ((high - low) / highest).astype(np.float16).astype(np.float32)
    z = np.clip(np.rint(-low / s), 0, highest).astype(np.int64)
    z[0], z[1] = 0, highest
    q = np.clip(np.rint(weight / s[:, g_idx]) + z[:, g_idx], 0, highest).astype(np.int64)
    planes = awq_planes(q, s, z) if case.config["quant_method"] == "awq" else gptq_planes(q, s, z, g_idx, case)
    return planes, s[:, g_idx] * (q - z[:, g_idx]).astype(np.float32)


def save(case: Case, directory: Path) -> LlamaForCausalLM:
    """A tiny model whose layers are quantised, in ``directory``; returns it with the quantised weights."""
    torch.manual_seed(5)
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=128, **shape)
    config.initializer_range, config.tie_word_embeddings = 0.12, False
    model = LlamaForCausalLM(config).eval()
    model.config.save_pretrained(directory)
    tensors = {}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if name.startswith("model.layers.") and parameter.dim() == 2:
            planes, weights = quantise(parameter.detach().numpy(), case, seed)
            parameter.data = torch.tensor(weights)
            tensors |= {f"{name.removesuffix('.weight')}.{plane}": array for plane, array in planes.items()}
        else:
            tensors[name] = parameter.data
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    values = json.loads((directory / "config.json").read_text())
    values |= {"architectures": ["LlamaForCausalLM"], "quantization_config": case.config}
    (directory / "config.json").write_text(json.dumps(values))
    return model


@pytest.mark.parametrize("name", CASES)
def test_weights_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save(CASES[name], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spread = 0
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            tensor = checkpoint.tensor(canonical_name(parameter_name))
            spread += tensor.order is not None
            assert np.array_equal(dequantize(tensor), parameter.detach().numpy()), parameter_name
    assert spread == (14 if CASES[name].spread else 0)

    executor = NativeExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=2, weights="f32"))
    ours = theirs = random_sequences([NUM_PROMPT], VOCAB, seed=11)[0].tokens
    for _ in range(NUM_NEW):
        sequence = TokenSequence(ours, np.arange(2, dtype=np.int32))
        ours = np.append(ours, run_chunks(executor, sequence, len(ours))[-1].argmax().astype(np.int32))
        with torch.no_grad():
            logits = model(torch.from_numpy(theirs.astype(np.int64))[None], use_cache=False).logits[0, -1]
        theirs = np.append(theirs, logits.argmax().numpy().astype(np.int32))
    assert ours.tolist() == theirs.tolist()

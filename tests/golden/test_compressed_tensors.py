"""Files that compressed-tensors' own code writes: the same weights, bit for bit, and the tokens of Transformers.

Tiny random models are quantised and saved by the library; Transformers opens them with the library and dequantises. Its
weights are products in the type of the scales, so ours (exact, in f32) are rounded to that type and must be its bits.

Scales of a float32 model are rounded to f16 before the library sees them: what other f32 scales cost is bounded in
tests/unit/test_planes.py.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from numpy.typing import NDArray
from token_sequences import Ids, TokenSequence, engine_config, random_sequences, run_chunks
from transformers import (
    CompressedTensorsConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from paceline.executors.native import NativeExecutor
from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.raw import Checkpoint
from paceline.weights.safetensors import canonical_name

VOCAB = 160
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
NUM_PROMPT, NUM_NEW = 20, 12
LLAMA, QWEN2 = (LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config)


@dataclass(frozen=True)
class Case:
    """A model's class and type, and the library's arguments for its weights, inputs and layers left alone."""

    weights: dict[str, Any]
    format: str
    kinds: set[str]
    dtype: torch.dtype = torch.bfloat16
    model: tuple[type[PreTrainedModel], type[Any]] = LLAMA
    inputs: dict[str, Any] | None = None
    ignore: list[str] = field(default_factory=lambda: ["lm_head"])


def group(bits: int, size: int, *, symmetric: bool) -> dict[str, Any]:
    return {"num_bits": bits, "strategy": "group", "group_size": size, "symmetric": symmetric}


CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
CASES = {
    "4 bits": Case(group(4, 64, symmetric=True), "pack-quantized", {"Q4G64"}),
    "4 bits, asymmetric": Case(group(4, 32, symmetric=False), "pack-quantized", {"Q4G32Z"}, dtype=torch.float16),
    "4 bits, groups of 128 and 64": Case(
        group(4, 64, symmetric=False), "pack-quantized", {"Q4G64Z"}, dtype=torch.float32, model=QWEN2
    ),
    "4 bits, channel": Case(
        {"num_bits": 4, "strategy": "channel", "symmetric": True}, "pack-quantized", {"Q4G128", "Q4G64"}
    ),
    "3 bits": Case(group(3, 32, symmetric=True), "pack-quantized", {"Q4G32Z"}, dtype=torch.float16),
    "head too, a layer not": Case(
        group(4, 64, symmetric=True),
        "pack-quantized",
        {"Q4G64"},
        ignore=["re:.*layers.1.mlp.*", "model.layers.0.self_attn.q_proj"],
    ),
    "8 bits, asymmetric": Case(group(8, 64, symmetric=False), "pack-quantized", {"Q8G64Z"}, dtype=torch.float16),
    "int8, channel": Case(CHANNEL, "int-quantized", {"Q8G128", "Q8G64"}, model=QWEN2),
    "int8, tensor": Case(CHANNEL | {"strategy": "tensor"}, "int-quantized", {"Q8G128", "Q8G64"}, dtype=torch.float32),
    "int8 activations": Case(CHANNEL, "int-quantized", {"Q8C"}, inputs=TOKEN, dtype=torch.float32),
}


def quantise(model: PreTrainedModel, case: Case, directory: Path) -> None:
    """Scales and zero points from extremes, then what llm-compressor calls to save."""
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**case.weights),
        input_activations=None if case.inputs is None else QuantizationArgs(**case.inputs),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=case.ignore))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        size = case.weights.get("group_size") or module.weight.shape[1]
        parts = module.weight.detach().unflatten(-1, (-1, size))
        low, high = parts.amin(-1), parts.amax(-1)
        if case.weights["strategy"] == "tensor":
            low, high = low.min(), high.max()
        scale, zero_point = calculate_qparams(low, high, scheme.weights)
        module.weight_scale.data.copy_(scale.half())
        module.weight_zero_point.data.copy_(zero_point)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=case.format)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(str(directory))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """The directory of a case, and what Transformers makes of it."""

    @cache
    def make(name: str) -> tuple[Path, PreTrainedModel]:
        case, directory = CASES[name], tmp_path_factory.mktemp("saved")
        torch.manual_seed(3)
        model_class, config_class = case.model
        model = model_class(config_class(**SHAPE, initializer_range=0.12)).to(case.dtype)
        quantise(model, case, directory)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You passed `quantization_config`")  # which is how it is asked for
            config = CompressedTensorsConfig(dequantize=True)
            loaded = model_class.from_pretrained(directory, dtype=case.dtype, quantization_config=config)
        return directory, loaded.eval()

    return make


def matrices_of(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    """Its matrices by name, without the library's scales."""
    named = model.named_parameters()
    return [(name, parameter) for name, parameter in named if name.endswith(".weight") and parameter.dim() == 2]


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_transformers(name: str, saved: Any) -> None:
    directory, model = saved(name)
    checkpoint = open_checkpoint(directory)
    kinds = set()
    for parameter_name, parameter in matrices_of(model):
        tensor = checkpoint.tensor(canonical_name(parameter_name))
        found = torch.tensor(dequantize(tensor)).to(parameter.dtype)
        assert torch.equal(found, parameter), parameter_name
        kinds.add(tensor.kind)
    plain = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[CASES[name].dtype]
    assert kinds == CASES[name].kinds | {plain}
    assert json.loads((directory / "config.json").read_text())["quantization_config"]["format"] == CASES[name].format


def test_one_other_bit_is_seen(saved: Any, tmp_path: Path) -> None:
    directory, model = saved("4 bits")
    name = "model.layers.1.mlp.up_proj.weight"
    content = bytearray((directory / "model.safetensors").read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    start = json.loads(content[8 : 8 + header_bytes])[f"{name}_packed"]["data_offsets"][0]
    content[8 + header_bytes + start] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    found = torch.tensor(dequantize(open_checkpoint(tmp_path).tensor(canonical_name(name))))
    assert (found.to(torch.bfloat16) != model.get_parameter(name)).sum() == 1


def greedy(logits_of: Callable[[Ids], NDArray[np.float32]]) -> list[int]:
    """The tokens that follow a prompt, one by one, each from the logits of the last position."""
    tokens = random_sequences([NUM_PROMPT], VOCAB, seed=11)[0].tokens
    for _ in range(NUM_NEW):
        tokens = np.append(tokens, logits_of(tokens)[-1].argmax().astype(np.int32))
    return tokens[NUM_PROMPT:].tolist()


def exact_model(loaded: PreTrainedModel, checkpoint: Checkpoint) -> PreTrainedModel:
    """The model in float32 with the exact weights, which no type of scales has rounded."""
    model = copy.deepcopy(loaded).float()
    for parameter_name, parameter in matrices_of(model):
        parameter.data = torch.tensor(dequantize(checkpoint.tensor(canonical_name(parameter_name))))
    return model


def logits_of_transformers(model: PreTrainedModel, tokens: Ids, *, rounded_inputs: bool = False) -> NDArray[np.float32]:
    """[tokens, vocab]; with ``rounded_inputs`` the library rounds activations as its scheme says."""
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = rounded_inputs
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].numpy()


def logits_of_native(checkpoint: Checkpoint, weights: str) -> Callable[[Ids], NDArray[np.float32]]:
    """A function from tokens to logits [tokens, vocab]."""
    executor = NativeExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=2, weights=weights))
    pages = np.arange(2, dtype=np.int32)
    return lambda tokens: run_chunks(executor, TokenSequence(tokens, pages), len(tokens))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.inputs is None])
def test_tokens_are_those_of_transformers(name: str, saved: Any) -> None:
    """Both with the exact weights in float32: what is compared is where each row, head and input of a matrix went."""
    directory, loaded = saved(name)
    checkpoint = open_checkpoint(directory)
    model = exact_model(loaded, checkpoint)
    assert greedy(logits_of_native(checkpoint, "f32")) == greedy(lambda tokens: logits_of_transformers(model, tokens))


def distance(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Root mean square of the differences, in units of that of the logits."""
    assert found.shape == expected.shape == (NUM_PROMPT, VOCAB)
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("name", CASES)
def test_native_products_are_off_by_the_rounding_of_activations(name: str, saved: Any) -> None:
    """A code of 8 bits errs by 1 / (254 sqrt 12) = 0.1 % of the largest of its group, 0.3 % of the group's root mean
    square where the largest is 2.5 of these; fourteen products in a row, each with as much again from its inputs, add
    up to some 3 %. A matrix whose inputs are in another order is off by 100 %.
    """
    directory, loaded = saved(name)
    checkpoint = open_checkpoint(directory)
    tokens = random_sequences([NUM_PROMPT], VOCAB, seed=5)[0].tokens
    expected = logits_of_transformers(exact_model(loaded, checkpoint), tokens)
    assert 1e-3 < distance(logits_of_native(checkpoint, "native")(tokens), expected) < 0.1


def test_int8_activations_are_rounded_as_the_library_rounds_them(saved: Any) -> None:
    """Not to the same codes, since it divides by 127.5 where we divide by 127; so there are two roundings of one size,
    whose errors do not lie further apart than two independent ones.
    """
    directory, loaded = saved("int8 activations")
    checkpoint = open_checkpoint(directory)
    model = exact_model(loaded, checkpoint)
    tokens = random_sequences([NUM_PROMPT], VOCAB, seed=5)[0].tokens
    plain = logits_of_transformers(model, tokens)
    theirs = logits_of_transformers(model, tokens, rounded_inputs=True)
    ours = logits_of_native(checkpoint, "native")(tokens)
    assert 0.01 < distance(theirs, plain) < 0.1
    assert 0.67 < distance(ours, plain) / distance(theirs, plain) < 1.5
    assert distance(ours, theirs) < np.hypot(distance(ours, plain), distance(theirs, plain))

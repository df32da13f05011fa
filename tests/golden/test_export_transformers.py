"""What we write as compressed-tensors loads in Transformers, through that library's code: equal weights, equal text.

Tokens are compared with the engine on float weights: both sides then compute the same thing in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import file_config, write_directory_model, write_gguf_model
from rounded_models import RoundedModel
from tokenizer_files import TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import LLM, SamplingParams
from paceline.quantize.export.tensors import half_split_rows, huggingface_name, with_rows
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf import GGUFCheckpoint
from paceline.weights.raw import Checkpoint

pytest.importorskip("compressed_tensors")

SCHEMES = [
    *(
        Scheme("rtn", bits, group, symmetric)
        for bits in (4, 8, 3)
        for group in (32, None)
        for symmetric in (False, True)
    ),
    Scheme("rtn", 4, 64, False),
    Scheme("rtn", 4, 128, True),
    Scheme("smoothquant", 8, None, True),
]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_gguf_model(folder / "llama.gguf", file_config(), {"token_embd.weight": "Q8_0"})
    write_directory_model(folder / "llama", file_config(tie_embeddings=False), "F16")
    write_gguf_model(folder / "qwen2.gguf", file_config(architecture="qwen2", attention_bias=True))
    write_directory_model(folder / "qwen3", file_config(architecture="qwen3", qk_norm=True))
    return folder


def load(path: Path) -> Any:
    """The model in float32."""
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(model: Any, ids: list[int]) -> list[int]:
    """The tokens that follow."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones(1, len(ids))
        )
    return list(out[0, len(ids) :].tolist())


def check_weights(loaded: Any, model: RoundedModel) -> None:
    """Bit for bit; the model has been run before, which is when compressed weights become plain ones."""
    source = model.checkpoint
    parameters = dict(loaded.named_parameters())
    num_checked = 0
    for name in source.names():
        rows = half_split_rows(source.config, name) if source.interleaved_rope else None
        matrix = model.matrix(name)
        if matrix is not None:
            expected = with_rows(matrix, rows).values()
        else:
            expected = model.values(name)
            if source.header(name).kind == "Q8_0":
                expected = expected.astype(np.float16).astype(np.float32)
            expected = expected if rows is None else expected[rows]
        found = parameters[huggingface_name(name)]
        assert found.dtype == torch.float32
        assert np.array_equal(found.detach().numpy(), expected), name
        num_checked += matrix is not None
    assert num_checked == 7 * source.config.num_layers


@pytest.mark.parametrize("name", ["llama.gguf", "llama", "qwen2.gguf", "qwen3"])
def test_every_family(folder: Path, tmp_path: Path, name: str) -> None:
    check(open_checkpoint(folder / name), Scheme("rtn", 4, 32), tmp_path / "m")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_scheme(folder: Path, tmp_path: Path, scheme: Scheme) -> None:
    check(open_checkpoint(folder / "llama.gguf"), scheme, tmp_path / "m")


def check(source: Checkpoint, scheme: Scheme, out: Path) -> None:
    model = RoundedModel(source, scheme)
    write_model(model, out, "compressed-tensors")
    loaded = load(out)
    ids = load_tokenizer(source).encode("Hello world, it's 12345")
    tokens = greedy(loaded, ids)
    check_weights(loaded, model)
    if not scheme.per_token:  # Transformers rounds activations here; what it computes is not what we do to the bit
        llm = LLM(str(out), weights="f32", speculate="off")
        answer = llm.generate([ids], SamplingParams(max_tokens=NEW_TOKENS, temperature=0))[0]
        assert list(answer.token_ids) == tokens[: len(answer.token_ids)]


@pytest.mark.parametrize("name", ["llama.gguf", "llama"])
def test_the_tokenizer(folder: Path, tmp_path: Path, name: str) -> None:
    source = open_checkpoint(folder / name)
    write_model(RoundedModel(source, Scheme("rtn", 4, 32)), tmp_path / "m", "compressed-tensors")
    ours, theirs = load_tokenizer(source), AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    messages = [{"role": "user", "content": "Hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "Hi<|im_end|>"


def test_the_packaged_model(tmp_path: Path) -> None:
    source = open_checkpoint(resolve_model("smollm2-135m", download=False))
    assert isinstance(source, GGUFCheckpoint)
    model = RoundedModel(source, Scheme("rtn", 4, 64))
    write_model(model, tmp_path / "m", "compressed-tensors")
    ours, theirs = load_tokenizer(source), AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
    loaded = load(tmp_path / "m")
    ids = ours.encode("The capital of France is")
    tokens = greedy(loaded, ids)
    check_weights(loaded, model)
    answer = LLM(str(tmp_path / "m"), weights="f32", speculate="off").generate(
        [ids], SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    )[0]
    assert list(answer.token_ids) == tokens

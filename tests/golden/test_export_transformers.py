"""What we write as compressed-tensors loads in Transformers, through that library's code: equal weights, equal text.

Tokens are compared with the engine on float weights: both sides then compute the same thing in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import file_config, write_directory_model, write_gguf_model
from rounded_models import RoundedModel
from tokenizer_files import TEXTS
from transformers import AutoTokenizer
from transformers_models import check_weights, greedy, load

from paceline import LLM, SamplingParams
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.checkpoint import open_checkpoint
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
    tokens = greedy(loaded, ids, NEW_TOKENS)
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

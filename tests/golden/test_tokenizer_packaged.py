"""The header, tokenizer and chat template of the packaged model, which ``make test`` has pulled before."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from paceline.config import ModelConfig, RopeConfig
from paceline.text.chat import load_chat_template
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf import GGUFCheckpoint, read_header
from paceline.weights.mapped_file import map_file

QUESTION = "Explain why the sky is blue in three sentences."
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)
# As llama.cpp and Transformers tokenise it.
PROMPT_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 36971, 1701, 260, 6376, 314, 4461, 281, 1296, 8545, 30, 2, 198),
    *(1, 520, 9531, 198),
]
TEXTS = [
    "안녕하세요, 세계! 오늘 날씨는 맑고 기온은 23.5도입니다.",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 🍚, e\u0301 and é, ½ Ⅷ",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\nprint(fib(10))  # 55\n",
    "  leading,   inner\t\ttabs\r\nand trailing   \n\n\n",
    "It's 12345 o'clock; we'll SEE, they'RE 1st — “quoted” …",
    "русский 中文 日本語 العربية हिन्दी ไทย",
    "\x00\x07\u200b\ufeff",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model("smollm2-135m", download=False)


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> GGUFCheckpoint:
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


@pytest.fixture(scope="module")
def tokenizer(checkpoint: GGUFCheckpoint) -> Tokenizer:
    return load_tokenizer(checkpoint)


def test_header_equals_the_gguf_library(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    header = read_header(path, map_file(path))
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for key, field in fields.items():
        value = header.metadata[key]
        if isinstance(value, np.ndarray):
            assert value.tolist() == field.contents()
        else:
            assert value == field.contents(), key
    assert [
        (name, info.shape[::-1], info.kind, info.start, info.num_bytes) for name, info in header.tensors.items()
    ] == [(t.name, tuple(t.shape.tolist()), t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors]


def test_config_and_tensors(checkpoint: GGUFCheckpoint) -> None:
    assert checkpoint.config == ModelConfig(
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        context_length=8192,
        rms_norm_eps=float(np.float32(1e-5)),
        rope=RopeConfig(100000.0, 64),
        tie_embeddings=True,
    )
    assert checkpoint.interleaved_rope
    assert len(checkpoint.names()) == 272
    embedding = checkpoint.tensor("token_embd.weight")
    assert (embedding.kind, embedding.shape, embedding.data.nbytes) == ("Q8_0", (49152, 576), 49152 * 18 * 34)


def test_known_ids_of_the_chat_prompt(checkpoint: GGUFCheckpoint, tokenizer: Tokenizer) -> None:
    template = load_chat_template(checkpoint)
    assert template is not None
    assert template.render([{"role": "user", "content": QUESTION}]) == PROMPT
    assert tokenizer.encode(PROMPT, add_special_tokens=False) == PROMPT_IDS
    assert tokenizer.encode(PROMPT) == PROMPT_IDS  # this model wants no begin token
    assert tokenizer.decode(PROMPT_IDS, skip_special_tokens=False) == PROMPT
    assert (tokenizer.bos_token_id, tokenizer.add_bos) == (1, False)
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.vocab_size == 49152


def test_ids_equal_smollm_s_own_definition(checkpoint: GGUFCheckpoint, tokenizer: Tokenizer) -> None:
    """Against the pre-tokenizer of its tokenizer.json: single digits, then GPT-2's byte-level split."""
    tokens, merges = (checkpoint.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    backend = Backend(BPE({token: i for i, token in enumerate(tokens)}, [tuple(pair.split(" ")) for pair in merges]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("text", TEXTS)
def test_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_every_token_s_bytes_equal_the_library_s_text(checkpoint: GGUFCheckpoint, tokenizer: Tokenizer) -> None:
    decoder = decoders.ByteLevel()
    for token_id, token in enumerate(checkpoint.metadata["tokenizer.ggml.tokens"]):
        data = tokenizer.token_bytes(token_id, include_special=True)
        assert data.decode("utf-8", errors="replace") == decoder.decode([token])
    assert [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i)] == list(range(17))

"""A tokenizer.json as the metadata of a GGUF file, so that llama.cpp and we cut texts as it does.

A GGUF file has no rules but the name of some: ``tokenizer.ggml.pre`` for byte-level vocabularies. The name is found by
behaviour: among PRETOKENIZERS, one that splits PROBES as tokenizer.json does, normalises them alike and treats whole
words alike. SentencePiece vocabularies have no name but scores, and tokenizer.json no scores but merges in their
order; a token's score is minus the place of the first merge that makes it, which orders merges as the file does.

Whatever is found, the result must give the ids of tokenizer.json for all PROBES, or the tokenizer is refused.

Checked by: tests/unit/test_export_vocabulary.py, tests/interchange/test_llama_cpp.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import UnsupportedError
from paceline.text.chat import load_chat_template
from paceline.text.gguf_tokenizer import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    tokenizer_from_metadata,
)
from paceline.text.huggingface_tokenizer import read_optional_json, special_text, tokenizer_from_directory
from paceline.text.pretokenizers import PRETOKENIZERS
from paceline.text.sentencepiece import WORD_START
from paceline.text.special_tokens import SpecialTokens
from paceline.weights.raw import Checkpoint

if TYPE_CHECKING:
    import tokenizers

UNUSED, BYTE = 5, 6
"""Values of ``tokenizer.ggml.token_type`` beside those of ``gguf_tokenizer``."""

PREFERRED = ("llama-bpe", "qwen2", "smollm", "gpt-2", "tekken", "deepseek-coder")
"""Of names that behave alike the one of the family."""

PROBES = (
    "Hello world, it's 1 12 123 1234 12345678 o'clock! We'LL see; they'RE 'Sure' don'T",
    "  two   spaces\n\n\ttabs \r\n\r\n end \t \n   x   ",
    "안녕하세요, 세계! 한국어 문장입니다. 中文字符 日本語テキスト русский текст العربية हिन्दी ไทย",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 and é vs e\u0301, ﬁ, ½, Ⅷ, ٣, x² ¼",
    "def f(x):\n    return {'a': [1, 22, 333], \"b\": x**2}  # done/\n\n\nprint(f(-1.5e-10))//\n",
    "CamelCaseWords HTTPServer iOS snake_case kebab-case a/b\\c $5.00 €3,50 #tag @user <tag> a+b=c ~x^y|z",
    "\x00\x01 nul \u200b zero width \ufeff \u3000 wide \xa0 fixed",
    "a",
    " a",
    "",
)


def vocabulary_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The keys under ``tokenizer.``, for a checkpoint that is a directory. UnsupportedError when there are none that do
    what its tokenizer does.
    """
    directory = Path(checkpoint.path)
    backend, special = tokenizer_from_directory(directory)
    state = json.loads(backend.to_str())
    if state["model"]["type"] != "BPE":
        raise UnsupportedError(f"{directory}: a tokenizer of type {state['model']['type']}; GGUF files get BPE only")
    tokens, types = _tokens(backend, state, checkpoint.config.vocab_size)
    values: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if state["model"].get("byte_fallback"):
        values |= {"model": "llama", "scores": _scores(state, tokens)}
        values["add_space_prefix"] = WORD_START in (backend.normalizer.normalize_str("a") if backend.normalizer else "")
    else:
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]]
        values |= {"model": "gpt2", "pre": pretokenizer_name(directory, backend, state), "merges": merges}
    values |= _special_values(directory, backend, special)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    _check(directory, backend, special, metadata)
    template = load_chat_template(checkpoint)
    if template is not None:
        metadata["tokenizer.chat_template"] = template.source
    return metadata


def pretokenizer_name(directory: Path, backend: tokenizers.Tokenizer, state: Mapping[str, Any]) -> str:
    """The name under which GGUF files know the rules; UnsupportedError when none of ours does the same."""
    ignores_merges = bool(state["model"].get("ignore_merges"))
    expected = _pieces(backend)
    for name in dict.fromkeys((*PREFERRED, *PRETOKENIZERS)):
        rules = PRETOKENIZERS[name]
        if rules.ignore_merges != ignores_merges:
            continue
        values = {"model": "gpt2", "pre": name, "tokens": ["a"], "merges": []}
        candidate, _ = tokenizer_from_metadata(directory, {f"tokenizer.ggml.{key}": v for key, v in values.items()})
        if _pieces(candidate) == expected:
            return name
    raise UnsupportedError(
        f"{directory / 'tokenizer.json'}: no pre-tokenizer of GGUF files that Paceline knows cuts texts as this one "
        f"does; known are {', '.join(PRETOKENIZERS)}. The other formats copy the tokenizer as it is"
    )


def _pieces(backend: tokenizers.Tokenizer) -> list[list[str]]:
    """The pieces of the probes between which nothing is merged."""
    normalizer, cutter = backend.normalizer, backend.pre_tokenizer
    texts = [normalizer.normalize_str(text) if normalizer else text for text in PROBES]
    return [[piece for piece, _ in cutter.pre_tokenize_str(text)] if cutter else [text] for text in texts]


def _tokens(backend: tokenizers.Tokenizer, state: Mapping[str, Any], vocab_size: int) -> tuple[list[str], Any]:
    """Texts and types by id; ids that the model has and the tokenizer lacks are unused."""
    added = backend.get_added_tokens_decoder()
    count = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
    tokens, types = [], np.full(count, NORMAL, np.int32)
    unknown = state["model"].get("unk_token")
    for token_id in range(count):
        text = backend.id_to_token(token_id)
        if text is None:
            text = f"[PAD{token_id}]"
            types[token_id] = UNUSED
        elif token_id in added:
            types[token_id] = CONTROL if added[token_id].special else USER_DEFINED
        elif state["model"].get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
            types[token_id] = BYTE
        if text == unknown and state["model"].get("byte_fallback"):
            types[token_id] = UNKNOWN
        tokens.append(text)
    return tokens, types


def _scores(state: Mapping[str, Any], tokens: list[str]) -> Any:
    """Minus the place of the first merge that makes a token, f32; 0 for what no merge makes: nobody asks for it."""
    places: dict[str, int] = {}
    for place, pair in enumerate(state["model"]["merges"]):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        places.setdefault(left + right, place + 1)
    return np.array([-float(places.get(token, 0)) for token in tokens], np.float32)


def _special_values(directory: Path, backend: tokenizers.Tokenizer, special: SpecialTokens) -> dict[str, Any]:
    settings = read_optional_json(directory / "tokenizer_config.json")
    values: dict[str, Any] = {
        "add_bos_token": bool(special.prefix_ids),
        "add_eos_token": bool(special.suffix_ids),
    }
    ids = {
        "bos_token_id": special.bos_id,
        "eos_token_id": special.eos_ids[0] if special.eos_ids else None,
        "eot_token_id": special.eos_ids[1] if len(special.eos_ids) > 1 else None,
    }
    for key, name in (("unknown_token_id", "unk_token"), ("padding_token_id", "pad_token")):
        text = special_text(settings, name)
        ids[key] = None if text is None else backend.token_to_id(text)
    return values | {key: token_id for key, token_id in ids.items() if token_id is not None}


def _check(directory: Path, backend: tokenizers.Tokenizer, special: SpecialTokens, metadata: Mapping[str, Any]) -> None:
    """UnsupportedError unless the metadata give the ids of the tokenizer that they are made from."""
    written, found = tokenizer_from_metadata(directory, metadata)
    texts = [*PROBES, *(token.content + " a" for token in backend.get_added_tokens_decoder().values())]
    for text in texts:
        ids = backend.encode(text, add_special_tokens=False).ids
        if written.encode(text, add_special_tokens=False).ids != ids:
            raise UnsupportedError(
                f"{directory / 'tokenizer.json'}: a GGUF file would cut {text!r} differently: this tokenizer has rules "
                "that such files cannot hold. The other formats copy the tokenizer as it is"
            )
    if (found.prefix_ids, found.suffix_ids) != (special.prefix_ids, special.suffix_ids):
        raise UnsupportedError(
            f"{directory / 'tokenizer.json'}: puts tokens {special.prefix_ids} before and {special.suffix_ids} after a "
            "text; a GGUF file can say the begin and the end token only. The other formats copy the tokenizer as it is"
        )

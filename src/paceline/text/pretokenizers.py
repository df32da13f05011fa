"""How byte-level vocabularies cut text before they merge, under the names of GGUF files (``tokenizer.ggml.pre``).

Source: the tokenizer.json of each model family; "default" is what llama.cpp does for files of that name.
Checked by: tests/unit/test_tokenizer.py, against the same splits written with the parts of ``tokenizers``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PREFIX = r"[^\r\n\p{L}\p{N}]?"
O200K = (
    rf"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions, each applied to the pieces that the one before left, and the settings that go with them.

    ``ignore_merges``: a piece that is a token as a whole is not merged up from its bytes. ``composes``: text is brought
    to Unicode form NFC first. ``add_bos``: whether a text begins with the begin token where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    composes: bool = False
    add_bos: bool = False


_LLAMA_BPE = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_GPT2 = PreTokenizer((GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", GPT2))
_QWEN2 = PreTokenizer((QWEN2,), composes=True)

PRETOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "exaone4": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "smaug-bpe": PreTokenizer((LLAMA3,)),
    "dbrx": PreTokenizer((LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": replace(_QWEN2, composes=False),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "gpt-4o": PreTokenizer((O200K,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
}

"""The tokenizer of a model as the files of a Hugging Face directory.

Checked by: tests/golden/test_export_transformers.py, against Transformers' AutoTokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.text.gguf_tokenizer import tokenizer_from_metadata
from paceline.weights.gguf import GGUFCheckpoint

if TYPE_CHECKING:
    import tokenizers

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)
"""Files of a directory that are about the model and not about its weights."""

SPECIAL_KEYS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
SPECIAL_KEYS |= {"pad_token": "padding_token_id"}


def copy_tokenizer_files(source: Path, directory: Path) -> None:
    """Those that the source has, as they are."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def write_tokenizer_files(checkpoint: GGUFCheckpoint, directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json, with the chat template, from the metadata of a GGUF file."""
    backend, special = tokenizer_from_metadata(Path(checkpoint.path), checkpoint.metadata)
    tokens: list[str] = checkpoint.metadata["tokenizer.ggml.tokens"]
    if special.prefix_ids or special.suffix_ids:
        backend.post_processor = _surrounding(tokens, special.prefix_ids, special.suffix_ids)
    backend.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config.context_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(special.prefix_ids),
        "add_eos_token": bool(special.suffix_ids),
    }
    for name, key in SPECIAL_KEYS.items():
        token_id = checkpoint.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token_id, int) and token_id < len(tokens):
            settings[name] = tokens[token_id]
    template = checkpoint.metadata.get("tokenizer.chat_template")
    if template:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _surrounding(
    tokens: list[str], prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> tokenizers.processors.TemplateProcessing:
    from tokenizers.processors import TemplateProcessing

    before, after = ([tokens[i] for i in ids] for ids in (prefix, suffix))
    return TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *[f"{token}:1" for token in before], "$B:1", *[f"{token}:1" for token in after]],
        special_tokens=[(tokens[i], i) for i in dict.fromkeys((*prefix, *suffix))],
    )

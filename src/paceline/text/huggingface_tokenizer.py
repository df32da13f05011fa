"""The tokenizer of a Hugging Face directory: tokenizer.json, and the special tokens that its neighbours name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError
from paceline.text.special_tokens import SpecialTokens, end_token_ids
from paceline.weights.safetensors import read_json

if TYPE_CHECKING:
    import tokenizers


def tokenizer_from_directory(directory: Path) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    """The tokenizer and its special tokens. Raises CheckpointError naming the file."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(path, "missing: Paceline needs the `tokenizers` form of a tokenizer")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(path, f"is not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    settings = read_optional_json(directory / "tokenizer_config.json")
    bos_text, eos_text = special_text(settings, "bos_token"), special_text(settings, "eos_token")
    bos_id = None if bos_text is None else backend.token_to_id(bos_text)
    declared = _declared_end_ids(directory)
    if eos_text is not None:
        declared.append(backend.token_to_id(eos_text))
    specials = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    prefix, suffix = _surroundings(backend)
    if settings.get("add_bos_token") is not None and bos_id is not None:
        prefix = (bos_id,) if settings["add_bos_token"] else ()
    return backend, SpecialTokens(bos_id, end_token_ids(declared, specials.get), prefix, suffix)


def read_optional_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file, empty when there is no such file."""
    return read_json(path) if path.is_file() else {}


def special_text(settings: Mapping[str, Any], key: str) -> str | None:
    """The text of a special token in tokenizer_config.json, which writes it as a string or as an object."""
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _declared_end_ids(directory: Path) -> list[int | None]:
    """The eos_token_id (a number or a list) of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = read_optional_json(directory / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if any(isinstance(i, bool) or not isinstance(i, int | None) for i in ids):
                raise CheckpointError(directory / name, f"eos_token_id is {value!r}, expected one or several token ids")
            return list(ids)
    return []


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    plain = [i for i, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    if not plain:
        return tuple(encoding.ids), ()
    return tuple(encoding.ids[: plain[0]]), tuple(encoding.ids[plain[-1] + 1 :])

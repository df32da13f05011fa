"""The tokens that stand for no text: where a text begins and where an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Names under which model families end a turn or a text. Files often name just one of them as their end token."""

HARMONY_ENDS = ("<|return|>", "<|call|>")
"""What ends an answer in OpenAI's harmony format, where "<|end|>" stands between its messages."""


@dataclass(frozen=True)
class SpecialTokens:
    """``bos_id`` begins a text; any of ``eos_ids`` ends an answer (the file's own first).

    ``prefix_ids`` and ``suffix_ids`` are put around every text that is encoded as a whole.
    """

    bos_id: int | None
    eos_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()


def end_token_ids(declared: Iterable[int | None], special_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """The declared ids, then those of END_TOKENS that are special here (``special_id`` gives None for others); with
    HARMONY_ENDS these in place of "<|end|>".
    """
    names: tuple[str, ...] = END_TOKENS
    if all(special_id(name) is not None for name in HARMONY_ENDS):
        names = (*(name for name in END_TOKENS if name != "<|end|>"), *HARMONY_ENDS)
    ids = [*declared, *map(special_id, names)]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

"""The 256 printable characters in which byte-level vocabularies spell bytes.

Source: Radford et al., GPT-2 (2019), encoder.py. Checked by: tests/unit/test_tokenizer.py, against ``tokenizers``.
"""

from __future__ import annotations

from functools import cache


@cache
def byte_of_character() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 characters spell themselves; the other bytes follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

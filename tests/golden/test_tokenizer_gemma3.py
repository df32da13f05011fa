"""The tokenizer of the packaged Gemma 3, where `paceline pull gemma3-270m` has brought it: 262,144 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizer_files import load_gguf

from paceline.text.tokenizer import Tokenizer
from paceline.weights.catalog import verify_cached

MODEL = verify_cached("gemma3-270m")
pytestmark = pytest.mark.skipif(MODEL is None, reason="needs `paceline pull gemma3-270m` (238 MB)")

# The ids that the `tokenizers` library gives with Gemma 3's own tokenizer.json.
EXPECTED = {
    "안녕하세요, 세계! 기온은 23.5도입니다.": [
        *(61659, 236764, 67195, 236888, 9554, 239529, 237456),
        *(236743, 236778, 236800, 236761, 236810, 237490, 15245, 236761),
    ],
    "🏳️‍🌈 🍚 e\u0301 é ½": [248177, 238178, 237243, 243712, 236743, 250367, 545, 238288, 1559, 47041],
    "def f(n):\n    if n < 2:\n\treturn n\n\n\n": [
        *(2063, 517, 236769, 236749, 1473, 107, 140, 584, 538, 655, 236743, 236778, 236787),
        *(107, 255968, 2060, 538, 109),
    ],
    "x" + 33 * " " + "y": [236781, 167, 138, 236762],  # the longest run of spaces has 31
    "<start_of_turn>user\nWhy is the sky blue?<end_of_turn>\n<start_of_turn>model\n": [
        *(105, 2364, 107, 11355, 563, 506, 7217, 3730, 236881, 106, 107, 105, 4368, 107),
    ],
    "<table><b>1</b> </table>": [168, 200, 236770, 209, 236743, 176],
    "hahahahaha 0000000": [89009, 957, 118653, 236743, *[236771] * 7],  # where two splits of one piece overlap
    "\x00\u200b\ufeff\U000103ff": [238, 237141, 237922, 478, 382, 381, 429],  # the last has no piece: four bytes
    "": [],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_gguf(MODEL or Path())


@pytest.mark.parametrize("text", EXPECTED)
def test_ids_equal_the_library_s(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False) == EXPECTED[text]
    assert tokenizer.encode(text) == [2, *EXPECTED[text]]
    assert tokenizer.decode(EXPECTED[text], skip_special_tokens=False) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.add_bos) == (2, True)
    assert tokenizer.eos_token_ids == (1, 106)
    assert tokenizer.vocab_size == 262_144
    assert tokenizer.decode([105, 2364, 107, 138, 106]) == "user\n  "
    assert tokenizer.token_bytes(140) == b"    "
    assert tokenizer.token_bytes(238 + 0xEA) == b"\xea"

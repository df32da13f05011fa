"""TECHNIQUES.md and docstrings name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows(text: str) -> list[list[str]]:
    """The cells of the table's rows, header and rule left out."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def missing_paths(text: str) -> list[str]:
    """Paths in the table that are not in the repository."""
    paths = re.findall(r"`((?:src|csrc|tests|benchmarks)/[^` ]+)`", text)
    return [path for path in paths if not (ROOT / path).exists()]


def test_every_file_exists() -> None:
    assert missing_paths((ROOT / "TECHNIQUES.md").read_text()) == []


def test_every_technique_has_file_source_and_test() -> None:
    table = rows((ROOT / "TECHNIQUES.md").read_text())
    assert len(table) > 10
    for cells in table:
        assert len(cells) == 5, cells
        assert all(cells[:4]), f"{cells[0]} lacks a file, a source or a test"


def test_every_test_that_code_names_exists() -> None:
    """Their modules say "Checked by"."""
    found = []
    for source in (ROOT / "src").rglob("*.py"):
        found += re.findall(r"(?:tests|benchmarks)/[a-z_0-9/]+\.py", source.read_text("utf-8"))
    assert len(found) > 50
    assert [path for path in found if not (ROOT / path).exists()] == []


def test_a_wrong_path_is_found() -> None:
    assert missing_paths("| x | `csrc/kernels/no_such_file.h` | y |") == ["csrc/kernels/no_such_file.h"]

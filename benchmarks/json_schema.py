"""What the answers of a JSON schema may be, against a test suite: `python benchmarks/json_schema.py FILE`.

FILE has one JSON object a line: `schema`, and `tests` of `data` and whether it is `valid`, as in the JSON-Schema-Test-
Suite (draft 2020-12). Each schema is compiled over a vocabulary of bytes, or refused, which a server tells as a 400.
An instance is accepted if its JSON text, byte after byte, is a whole answer. Three numbers count:

invalid accepted  an answer that the schema forbids could be: there must be none
valid rejected    an answer that the schema allows cannot be (properties in another order, say): the answer obeys all
                  the same, the model only has less to choose from
refused           schemas with keywords that would not hold

Prints a line for each file of the suite, what is refused and why, and last a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ParameterError
from paceline.params import Structure
from paceline.sampling.grammar import CompiledGrammar, GrammarCompiler

END = 256
SEPARATORS = ((", ", ": "), (",", ":"))


class Bytes:
    """A vocabulary of the 256 bytes and an end of text."""

    eos_token_ids = (END,)

    def token_bytes(self, token_id: int) -> bytes:
        """One byte."""
        return bytes([token_id]) if token_id < END else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())


@dataclass
class Counts:
    """Of the schemas of one file, or of all."""

    schemas: int = 0
    refused: int = 0
    valid_accepted: int = 0
    valid_rejected: int = 0
    invalid_rejected: int = 0
    invalid_accepted: int = 0

    def add(self, other: Counts) -> None:
        """Counts these as well."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Report:
    """What became of a suite. ``reasons`` counts refusals; the lists name what instances show."""

    files: dict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))
    reasons: Counter[str] = field(default_factory=Counter)
    invalid_accepted: list[str] = field(default_factory=list)
    valid_rejected: list[str] = field(default_factory=list)

    @property
    def total(self) -> Counts:
        """Of all files."""
        total = Counts()
        for counts in self.files.values():
            total.add(counts)
        return total

    def lines(self) -> Iterator[str]:
        """The report for people."""
        names = ("schemas", "refused", "valid_accepted", "valid_rejected", "invalid_rejected", "invalid_accepted")
        yield f"{'':32}" + "".join(f"{name.replace('_', ' '):>18}" for name in names)
        for name, counts in [*sorted(self.files.items()), ("all", self.total)]:
            yield f"{name:32}" + "".join(f"{getattr(counts, column):18}" for column in names)
        yield from _listed("Refused", [f"{count:4}  {reason}" for reason, count in self.reasons.most_common()])
        yield from _listed("Valid, and cannot be an answer", self.valid_rejected)
        yield from _listed("INVALID, and can be an answer", self.invalid_accepted)

    def document(self) -> dict[str, Any]:
        """The report for machines."""
        return {"benchmark": "json_schema", **asdict(self.total), "refusals": dict(self.reasons)}


def judge(lines: Sequence[dict[str, Any]]) -> Report:
    """Compiles each schema of a suite and asks for each of its instances."""
    compiler, report = GrammarCompiler(Bytes(), END + 1), Report()
    for line in lines:
        counts = report.files[line["file"]]
        counts.schemas += 1
        try:
            grammar = compiler.compile(Structure("json_schema", json.dumps(line["schema"])))
        except ParameterError as error:
            counts.refused += 1
            report.reasons.update(_kinds_of(error.allowed))
            continue
        for test in line["tests"]:
            accepted, valid = accepts(grammar, test["data"]), test["valid"]
            column = f"{'valid' if valid else 'invalid'}_{'accepted' if accepted else 'rejected'}"
            setattr(counts, column, getattr(counts, column) + 1)
            if accepted != valid:
                where = f"{line['file']}: {line['description']}: {test['description']}"
                (report.invalid_accepted if accepted else report.valid_rejected).append(where)
    return report


def accepts(grammar: CompiledGrammar, value: object) -> bool:
    """Whether the JSON of a value, with or without blanks, is a whole answer."""
    return any(_is_whole(grammar, json.dumps(value, ensure_ascii=False, separators=pair)) for pair in SEPARATORS)


def _is_whole(grammar: CompiledGrammar, text: str) -> bool:
    matcher, tokens = grammar.matcher(), list(text.encode())
    if matcher.num_allowed(tokens) < len(tokens):
        return False
    for token in tokens:
        matcher.advance(token)
    return matcher.may_end


def _kinds_of(reason: str) -> list[str]:
    """A reason without what is particular to one schema; of several keywords each."""
    if reason.startswith("Unimplemented keys: "):
        return [f"the keyword {key}" for key in json.loads(reason.removeprefix("Unimplemented keys: "))]
    return [re.sub(r"'[^']{20,}'|http\S+|[-\d.]+$", "...", reason.partition("\n")[0])[:100]]


def _listed(title: str, entries: Sequence[str]) -> Iterator[str]:
    if entries:
        yield f"\n{title}:"
        yield from (f"  {entry}" for entry in entries)


def main() -> None:
    """Prints the report of a suite."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    text = parser.parse_args().file.read_text(encoding="utf-8")
    report = judge([json.loads(line) for line in text.splitlines() if line])
    print("\n".join(report.lines()))
    print(json.dumps(report.document()))


if __name__ == "__main__":
    main()

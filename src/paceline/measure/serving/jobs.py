"""The requests of a load: prompts from files, prompts made up to a length, and arrivals from production traces."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline.errors import ParameterError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one entry of ``hash_ids`` stands for."""

FORMS = (
    'JSON lines with "messages", "prompt", "turns" or "question", a Mooncake trace (JSON lines with "timestamp", '
    '"input_length", "output_length", "hash_ids") or an Azure trace (CSV with TIMESTAMP, '
    "ContextTokens, GeneratedTokens)"
)

WORDS = tuple(
    """
    about after again air all also always and another answer any around ask away back because been before began being
    below between big book both boy but call came can car carry change children city close come could country cut day
    did different does done door down each earth eat end enough even every example eye face family far father feet few
    find first five follow food form found four from gave get girl give good great green group grow had hand hard has
    have head hear help her here high him his home house how idea into its just keep kind know land large last late
    learn leave left letter life light like line list little live long look made make man many may mean men might mile
    money more most mother mountain move much must name near need never new next night not number off often old once one
    only open order other our out over own page paper part people place plant play point put question quick read real
    right river room run said same saw say school sea second see seem sentence set she should show side small some
    song soon sound still stop story study such sun take talk tell than that the their them then there these they thing
    think this those thought three through time together too took top town tree try turn two under until use very
    voice walk want war watch water way week well went were what when where which while white who why will wind with
    without word work world would write year young your
    """.split()
)
"""Words that nearly every vocabulary has as one token."""


@dataclass(frozen=True)
class Sizing:
    """How long a text becomes as a prompt: tokens = overhead_tokens + tokens_per_word · words."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0

    @classmethod
    def between(cls, short: tuple[int, int], long: tuple[int, int]) -> Sizing:
        """The line through two measured prompts, each (words, tokens)."""
        slope = (long[1] - short[1]) / (long[0] - short[0])
        return cls(slope, short[1] - slope * short[0]) if slope > 0 else cls()

    def words(self, num_tokens: float) -> int:
        """Words of a prompt of so many tokens."""
        return max(1, round((num_tokens - self.overhead_tokens) / self.tokens_per_word))


@dataclass(frozen=True)
class MadeUp:
    """A prompt of ``num_tokens`` tokens in blocks of ``block_tokens``; blocks of the same name have the same words, so
    prompts that begin with the same blocks begin with the same text."""

    num_tokens: int
    blocks: tuple[str, ...]
    block_tokens: float

    def text(self, sizing: Sizing) -> str:
        """The words. The last block is as long as the rest of the prompt is."""
        missing = sizing.words(self.num_tokens)
        of_block = max(1, round(self.block_tokens / sizing.tokens_per_word))
        words: list[str] = []
        for at, block in enumerate(self.blocks):
            is_last = at == len(self.blocks) - 1
            count = missing if is_last else min(of_block, missing)
            words += random.Random(block).choices(WORDS, k=count)
            missing -= count
        return " ".join(words)


Message = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One request to send: its prompt (text, a conversation, or made up), the longest answer (None: the load's own) and
    when it comes, in seconds from the start (None: the load decides)."""

    prompt: str | tuple[Message, ...] | MadeUp
    max_tokens: int | None = None
    at_s: float | None = None

    def sized(self, sizing: Sizing) -> Job:
        """The same with a text in place of one that is made up."""
        return replace(self, prompt=self.prompt.text(sizing)) if isinstance(self.prompt, MadeUp) else self


def made_up_job(seed: int, index: int, num_tokens: int) -> Job:
    """A request whose prompt no other index has, from its first words on."""
    return Job(MadeUp(num_tokens, (f"{seed}/{index}",), num_tokens))


def made_up_jobs(seed: int, num_tokens: int) -> Iterator[Job]:
    """As many as are wanted."""
    index = 0
    while True:
        yield made_up_job(seed, index, num_tokens)
        index += 1


def read_jobs(path: Path, *, length_scale: float = 1.0, rate_scale: float = 1.0) -> list[Job]:
    """The requests of a file in one of the ``FORMS``, in order of arrival where they have times.

    Lengths of a trace are multiplied by ``length_scale``; its times are divided by ``rate_scale``. Raises
    ``ParameterError`` for what is none of the forms, with its line.
    """
    read = _azure_jobs if path.suffix == ".csv" else _json_jobs
    try:
        jobs = list(read(path, length_scale, rate_scale))
    except UnicodeDecodeError as error:
        raise ParameterError("data", str(path), f"a file in UTF-8 ({error})") from error
    if not jobs:
        raise ParameterError("data", str(path), f"at least one request: {FORMS}")
    if any(job.at_s is None for job in jobs):
        return jobs
    jobs.sort(key=lambda job: job.at_s or 0.0)
    first_s = jobs[0].at_s or 0.0
    return [replace(job, at_s=(job.at_s or 0.0) - first_s) for job in jobs]


def _json_jobs(path: Path, length_scale: float, rate_scale: float) -> Iterator[Job]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                job = _trace_job(record, length_scale, rate_scale) if "hash_ids" in record else Job(_prompt(record))
            except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                raise ParameterError("data", f"{path}, line {number}", FORMS) from error
            yield job


def _prompt(record: Mapping[str, Any]) -> str | tuple[Message, ...]:
    if messages := record.get("messages"):
        return tuple({"role": str(one["role"]), "content": one["content"]} for one in messages)
    text = record["turns"][0] if "turns" in record else record["prompt"] if "prompt" in record else record["question"]
    if not isinstance(text, str) or not text:
        raise TypeError("a prompt is a text")
    return text


def _trace_job(record: Mapping[str, Any], length_scale: float, rate_scale: float) -> Job:
    prompt = MadeUp(
        _scaled(record["input_length"], length_scale),
        tuple(f"block {one}" for one in record["hash_ids"]),
        MOONCAKE_BLOCK_TOKENS * length_scale,
    )
    return Job(prompt, _scaled(record["output_length"], length_scale), record["timestamp"] / 1e3 / rate_scale)


def _azure_jobs(path: Path, length_scale: float, rate_scale: float) -> Iterator[Job]:
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                at_s = _timestamp_s(row["TIMESTAMP"]) / rate_scale
                job = made_up_job(0, number, _scaled(row["ContextTokens"], length_scale))
                yield replace(job, max_tokens=_scaled(row["GeneratedTokens"], length_scale), at_s=at_s)
            except (KeyError, ValueError, TypeError) as error:
                raise ParameterError("data", f"{path}, line {number + 2}", FORMS) from error


def _scaled(length: str | int, scale: float) -> int:
    return max(1, round(int(length) * scale))


def _timestamp_s(text: str) -> float:
    """Seconds, from a date with a fraction of any number of digits."""
    whole, _, fraction = text.partition(".")
    seconds = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp()
    return seconds + float(f"0.{fraction or 0}")


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Arrival times in seconds, ``rate`` a second on average, with exponential gaps; the first is 0."""
    generator = random.Random(seed)
    at_s = 0.0
    while True:
        yield at_s
        at_s += generator.expovariate(rate)


def shorter_than(jobs: Sequence[Job], max_prompt_tokens: int) -> list[Job]:
    """Those that are not made up to a longer prompt."""
    return [job for job in jobs if not isinstance(job.prompt, MadeUp) or job.prompt.num_tokens <= max_prompt_tokens]

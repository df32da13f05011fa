"""What speculation gains, by category of prompts: every answer with and without drafts, in turns in one process.

Definitions: decoding is the time from an answer's first token to its last, so prompts are left out; ``end_to_end``
counts them. With several requests at a time it is the time of all, prompts included, for both. The mean accepted
length is output tokens over passes; ``distinct_4`` is the share of an answer's 4-grams that differ: a small model that
repeats itself flatters drafts that look things up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ParameterError
from paceline.measure.prompts import QUESTIONS, TEXT
from paceline.measure.record import Measurement
from paceline.measure.roofline import PeaksProbe, Traffic, decode_work, measure_peaks
from paceline.measure.runs import Report, cold_domain, path_peaks, quiet
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.outputs import Completion
    from paceline.llm import LLM


@dataclass(frozen=True)
class Conversation:
    """What a person says, turn by turn; ``category`` is the kind of work."""

    category: str
    turns: tuple[str, ...]


@dataclass
class Category:
    """Sums over the answers of one category: seconds with and without drafts, of decoding and of all."""

    plain_s: float = 0.0
    drafted_s: float = 0.0
    plain_all_s: float = 0.0
    drafted_all_s: float = 0.0
    plain_tokens: int = 0
    drafted_tokens: int = 0
    passes: int = 0
    num_answers: int = 0
    num_equal: int = 0
    num_four_grams: int = 0
    num_distinct: int = 0

    def document(self, *, is_random: bool) -> dict[str, Any]:
        """As plain data for JSON. ``is_random``: answers need not be equal, so nothing is said about that."""
        return {
            "speedup": _rate(self.drafted_tokens, self.drafted_s) / _rate(self.plain_tokens, self.plain_s),
            "end_to_end_speedup": _rate(self.drafted_tokens, self.drafted_all_s)
            / _rate(self.plain_tokens, self.plain_all_s),
            "tokens_per_s": _rate(self.drafted_tokens, self.drafted_s),
            "plain_tokens_per_s": _rate(self.plain_tokens, self.plain_s),
            "mean_accepted_length": self.drafted_tokens / max(1, self.passes),
            "distinct_4": self.num_distinct / max(1, self.num_four_grams),
            "tokens_equal": None if is_random else self.num_equal == self.num_answers,
            "answers": self.num_answers,
        }


def _rate(tokens: int, seconds: float) -> float:
    return tokens / max(seconds, 1e-9)


BUILT_IN = (
    Conversation(
        "copying",
        (
            'Copy the following text word for word, replacing "he" by "she". Output only the text.\n\n'
            + TEXT.split("\n\n")[3].replace("\n", " "),
        ),
    ),
    Conversation("summary", ("Summarize this text in five sentences:\n\n" + "\n\n".join(TEXT.split("\n\n")[:3]),)),
    Conversation(
        "extraction",
        ("List each complaint that this text makes, one a line:\n\n" + TEXT.split("\n\n")[2],),
    ),
    Conversation("chat", QUESTIONS[:3]),
    Conversation("story", ("Write a short story about a lighthouse keeper who finds a map.",)),
)
"""Where no data is given: a few prompts of our own."""


def read_conversations(path: Path, *, per_category: int | None = None) -> list[Conversation]:
    """Conversations of a JSON-lines file with "category" and "turns", of each category the first ``per_category``.

    Raises ``ParameterError`` for a file that is none.
    """
    allowed = 'a file of JSON lines such as {"category": "qa", "turns": ["Who ...?"]}'
    found: dict[str, list[Conversation]] = {}
    try:
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                entry = json.loads(line)
                turns = tuple(entry["turns"])
                if not turns or not all(isinstance(turn, str) for turn in turns):
                    raise ParameterError("data", str(path), allowed)
                found.setdefault(str(entry["category"]), []).append(Conversation(str(entry["category"]), turns))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError("data", str(path), f"{allowed} ({error})") from error
    if not found:
        raise ParameterError("data", str(path), allowed)
    return [one for conversations in found.values() for one in conversations[:per_category]]


def measure_speculation(
    llm: LLM,
    traffic: Traffic,
    conversations: Sequence[Conversation] = BUILT_IN,
    *,
    num_new: int = 256,
    temperature: float = 0.0,
    concurrency: int = 1,
    num_runs: int = 1,
    report: Report = quiet,
    probe: PeaksProbe = measure_peaks,
) -> Measurement:
    """How many times faster decoding is with drafts, as the mean over categories.

    Each answer is given without drafts and with them, in turns, which of them first alternating, both after the same
    conversation. A conversation knows only itself: what was said in others, in other runs or without drafts is in other
    cache domains, for the prefix cache and for drafters. ``concurrency`` requests of a category run at a time, and the
    whole is done ``num_runs`` times.
    """
    if llm.chat_template is None:
        raise ParameterError("model", "this model", "one with a chat template")
    if num_new < 2:
        raise ParameterError("new_tokens", num_new, "at least 2: the first token's time is the prompt's")
    if llm.path()["speculation"] == "off":
        raise ParameterError("speculate", "off", "somebody who drafts: that is what is measured")
    categories: dict[str, Category] = {}
    for one in conversations:
        categories.setdefault(one.category, Category())
    params = SamplingParams(temperature=temperature, max_tokens=num_new, seed=1)
    _answer(llm, [list(range(8))], dataclasses.replace(params, max_tokens=16), [cold_domain()])  # warms up
    groups = list(_groups(conversations, concurrency))
    for run in range(num_runs):
        for index, group in enumerate(groups):
            sums = categories[group[0].category]
            _measure_group(llm, group, params, sums, alone=concurrency == 1, drafted_first=(run + index) % 2 == 1)
            report(run * len(groups) + index + 1, num_runs * len(groups))
    exact = temperature > 0 and llm.config.acceptance == "exact"
    documents = {name: category.document(is_random=exact) for name, category in categories.items()}
    speedups = [document["speedup"] for document in documents.values()]
    plain_rate = statistics.mean(document["plain_tokens_per_s"] for document in documents.values())
    return Measurement(
        metric="speculation_speedup",
        runs=tuple(speedups),
        path=llm.path(),
        work=decode_work(traffic, depth=512, num_new=num_new),
        peaks=path_peaks(llm, probe),
        achieved_tokens_per_s=plain_rate,
        details={
            "mean_speedup": statistics.mean(speedups),
            "categories": documents,
            "temperature": temperature,
            "concurrency": concurrency,
            "new_tokens": num_new,
            "num_runs": num_runs,
        },
    )


def _groups(conversations: Sequence[Conversation], size: int) -> Iterator[list[Conversation]]:
    """Conversations of one category and as many turns, ``size`` at a time."""
    kinds: dict[tuple[str, int], list[Conversation]] = {}
    for one in conversations:
        kinds.setdefault((one.category, len(one.turns)), []).append(one)
    for group in kinds.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _measure_group(
    llm: LLM,
    group: Sequence[Conversation],
    params: SamplingParams,
    sums: Category,
    *,
    alone: bool,
    drafted_first: bool,
) -> None:
    domains = {drafted: [cold_domain() for _ in group] for drafted in (False, True)}
    messages: list[list[dict[str, str]]] = [[] for _ in group]
    for turn in range(len(group[0].turns)):
        for said, one in zip(messages, group, strict=True):
            said.append({"role": "user", "content": one.turns[turn]})
        prompts = [_fitting(llm, llm.chat_tokens(said), params.max_tokens or 1) for said in messages]
        answers: dict[bool, tuple[list[Completion], float]] = {}
        for drafted in (drafted_first, not drafted_first):
            with contextlib.nullcontext() if drafted else llm.without_drafts():
                answers[drafted] = _answer(llm, prompts, params, domains[drafted])
        _add(sums, *answers[False], *answers[True], alone=alone)
        for said, answer in zip(messages, answers[False][0], strict=True):
            said.append({"role": "assistant", "content": answer.text})


def _fitting(llm: LLM, prompt: list[int], num_new: int) -> list[int]:
    """The prompt, its beginning cut where the context is too short for it and its answer."""
    room = (llm.config.context_length or len(prompt)) - num_new
    return prompt if len(prompt) <= room else prompt[-max(1, room) :]


def _answer(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, domains: Sequence[str]
) -> tuple[list[Completion], float]:
    """The answers to prompts that run together, each in a cache domain of its own, and the seconds they took."""

    async def all_of_them() -> list[Completion]:
        asked = zip(prompts, domains, strict=True)
        return await asyncio.gather(*(llm.agenerate(list(one), params, cache_domain=domain) for one, domain in asked))

    started_s = time.perf_counter()
    completions = asyncio.run(all_of_them())
    return completions, time.perf_counter() - started_s


def _add(
    sums: Category,
    plain: Sequence[Completion],
    plain_s: float,
    drafted: Sequence[Completion],
    drafted_s: float,
    *,
    alone: bool,
) -> None:
    for one in plain:
        sums.plain_tokens += one.num_completion_tokens - alone
        sums.plain_s += one.timing.e2e_s - one.timing.ttft_s if alone else 0.0
    for one, reference in zip(drafted, plain, strict=True):
        sums.drafted_tokens += one.num_completion_tokens - alone
        sums.drafted_s += one.timing.e2e_s - one.timing.ttft_s if alone else 0.0
        accepted = one.speculation.accepted if one.speculation is not None else 0
        sums.passes += one.num_completion_tokens - alone - accepted
        sums.num_answers += 1
        sums.num_equal += one.token_ids == reference.token_ids
        ids = one.token_ids
        four_grams = [tuple(ids[at : at + 4]) for at in range(len(ids) - 3)]
        sums.num_four_grams += len(four_grams)
        sums.num_distinct += len(set(four_grams))
    sums.plain_all_s += plain_s
    sums.drafted_all_s += drafted_s
    if not alone:
        sums.plain_s += plain_s
        sums.drafted_s += drafted_s


def category_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Header and rows of the categories, for a table."""
    rows: list[tuple[str, ...]] = [("", "times faster", "accepted", "tok/s", "without", "distinct-4", "same tokens")]
    for name, figures in document["categories"].items():
        rows.append(
            (
                name,
                f"{figures['speedup']:.2f}",
                f"{figures['mean_accepted_length']:.2f}",
                f"{figures['tokens_per_s']:.0f}",
                f"{figures['plain_tokens_per_s']:.0f}",
                f"{figures['distinct_4']:.2f}",
                {True: "yes", False: "NO", None: "random"}[figures["tokens_equal"]],
            )
        )
    return rows

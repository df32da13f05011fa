"""The cells of `paceline verify`: the paths that an answer can take through the engine, and the requests that go there.

A path is a ``Cell``; the plain one is ``Cell()``. What can be varied is one table, ``dimensions``: a new way to compute
the same tokens is a new entry there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any, Literal

from paceline import _native
from paceline.config import KV_FORMATS, PAGE_TOKENS, SPLIT_TOKENS, EngineConfig, KVFormat
from paceline.engine.request import choice_seed
from paceline.machine import detect_machine
from paceline.measure.prompts import Encoder, distinct_prompts, prompt_tokens
from paceline.params import SamplingParams, Structure

Drafts = Literal["chain", "tree", "suffix", "ngram", "forced", "self"]
Cache = Literal["off", "cold", "hit", "partial", "shared", "disk"]

NUM_DISTINCT = 32
NUM_SHARING = 4
SHARED_TOKENS = SPLIT_TOKENS + 22
"""So many tokens begin the prompts of the requests that share them: more than attention takes at a time, so that
their keys and values may be read once for all, and not whole pages."""


@dataclass(frozen=True)
class Cell:
    """One path. The defaults are the plain one: a request after the other, each prompt whole, on one thread.

    batch       requests that run together
    chunk       rows of a prompt in one step, None for the whole prompt
    cache       the prefix cache: off; empty; holding the same prompts; holding prompts that begin alike; empty, while
                the requests that run begin alike; reloaded from disk
    isa         None for that of the configuration; so for kv_dtype
    pool_pages  of the KV cache when it is to be too small, so that requests are preempted and resumed
    drafts      who drafts what is verified: the expected answers with errors planted in them, as chains or trees; a
                drafter; the model itself with int4 weights
    picks       which requests run, by index; None for the first ``batch``, at least two
    """

    batch: int = 1
    chunk: int | None = None
    cache: Cache = "off"
    num_threads: int = 1
    isa: str | None = None
    kv_dtype: KVFormat | None = None
    pool_pages: int | None = None
    drafts: Drafts | None = None
    picks: tuple[int, ...] | None = None

    @property
    def request_indexes(self) -> Sequence[int]:
        """Which requests run."""
        return range(max(2, self.batch)) if self.picks is None else self.picks

    @property
    def is_loaded_apart(self) -> bool:
        """Whether another engine must be loaded for it than the configuration's own."""
        apart = self.kv_dtype is not None or self.isa is not None
        return apart or self.cache == "disk" or self.drafts == "self"

    def varied(self) -> str:
        """What is not plain about it, in words."""
        words = {
            "pool_pages": f"preempted and resumed in {self.pool_pages} pages",
            "kv_dtype": f"{self.kv_dtype} KV against itself",
            "isa": f"{self.isa}",
            "drafts": {
                "chain": "planted chains",
                "tree": "planted trees",
                "suffix": "suffix drafts",
                "ngram": "n-gram drafts",
                "forced": "drafts of what a structure forces",
                "self": "drafts by its own int4 weights",
            }.get(self.drafts or "", ""),
            "cache": {
                "cold": "cache cold",
                "hit": "cache hit",
                "partial": "cache partly hit",
                "shared": "prefix shared while it is read",
                "disk": "cache reloaded from disk",
            }.get(self.cache, ""),
            "chunk": f"chunk {self.chunk}",
            "batch": f"batch {self.batch}",
            "num_threads": f"{self.num_threads} threads",
        }
        plain = Cell()
        changed = [name for name in words if getattr(self, name) != getattr(plain, name)]
        return " · ".join(words[name] for name in changed) or "nothing, once more"


@dataclass(frozen=True)
class Host:
    """What the machine leaves to vary: threads, and the instruction sets and KV formats besides the plain path's.

    ``drafts_itself``: whether the model can be loaded twice over one pool of pages, to draft for itself.
    """

    num_threads: int
    isas: tuple[str, ...]
    kv_formats: tuple[KVFormat, ...]
    drafts_itself: bool = True

    @classmethod
    def of(cls, config: EngineConfig, *, has_isas: bool = True) -> Host:
        """This one; ``config`` may name threads and instruction set. One processor still runs two threads.
        ``has_isas``: whether the executor lets the instruction set be chosen."""
        resolved = config.resolve(detect_machine(config.isa))
        return cls(
            num_threads=max(2, resolved.num_threads or 1),
            isas=tuple(isa for isa in _native.isas() if has_isas and isa != resolved.isa),
            kv_formats=tuple(other for other in KV_FORMATS if other != config.kv_dtype),
        )


CROSSED = ("threads", "batch", "chunk", "cache")
"""Dimensions of which ``--full`` takes every combination; loading is dear, so what needs it comes first."""


def dimensions(host: Host) -> dict[str, list[dict[str, Any]]]:
    """Dimension -> the fields that each of its values gives a ``Cell``."""
    few, growing = (1, 7), tuple(range(1, 7))
    sharing = tuple(range(NUM_DISTINCT, NUM_DISTINCT + NUM_SHARING))
    shared = {"cache": "shared", "batch": NUM_SHARING, "picks": sharing}
    return {
        "threads": [{"num_threads": 1}, {"num_threads": host.num_threads}],
        "batch": [{"batch": batch} for batch in (1, 2, 7, 32)],
        "chunk": [{"chunk": chunk} for chunk in (None, 16, 128)],
        "cache": [
            *({"cache": cache} for cache in ("off", "cold", "hit", "partial")),
            shared,
            {"cache": "disk"},
        ],
        "drafts": [
            {"drafts": drafts, **more}
            for drafts in ("chain", "tree", "suffix", "ngram", *(["self"] if host.drafts_itself else []))
            # Prompt lookup needs an answer that repeats something: one of eight will.
            for more in ({"picks": tuple(range(8))} if drafts == "ngram" else {}, {"batch": 8, "cache": "hit"})
        ],
        "memory": [{"batch": 6, "pool_pages": 5, "cache": cache, "picks": growing} for cache in ("off", "cold")],
        # One of the first two is longer than a split of attention. Scalar code is fifty times slower: short ones there.
        "isa": [{"isa": isa, "batch": 2, "picks": few if isa == "scalar" else None} for isa in host.isas],
        "kv": [
            *({"kv_dtype": other, "batch": 2, "chunk": 16, "cache": "partial"} for other in host.kv_formats),
            # The others do the arithmetic of f16.
            *({"kv_dtype": "int8", **shared} for other in host.kv_formats if other == "int8"),
        ],
    }


def cells(host: Host, *, full: bool) -> list[tuple[str, Cell]]:
    """(dimension, cell) of all that is compared bit by bit, none twice; those that share a load follow each other.

    Quick takes each value of a dimension alone, on all threads. Full adds the long request in scalar code, and every
    combination of the ``CROSSED`` ones with the cache on, in memory.
    """
    table = dimensions(host)
    busy = Cell(num_threads=host.num_threads)
    found: dict[Cell, str] = {}
    for name, values in table.items():
        for value in values:
            found.setdefault(replace(busy, **value), name)
    if full:
        found.update({replace(busy, isa=isa, picks=(0,)): "isa" for isa in host.isas if isa == "scalar"})
        for combination in itertools.product(*(table[name] for name in CROSSED)):
            cell = Cell(**{field: value for part in combination for field, value in part.items()})
            if cell.cache not in ("off", "disk"):
                found.setdefault(cell, "crossed")

    def load_order(cell: Cell) -> tuple[bool, bool, str, bool]:
        # The plain path's engine is open already.
        return cell.is_loaded_apart, cell.num_threads > 1, cell.isa or "", cell.cache == "disk" or cell.drafts == "self"

    return [(found[cell], cell) for cell in sorted(found, key=load_order)]


WORDS = Structure("regex", "I can say this: [A-Z][a-z]*( [a-z]+){3,}[.]")
"""What few models write by themselves, and each can. Its beginning leaves no choice, so that it can be drafted."""


@dataclass(frozen=True)
class Question:
    """A request that is asked on every path: it has a seed of its own, by which its outputs are known."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams

    def seed(self, choice: int) -> int:
        """The seed of one of its ``params.n`` answers."""
        assert self.params.seed is not None
        return choice_seed(self.params.seed, choice)


def plain_questions(encoder: Encoder, *, num_long: int, num_new: int) -> list[Question]:
    """One long prompt; six that grow over the end of a page while they answer; short ones. No two of these
    ``NUM_DISTINCT`` begin alike. Then ``NUM_SHARING`` that do."""

    def question(name: str, prompt: Sequence[int], new: int) -> Question:
        params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=1, seed=1000 + len(questions))
        return Question(name, tuple(prompt), params)

    num_grow = 2 * num_new
    questions: list[Question] = []
    for index, prompt in enumerate(distinct_prompts(encoder, NUM_DISTINCT, num_long)):
        if index == 0:
            questions.append(question("long", prompt, num_grow))
        elif index <= 6:
            questions.append(question(f"growing {index}", prompt[: PAGE_TOKENS - 6 + index], num_grow))
        else:
            questions.append(question(f"short {index - 6}", prompt[: 3 + 5 * index % 14], num_new))
    assert len({one.prompt[0] for one in questions}) == NUM_DISTINCT, "prompts must not begin alike"
    beginning = prompt_tokens(encoder, SHARED_TOKENS, offset=97)
    for index in range(NUM_SHARING):
        questions.append(question(f"sharing {index + 1}", [*beginning, *questions[index].prompt[:5]], num_grow))
    return questions


def format_question(encoder: Encoder, *, num_prompt: int, num_new: int) -> Question:
    """A text whose every position is an output, so that formats can be compared after the same tokens."""
    params = SamplingParams(max_tokens=num_new, ignore_eos=True, prompt_logprobs=0, logprobs=0, seed=2000)
    return Question("text", tuple(prompt_tokens(encoder, num_prompt)), params)


def sampling_base(encoder: Encoder, *, num_new: int) -> Question:
    """The request of which each sampling question varies one parameter."""
    params = SamplingParams(max_tokens=num_new, logprobs=2, seed=3000, ignore_eos=True)
    return Question("plain", tuple(prompt_tokens(encoder, 20, offset=40)), params)


def sampling_questions(
    base: Question, token_ids: Sequence[int], text: str, eos_token_ids: Sequence[int]
) -> list[Question]:
    """A question for each field of ``SamplingParams`` (``structure`` where it can be), and one for many together.

    ``token_ids`` and ``text`` are the answer to ``base``: they decide what is banned and where to stop, so that it has
    an effect on any model.
    """
    first, later = token_ids[0], token_ids[len(token_ids) // 2]
    stop = text[len(text) // 2 :][:3] or "the"
    draw = {"temperature": 0.9}
    varied: Mapping[str, Mapping[str, Any]] = {
        "temperature": {"temperature": 1.5},
        "seed": draw,
        "top_k": {**draw, "top_k": 5},
        "top_p": {**draw, "top_p": 0.7},
        "min_p": {**draw, "min_p": 0.1},
        "repetition_penalty": {"repetition_penalty": 1.4},
        "presence_penalty": {"presence_penalty": 1.5},
        "frequency_penalty": {"frequency_penalty": 1.5},
        "logit_bias": {"logit_bias": {first: -100.0, later: 1.0}},
        "min_tokens": {"min_tokens": base.params.max_tokens, "stop_token_ids": (first, later)},
        "stop": {"stop": (stop,)},
        "stop_token_ids": {"stop_token_ids": (later,)},
        "ignore_eos": {"ignore_eos": True, "logit_bias": dict.fromkeys(eos_token_ids, 50.0)},
        "n": {**draw, "n": 3},
        "logprobs": {"logprobs": 5},
        "prompt_logprobs": {"prompt_logprobs": 3},
        "max_tokens": {"max_tokens": max(1, (base.params.max_tokens or 2) // 2)},
        **({"structure": {**draw, "structure": WORDS}} if eos_token_ids and find_spec("llguidance") else {}),
        "many at once": {**draw, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {first: -2.0}},
    }
    plain = {field.name: getattr(base.params, field.name) for field in fields(SamplingParams)} | {"ignore_eos": False}
    return [
        Question(name, base.prompt, SamplingParams(**{**plain, "seed": 3001 + index, **changes}))
        for index, (name, changes) in enumerate(varied.items())
    ]


def number_of_requests(questions: Iterable[Question]) -> int:
    """Requests that the questions make: one an answer."""
    return sum(question.params.n for question in questions)

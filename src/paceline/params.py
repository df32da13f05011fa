"""How the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from paceline.errors import ParameterError

MAX_ALTERNATIVES = 64
"""Most alternatives that ``logprobs`` and ``prompt_logprobs`` may ask for."""

MAX_CHOICES = 128
_MAX_INT = 2**31 - 1


class LogitBias(Mapping[int, float]):
    """Read-only token id -> bias, in ascending order of ids; hashable, so that frozen parameters are."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[int, float]) -> None:
        self._items = dict(sorted(items.items()))

    def __getitem__(self, token: int) -> float:
        return self._items[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


_NO_BIAS = LogitBias({})

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
STRUCTURE_KINDS: tuple[StructureKind, ...] = ("json_object", "json_schema", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Structure:
    """What the text of an answer must be, whole, from its first character to its end.

    kind    "json_object" any JSON object; "json_schema" what the schema allows; "regex" a full match; "choice" one of
            some texts; "grammar" a Lark grammar whose rule ``start`` is the answer
    source  the schema as JSON, the expression, a JSON list of texts, or the grammar; empty for "json_object"
    name    what whoever asks for it calls it, for errors; structures that differ in it alone are equal
    """

    kind: StructureKind
    source: str = ""
    name: str = field(default="structure", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in STRUCTURE_KINDS:
            raise ParameterError(self.name, self.kind, f"one of {', '.join(STRUCTURE_KINDS)}")
        if not isinstance(self.source, str) or bool(self.source) != (self.kind != "json_object"):
            raise ParameterError(self.name, self.source, "the source as text; none for json_object")


@dataclass(frozen=True)
class SamplingParams:
    """Validated on construction: an impossible value raises ``ParameterError`` with the field, the value and the range.

    temperature         0 takes the most likely token; otherwise logits are divided by it
    top_k               keep the k most likely tokens; 0 keeps all
    top_p               then keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all
    min_p               then keep tokens at least this likely relative to the most likely one; 0 keeps all
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output
    presence_penalty    subtracted once from the logit of every token in the output
    frequency_penalty   subtracted from a token's logit for each time it is in the output
    logit_bias          token id -> number added to its logit before everything else
    seed                of the draws, None = the engine chooses one
    n                   answers to the same prompt
    max_tokens          longest answer, None = to the end of the context
    min_tokens          no end of text and no stop before so many tokens
    stop                strings that end the answer and are not part of it; also one string, or a list with None entries
    stop_token_ids      tokens that end the answer
    ignore_eos          the model's own end of text does not end the answer
    logprobs            None = none, k = log-probability of each token and of the k most likely ones
    prompt_logprobs     likewise for the tokens of the prompt
    structure           what the answer must be; it ends when it is whole and nothing can follow, and ``min_tokens`` and
                        ``ignore_eos`` give way where nothing but its end is left. Stops and ``max_tokens`` cut it short

    Sequences become tuples and ``logit_bias`` a read-only copy.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = _NO_BIAS
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: Structure | None = None

    def __post_init__(self) -> None:
        def put(field: str, value: object) -> None:
            object.__setattr__(self, field, value)

        # Below 0.001 a float32 logit divided by the temperature can leave the range in which noise still changes it.
        if _number("temperature", self.temperature, "0 (greedy), or between 0.001 and 1000") != 0.0:
            _between("temperature", self.temperature, 1e-3, 1e3, "0 (greedy), or between 0.001 and 1000")
        put("temperature", float(self.temperature))
        put("top_p", _between("top_p", self.top_p, 1e-6, 1.0))
        put("min_p", _between("min_p", self.min_p, 0.0, 1.0))
        put("repetition_penalty", _between("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        put("presence_penalty", _between("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put("logit_bias", _bias(self.logit_bias))
        put("top_k", _integer("top_k", self.top_k, 0, _MAX_INT))
        put("seed", _optional("seed", self.seed, 0, 2**64 - 1))
        put("n", _integer("n", self.n, 1, MAX_CHOICES))
        put("max_tokens", _optional("max_tokens", self.max_tokens, 1, _MAX_INT))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, _MAX_INT))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        put("stop", _strings("stop", self.stop))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError("ignore_eos", self.ignore_eos, "true or false")
        put("logprobs", _optional("logprobs", self.logprobs, 0, MAX_ALTERNATIVES))
        put("prompt_logprobs", _optional("prompt_logprobs", self.prompt_logprobs, 0, MAX_ALTERNATIVES))
        if self.structure is not None and not isinstance(self.structure, Structure):
            raise ParameterError("structure", self.structure, "a Structure")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no random number is used."""
        return self.temperature == 0.0

    def validate_for(self, vocab_size: int) -> None:
        """Raises ``ParameterError`` if a token id lies outside a vocabulary of ``vocab_size``."""
        for name, tokens in (("logit_bias", tuple(self.logit_bias)), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if token >= vocab_size:
                    raise ParameterError(name, token, f"token ids of this model are between 0 and {vocab_size - 1}")


def _number(field: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterError(field, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ParameterError(field, value, f"a finite number, {allowed}")
    return number


def _between(field: str, value: Any, low: float, high: float, allowed: str | None = None) -> float:
    allowed = allowed or f"between {low:g} and {high:g}"
    number = _number(field, value, allowed)
    if not low <= number <= high:
        raise ParameterError(field, value, allowed)
    return number


def _integer(field: str, value: Any, low: int, high: int) -> int:
    allowed = f"a whole number between {low} and {high}"
    if isinstance(value, bool):
        raise ParameterError(field, value, allowed)
    try:
        number = operator.index(value)
    except TypeError:
        raise ParameterError(field, value, allowed) from None
    if not low <= number <= high:
        raise ParameterError(field, value, allowed)
    return number


def _optional(field: str, value: Any, low: int, high: int) -> int | None:
    return None if value is None else _integer(field, value, low, high)


def _bias(value: Any) -> LogitBias:
    if value is None:
        return _NO_BIAS
    if not isinstance(value, Mapping):
        raise ParameterError("logit_bias", value, "a mapping from token id to a number between -100 and 100")
    items: dict[int, float] = {}
    for token, bias in value.items():
        key = _integer("logit_bias", token, 0, _MAX_INT)
        items[key] = _between("logit_bias", bias, -100.0, 100.0, f"the bias of token {key} lies between -100 and 100")
    return LogitBias(items)


def _strings(field: str, value: Any) -> tuple[str, ...]:
    allowed = "a string that is not empty, or a list of such strings"
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise ParameterError(field, value, allowed)
    strings = tuple(entry for entry in value if entry is not None)
    for entry in strings:
        if not isinstance(entry, str) or not entry:
            raise ParameterError(field, entry, allowed)
    return strings


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ParameterError(field, value, "a list of token ids")
    return tuple(_integer(field, entry, 0, _MAX_INT) for entry in value)

"""Whether two runs of one request gave the same bits; where they part if not; and whether rounding alone explains it.

Bits are tokens, log-probabilities and the two largest logits at every position. Two KV formats round keys and values
differently, so their runs are compared by ``rounding_tie`` instead.

Notation
    l, l'  logits of two formats at one position after the same tokens
    u      root mean square error that one rounding leaves, relative to the norm of the vector that is rounded, for
           the vector that makes it largest; errors lie anywhere in a step
    s      standard deviation of l over the vocabulary
    drift  root mean square of l' - l, its mean over the vocabulary taken off, since a shift of all logits changes
           nothing

Drift bound. A layer rounds its keys and values once (u_kv of both formats) and its activations four times (u_act: codes
of inputs that differ a little differ by whole steps), and adds its result to the residual stream. To first order the
roundings are independent and the stream carries them on with the gain that it has for the signal, so after L layers
drift <= s sqrt(L (2 u_kv^2 + 4 u_act^2)).

A mixture of k of E experts has jumps besides: where the stream is off by r, relative to its norm, so is every router
logit, and the k-th and the next may change places. For normal logits the gap between these is below any small g with
probability E phi(z) g, z the quantile of 1 - k / E, so a difference of two errors, of deviation sqrt(2) r, is larger
with probability E phi(z) r / sqrt(pi). Then the smallest of k weights goes to another expert, which changes the mean
square of their sum by at most 2 / k. So a layer adds 2 E phi(z) r / (k sqrt(pi)) to r^2: few roundings move a mixture
far. Unrelated logits have a drift of sqrt(2) s; the bound ends at s, so that these are never excused.

Margin bound. Where rounding alone makes l' prefer another token than l, the margin of l between the two is at most the
difference of two errors, whose deviation is sqrt(2) drift; six deviations cover every position of any run. Drift is
measured at the prompt's positions, whose tokens are given, never at those that it must explain.

Checked by: tests/unit/test_losslessness.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.config import ModelConfig
from paceline.measure.trace import TopTwo

Logits = NDArray[np.float32]
Verdict = Literal["EQUAL", "TIE", "FAIL"]
_DEVIATIONS = 6.0
_ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
_ACTIVATION_GROUP = 32


@dataclass(frozen=True)
class Position:
    """One token of a request, of its prompt or drawn, and what it was chosen from. Numbers are float32 values.

    index         of the token in its sequence
    logprob       None where none was asked for
    alternatives  (token, log-probability) of the likeliest, as many as were asked for
    top           None where the executor was never seen to compute this position
    """

    index: int
    token: int
    logprob: float | None
    top: TopTwo | None
    alternatives: tuple[tuple[int, float], ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether nothing in it is NaN or infinite."""
        numbers = [*(value for _, value in self.alternatives), *(self.top.logits if self.top else ())]
        return all(map(math.isfinite, numbers if self.logprob is None else [self.logprob, *numbers]))


@dataclass(frozen=True)
class Answer:
    """All that one request got: its positions in order, and how it ended (reason and text)."""

    positions: tuple[Position, ...]
    ending: tuple[str, str]


@dataclass(frozen=True)
class Difference:
    """The first place where an answer is not what it was on the plain path.

    ``position`` is that of a token in its sequence, None where the ends differ alone; the tops are the plain path's and
    the other's.
    """

    request: str
    position: int | None
    what: str
    expected: TopTwo | None = None
    found: TopTwo | None = None


def same_bits(a: float | None, b: float | None) -> bool:
    """Whether two float32 values are the same pattern of bits: 0.0 is not -0.0."""
    if a is None or b is None:
        return a is b
    return struct.pack("<f", a) == struct.pack("<f", b)


def first_difference(request: str, expected: Answer, found: Answer) -> Difference | None:
    """The first position at which any bit differs or is no number; None when all are equal."""
    for here, there in zip_longest(expected.positions, found.positions):
        what = _difference(here, there)
        if what is not None:
            tops = [position.top if position is not None else None for position in (here, there)]
            return Difference(request, (here or there).index, what, *tops)
    if expected.ending != found.ending:
        return Difference(request, None, f"ends with {found.ending!r} instead of {expected.ending!r}")
    return None


def _difference(expected: Position | None, found: Position | None) -> str | None:
    if found is None:
        return "the answer ends too early"
    if expected is None:
        return "the answer goes on too long"
    if not (expected.is_number and found.is_number):
        return "not a number"
    if expected.top is None or found.top is None:
        return "the logits were not seen"
    if (expected.index, expected.token) != (found.index, found.token):
        return f"token {found.token} instead of {expected.token}"
    if expected.top.tokens != found.top.tokens or not _same(expected.top.logits, found.top.logits):
        return "other logits"
    if not same_bits(expected.logprob, found.logprob):
        return f"log-probability {found.logprob!r} instead of {expected.logprob!r}"
    tokens, values = _columns(expected), _columns(found)
    if tokens[0] != values[0] or not _same(tokens[1], values[1]):
        return "other alternatives"
    return None


def _columns(position: Position) -> tuple[list[int], list[float]]:
    return [token for token, _ in position.alternatives], [value for _, value in position.alternatives]


def _same(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))


@dataclass(frozen=True)
class Rounding:
    """What another format moved, and what it may move; ``mean_kl`` is KL(l || l') in nats over the prompt's positions.

    ``margin`` is that of l where the tokens part, None when they never do; ``num_positions`` were compared until then.
    """

    num_positions: int
    drift: float
    drift_bound: float
    mean_kl: float
    margin: float | None
    margin_bound: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains all of it; NaN is never explained."""
        explained = self.margin is None or self.margin <= self.margin_bound
        return self.drift <= self.drift_bound and explained


def relative_rounding(kv_dtype: str, head_dim: int) -> float:
    """u of a KV format. int8 rounds to steps of max|x| / 127 <= ||x|| / 127, which leaves step / sqrt(12) a component.
    Floats are taken at their largest error, half a unit in the last place."""
    return _ROUNDING[kv_dtype] if kv_dtype in _ROUNDING else _integer_rounding(head_dim)


def _integer_rounding(width: int) -> float:
    return math.sqrt(width) / (127 * math.sqrt(12))


def compare_formats(
    expected: Logits,
    found: Logits,
    *,
    num_prompt: int,
    tokens: tuple[Sequence[int], Sequence[int]],
    model: ModelConfig,
    formats: tuple[str, str],
) -> Rounding:
    """What lies between two formats' logits [positions, vocab] of one request: first ``num_prompt`` positions of the
    prompt, then those of ``tokens``, the greedy answers."""
    plain, other = expected.astype(np.float64), found.astype(np.float64)
    moved = other[:num_prompt] - plain[:num_prompt]
    drift = float(np.sqrt(np.mean((moved - moved.mean(axis=1, keepdims=True)) ** 2)))
    u_kv = math.hypot(*(relative_rounding(kv_dtype, model.head_dim) for kv_dtype in formats))
    share = relative_drift(model, 2 * u_kv**2 + 4 * _integer_rounding(_ACTIVATION_GROUP) ** 2)
    log_p, log_q = _log_softmax(plain[:num_prompt]), _log_softmax(other[:num_prompt])
    margin = None
    num_positions = len(expected)
    for at, (ours, theirs) in enumerate(zip(*tokens, strict=True)):
        if ours != theirs:
            margin = float(plain[num_prompt + at, ours] - plain[num_prompt + at, theirs])
            num_positions = num_prompt + at + 1
            break
    return Rounding(
        num_positions=num_positions,
        drift=drift,
        drift_bound=share * float(np.mean(plain[:num_prompt].std(axis=1))),
        mean_kl=float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=1))),
        margin=margin,
        margin_bound=_DEVIATIONS * math.sqrt(2) * drift,
    )


def relative_drift(model: ModelConfig, layer_square: float) -> float:
    """The drift bound in units of s, where each layer's roundings leave ``layer_square`` on average."""
    square = 0.0
    for layer in range(model.num_layers):
        square += layer_square
        experts = model.experts_of(layer)
        if experts is not None and experts.num_chosen < experts.num_experts:
            square += jump_square(experts.num_experts, experts.num_chosen, math.sqrt(square))
    return min(math.sqrt(square), 1.0)


def jump_square(num_experts: int, num_chosen: int, error: float) -> float:
    """The mean square that other choices of experts leave, relative to their sum, where logits are off by ``error`` of
    their deviation; see the module.
    """
    normal = NormalDist()
    density = num_experts * normal.pdf(normal.inv_cdf(1 - num_chosen / num_experts))
    return 2 * density * error / (num_chosen * math.sqrt(math.pi))


def _log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = x - x.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))

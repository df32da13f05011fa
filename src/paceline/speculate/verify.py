"""Which drafted tokens are accepted, so that the text has exactly the law that the target alone gives it.

Source
    accept_drawn          Daliri, Musco and Suresh 2024 (2408.07978): draws coupled by shared Gumbel noise
    accept_chain_by_token Leviathan et al. 2022 (2211.17192), Algorithm 1; Chen et al. 2023 (2302.01318)
    accept_chain          Sun et al. 2024 (2403.10444): block verification
    accept_tree           Miao et al. 2023 (SpecInfer, 2305.09781); Yang et al. 2024 (2401.06706): siblings without
                          replacement

Notation
    gamma    drafted tokens of a chain
    x        a drafted token; in a chain that of node i, i from 0, which follows row i
    p(row)   the target's distribution [vocab] of the token after that row; in a tree, what rejected siblings left of it
    q        distribution [vocab] that a node was drawn from; 1 at x where the proposal was certain
    P[i]     (p_i of Sun et al.) probability that the first i drafted tokens are accepted, given that they were drafted
    S        mass of the residual max(P p - q, 0)
    h        probability to stop behind the first tau tokens, given that no more are accepted
    tau      drafted tokens of a chain that are accepted

All rest on one step. Where x ~ q is kept with probability min(1, p(x) / q(x)), a token y is drafted and kept with
probability min(p(y), q(y)); the token that stands in for a rejected x is drawn from what p has beyond that, the
residual max(p - q, 0), normalised. Residuals do not depend on x, so the next sibling may be tried on them in turn.

What a draft must satisfy, since no check here can see it: q is the law of a node given all that was drawn before it.
So a node must not be dropped for its own token once it is drawn, only left undrawn; and its randomness must be used
nowhere else. The noise of a rejected draft is spent: a block's end depends on the tokens behind it.

Departures: block verification tries the longest block first and stops at the first success, which gives the same law
as the paper's pass over all lengths and needs fewer random numbers. Any node of a tree may be certain, siblings of
sampled ones too.

Checked by: tests/unit/test_speculate_verify.py and test_speculate_parameters.py (all outcomes enumerated on small
vocabularies, under every sampling parameter, planted errors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.speculate.chance import Chance
from paceline.speculate.draft import Draft

Distribution = NDArray[np.float64]
Target = Callable[[int], Distribution]
"""p: row -> [vocab]. Asked for rows that matter only, and once for each; answers are not modified."""


@dataclass(frozen=True)
class Accepted:
    """What a step adds to a request: the drafted tokens of ``rows``, from the first node down, then ``token``."""

    rows: tuple[int, ...]
    token: int


def accept_drawn(draft: Draft, drawn: Sequence[int]) -> list[int]:
    """Rows whose tokens the target would have drawn as well, from the first node down.

    drawn [rows]: the token that the target drew after each row. The token that follows the accepted ones is the one
    drawn after the last accepted row (row 0 if there is none). Exact for any draft as long as a draw depends on its
    row's past alone: at temperature 0, and where the noise of a position is given by the seed.
    """
    assert len(drawn) == len(draft) + 1, "one drawn token a row"
    rows: list[int] = []
    row = 0
    for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        if parent == row and token == drawn[row]:  # children come after their parent, and no two have one token
            row = node + 1
            rows.append(row)
    return rows


def accept(draft: Draft, p: Target, chance: Chance) -> Accepted:
    """Accepts by the algorithm that accepts most.

    Of certain proposals a block accepts no more than a walk from token to token, which reads fewer rows.
    """
    return accept_chain(draft, p, chance) if draft.is_chain and draft.q is not None else accept_tree(draft, p, chance)


def accept_chain_by_token(draft: Draft, p: Target, chance: Chance) -> Accepted:
    """Accepts a chain token by token up to the first rejection: the plain version of ``accept_chain``."""
    assert draft.is_chain
    for i, x in enumerate(draft.tokens):
        p_i = p(i)
        q = _proposal(draft, i, [], len(p_i))
        if not chance.happens(_ratio(p_i[x], q[x])):
            return Accepted(tuple(range(1, i + 1)), chance.choose(_residual(p_i, q)))
    return Accepted(tuple(range(1, len(draft) + 1)), chance.choose(p(len(draft))))


def accept_chain(draft: Draft, p: Target, chance: Chance) -> Accepted:
    """Accepts a chain as a block: a likely token makes up for an unlikely one before it.

    Never fewer tokens in expectation than token by token. Reads p of all rows, except behind a token that the target
    cannot draw, and of the last one unless all is accepted.
    """
    assert draft.is_chain
    gamma = len(draft)
    P = [1.0]
    ps: list[Distribution] = []
    qs: list[Distribution] = []
    for i, x in enumerate(draft.tokens):
        ps.append(p(i))
        qs.append(_proposal(draft, i, [], len(ps[i])))
        P.append(_ratio(P[i] * ps[i][x], qs[i][x]))
        if P[-1] == 0:
            break  # and so are all that follow
    if len(P) == gamma + 1 and chance.happens(P[gamma]):
        return Accepted(tuple(range(1, gamma + 1)), chance.choose(p(gamma)))
    tau = len(ps) - 1
    while tau > 0 and not chance.happens(_stop(P[tau], ps[tau], qs[tau])):
        tau -= 1
    return Accepted(tuple(range(1, tau + 1)), chance.choose(_residual(ps[tau], qs[tau], P[tau])))


def accept_tree(draft: Draft, p: Target, chance: Chance) -> Accepted:
    """Tries the children of each accepted row in order, each on what those before it left of p.

    A sampled child was drawn from its q without the tokens of the siblings before it. Chains are accepted as by
    ``accept_chain_by_token``.
    """
    rows: list[int] = []
    child, left = _accepted_child(draft, 0, p(0), chance)
    while child is not None:
        rows.append(child)
        child, left = _accepted_child(draft, child, p(child), chance)
    return Accepted(tuple(rows), chance.choose(left))


def _accepted_child(draft: Draft, row: int, p: Distribution, chance: Chance) -> tuple[int | None, Distribution]:
    """The row of the child that is accepted, or None, and what rejected children left of ``p``."""
    rejected: list[int] = []
    for child in draft.children(row):
        x = draft.tokens[child - 1]
        assert 0 <= x < len(p), "a drafted token lies outside the vocabulary"
        if draft.q is None or draft.q[child - 1] is None:  # as below with q 1 at x, without writing it down
            if chance.happens(float(p[x])):
                return child, p
            p = _without(p, x)
        else:
            q = _proposal(draft, child - 1, rejected, len(p))
            if chance.happens(_ratio(p[x], q[x])):
                return child, p
            p = _residual(p, q)
        rejected.append(x)
    return None, p


def _proposal(draft: Draft, node: int, rejected: list[int], vocab_size: int) -> Distribution:
    """q of a node [vocab]: that of the draft without the siblings before it, which were rejected."""
    x = draft.tokens[node]
    assert 0 <= x < vocab_size, "a drafted token lies outside the vocabulary"
    given = None if draft.q is None else draft.q[node]
    if given is None:
        q = np.zeros(vocab_size)
        q[x] = 1.0
        return q
    assert len(given) == vocab_size, "p and q have different vocabularies"
    if rejected:
        given = given.copy()
        given[rejected] = 0.0
        given /= given.sum()
    assert given[x] > 0, "a token was drawn that its q rules out"
    return given


def _ratio(p: float, q: float) -> float:
    """min(1, p / q), which does not overflow."""
    return float(p / q) if p < q else 1.0


def _residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """max(weight p - q, 0), normalised.

    Where that is 0 everywhere, p = q but for rounding and nothing is rejected; should rounding do it all the same, p
    is as good.
    """
    rest: Distribution = np.maximum(weight * p - q, 0.0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p


def _without(p: Distribution, x: int) -> Distribution:
    """p without x, normalised: the residual of a certain proposal. Where nothing is left nothing is rejected; should
    rounding do it all the same, p is as good."""
    rest = p.copy()
    rest[x] = 0.0
    mass = rest.sum()
    return rest / mass if mass > 0 else p


def _stop(P: float, p: Distribution, q: Distribution) -> float:
    """h of a block of accepted probability P which is followed by p in the target and by q in the draft.

    More tokens are accepted with probability sum(min(P p, q)) = P - S; h makes up what is missing to P.
    """
    S = float(np.maximum(P * p - q, 0.0).sum())
    return S / (S + (1.0 - P)) if S > 0 else 0.0

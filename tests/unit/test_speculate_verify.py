"""Verification against the target's own law: every draft, every random choice, every sequence on small vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from enumerated_law import (
    EXACT,
    WRONG,
    Distribution,
    Drafting,
    Model,
    ScriptedChance,
    Tokens,
    Verify,
    continued,
    distance,
    law_error,
    law_of,
    one_step,
    outcomes,
)

from paceline.speculate.chance import Chance
from paceline.speculate.draft import Draft
from paceline.speculate.verify import (
    Accepted,
    Target,
    accept,
    accept_chain,
    accept_chain_by_token,
    accept_tree,
)

ROOTS = (0, 0, 0)
CHAINS = [tuple(range(length)) for length in range(5)]
TREES = [ROOTS[:2], ROOTS, (0, 1, 1), (0, 0, 1, 2), (0, 0, 1, 1), (0, 1, 0, 3), (0, 0, 0, 2, 4)]


def num_accepted(verify: Verify, model: Model, drafting: Drafting) -> float:
    """Expected number of drafted tokens that are accepted."""
    steps = outcomes(partial(one_step, verify=verify, model=model, drafting=drafting))
    return sum((len(tokens) - 1) * probability for tokens, probability in steps)


def random_model(
    seed: int, vocab_size: int, zeros: Sequence[int] = (), share_zeros: float = 0.0, scale: float = 1.0
) -> Model:
    """A distribution for each history, some entries 0: all of ``zeros``, and others at random; it sums to ``scale``."""

    @cache
    def model(history: Tokens) -> Distribution:
        rng = np.random.default_rng([seed, *history, 99])
        p = rng.exponential(size=vocab_size) ** 2
        p[rng.random(vocab_size) < share_zeros] = 0.0
        p[list(zeros)] = 0.0
        if p.sum() == 0:
            p[[y for y in range(vocab_size) if y not in zeros]] = 1.0
        p *= scale / p.sum()
        p.setflags(write=False)  # verification must not modify what it is given
        return p

    return model


VOCAB = 4
PAIRS: dict[str, tuple[Model, Model]] = {
    "random": (random_model(1, VOCAB), random_model(2, VOCAB)),
    "other": (random_model(3, VOCAB), random_model(4, VOCAB)),
    "zeros": (random_model(5, VOCAB, share_zeros=0.4), random_model(6, VOCAB, share_zeros=0.3)),
    "disjoint": (random_model(7, VOCAB, zeros=(0, 1)), random_model(8, VOCAB, zeros=(2, 3))),
    "equal": (random_model(9, VOCAB), random_model(9, VOCAB)),
    "equal but for rounding": (random_model(9, VOCAB), random_model(9, VOCAB, scale=1 + 2**-52)),
    "two tokens": (random_model(10, 2), random_model(11, 2)),
    "point": (random_model(12, VOCAB, zeros=(0, 1, 3)), random_model(13, VOCAB)),
}


@pytest.mark.parametrize("verify", [accept_chain, accept_chain_by_token, accept_tree, accept])
@pytest.mark.parametrize("pair", PAIRS)
def test_chains_keep_the_law(verify: Verify, pair: str) -> None:
    p, q = PAIRS[pair]
    for parents in CHAINS[:4]:
        for certain in (frozenset[int](), frozenset({0}), frozenset({1, 2}), frozenset({0, 1, 2})):
            error = law_error(verify, p, Drafting(parents, q, certain), horizon=len(parents) + 1)
            assert error < EXACT, (parents, certain)


@pytest.mark.parametrize("verify", [accept_chain, accept_chain_by_token])
def test_longer_chains_keep_the_law(verify: Verify) -> None:
    p, q = random_model(20, 3), random_model(21, 3, share_zeros=0.1)
    assert law_error(verify, p, Drafting(CHAINS[4], q), horizon=5) < EXACT


@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_trees_keep_the_law(parents: Tokens, pair: str) -> None:
    p, q = PAIRS[pair]
    for certain in (frozenset[int](), frozenset({0}), frozenset({1, 3}), frozenset(range(5))):
        assert law_error(accept_tree, p, Drafting(parents, q, certain), horizon=3) < EXACT, certain


def test_siblings_may_be_the_whole_vocabulary() -> None:
    p, q = random_model(30, 3), random_model(31, 3)
    for certain in (frozenset[int](), frozenset({1}), frozenset({0, 1, 2})):
        drafting = Drafting(ROOTS, q, certain)
        assert law_error(accept_tree, p, drafting, horizon=2) < EXACT
        if len(certain) == 3:
            assert num_accepted(accept_tree, p, drafting) == pytest.approx(1.0, abs=1e-12)


# What goes wrong in other implementations. ``walk`` is right with its own parts, so only the planted one can fail.

Ratio = Callable[[float, float], float]
Residual = Callable[[Distribution, Distribution], Distribution]


def true_ratio(p: float, q: float) -> float:
    return min(1.0, p / q)


def true_residual(p: Distribution, q: Distribution) -> Distribution:
    rest = np.maximum(p - q, 0)
    normalised: Distribution = rest / rest.sum()
    return normalised


def walk(
    draft: Draft,
    p: Target,
    chance: Chance,
    ratio: Ratio = true_ratio,
    residual: Residual = true_residual,
    with_replacement: bool = False,
) -> Accepted:
    """Sampled trees, with replaceable parts."""
    rows: list[int] = []
    while True:
        row = rows[-1] if rows else 0
        left = p(row)
        gone: list[int] = []
        for child in draft.children(row):
            assert draft.q is not None
            x, law = draft.tokens[child - 1], draft.q[child - 1]
            assert law is not None
            q = law.copy()
            if not with_replacement:
                q[gone] = 0.0
                q /= q.sum()
            if chance.happens(ratio(left[x], q[x])):
                rows.append(child)
                break
            left = residual(left, q)
            gone.append(x)
        else:
            return Accepted(tuple(rows), chance.choose(left))


PLANTED: dict[str, dict[str, Any]] = {
    "nothing subtracted": {"residual": lambda p, q: p},
    "not renormalised": {"residual": lambda p, q: np.maximum(p - q, 0)},
    "subtracted the wrong way": {"residual": lambda p, q: true_residual(q, p)},
    "p and q swapped": {"ratio": lambda p, q: min(1.0, q / p) if p > 0 else 1.0},
    "any drafted token": {"ratio": lambda p, q: 1.0},
}


@pytest.mark.parametrize("parents", [(0, 1), (0, 0)], ids=["chain", "siblings"])
def test_planted_errors_fail(parents: Tokens) -> None:
    p, q = PAIRS["random"]
    drafting = Drafting(parents, q)
    assert law_error(walk, p, drafting, horizon=3) < EXACT
    for name, parts in PLANTED.items():
        assert law_error(partial(walk, **parts), p, drafting, horizon=3) > WRONG, name


def test_siblings_taken_as_drawn_with_replacement_fail() -> None:
    p, q = PAIRS["random"]
    wrong = partial(walk, with_replacement=True)
    assert law_error(wrong, p, Drafting((0, 1), q), horizon=3) < EXACT  # a chain has no siblings
    for parents in (ROOTS[:2], ROOTS, (0, 1, 1)):
        assert law_error(wrong, p, Drafting(parents, q), horizon=3) > WRONG


def block(draft: Draft, p: Target, chance: Chance, weight_residual: bool = True, weight_stop: bool = True) -> Accepted:
    """Block verification as its paper has it, over all lengths from the shortest, with replaceable parts."""
    assert draft.q is not None
    gamma, tau, weight = len(draft), 0, 1.0
    choices = []
    for i, law in enumerate(draft.q):
        assert law is not None
        choices.append(np.maximum((weight if weight_residual else 1.0) * p(i) - law, 0))
        weight = min(1.0, weight * p(i)[draft.tokens[i]] / law[draft.tokens[i]])
        if i + 1 == gamma:
            h = weight
        else:
            left = np.maximum(weight * p(i + 1) - draft.q[i + 1], 0).sum()
            h = left / (left + 1 - weight) if weight_stop else weight
        if chance.happens(h):
            tau = i + 1
    rest = choices[tau] if tau < gamma and choices[tau].any() else p(tau)
    return Accepted(tuple(range(1, tau + 1)), chance.choose(rest / rest.sum()))


def test_blocks_equal_the_papers_pass_and_its_planted_errors_fail() -> None:
    p, q = random_model(44, 3), random_model(45, 3)
    drafting = Drafting((0, 1, 2), q)
    papers, ours = (
        law_of(partial(one_step, verify=verify, model=p, drafting=drafting)) for verify in (block, accept_chain)
    )
    assert distance(papers, ours) < EXACT  # not continued: where each step ends agrees as well
    assert law_error(block, p, drafting, horizon=4) < EXACT
    for wrong in (partial(block, weight_residual=False), partial(block, weight_stop=False)):
        assert law_error(wrong, p, drafting, horizon=4) > WRONG


# What a draft must satisfy, and that the law tells when it does not.


def stopped_before(q: Model, chance: Chance) -> Draft:
    """Draws a second token only behind a likely first one."""
    x = chance.choose(q(()))
    if x != np.argmax(q(())):
        return Draft.chain([x], [1.0], "test", [q(())])
    return Draft.chain([x, chance.choose(q((x,)))], [1.0, 1.0], "test", [q(()), q((x,))])


def dropped_after(q: Model, chance: Chance) -> Draft:
    """Draws a second token and keeps it only if it is a likely one."""
    draft = Drafting((0, 1), q)(chance)
    return draft if draft.tokens[1] == np.argmax(q(draft.tokens[:1])) else draft.keep([0])


@pytest.mark.parametrize("verify", [accept_chain, accept_chain_by_token, accept_tree])
def test_a_draft_may_stop_before_a_draw_but_not_because_of_it(verify: Verify) -> None:
    p, q = PAIRS["random"]
    assert law_error(verify, p, partial(stopped_before, q), horizon=3) < EXACT
    assert law_error(verify, p, partial(dropped_after, q), horizon=3) > WRONG


def two_steps(chance: Chance, verify: Verify, p: Model, q: Model, fresh: bool) -> Tokens:
    """Two steps that draft three tokens and one; the second draft is drawn again or, where it can be, is what the first
    step drew for that position (q does not look at the past here)."""
    draft = Drafting((0, 1, 2), lambda history: q((len(history),)))(chance)
    emitted = one_step(chance, verify, p, lambda chance: draft)
    if len(emitted) > 2:
        return emitted
    law = q((len(emitted),))
    x = chance.choose(law) if fresh else draft.tokens[len(emitted)]
    second = Draft.chain([x], [1.0], "test", [law])
    return emitted + one_step(chance, verify, lambda history: p(emitted + history), lambda chance: second)


def test_the_noise_of_an_earlier_draft_is_spent() -> None:
    """A block's end tells something of the tokens behind it, so drawing them again from the same noise is biased."""
    p, q = random_model(50, 2), random_model(51, 2)
    for fresh, is_exact in ((True, True), (False, False)):
        law = law_of(partial(two_steps, verify=accept_chain, p=p, q=q, fresh=fresh))
        error = distance(continued(law, p, 4), continued({(): 1.0}, p, 4))
        assert error < EXACT if is_exact else error > WRONG


# How much is accepted.


@pytest.mark.parametrize("pair", PAIRS)
def test_a_block_accepts_at_least_as_much(pair: str) -> None:
    p, q = PAIRS[pair]
    for parents in CHAINS[1:4]:
        for certain in (frozenset[int](), frozenset({1}), frozenset({0, 1, 2})):
            drafting = Drafting(parents, q, certain)
            by_block, by_token = (num_accepted(verify, p, drafting) for verify in (accept_chain, accept_chain_by_token))
            assert by_block >= by_token - 1e-12
            if len(parents) == 1 or len(certain) == 3:
                assert by_block == pytest.approx(by_token, abs=1e-12)


def test_expected_lengths_of_the_papers_example() -> None:
    """Sun et al. 2024, section 2: two drafted tokens, p = (1/3, 2/3), q = (2/3, 1/3)."""
    drafting = Drafting((0, 1), lambda history: np.array([2 / 3, 1 / 3]))
    expected = {accept_chain: 11 / 9, accept_chain_by_token: 10 / 9, accept_tree: 10 / 9, accept: 11 / 9}
    for verify, length in expected.items():
        assert num_accepted(verify, lambda history: np.array([1 / 3, 2 / 3]), drafting) == pytest.approx(length)


def test_a_perfect_draft_is_accepted_whole() -> None:
    p, _ = PAIRS["random"]
    for verify in (accept_chain, accept_chain_by_token, accept_tree):
        assert num_accepted(verify, p, Drafting((0, 1, 2), p)) == pytest.approx(3.0, abs=1e-12)
    assert num_accepted(accept_tree, p, Drafting(ROOTS, p)) == pytest.approx(1.0, abs=1e-12)


# Edges.


def test_rows_that_do_not_matter_are_not_read() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.full(3, 1 / 3)
    sampled = Draft.chain([0, 2, 1], [1.0] * 3, "test", [q, q, q])  # the target never draws 2
    certain = Draft.chain([0, 2, 1], [1.0] * 3, "test")
    tree = Draft((2, 0, 1), (0, 0, 2), (1.0,) * 3, "test")
    asked: list[int] = []

    def target(row: int) -> Distribution:
        asked.append(row)
        return p

    cases: list[tuple[Verify, Draft, Tokens, list[int]]] = [
        (accept_chain, sampled, (), [0, 1]),
        (accept_chain, sampled.keep([0]), (0,), [0]),
        (accept_chain, sampled.keep([0]), (1,), [0, 1]),
        (accept_chain_by_token, certain, (0,), [0]),
        (accept, certain, (0,), [0]),
        (accept, certain, (1,), [0, 1]),
        (accept_tree, tree, (0, 1), [0, 2]),
        (accept, Draft.chain([], [], "test"), (), [0]),
    ]
    for verify, draft, script, rows in cases:
        asked.clear()
        verify(draft, target, ScriptedChance(script))
        assert asked == rows


def test_no_division_by_zero_where_rounding_rejects_what_cannot_be() -> None:
    """p = q leaves no residual; if rounding rejects all the same, the stand-in is drawn from p."""
    p = np.array([0.25, 0.75, 0.0])
    for verify in (accept_chain, accept_chain_by_token, accept_tree):
        draft = Draft.chain([1, 0], [1.0, 1.0], "test", [p, p])
        with np.errstate(all="raise"):
            result = verify(draft, lambda row: p, Never())
        assert result == Accepted((), 1)


class Never:
    """Rejects everything and chooses the likeliest token."""

    def happens(self, probability: float) -> bool:
        return False

    def choose(self, p: Distribution) -> int:
        assert p.sum() == pytest.approx(1.0)
        return int(np.argmax(p))


def test_extreme_ratios_do_not_overflow() -> None:
    p, q = np.array([1.0, 5e-324]), np.array([5e-324, 1.0])
    draft = Draft.chain([0, 0], [1.0, 1.0], "test", [q, q])
    for verify in (accept_chain, accept_chain_by_token, accept_tree):
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            assert verify(draft, lambda row: p, ScriptedChance((1, 1, 0))).rows == (1, 2)


@pytest.mark.parametrize("verify", [accept_chain, accept_chain_by_token, accept_tree])
def test_impossible_drafts_are_our_own_mistake(verify: Verify) -> None:
    p = np.array([0.5, 0.5])
    for token, q, what in ((2, None, "vocabulary"), (-1, None, "vocabulary"), (0, [0.0, 1.0], "rules out")):
        laws = None if q is None else [np.array(q)]
        with pytest.raises(AssertionError, match=what):
            verify(Draft.chain([token], [1.0], "test", laws), lambda row: p, Never())
    with pytest.raises(AssertionError, match="different vocabularies"):
        verify(Draft.chain([0], [1.0], "test", [np.full(3, 1 / 3)]), lambda row: p, Never())

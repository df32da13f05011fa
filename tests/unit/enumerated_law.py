"""Exact laws: runs a random procedure through every outcome of its choices and adds up their probabilities; what a step
of speculative decoding emits against the target's own law."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.speculate.chance import Chance
from paceline.speculate.draft import Draft
from paceline.speculate.verify import Accepted, Target

T = TypeVar("T")
Tokens = tuple[int, ...]
Distribution = NDArray[np.float64]
Law = dict[Tokens, float]
Model = Callable[[Tokens], Distribution]
"""Tokens so far -> distribution [vocab] of the next one."""
Verify = Callable[[Draft, Target, Chance], Accepted]

EXACT = 1e-9
"""Above what some thousand roundings of 1e-16 add up to, far below what a wrong algorithm does."""
WRONG = 1e-3


class ScriptedChance:
    """A ``Chance`` that first repeats a script of outcomes and then takes the first possible one each time.

    probability  of all outcomes so far
    branches     scripts of the outcomes that were possible instead, behind the given script
    """

    def __init__(self, script: tuple[int, ...]) -> None:
        self._script = script
        self._taken: list[int] = []
        self.probability = 1.0
        self.branches: list[tuple[int, ...]] = []

    def happens(self, probability: float) -> bool:
        return bool(self._take([1.0 - probability, probability]))

    def choose(self, p: Distribution) -> int:
        return self._take(p)

    def _take(self, probabilities: Sequence[float] | Distribution) -> int:
        at = len(self._taken)
        if at < len(self._script):
            outcome = self._script[at]
        else:
            outcome, *others = (i for i, probability in enumerate(probabilities) if probability > 0)
            self.branches += [(*self._taken, other) for other in others]
        self._taken.append(outcome)
        self.probability *= float(probabilities[outcome])
        return outcome


def outcomes(procedure: Callable[[Chance], T]) -> Iterator[tuple[T, float]]:
    """Every way in which a procedure may go: what it returns, and how probable that is."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = ScriptedChance(scripts.pop())
        yield procedure(chance), chance.probability
        scripts += chance.branches


def law_of(procedure: Callable[[Chance], Tokens]) -> Law:
    """The law of the tokens that a procedure emits."""
    law: Law = defaultdict(float)
    for tokens, probability in outcomes(procedure):
        law[tokens] += probability
    return law


def continued(law: Law, model: Model, horizon: int) -> Law:
    """The law of the first ``horizon`` tokens where the model goes on from each sequence."""
    result: Law = defaultdict(float)
    for tokens, probability in law.items():
        if len(tokens) >= horizon:
            result[tokens[:horizon]] += probability
            continue
        extended = {(*tokens, y): probability * py for y, py in enumerate(model(tokens).tolist()) if py > 0}
        for longer, share in continued(extended, model, horizon).items():
            result[longer] += share
    return result


def distance(one: Law, other: Law) -> float:
    """The sum of the differences over all sequences: twice the total variation, if both add up to 1."""
    return sum(abs(one.get(tokens, 0.0) - other.get(tokens, 0.0)) for tokens in one.keys() | other.keys())


@dataclass(frozen=True)
class Drafting:
    """Draws drafts of one shape: node i's token from ``q`` of its path, unless it is certain.

    parents  as in a ``Draft``; a node for which no token is left is not drawn, nor are those that follow it
    certain  nodes whose token depends on the path alone
    """

    parents: Tokens
    q: Model
    certain: frozenset[int] = frozenset()

    def __call__(self, chance: Chance) -> Draft:
        paths: dict[int, Tokens] = {0: ()}  # of the rows of ``parents`` that were drawn
        row_of = {0: 0}
        siblings: dict[int, list[int]] = defaultdict(list)
        tokens, parents, laws = [], [], []
        for node, parent in enumerate(self.parents):
            if parent not in paths:
                continue
            law = self.q(paths[parent])
            left = law.copy()
            left[siblings[parent]] = 0.0
            if left.sum() == 0:
                continue
            certain = node in self.certain
            x = int(np.argmin(np.where(left > 0, left, np.inf))) if certain else chance.choose(left / left.sum())
            siblings[parent].append(x)
            paths[node + 1] = (*paths[parent], x)
            tokens.append(x)
            parents.append(row_of[parent])
            laws.append(None if certain else law)
            row_of[node + 1] = len(tokens)
        q = None if all(law is None for law in laws) else tuple(laws)
        return Draft(tuple(tokens), tuple(parents), (1.0,) * len(tokens), "test", q)


def path_tokens(draft: Draft, row: int) -> Tokens:
    return tuple(draft.tokens[at - 1] for at in draft.path(row))


def one_step(chance: Chance, verify: Verify, model: Model, drafting: Callable[[Chance], Draft]) -> Tokens:
    """What one step emits: accepted tokens, which must be a path of the draft, and the one after them."""
    draft = drafting(chance)
    accepted = verify(draft, lambda row: model(path_tokens(draft, row)), chance)
    last = accepted.rows[-1] if accepted.rows else 0
    assert list(accepted.rows) == draft.path(last)
    return (*path_tokens(draft, last), accepted.token)


def law_error(verify: Verify, model: Model, drafting: Callable[[Chance], Draft], horizon: int) -> float:
    """How far the law of ``horizon`` tokens, of which a step emits the first and the target the rest, is from the
    target's own. Probabilities that do not add up to 1 count as well."""
    model = cache(model)
    law = law_of(partial(one_step, verify=verify, model=model, drafting=drafting))
    return distance(continued(law, model, horizon), continued({(): 1.0}, model, horizon))

"""Drafters for tests: one that knows the answers and errs on purpose, one that proposes nonsense; and a policy that
verifies all that is proposed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from paceline.speculate.counts import SpeculationCounts
from paceline.speculate.draft import MAX_NODES, Context, Draft
from paceline.speculate.policy import FixedPolicy


class TakeAll(FixedPolicy):
    """Verifies every draft, and remembers who ended."""

    def __init__(self, limit: int = MAX_NODES) -> None:
        super().__init__(limit)
        self.finished: list[int] = []

    @property
    def verified(self) -> int:
        """Nodes, of all requests."""
        return self.counts().proposed

    @property
    def accepted(self) -> int:
        """Those of them that became output."""
        return self.counts().accepted

    def finish(self, request_id: int) -> SpeculationCounts:
        """As the policy does."""
        self.finished.append(request_id)
        return super().finish(request_id)


class OracleDrafter:
    """Proposes trees that hold a part of the true continuation among wrong tokens, at random.

    answers  request id -> all tokens that the answer will have, from the first of the prompt on
    """

    name = "oracle"
    is_free = True
    catch_up_s = 0.0

    def __init__(self, answers: Mapping[int, Sequence[int]], vocab_size: int, *, seed: int, chains: bool) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._chains = chains

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """One draft each, or now and then none."""
        return [self._draft(context, limit) for context, limit in zip(contexts, limits, strict=True)]

    def _draft(self, context: Context, limit: int) -> Draft | None:
        rng = self._random
        count = rng.randint(0, min(limit, 12))
        if count == 0:
            return None
        truth = self._answers[context.request_id]
        assert list(truth[: len(context.tokens)]) == context.tokens[: len(truth)], "the answer has changed"
        tokens: list[int] = []
        parents: list[int] = []
        depth, right = [0], [True]
        while len(tokens) < count:
            parent = len(tokens) if self._chains else rng.choice([len(tokens), rng.randint(0, len(tokens))])
            at = len(context.tokens) + depth[parent]
            known = right[parent] and at < len(truth) and rng.random() < 0.8
            token = truth[at] if known else rng.randrange(self._vocab_size)
            if (parent, token) in zip(parents, tokens, strict=True):
                count -= 1
                continue
            tokens.append(token)
            parents.append(parent)
            depth.append(depth[parent] + 1)
            right.append(right[parent] and at < len(truth) and token == truth[at])
        return Draft(tuple(tokens), tuple(parents), (0.5,) * len(tokens), self.name) if tokens else None

    def finish(self, context: Context) -> None:
        """Keeps nothing."""


class NonsenseDrafter:
    """Proposes what no drafter should: tokens outside the vocabulary, the same twice, too many, too deep."""

    name = "nonsense"
    is_free = True
    catch_up_s = 0.0

    def __init__(self, vocab_size: int, *, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """Anything."""
        return [self._draft() for _ in contexts]

    def _draft(self) -> Draft | None:
        rng = self._random
        count = rng.choice([0, 1, 3, MAX_NODES])
        tokens = [rng.randint(-3, self._vocab_size + 3) for _ in range(count)]
        parents = [rng.choice([node, rng.randint(0, node)]) for node in range(count)]
        return Draft(tuple(tokens), tuple(parents), (1.0,) * count, self.name) if count else None

    def finish(self, context: Context) -> None:
        """Keeps nothing."""

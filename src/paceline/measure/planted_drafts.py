"""Drafts made from the answers that are expected, with errors planted in them: every step accepts and refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.speculate.draft import Context, Draft

MAX_LENGTH = 7


class PlantedDrafter:
    """Proposes what is known to follow, but for planted errors.

    known  seed of a request's draws -> its prompt and its whole answer
    trees  whether wrong tokens stand beside the right ones, in branches before and after them; else drafts are chains,
    of which two in three hold a wrong token

    Lengths go round from 1 to ``MAX_LENGTH`` by the number of tokens that a request has, so a draft depends on nothing
    else.
    """

    name = "planted"
    is_free = True
    catch_up_s = 0.0

    def __init__(self, known: Mapping[int, Sequence[int]], vocab_size: int, *, trees: bool) -> None:
        self._known = known
        self._vocab_size = vocab_size
        self._trees = trees

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """One draft each, None for a request that is not known or at its end."""
        return [self._draft(context, limit) for context, limit in zip(contexts, limits, strict=True)]

    def finish(self, context: Context) -> None:
        """Keeps nothing."""

    def _draft(self, context: Context, limit: int) -> Draft | None:
        start = len(context.tokens)
        known = self._known.get(int(context.record["seed"][0]), ())
        right = list(known[start : start + 1 + start % MAX_LENGTH])
        if not right:
            return None
        draft = self._tree(right) if self._trees else self._chain(right, start)
        return draft if len(draft) <= limit else draft.keep(range(limit))

    def _chain(self, right: list[int], start: int) -> Draft:
        if start % 3 > 0:
            at = start % len(right)
            right[at] = self._other(right[at], 1)
        return Draft.chain(right, [0.9] * len(right), self.name)

    def _tree(self, right: Sequence[int]) -> Draft:
        """A wrong token before each right one, with a right one behind it, and a wrong one after it."""
        tokens: list[int] = []
        parents: list[int] = []
        row = 0
        for at, token in enumerate(right):
            behind = right[min(at + 1, len(right) - 1)]
            tokens += [self._other(token, 1), behind, token, self._other(token, 2)]
            parents += [row, len(tokens) - 3, row, row]
            row = len(tokens) - 1
        return Draft(tuple(tokens), tuple(parents), (0.9,) * len(tokens), self.name)

    def _other(self, token: int, step: int) -> int:
        return (token + step) % self._vocab_size

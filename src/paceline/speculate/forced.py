"""Drafts what a request's structure leaves no choice about: the braces, names and colons of a JSON schema.

Source: the fast-forward tokens of llguidance (``LLMatcher.compute_ff_tokens``), which end before a byte that a token
could read together with what is open; "jump-forward decoding" of SGLang (Zheng et al. 2023, 2312.07104), which appends
such tokens unasked.

Departures: here they are a draft. What must follow is text, and the model may spell it with other tokens than the
tokenizer would; a draft that is verified leaves the answer as it is without.

Checked by: tests/unit/test_forced.py: the grammar allows nothing that reads otherwise, and answers equal those without.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.speculate.draft import MAX_NODES, Context, Draft

CONFIDENCE = 0.9
"""That the model spells what must follow as the tokenizer does."""


class ForcedDrafter:
    """What must follow in answers with a structure; knows nothing of others."""

    name = "forced"
    is_free = True
    catch_up_s = 0.0
    needs_structure = True

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """See ``Drafter``."""
        return [self._propose(context, limit) for context, limit in zip(contexts, limits, strict=True)]

    def finish(self, context: Context) -> None:
        """See ``Drafter``."""

    def _propose(self, context: Context, limit: int) -> Draft | None:
        if context.constraint is None:
            return None
        limit = min(limit, context.max_tokens - len(context.tokens) - 1, MAX_NODES)
        tokens = context.constraint.forced(max(0, limit))
        return Draft.chain(tokens, [CONFIDENCE] * len(tokens), self.name) if tokens else None

"""How a long text is cut into windows that a model reads, and which tokens of each are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ParameterError


@dataclass(frozen=True)
class Window:
    """A sequence that is read from position 0 on.

    tokens   [n] i32  what the model reads
    targets  [m] i32  ascending positions from 1 on, at least one: each token there is scored, by the logits of the row
                      before it
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]

    def __post_init__(self) -> None:
        assert len(self.targets)
        assert self.targets[0] >= 1
        assert self.targets[-1] < len(self.tokens)


def sliding_windows(
    tokens: Sequence[int],
    *,
    context: int,
    stride: int,
    prefix: Sequence[int] = (),
    scored: NDArray[np.bool_] | None = None,
) -> list[Window]:
    """Windows of ``context`` tokens, each ``stride`` further on; each scores what none before it has.

    So every token is scored once, after at least ``context - stride`` others where there are as many. Every window
    begins with ``prefix`` (the BOS token of models that want one), which counts towards ``context`` and is not scored;
    without one the first token of the text follows nothing and is not scored either. ``scored`` [tokens] leaves out
    further ones. Windows that would score nothing are left out. Raises ``ParameterError``.
    """
    body = context - len(prefix)
    if body < 1 or context < 2:
        raise ParameterError("context", context, f"at least {max(2, len(prefix) + 1)} tokens")
    if not 1 <= stride < context:
        raise ParameterError("stride", stride, f"between 1 and {context - 1}, one less than the context")
    wanted = np.ones(len(tokens), np.bool_) if scored is None else scored.copy()
    if not prefix:
        wanted[:1] = False
    windows, start, done = [], 0, 0
    while done < len(tokens):
        end = min(start + body, len(tokens))
        targets = done + np.flatnonzero(wanted[done:end]) - start + len(prefix)
        if len(targets):
            text = np.array([*prefix, *tokens[start:end]], np.int32)
            windows.append(Window(text, targets.astype(np.int32)))
        start, done = start + stride, end
    return windows


def chunk_windows(tokens: Sequence[int], *, context: int, prefix: Sequence[int] = ()) -> list[Window]:
    """Chunks side by side, of each only the second half scored; what does not fill a chunk is left out.

    Source: llama.cpp, tools/perplexity, whose figures these windows give. There, too, BOS takes the place of a chunk's
    first token in models that want one. Raises ``ParameterError`` for a text that is shorter than a chunk.
    """
    if context < 4:
        raise ParameterError("context", context, "at least 4 tokens, so that half of them can be scored")
    if len(tokens) < context:
        raise ParameterError("context", context, f"at most the text, which has {len(tokens)} tokens")
    targets = np.arange(context // 2 + 1, context, dtype=np.int32)
    windows = []
    for start in range(0, len(tokens) - context + 1, context):
        text = np.array(tokens[start : start + context], np.int32)
        text[: len(prefix)] = prefix
        windows.append(Window(text, targets))
    return windows

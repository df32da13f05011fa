"""What a request gives back: log-probabilities, timings, completions and the pieces of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.engine.detokenize import TextPieces
from paceline.speculate.counts import SpeculationCounts

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TopLogprob:
    """One alternative: a token, the bytes it stands for, and its log-probability."""

    token_id: int
    logprob: float
    token_bytes: bytes

    @property
    def text(self) -> str:
        """The token as text; bytes that are no character of their own show as U+FFFD."""
        return self.token_bytes.decode("utf-8", "replace")


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability (of the model's raw logits) and the likeliest alternatives, likeliest first."""

    token_id: int
    logprob: float
    token_bytes: bytes
    top: tuple[TopLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The token as text; bytes that are no character of their own show as U+FFFD."""
        return self.token_bytes.decode("utf-8", "replace")


@dataclass(frozen=True)
class Timing:
    """When things happened to one request.

    queue_s                from submission to the first step
    ttft_s                 from submission to the first token
    tpot_s                 mean time of each further token, 0 when there is at most one token
    e2e_s                  from submission to the last token
    prefill_tokens_per_s   computed prompt tokens over the time from the first step to the first token
    decode_tokens_per_s    1 / tpot_s, 0 when there is at most one token
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    queue_s: float = 0.0

    @classmethod
    def of(
        cls, *, submitted_s: float, started_s: float, first_token_s: float, last_s: float, prompt: int, output: int
    ) -> Timing:
        """Timings from readings of one clock and the numbers of computed prompt tokens and output tokens."""
        decode_s = last_s - first_token_s if output > 1 else 0.0
        prefill_s = first_token_s - started_s
        return cls(
            ttft_s=first_token_s - submitted_s,
            tpot_s=decode_s / (output - 1) if output > 1 else 0.0,
            e2e_s=last_s - submitted_s,
            prefill_tokens_per_s=prompt / prefill_s if prefill_s > 0 else 0.0,
            decode_tokens_per_s=(output - 1) / decode_s if decode_s > 0 else 0.0,
            queue_s=started_s - submitted_s,
        )


@dataclass(frozen=True)
class Completion:
    """The answer to a prompt.

    ``token_ids`` are all tokens drawn, the one that ended the answer included; ``text`` is without it and without the
    stop string. ``error`` is set exactly when ``finish_reason`` is "error". ``choices`` holds all answers when n > 1;
    the fields are the first one's. ``speculation`` tells what became of its drafts, None where nobody drafts.
    ``pooled`` is the mean of the prompt's hidden states where an embedding was asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    timing: Timing = Timing()
    choices: tuple[Completion, ...] = ()
    error: Exception | None = None
    num_cached_tokens: int = 0
    num_wasted_tokens: int = 0
    speculation: SpeculationCounts | None = None
    pooled: NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens drawn for this answer (not for its siblings in ``choices``)."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer: new text, the tokens since the piece before; on the last piece, the completion.

    ``index`` is the choice (0 unless n > 1); ``logprobs`` those of ``token_ids``, when asked for. ``pieces`` are
    ``text`` in parts, each with whether tokens of an accepted draft made it.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    index: int = 0
    completion: Completion | None = None
    logprobs: list[TokenLogprob] | None = None
    pieces: TextPieces = ()

"""Sampling parameters of the outputs of one step, in the flat form that crosses to native code.

One ``SAMPLE_ROW`` record an output; the variable-length parts (penalised tokens, biases, banned ids) of all outputs lie
in three flat arrays that each record addresses by (start, count).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SAMPLE_ROW = np.dtype(
    [
        ("seed", "<u8"),  # key of the counter-based generator
        ("position", "<u4"),  # position in the sequence of the token that is drawn: the counter
        ("temperature", "<f4"),  # 0 = argmax
        ("top_p", "<f4"),  # 1 = off
        ("min_p", "<f4"),  # 0 = off
        ("repetition_penalty", "<f4"),  # 1 = off
        ("presence_penalty", "<f4"),  # 0 = off
        ("frequency_penalty", "<f4"),  # 0 = off
        ("top_k", "<i4"),  # 0 = off
        ("num_logprobs", "<i4"),  # alternatives wanted; -1 = not even the token's own
        ("forced", "<i4"),  # token that is taken whatever the logits say (prompt logprobs); -1 = none
        ("counts_start", "<i4"),
        ("counts_len", "<i4"),
        ("bias_start", "<i4"),
        ("bias_len", "<i4"),
        ("banned_start", "<i4"),
        ("banned_len", "<i4"),
        ("mask", "<i4"),  # which mask says what may be drawn; -1 = anything
    ],
    align=True,
)

NOT_FINITE, NOTHING_LEFT, BAD_TOKEN = 1, 2, 3
"""Statuses of an output for which no token can be chosen; 0 is well."""

MAX_LOGPROBS = 64
"""Most alternatives that one output can report."""


def mask_width(vocab_size: int) -> int:
    """Words of a mask."""
    return (vocab_size + 31) // 32


@dataclass(frozen=True)
class SampleRows:
    """How the token of each output of a step is chosen.

    rows          [outputs] SAMPLE_ROW
    count_tokens  [c] i32  ids that occurred in prompt or output, each once
    count_values  [c] i32  how often each occurred in the output (0: only in the prompt)
    bias_tokens   [b] i32, bias_values [b] f32: added to the logits
    banned_tokens [n] i32: logits become -inf (min_tokens)
    mask_words    [masks, ceil(vocab / 32)] u32: bit id % 32 of word id / 32 is 0 where a token's logit becomes -inf
    """

    rows: NDArray[np.void]
    count_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    count_values: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    bias_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    bias_values: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    banned_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    mask_words: NDArray[np.uint32] = field(default_factory=lambda: np.zeros((0, 0), np.uint32))


@dataclass(frozen=True)
class SampledRows:
    """What was chosen.

    tokens       [outputs] i32
    logprobs     [outputs] f32       log-softmax of the model's own logits at the token (nan where num_logprobs was -1)
    top_tokens   [outputs, k] i32    the k most likely ids, k the largest num_logprobs of the step; unused entries -1
    top_logprobs [outputs, k] f32    theirs, descending (ties by id)
    status       [outputs] u32       0 well; 1 a logit was not finite; 2 every token was banned or masked; 3 an id
    outside the vocabulary
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_tokens: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    status: NDArray[np.uint32] | None = None


def greedy_rows(count: int) -> SampleRows:
    """Rows that take the argmax and report nothing else."""
    rows = np.zeros(count, SAMPLE_ROW)
    rows["top_p"] = 1.0
    rows["repetition_penalty"] = 1.0
    rows["num_logprobs"] = -1
    rows["forced"] = -1
    rows["mask"] = -1
    return SampleRows(rows)

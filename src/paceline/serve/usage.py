"""What an answer cost, in the form clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.engine.outputs import Completion


def usage_document(completions: Sequence[Completion], *, num_prompt_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's ``usage`` of the answers to one prompt (or to several, whose tokens are then given)."""
    prompt = completions[0].num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens
    output = sum(completion.num_completion_tokens for completion in completions)
    counts = [completion.speculation for completion in completions if completion.speculation is not None]
    accepted = sum(count.accepted for count in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": max(c.num_cached_tokens for c in completions)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(count.proposed for count in counts) - accepted,
        },
    }


def total_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The usage of several prompts together; of all of which ``usage_document`` tells."""
    first = usages[0]
    return {
        name: total_usage([usage[name] for usage in usages])
        if isinstance(first[name], dict)
        else sum(usage[name] for usage in usages)
        for name in first
    }


def timings_document(completion: Completion) -> dict[str, float]:
    """Ours: how long an answer took, by the engine's clock."""
    timing = completion.timing
    return {
        "ttft_s": timing.ttft_s,
        "tpot_s": timing.tpot_s,
        "e2e_s": timing.e2e_s,
        "prefill_tokens_per_s": timing.prefill_tokens_per_s,
        "decode_tokens_per_s": timing.decode_tokens_per_s,
    }

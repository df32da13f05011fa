"""What one request may ask for at most, by the settings of the server."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.serve.errors import HTTPError
from paceline.serve.settings import ServeSettings


def check_limits(settings: ServeSettings, params: SamplingParams, *, logprobs_field: str = "logprobs") -> None:
    """400 that names the field and the limit when a request asks for more than the server gives."""
    for field, given, most, what in (
        ("n", params.n, settings.max_choices, "choices"),
        ("stop", len(params.stop), settings.max_stop, "stop strings"),
        (logprobs_field, params.logprobs or 0, settings.max_logprobs, "alternatives for a token"),
    ):
        if given > most:
            raise HTTPError(
                400,
                f"{field}: {given} {what} were asked for and this server gives at most {most}",
                param=field,
                code="invalid_value",
            )


def check_tokens(llm: LLM, tokens: Sequence[int], field: str) -> None:
    """Raises ``ParameterError`` for a number that is no token of the model."""
    vocab_size = llm.model_config.vocab_size
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ParameterError(field, token, f"token ids of this model are between 0 and {vocab_size - 1}")


def context_length(llm: LLM) -> int:
    """Tokens that prompt and answer may have together."""
    length = llm.config.context_length
    assert length is not None, "it is known once a model is loaded"
    return length

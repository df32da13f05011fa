"""What all requests and answers on the wire have in common.

Source: OpenAI's API reference (chat completions, completions); the extensions of vLLM that clients send.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from paceline.params import SamplingParams, Structure
from paceline.serve.protocol.structure import ResponseFormat, Schema, StructuredOutputs
from paceline.serve.protocol.wire import WireAnswer, WireModel
from paceline.serve.structure import structure_of


class StreamOptions(WireModel):
    """``include_drafted`` (ours) has each chunk tell which of its text was drafted."""

    include_usage: bool = False
    include_drafted: bool = False


class SamplingFields(WireModel):
    """The parameters that chat and plain completions share; ranges are those of ``SamplingParams``."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str | None] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    user: str | None = Field(default=None, description="taken and not used: the cache domain follows from the key")
    metadata: dict[str, Any] | None = Field(default=None, description="taken and not used")

    @field_validator("stream", mode="before")
    @classmethod
    def _null_is_false(cls, stream: Any) -> Any:
        return False if stream is None else stream

    def sampling_params(self, **fields: Any) -> SamplingParams:
        """The engine's parameters; ``fields`` are those that the endpoint sets. Raises ``ParameterError``."""
        given: dict[str, Any] = {"temperature": 1.0}
        names = (
            "temperature top_p top_k min_p n seed stop stop_token_ids min_tokens ignore_eos presence_penalty "
            "frequency_penalty repetition_penalty"
        )
        for name in names.split():
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        if given.get("top_k") == -1:  # vLLM's word for all
            given["top_k"] = 0
        if self.logit_bias:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        given["structure"] = self.structure()
        return SamplingParams(**{**given, **fields})

    def structure(self) -> Structure | None:
        """What the answer must be. Raises ``ParameterError`` for more than one structure."""
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        return structure_of(
            response_format=self.response_format,
            structured_outputs=self.structured_outputs,
            guided={name: getattr(self, name) for name in names},
        )


def _token_id(text: str) -> int | str:
    """The key of a ``logit_bias``; one that is no number is left for ``SamplingParams`` to refuse."""
    try:
        return int(text)
    except ValueError:
        return text


class PromptTokensDetails(WireAnswer):
    cached_tokens: int = 0


class CompletionTokensDetails(WireAnswer):
    """Of the drafts that speculation verified; rejected ones are in no answer and not in ``completion_tokens``."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(WireAnswer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class Timings(WireAnswer):
    """Ours: how long the answer took, by the engine's clock."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float

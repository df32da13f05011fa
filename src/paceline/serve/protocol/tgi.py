"""Text Generation Inference on the wire. Source: its API reference, version 3."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, RootModel, StrictInt

from paceline.serve.protocol.structure import TGIGrammar
from paceline.serve.protocol.wire import WireAnswer, WireModel

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class GenerateParameters(WireModel):
    """As TGI has it, an answer is sampled when ``do_sample`` says so or a parameter of sampling is given (a temperature
    other than 1, ``top_k``, ``top_p`` below 1); it is greedy otherwise."""

    max_new_tokens: StrictInt | None = Field(
        default=None, ge=1, le=2**31 - 1, description="null: what the context holds"
    )
    do_sample: bool | None = None
    temperature: float | None = Field(default=None, gt=0)
    top_k: StrictInt | None = Field(default=None, ge=1, le=2**31 - 1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1, description="refused below 1")
    repetition_penalty: float | None = Field(default=None, gt=0)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: StrictInt | None = Field(default=None, ge=0, lt=2**64)
    stop: list[str] | None = None
    best_of: StrictInt | None = Field(default=None, ge=1, description="answers, of which the likeliest is given")
    return_full_text: bool | None = None
    truncate: StrictInt | None = Field(default=None, ge=1, description="tokens of the prompt that are kept, the last")
    details: bool = False
    decoder_input_details: bool = False
    top_n_tokens: StrictInt | None = Field(default=None, ge=0)
    grammar: TGIGrammar | None = None
    watermark: bool = Field(default=False, description="refused")
    adapter_id: str | None = Field(default=None, description="refused")


class GenerateRequest(WireModel):
    inputs: str = Field(min_length=1)
    parameters: GenerateParameters | None = None
    add_special_tokens: bool = True


class CompatGenerateRequest(GenerateRequest):
    """What `/` takes: both forms of answer in one place."""

    stream: bool = False


class PrefillToken(WireAnswer):
    id: int
    text: str
    logprob: float | None = Field(description="null for the first token, before which there is none")


class GeneratedToken(WireAnswer):
    id: int
    text: str
    logprob: float
    special: bool


class BestOfSequence(WireAnswer):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[GeneratedToken]
    top_tokens: list[list[GeneratedToken]] | None = None


class Details(WireAnswer):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = Field(description="with which the answer can be had again; null for a greedy one")
    prefill: list[PrefillToken]
    tokens: list[GeneratedToken]
    top_tokens: list[list[GeneratedToken]] | None = None
    best_of_sequences: list[BestOfSequence] | None = None


class GenerateResponse(WireAnswer):
    """The texts of ``tokens`` that are not special, joined, are ``generated_text``: a stop sequence is part of it."""

    generated_text: str
    details: Details | None = None


class GenerateResponses(RootModel[list[GenerateResponse]]):
    """What `/` answers: a list of one."""


class StreamDetails(WireAnswer):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(WireAnswer):
    """One token. The last one carries the whole text and the details."""

    index: int
    token: GeneratedToken
    top_tokens: list[GeneratedToken] | None = None
    generated_text: str | None = None
    details: StreamDetails | None = None


class ErrorResponse(WireAnswer):
    error: str
    error_type: str


class Info(WireAnswer):
    model_id: str
    model_sha: str | None = None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_input_length: int = Field(description="the same, as earlier versions called it")
    max_total_tokens: int
    max_client_batch_size: int
    validation_workers: int
    router: str
    version: str
    sha: str | None = None
    docker_label: str | None = None

"""The endpoints of Text Generation Inference: `/generate`, `/generate_stream`, `/`, `/info` and `/health`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from paceline import __version__
from paceline.engine.outputs import Completion, Delta
from paceline.engine.prompts import PromptTokenizer
from paceline.params import SamplingParams
from paceline.serve.answers import Answer, DocumentAnswer, EventAnswer, TextAnswer, until_disconnected
from paceline.serve.bridge import AnswerStream
from paceline.serve.errors import HTTPError, Problem
from paceline.serve.events import AnswerEvents
from paceline.serve.limits import check_limits, context_length
from paceline.serve.outcomes import check_outcomes
from paceline.serve.protocol.tgi import CompatGenerateRequest, GenerateParameters, GenerateRequest, Info
from paceline.serve.service import Exchange, Service
from paceline.serve.spelling import Spelling
from paceline.serve.sse import PING, json_bytes
from paceline.serve.structure import structure_of_tgi
from paceline.serve.tgi_tokens import TokenTexts, prefill_documents

ERROR_TYPES = {422: "validation", 424: "generation", 429: "overloaded", 503: "overloaded", 401: "authentication"}


def tgi_problem(problem: Problem) -> DocumentAnswer:
    """An error in TGI's form: what is wrong with a request is a 422, what fails on the way a 424."""
    status = {400: 422, 500: 424}.get(problem.status, problem.status)
    document = {"error": problem.message, "error_type": ERROR_TYPES.get(status, "validation")}
    return DocumentAnswer(document, status, problem.headers)


@dataclass(frozen=True)
class _Job:
    """A request as it is worked on. ``seed`` is None where nothing is drawn at random."""

    tokenizer: PromptTokenizer
    spelling: Spelling
    inputs: str
    prompt: list[int]
    asked: GenerateParameters
    params: SamplingParams
    seed: int | None

    def texts(self) -> TokenTexts:
        """For one answer."""
        return TokenTexts(self.tokenizer, self.spelling, self.prompt, self.params.stop)

    def full_text(self, texts: TokenTexts) -> str:
        """What is shown as the text of an answer."""
        return (self.inputs if self.asked.return_full_text else "") + texts.text


async def generate(service: Service, exchange: Exchange, http: Request, body: GenerateRequest) -> Answer:
    """The continuation of a text."""
    return DocumentAnswer(await _generated(service, exchange, http, body))


async def generate_stream(service: Service, exchange: Exchange, http: Request, body: GenerateRequest) -> Answer:
    """The continuation of a text, an event for each token."""
    asked = body.parameters or GenerateParameters()
    if (asked.best_of or 1) > 1:
        raise _refusal("best_of", asked.best_of, "1 in a stream: which answer is the best shows at the end")
    if asked.decoder_input_details:
        raise _refusal("decoder_input_details", True, "false in a stream")
    job = await _job(service, body, streaming=True)
    stream = await service.ask(exchange, job.prompt, job.params, field="inputs", streaming=True)
    return EventAnswer(AnswerEvents(_events(stream, job, service.settings.ping_s), [stream]))


async def compat_generate(service: Service, exchange: Exchange, http: Request, body: CompatGenerateRequest) -> Answer:
    """Either of the two, as ``stream`` says; clients that are given an address alone ask here."""
    if body.stream:
        return await generate_stream(service, exchange, http, body)
    return DocumentAnswer([await _generated(service, exchange, http, body)])


async def info(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """What is served, and how much of it one request may ask for."""
    llm, settings = service.llm, service.settings
    length = context_length(llm)
    path = llm.path()
    longest = min(length - 1, settings.max_prompt_tokens or length)
    document = Info(
        model_id=service.model,
        model_dtype=str(path["weights"]),
        model_device_type="cpu",
        model_pipeline_tag="text-generation",
        max_concurrent_requests=settings.max_connections,
        max_best_of=settings.max_choices,
        max_stop_sequences=settings.max_stop,
        max_input_tokens=longest,
        max_input_length=longest,
        max_total_tokens=length,
        max_client_batch_size=1,
        validation_workers=1,
        router="paceline",
        version=__version__,
    )
    return DocumentAnswer(document.model_dump())


async def health(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """200 while requests are taken, 503 otherwise; no body."""
    return TextAnswer("", status=200 if service.status == "ready" else 503)


def _refusal(field: str, value: object, allowed: str) -> HTTPError:
    return HTTPError(400, f"{field}={value!r} is not possible: {allowed}", param=field, code="unsupported")


async def _job(service: Service, body: GenerateRequest, *, streaming: bool) -> _Job:
    """What is asked for; an error that names the parameter where it cannot be had."""
    asked = body.parameters or GenerateParameters()
    _refuse_unsupported(asked)
    has_details = streaming or asked.details
    num_top = asked.top_n_tokens or 0
    if num_top > service.settings.max_logprobs:
        raise _refusal("top_n_tokens", num_top, f"this server gives at most {service.settings.max_logprobs}")
    best_of = asked.best_of or 1
    if best_of > service.settings.max_choices:
        raise _refusal("best_of", best_of, f"this server gives at most {service.settings.max_choices}")
    is_sampled = _is_sampled(asked)
    if best_of > 1 and not is_sampled:
        raise _refusal("best_of", best_of, "1 unless do_sample is true: greedy answers are all the same")
    seed = None if not is_sampled else asked.seed if asked.seed is not None else secrets.randbits(63)
    given: dict[str, Any] = {
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "repetition_penalty": asked.repetition_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "stop": asked.stop,
    }
    params = SamplingParams(
        temperature=(1.0 if asked.temperature is None else asked.temperature) if is_sampled else 0.0,
        seed=seed,
        n=best_of,
        max_tokens=asked.max_new_tokens,
        logprobs=num_top if has_details or best_of > 1 else None,
        prompt_logprobs=0 if asked.details and asked.decoder_input_details else None,
        structure=None if asked.grammar is None else structure_of_tgi(asked.grammar),
        **{name: value for name, value in given.items() if value is not None},
    )
    check_limits(service.settings, params)
    prompt = await service.encode(body.inputs, add_special_tokens=body.add_special_tokens)
    prompt = prompt[-asked.truncate :] if asked.truncate is not None else prompt
    return _Job(service.llm.tokenizer, service.spelling, body.inputs, prompt, asked, params, seed)


def _refuse_unsupported(asked: GenerateParameters) -> None:
    """Refuses what would change an answer and is not built."""
    if asked.watermark:
        raise _refusal("watermark", True, "answers are not watermarked: false")
    if asked.adapter_id is not None:
        raise _refusal("adapter_id", asked.adapter_id, "adapters are not supported: null")
    if asked.typical_p is not None and asked.typical_p < 1:
        raise _refusal("typical_p", asked.typical_p, "typical sampling is not supported: 1 or null")


def _is_sampled(asked: GenerateParameters) -> bool:
    """Whether tokens are drawn at random: TGI takes a parameter of sampling for a wish to sample."""
    return (
        bool(asked.do_sample)
        or (asked.temperature is not None and asked.temperature != 1.0)
        or asked.top_k is not None
        or (asked.top_p is not None and asked.top_p < 1.0)
    )


async def _generated(service: Service, exchange: Exchange, http: Request, body: GenerateRequest) -> dict[str, Any]:
    job = await _job(service, body, streaming=False)
    stream = await service.ask(exchange, job.prompt, job.params, field="inputs", streaming=False)
    try:
        completions = await until_disconnected(http, stream.completions())
    finally:
        stream.close()
    check_outcomes(completions)
    size = sum(len(one.token_ids) + len(one.prompt_logprobs or ()) for one in completions)
    return await service.aside(size, _document, job, completions)


def _document(job: _Job, completions: Sequence[Completion]) -> dict[str, Any]:
    """The whole answer, the likeliest of several."""
    best, *others = sorted(completions, key=_mean_logprob, reverse=True)
    text, details = _sequence(job, best)
    if not job.asked.details:
        return {"generated_text": text}
    if others:
        sequences = [_sequence(job, completion) for completion in others]
        details["best_of_sequences"] = [{"generated_text": text, **details} for text, details in sequences]
    return {"generated_text": text, "details": details}


def _mean_logprob(completion: Completion) -> float:
    """How likely an answer is, a token; all alike where nothing was measured."""
    entries: Sequence[Any] = completion.logprobs or ()
    return sum(entry.logprob for entry in entries) / len(entries) if entries else 0.0


def _sequence(job: _Job, completion: Completion) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and its details."""
    texts = job.texts()
    last = len(completion.token_ids) - 1
    pieces = [texts.feed(token, completion if at == last else None) for at, token in enumerate(completion.token_ids)]
    entries = completion.logprobs or []
    details: dict[str, Any] = {
        "finish_reason": texts.finish_reason(completion),
        "generated_tokens": len(completion.token_ids),
        "seed": job.seed,
        "prefill": prefill_documents(texts, job.prompt, completion),
        "tokens": [texts.document(entry, piece) for entry, piece in zip(entries, pieces, strict=False)],
    }
    if job.asked.top_n_tokens:
        details["top_tokens"] = [texts.alternatives(entry) for entry in entries]
    return job.full_text(texts), details


async def _events(stream: AnswerStream, job: _Job, ping_s: float) -> AsyncGenerator[bytes, None]:
    """An event for each token; raises what the answer failed of."""
    texts = job.texts()
    index = 0
    while stream.is_open:
        deltas = await stream.next(ping_s)
        if not deltas:
            yield PING
        for delta in deltas:
            if delta.completion is not None:
                check_outcomes([delta.completion])
            events = []
            for document in _token_documents(texts, job, delta):
                index += 1
                events.append(_event({"index": index, **document}))
            yield b"".join(events)


def _token_documents(texts: TokenTexts, job: _Job, delta: Delta) -> list[dict[str, Any]]:
    """What the events of some tokens say; the last token of an answer has the text and the details."""
    entries = delta.logprobs or []
    documents: list[dict[str, Any]] = []
    for at, entry in enumerate(entries):
        completion = delta.completion if at == len(entries) - 1 else None
        document: dict[str, Any] = {"token": texts.document(entry, texts.feed(entry.token_id, completion))}
        if job.asked.top_n_tokens:
            document["top_tokens"] = texts.alternatives(entry)
        document |= {"generated_text": None, "details": None}
        if completion is not None:
            document["generated_text"] = job.full_text(texts)
            document["details"] = {
                "finish_reason": texts.finish_reason(completion),
                "generated_tokens": len(completion.token_ids),
                "seed": job.seed,
                "input_length": len(job.prompt),
            }
        documents.append(document)
    return documents


def _event(document: dict[str, Any]) -> bytes:
    """An event as TGI writes it, without a blank after the colon."""
    return b"data:" + json_bytes(document) + b"\n\n"

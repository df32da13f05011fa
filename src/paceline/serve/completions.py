"""`/v1/completions`: prompts as they are, one or many, with their own text and log-probabilities when asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from paceline.engine.detokenize import TextPieces, missing_bytes
from paceline.engine.outputs import Completion, Delta
from paceline.errors import ContextLengthError
from paceline.params import SamplingParams
from paceline.serve.answers import Answer, DocumentAnswer, EventAnswer, until_disconnected
from paceline.serve.bridge import AnswerStream
from paceline.serve.errors import HTTPError, too_long
from paceline.serve.events import AnswerEvents
from paceline.serve.head import head_of
from paceline.serve.limits import check_limits, check_tokens, context_length
from paceline.serve.logprobs import TokenArrays, joined, prompt_arrays
from paceline.serve.merging import merged
from paceline.serve.outcomes import check_outcomes
from paceline.serve.protocol.base import StreamOptions
from paceline.serve.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from paceline.serve.service import Exchange, Service
from paceline.serve.spelling import Spelling
from paceline.serve.sse import DONE, PING, event, json_text
from paceline.serve.usage import timings_document, total_usage, usage_document


@dataclass(frozen=True)
class _Prompt:
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class _Job:
    """A request as it is worked on.

    params       for each prompt
    is_scored    whether prompts are shown with their log-probabilities
    shows_answer whether anything but the prompts is asked for: the engine draws at least one token, which is cut then
    """

    prompts: list[_Prompt]
    params: SamplingParams
    echo: bool
    is_scored: bool
    shows_answer: bool
    spelling: Spelling

    def arrays(self, prompt: _Prompt) -> TokenArrays:
        """For the tokens of an answer to a prompt."""
        tail = b"".join(map(self.spelling.bytes_of, prompt.tokens[-3:]))[-3:]
        return TokenArrays(self.spelling, offset=len(prompt.text) if self.echo else 0, missing=missing_bytes(tail))

    def prompt_logprobs(self, prompt: _Prompt, completion: Completion) -> dict[str, Any] | None:
        """The arrays of a prompt that is shown with them."""
        if not self.is_scored:
            return None
        assert completion.prompt_logprobs is not None
        return prompt_arrays(self.spelling, prompt.tokens, prompt.text, completion.prompt_logprobs)

    def num_entries(self, answers: Sequence[Sequence[Completion]]) -> int:
        """How many log-probabilities some answers show."""
        width = 1 + (self.params.logprobs or 0)
        all_of_them = [completion for completions in answers for completion in completions]
        return width * sum(len(one.logprobs or ()) + len(one.prompt_logprobs or ()) for one in all_of_them)

    def shown(self, completion: Completion) -> Completion:
        """An answer without the token that nobody asked for."""
        if self.shows_answer:
            return completion
        return replace(completion, text="", token_ids=[], finish_reason="length", logprobs=completion.logprobs and [])


async def create_completion(service: Service, exchange: Exchange, http: Request, body: CompletionRequest) -> Answer:
    """The continuations of one or several prompts, whole or as a stream of chunks."""
    service.check_model(body.model)
    job = await _job(service, body)
    head = head_of(exchange, service.model, "cmpl", "text_completion")
    options = body.stream_options or StreamOptions()
    if body.stream and job.shows_answer:
        scored = await until_disconnected(http, _scored(service, exchange, job)) if job.is_scored else None
        params = replace(job.params, prompt_logprobs=None)
        streams = await _ask(service, exchange, job, params, streaming=True)
        return EventAnswer(
            AnswerEvents(_Chunks(head, job, options, scored).of(streams, service.settings.ping_s), streams)
        )
    streams = await _ask(service, exchange, job, job.params, streaming=False)
    try:
        answers = await until_disconnected(http, _completions(streams))
    finally:
        _close(streams)
    answers = [[job.shown(completion) for completion in completions] for completions in answers]
    document = await service.aside(job.num_entries(answers), _document, head, job, answers)
    if not body.stream:
        return DocumentAnswer(document)
    return EventAnswer(_replay(document, include_usage=options.include_usage))


async def _job(service: Service, body: CompletionRequest) -> _Job:
    """What is asked for; 400 where it cannot be had."""
    if body.suffix:
        raise HTTPError(
            400,
            "suffix is not supported: no model here fills the gap between a prompt and a suffix. Leave it out",
            param="suffix",
            code="unsupported",
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HTTPError(
            400,
            f"best_of={body.best_of} is not possible: answers are not ranked, so it must be n ({body.n or 1})",
            param="best_of",
            code="invalid_value",
        )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise HTTPError(
            400,
            "max_tokens=0 is not possible: at least 1, unless echo asks for the prompt",
            param="max_tokens",
            code="invalid_value",
        )
    is_scored = body.echo and body.logprobs is not None
    params = body.sampling_params(
        max_tokens=max(1, max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if is_scored else None,
    )
    check_limits(service.settings, params)
    prompts = await _prompts(service, body)
    return _Job(prompts, params, body.echo, is_scored, max_tokens > 0, service.spelling)


async def _prompts(service: Service, body: CompletionRequest) -> list[_Prompt]:
    """The prompts of a request as tokens and as text."""
    given: Any = body.prompt
    each: list[Any] = given if given and isinstance(given, list) and not isinstance(given[0], int) else [given]
    if len(each) > service.settings.max_prompts:
        raise HTTPError(
            400,
            f"{len(each)} prompts in one request and this server takes {service.settings.max_prompts}",
            param="prompt",
            code="invalid_value",
        )
    longest = context_length(service.llm)
    prompts = []
    for prompt in each:
        if isinstance(prompt, str):
            tokens = await service.encode(prompt, add_special_tokens=body.add_special_tokens)
            prompts.append(_Prompt(tokens, prompt))
        else:
            if len(prompt) >= longest:  # before work is done on all of them
                raise too_long(str(ContextLengthError(len(prompt), longest)), "prompt")
            check_tokens(service.llm, prompt, "prompt")
            prompts.append(_Prompt(prompt, service.spelling.text_of(prompt) if body.echo else ""))
    return prompts


async def _ask(
    service: Service, exchange: Exchange, job: _Job, params: SamplingParams, *, streaming: bool
) -> list[AnswerStream]:
    """Starts the answers to all prompts, or to none when one cannot be had."""
    streams: list[AnswerStream] = []
    try:
        for prompt in job.prompts:
            streams.append(await service.ask(exchange, prompt.tokens, params, field="prompt", streaming=streaming))
    except BaseException:
        _close(streams)
        raise
    return streams


def _close(streams: Sequence[AnswerStream]) -> None:
    for stream in streams:
        stream.close()


async def _completions(streams: Sequence[AnswerStream]) -> list[list[Completion]]:
    """The answers to each prompt; raises the first error among them."""
    answers = await asyncio.gather(*(stream.completions() for stream in streams))
    for completions in answers:
        check_outcomes(completions)
    return answers


async def _scored(service: Service, exchange: Exchange, job: _Job) -> list[Completion]:
    """The log-probabilities of the prompts before their answers are streamed: pieces of a stream do not carry them."""
    streams = await _ask(service, exchange, job, replace(job.params, n=1, max_tokens=1, min_tokens=0), streaming=False)
    try:
        return [completions[0] for completions in await _completions(streams)]
    finally:
        _close(streams)


def _document(head: dict[str, Any], job: _Job, answers: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """The whole answer."""
    choices: list[dict[str, Any]] = []
    for prompt, completions in zip(job.prompts, answers, strict=True):
        for completion in completions:
            logprobs = job.prompt_logprobs(prompt, completion)
            if completion.logprobs is not None:
                logprobs = joined(logprobs, job.arrays(prompt).document(completion.logprobs))
            choices.append(
                {
                    "index": len(choices),
                    "text": (prompt.text if job.echo else "") + completion.text,
                    "logprobs": logprobs,
                    "finish_reason": completion.finish_reason,
                }
            )
    usage = total_usage([usage_document(completions) for completions in answers])
    document = {**head, "choices": choices, "usage": usage}
    return {**document, "timings": timings_document(answers[0][0])} if len(answers) == 1 else document


async def _replay(document: dict[str, Any], *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """A whole answer as the chunks of a stream: where only prompts are asked for, nothing comes piece by piece."""
    usage, timings = document.pop("usage"), document.pop("timings", None)
    for choice in document["choices"]:
        for piece in ({**choice, "finish_reason": None}, {**choice, "text": "", "logprobs": None}):
            yield event({**document, "choices": [piece], **({"usage": None} if include_usage else {})})
    if include_usage:
        yield event({**document, "choices": [], "usage": usage, **({"timings": timings} if timings else {})})
    yield DONE


class _Chunks:
    """The chunks of one stream as bytes: prompts, texts, reasons, perhaps usage, and the end. What all of them share is
    written once. ``scored`` holds an answer to each prompt that is shown with its log-probabilities."""

    def __init__(
        self, head: dict[str, Any], job: _Job, options: StreamOptions, scored: Sequence[Completion] | None
    ) -> None:
        self._head = head
        self._job = job
        self._options = options
        self._scored = scored
        self._arrays = [job.arrays(prompt) for prompt in job.prompts for _ in range(job.params.n)]
        self._answers: list[dict[int, Completion]] = [{} for _ in job.prompts]
        self._start = f"data: {json_text(head)[:-1]}"
        self._end = ',"usage":null}\n\n' if options.include_usage else "}\n\n"

    async def of(self, streams: Sequence[AnswerStream], ping_s: float) -> AsyncGenerator[bytes, None]:
        """The chunks; raises what an answer failed of."""
        if self._job.echo:
            yield self._prompts().encode()
        async with aclosing(merged(streams, ping_s)) as reading:
            async for number, deltas in reading:
                yield "".join([self._piece(number, delta) for delta in deltas]).encode() if deltas else PING
        if self._options.include_usage:
            yield self._usage()
        yield DONE

    def _prompts(self) -> str:
        """A chunk with the prompt for each choice."""
        job = self._job
        chunks = []
        for number, prompt in enumerate(job.prompts):
            logprobs = None if self._scored is None else job.prompt_logprobs(prompt, self._scored[number])
            for choice in range(job.params.n):
                chunks.append(self._chunk(number * job.params.n + choice, prompt.text, logprobs=logprobs))
        return "".join(chunks)

    def _piece(self, number: int, delta: Delta) -> str:
        """What a delta of a prompt's answers comes to: perhaps text, perhaps the reason of the end."""
        index = number * self._job.params.n + delta.index
        completion = delta.completion
        if completion is not None:
            check_outcomes([completion])
            self._answers[number][delta.index] = completion
        chunks = ""
        if delta.text or delta.logprobs:
            logprobs = self._arrays[index].document(delta.logprobs) if delta.logprobs else None
            drafted = delta.pieces if self._options.include_drafted else None
            chunks += self._chunk(index, delta.text, logprobs=logprobs, drafted=drafted)
        if completion is not None:
            chunks += self._chunk(index, "", reason=json_text(completion.finish_reason))
        return chunks

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        drafted: TextPieces | None = None,
        reason: str = "null",
    ) -> str:
        arrays = "null" if logprobs is None else json_text(logprobs)
        extras = "" if drafted is None else f',"drafted":{json_text(drafted)}'
        choice = f'{{"index":{index},"text":{json_text(text)},"logprobs":{arrays}{extras},"finish_reason":{reason}}}'
        return f'{self._start},"choices":[{choice}]{self._end}'

    def _usage(self) -> bytes:
        answers = [[found[index] for index in sorted(found)] for found in self._answers]
        usage = total_usage([usage_document(completions) for completions in answers])
        timings = {"timings": timings_document(answers[0][0])} if len(answers) == 1 else {}
        return event({**self._head, "choices": [], "usage": usage, **timings})

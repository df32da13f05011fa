"""`/tokenize`, `/detokenize` and `/tokenizer_info`, with which clients count and cut without the model's files."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from paceline.serve.answers import Answer, DocumentAnswer
from paceline.serve.conversation import read_conversation
from paceline.serve.limits import check_tokens, context_length
from paceline.serve.protocol.chat import ChatRequest
from paceline.serve.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from paceline.serve.service import Exchange, Service
from paceline.serve.spelling import Spelling


async def tokenize(service: Service, exchange: Exchange, http: Request, body: TokenizeRequest) -> Answer:
    """The tokens of a text, or of messages in the model's chat template."""
    service.check_model(body.model)
    llm = service.llm
    if body.prompt is not None:
        tokens = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        text, _ = read_conversation(_as_chat(body), llm.chat_template)
        tokens = await service.encode(text, add_special_tokens=False)
    answer = TokenizeResponse(
        count=len(tokens),
        max_model_len=context_length(llm),
        tokens=tokens,
        token_strs=await service.aside(len(tokens), _names, service.spelling, tokens)
        if body.return_token_strs
        else None,
    )
    return DocumentAnswer(answer.model_dump())


async def detokenize(service: Service, exchange: Exchange, http: Request, body: DetokenizeRequest) -> Answer:
    """The text of tokens."""
    service.check_model(body.model)
    check_tokens(service.llm, body.tokens, "tokens")
    text = await service.aside(len(body.tokens), service.spelling.text_of, body.tokens)
    return DocumentAnswer(DetokenizeResponse(prompt=text).model_dump())


async def tokenizer_info(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """What a client needs to know to prepare prompts as the model wants them."""
    llm = service.llm
    spelling = service.spelling
    tokenizer = llm.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_ids
    info = TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=tokenizer.vocab_size,
        model_max_length=context_length(llm),
        bos_token=None if bos is None else spelling.name_of(bos),
        eos_token=spelling.name_of(eos[0]) if eos else None,
        pad_token=None,
        unk_token=None,
        add_bos_token=tokenizer.add_bos,
        chat_template=getattr(llm.chat_template, "source", None),
    )
    return DocumentAnswer(info.model_dump())


def _as_chat(body: TokenizeRequest) -> ChatRequest:
    """The chat that would begin with these messages."""
    return ChatRequest(
        messages=body.messages or [],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _names(spelling: Spelling, tokens: Sequence[int]) -> list[str]:
    return [spelling.name_of(token) for token in tokens]

"""From the messages and tools of a request to the prompt that the model reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.engine.prompts import Template
from paceline.errors import ParameterError, UnsupportedError
from paceline.serve.protocol.chat import ChatMessage, ChatRequest
from paceline.serve.tools.detect import template_style
from paceline.serve.tools.hermes import HERMES, instructions, result_text
from paceline.serve.tools.llama3 import LLAMA3
from paceline.serve.tools.toolbox import Toolbox, choose_tools

_ROLES = {"developer": "system", "function": "tool"}
"""What templates call roles that have a newer or older name with OpenAI."""

_MARK = "\ue000\ue001"
"""Stands at the end of the message that is continued while the template is rendered; private characters."""


def read_conversation(body: ChatRequest, template: Template | None) -> tuple[str, Toolbox | None]:
    """The text of the prompt, and what the answer may call.

    A template that shows no tools, or in a style we do not know, gets them as a system text in Hermes's style, with
    earlier calls and results as plain messages. Raises ``ParameterError``, and ``UnsupportedError`` without a template.
    """
    if template is None:
        raise UnsupportedError("this model has no chat template: send its prompt to /v1/completions instead")
    has_calls = bool(body.tools) or any(
        message.tool_calls or message.role in ("tool", "function") for message in body.messages
    )
    known = template_style(template) if has_calls else None
    toolbox = choose_tools(
        body.tools or [], body.tool_choice, known or HERMES, is_parallel=body.parallel_tool_calls is not False
    )
    shown = [] if toolbox is None else [tool.document() for tool in body.tools or []]
    messages = [_document(message, names) for message, names in _with_names(body.messages)]
    if has_calls and known is None:
        messages = _in_words(messages, shown)
        shown = []
    elif known is LLAMA3:
        messages = _one_call_a_message(messages)
    return _render(body, template, messages, shown or None), toolbox


def _render(body: ChatRequest, template: Template, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    variables = body.chat_template_kwargs
    if not body.continue_final_message:
        return template.render(messages, body.add_generation_prompt is not False, tools, variables)
    if body.add_generation_prompt:
        raise ParameterError("add_generation_prompt", True, "false together with continue_final_message")
    if body.messages[-1].role != "assistant" or body.messages[-1].tool_calls:
        raise ParameterError("continue_final_message", True, "only where the last message is text of the assistant")
    continued = {**messages[-1], "content": messages[-1]["content"] + _MARK}
    text = template.render([*messages[:-1], continued], False, tools, variables)
    prompt, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise ParameterError("continue_final_message", True, "the chat template does not show the last message")
    return prompt


def _with_names(messages: Sequence[ChatMessage]) -> Iterator[tuple[ChatMessage, Mapping[str, str]]]:
    """Each message with the functions' names by the ids of all calls before it."""
    names: dict[str, str] = {}
    for message in messages:
        yield message, names
        names.update({call.id: call.function.name for call in message.tool_calls or ()})


def _document(message: ChatMessage, names: Mapping[str, str]) -> dict[str, Any]:
    """A message as templates read it: results name their function, arguments are objects."""
    document: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": message.text()}
    name = message.name or names.get(message.tool_call_id or "")
    if name is not None:
        document["name"] = name
    if message.tool_call_id is not None:
        document["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        document["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return document


def _arguments(text: str) -> Any:
    """The arguments of an earlier call; text that is no JSON stays text, since the model may have been cut off."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _in_words(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template that knows neither tools nor calls nor results."""
    found: list[dict[str, Any]] = []
    if tools:
        found.append({"role": "system", "content": instructions(tools)})
        if messages[0]["role"] == "system":
            found[0]["content"] = f"{messages[0]['content']}\n\n{found[0]['content']}"
            messages = messages[1:]
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and follows_result:
            found[-1]["content"] += "\n" + result_text(message["content"])
        elif is_result:
            found.append({"role": "user", "content": result_text(message["content"])})
        elif "tool_calls" in message:
            found.append({"role": message["role"], "content": "\n".join(_call_lines(message))})
        else:
            found.append(message)
        follows_result = is_result
    return found


def _call_lines(message: Mapping[str, Any]) -> Iterator[str]:
    if message["content"]:
        yield message["content"]
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield HERMES.call(call["function"]["name"], text)


def _one_call_a_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Llama's templates take one call a message: further ones become messages, each before its result."""
    found: list[dict[str, Any]] = []
    waiting: dict[str, dict[str, Any]] = {}
    for message in messages:
        call = waiting.pop(message.get("tool_call_id", ""), None)
        if call is not None:
            found.append(call)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        found.append({**message, "tool_calls": calls[:1]})
        waiting = {each["id"]: {**message, "content": "", "tool_calls": [each]} for each in calls[1:]}
    return found

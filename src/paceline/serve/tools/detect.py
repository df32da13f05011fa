"""Which style of calls a chat template speaks: found out by having it write one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.engine.prompts import Template
from paceline.errors import ParameterError
from paceline.serve.tools.hermes import HERMES
from paceline.serve.tools.llama3 import LLAMA3
from paceline.serve.tools.style import CallStyle

_FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_QUESTION = {"role": "user", "content": "?"}
_CONVERSATIONS: tuple[Sequence[Mapping[str, Any]], ...] = (
    [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}],
    [_QUESTION],
)

# A call of the probe, or the pattern of one that the template tells the model: there are no quotes around its name.
_STYLES = (
    (HERMES, re.compile(r'<tool_call>\s*\{\s*"(name|arguments)"')),
    (LLAMA3, re.compile(r'\{\s*"name":\s*[^,{}]*,\s*"parameters"')),
)


def template_style(template: Template) -> CallStyle | None:
    """The style in which the template writes calls, or else tells the model to; None where it does not show tools, or
    in no style that is known."""
    for messages in _CONVERSATIONS:
        text = _rendered(template, messages, _TOOLS)
        if text == _rendered(template, messages, None):
            continue
        for style, pattern in _STYLES:
            if pattern.search(text):
                return style
    return None


def _rendered(template: Template, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str:
    """The text, empty where the template refuses."""
    try:
        return template.render(messages, False, tools)
    except ParameterError:
        return ""

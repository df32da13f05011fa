"""Calls as Hermes and Qwen models write them, and words that teach the form to a model whose template knows no tools.

Source: the function-calling format of Hermes 2 Pro (NousResearch, 2024), which Qwen 2.5 and 3 took over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.serve.tools.style import CallStyle

HERMES = CallStyle(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    is_bare=False,
    arguments="arguments",
    margin="\n",
    between="\n",
)


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """A system text that lists the tools and says how to call them."""
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. They are listed between <tools> and </tools>, one JSON document a line:\n"
        f"<tools>\n{signatures}\n</tools>\n"
        "To call a function, write its name and its arguments as JSON, in this form:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>\n'
        "What it returns will be given to you between <tool_response> and </tool_response>."
    )


def result_text(content: str) -> str:
    """What a function returned."""
    return f"<tool_response>\n{content}\n</tool_response>"

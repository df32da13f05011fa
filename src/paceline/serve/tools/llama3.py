"""Calls as Llama 3.1 and its successors write them.

Source: Meta's prompt format for Llama 3.1, "JSON based tool calling"; the tag, where there is one, is a control token,
and control tokens are no text: it is seen only of models that spell it out.
"""

from __future__ import annotations

from paceline.serve.tools.style import CallStyle

LLAMA3 = CallStyle(
    name="llama3",
    opening="<|python_tag|>",
    closing=";",
    is_bare=True,
    arguments="parameters",
    margin="",
    between="; ",
)

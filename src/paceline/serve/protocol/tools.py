"""Tools and calls of them on the wire. Source: OpenAI's API reference, "Chat completions", tools and tool_choice."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paceline.serve.protocol.wire import WireAnswer, WireModel


class FunctionDefinition(WireModel):
    """``parameters`` is the JSON schema of the arguments, an object; none means that there are none."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        default=None, description="whether calls obey the schema; those that are required or named do so anyway"
    )


class Tool(WireModel):
    type: Literal["function"]
    function: FunctionDefinition

    def document(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",  # some templates cannot do without
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class FunctionName(WireModel):
    name: str


class NamedTool(WireModel):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(WireAnswer):
    """``arguments`` is JSON as text."""

    name: str
    arguments: str


class ToolCall(WireAnswer):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionCallDelta(WireAnswer):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(WireAnswer):
    """The first of a call has its id, type and name; all have a piece of the arguments, which may be empty."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta

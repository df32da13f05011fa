"""What an answer must be, on the wire.

Source: OpenAI's API reference ("response_format"); vLLM's and Text Generation Inference's extensions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.serve.protocol.wire import WireModel

Schema = dict[str, Any] | bool


class TextFormat(WireModel):
    type: Literal["text"]


class JSONObjectFormat(WireModel):
    """``value`` is how Text Generation Inference, and Hugging Face's client with it, give a schema."""

    type: Literal["json_object"]
    value: Schema | None = None


class NamedSchema(WireModel):
    """The schema holds whether or not it is ``strict``; ``name`` and ``description`` are taken and not used."""

    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class JSONSchemaFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JSONObjectFormat | JSONSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(WireModel):
    """vLLM's, one of them: a schema (also as text), an expression, texts, a Lark grammar, or any JSON object."""

    json_: Schema | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class TGIGrammar(WireModel):
    """Text Generation Inference's: a schema or an expression."""

    type: Literal["json", "regex"]
    value: Schema | str

"""Chat templates: messages to the text that a model was trained on.

Source: Transformers, utils/chat_template_utils.py (the environment that templates are written for).
Checked by: tests/unit/test_chat_template.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, ParameterError
from paceline.text.huggingface_tokenizer import read_optional_json, special_text
from paceline.weights.gguf import GGUFCheckpoint
from paceline.weights.raw import Checkpoint

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's template, run in jinja's sandbox: it can neither reach Python's internals nor change the messages.

    It is compiled when it is first rendered, since the import of jinja alone takes 0.06 s.
    """

    def __init__(self, source: str, *, path: object, bos_token: str = "", eos_token: str = "") -> None:
        """``path`` is the file that holds the template, for errors."""
        self.source = source
        self._path = path
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; tokenise it with ``add_special_tokens=False``. Does not modify ``messages``. ``variables``
        are what else the template may read.

        Raises ParameterError with the template's own words when it refuses the messages, CheckpointError when the
        template is not valid jinja.
        """
        import jinja2

        roles = _roles(messages)
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools, **self._tokens}
        for name in variables or ():
            if name in given:
                raise ParameterError("chat_template_kwargs", name, f"variables other than {', '.join(given)}")
        try:
            return self._compiled.render({**(variables or {}), **given})
        # What an expression in a template can raise on values it does not expect.
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ParameterError("messages", roles, f"the chat template says: {error}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        from paceline.text.generation_tag import GenerationTag

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                self._path, f"the chat template is not valid, line {error.lineno}: {error}"
            ) from error


def load_chat_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """The template that comes with a checkpoint, None when there is none."""
    path = Path(checkpoint.path)
    if isinstance(checkpoint, GGUFCheckpoint):
        source, tokens = _from_metadata(checkpoint.metadata)
    else:
        source, tokens = _from_directory(path)
    return ChatTemplate(source, path=path, **tokens) if source else None


def _from_metadata(metadata: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    texts: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
    tokens = {}
    for name in ("bos_token", "eos_token"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_id")
        tokens[name] = texts[token_id] if token_id is not None and token_id < len(texts) else ""
    return metadata.get("tokenizer.chat_template"), tokens


def _from_directory(directory: Path) -> tuple[str | None, dict[str, str]]:
    settings = read_optional_json(directory / "tokenizer_config.json")
    tokens = {name: special_text(settings, name) or "" for name in ("bos_token", "eos_token")}
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8"), tokens
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = [entry for entry in source if isinstance(entry, Mapping)]
        source = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    if source is not None and not isinstance(source, str):
        raise CheckpointError(directory / "tokenizer_config.json", "chat_template is neither text nor named texts")
    return source, tokens


def _roles(messages: Sequence[Message]) -> tuple[str, ...]:
    """The role of each message; ParameterError for something that is not a message."""
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ParameterError("messages", message, "each is a mapping with a role and a content")
    if not messages:
        raise ParameterError("messages", messages, "at least one message")
    return tuple(message["role"] for message in messages)


def _raise_exception(message: str) -> None:
    """For templates that refuse a conversation."""
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Like jinja's filter, but without its HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

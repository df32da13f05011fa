"""Chat templates: the environment they expect, their errors, their sandbox, and where files keep them."""

from __future__ import annotations

import copy
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CheckpointError, ParameterError
from paceline.text.chat import ChatTemplate, _from_directory, _from_metadata

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, path="x.gguf", bos_token="<s>", eos_token="</s>").render(messages, **options)


def test_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "안녕 <b>"}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n안녕 <b><|im_end|>\n"
    assert render(CHATML, messages, add_generation_prompt=False) == expected
    assert render(CHATML, messages) == expected + "<|im_start|>assistant\n"


def test_the_variables_and_functions_that_templates_use() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}|{{ tools is none }}") == "<s>|</s>|True"
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ tools | tojson }}", tools=[{"name": "f<'é"}]) == '[{"name": "f<\'é"}]'
    assert render("{{ tools | tojson(indent=2) }}", tools=[1]) == "[\n  1\n]"
    assert render("{{ {'b': 1, 'a': 2} | tojson }}") == '{"b": 1, "a": 2}'


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert render("{% if true %}\n  a\n{% endif %}\nb\n") == "  a\nb"
    assert render("   {% if true %}x{% endif %}") == "x"


HARMONY = """\
{%- macro render_system(effort) -%}
Current date: {{ strftime_now("%Y-%m-%d") }}

Reasoning: {{ effort }}

# Valid channels: analysis, commentary, final.
{%- endmacro -%}
{%- set ns = namespace(last_user=none) -%}
{%- set system %}{{ render_system(reasoning_effort | default("medium")) }}{% endset -%}
<|start|>system<|message|>{{ system }}<|end|>
{%- for message in messages -%}
    {%- if message.role == "assistant" and "tool_calls" in message -%}
        {%- set call = message.tool_calls[0].function -%}
        <|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
        {{- call.arguments|tojson }}<|call|>
    {%- elif message.content is mapping -%}
        {{- raise_exception("a content is text") -}}
    {%- else -%}
        {%- if loop.last %}{% set ns.last_user = loop.index0 %}{% endif -%}
        <|start|>{{ message.role }}<|message|>{{ message.content | trim }}<|end|>
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
"""What the template of gpt-oss makes use of: macros, blocks that are set, a namespace, the date, tool calls as JSON."""


def test_what_a_harmony_template_asks_for() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "tool_calls": [call]}]
    found = render(HARMONY, messages, variables={"reasoning_effort": "high"})
    head, _, rest = found.partition("\n\nReasoning: high\n\n")
    assert re.fullmatch(r"<\|start\|>system<\|message\|>Current date: \d{4}-\d\d-\d\d", head)
    assert rest == (
        "# Valid channels: analysis, commentary, final.<|end|><|start|>user<|message|>hi<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": "é"}<|call|><|start|>assistant'
    )
    with pytest.raises(ParameterError, match="a content is text"):
        render(HARMONY, [{"role": "user", "content": {"text": "hi"}}])


def test_messages_are_not_modified() -> None:
    messages = [{"role": "user", "content": "hi"}]
    before = copy.deepcopy(messages)
    with pytest.raises(ParameterError):
        render("{{ messages.append(1) }}", messages)
    with pytest.raises(ParameterError):
        render("{{ messages[0].update({'role': 'x'}) }}", messages)
    assert messages == before


def test_refusals_carry_the_template_s_words() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate!') }}{% endif %}ok"
    assert render(source) == "ok"
    with pytest.raises(ParameterError, match="Roles must alternate!") as caught:
        render(source, [{"role": "assistant", "content": "no"}])
    assert caught.value.field == "messages"
    assert caught.value.value == ("assistant",)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
        "{{ messages | tojson(nonsense=1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.items() }}",
        "{% include 'x' %}",
    ],
)
def test_failing_and_forbidden_expressions(source: str) -> None:
    with pytest.raises(ParameterError, match="the chat template says"):
        render(source)


def test_a_template_that_is_not_jinja() -> None:
    with pytest.raises(CheckpointError, match=r"x\.gguf: the chat template is not valid, line 2"):
        render("a\n{% if %}")


@pytest.mark.parametrize(
    ("messages", "message"),
    [([], "at least one message"), (["hi"], "mapping with a role"), ([{"content": "hi"}], "mapping with a role")],
)
def test_things_that_are_not_messages(messages: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        render(CHATML, messages)


def test_the_generation_tag_of_transformers_is_transparent() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    assert render(source) == "hi;"


def test_where_gguf_files_keep_it() -> None:
    metadata = {
        "tokenizer.chat_template": CHATML,
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 99,
    }
    assert _from_metadata(metadata) == (CHATML, {"bos_token": "<s>", "eos_token": ""})
    assert _from_metadata({}) == (None, {"bos_token": "", "eos_token": ""})


def test_where_directories_keep_it(tmp_path: Path) -> None:
    def settings(**values: Any) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))

    assert _from_directory(tmp_path) == (None, {"bos_token": "", "eos_token": ""})
    settings(chat_template="a", bos_token={"content": "<s>"}, eos_token="</s>")
    assert _from_directory(tmp_path) == ("a", {"bos_token": "<s>", "eos_token": "</s>"})
    settings(chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert _from_directory(tmp_path)[0] == "d"
    (tmp_path / "chat_template.jinja").write_text("밥", "utf-8")
    assert _from_directory(tmp_path)[0] == "밥"

"""Tools, calls and results in prompts: in the style of the model's template, or in words where it has none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from byte_llm import PlainTemplate

from paceline.errors import ParameterError
from paceline.serve.conversation import read_conversation
from paceline.serve.protocol.chat import ChatRequest
from paceline.serve.tools.detect import template_style
from paceline.serve.tools.hermes import HERMES
from paceline.serve.tools.llama3 import LLAMA3
from paceline.text.chat import ChatTemplate

TOOLS_FIRST = "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
HERMES_SOURCE = TOOLS_FIRST + (
    "{% for m in messages %}<{{ m.role }}{{ ':' + m.name if m.name }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}"
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}"""
    "{{ '\\n</tool_call>' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA_SOURCE = TOOLS_FIRST + (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    """{"name": "{{ m.tool_calls[0].function.name }}", """
    """"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}{% endif %}{% endfor %}"""
)
# Refuses messages with calls, but tells the model how to write them.
SAYING_SOURCE = """{% if tools %}Write <tool_call>{"name": NAME, "arguments": ...}</tool_call>.{% endif %}
{% for m in messages %}{{ raise_exception('no calls') if m.tool_calls else m.content }}{% endfor %}"""

WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": None}}
SHOWN = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {}}},
}


def call(identity: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": "weather", "arguments": arguments}}


USER = {"role": "user", "content": "?"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call("a", "서울"), call("b", "Busan")]}
RESULTS = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in (("a", "12"), ("b", "15"))]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, path="x")


def prompt(source: ChatTemplate | PlainTemplate, *messages: Any, **fields: Any) -> str:
    """The prompt of a conversation."""
    body = ChatRequest.model_validate({"messages": messages, **fields})
    return read_conversation(body, source)[0]


def test_styles_are_found_in_what_templates_write() -> None:
    assert template_style(template(HERMES_SOURCE)) is HERMES
    assert template_style(template(LLAMA_SOURCE)) is LLAMA3
    assert template_style(template(SAYING_SOURCE)) is HERMES
    assert template_style(PlainTemplate()) is None
    assert template_style(template("{{ tools | tojson }}{{ messages[0].content }}")) is None
    assert template_style(template("{{ raise_exception('never') }}")) is None


def test_templates_get_tools_calls_as_objects_and_results_with_their_name() -> None:
    text = prompt(template(HERMES_SOURCE), USER, CALLS, *RESULTS, tools=[WEATHER])
    assert text.startswith(f"[{json.dumps(SHOWN)}]<user>?<assistant>\n<tool_call>\n")
    assert '{"name": "weather", "arguments": {"city": "서울"}}\n</tool_call>' in text
    assert text.endswith("<tool:weather>12<tool:weather>15<assistant>")


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    assert "[" not in prompt(template(HERMES_SOURCE), USER, tools=[WEATHER], tool_choice="none")


def test_llama_gets_one_call_a_message_before_its_result() -> None:
    text = prompt(template(LLAMA_SOURCE), USER, CALLS, *RESULTS, tools=[WEATHER])
    order = [text.index(part) for part in ("서울", "<tool>12", "Busan", "<tool>15")]
    assert order == sorted(order)


def test_arguments_that_are_no_json_stay_text() -> None:
    broken = {**CALLS, "tool_calls": [{**call("a", ""), "function": {"name": "weather", "arguments": '{"ci'}}]}
    assert '"arguments": "{\\"ci"' in prompt(template(HERMES_SOURCE), USER, broken, *RESULTS[:1])
    assert '"arguments": {"ci}\n</tool_call>' in prompt(PlainTemplate(), USER, broken, *RESULTS[:1])


def test_templates_without_tools_get_them_in_words() -> None:
    text = prompt(PlainTemplate(), {"role": "system", "content": "Be brief."}, USER, CALLS, *RESULTS, tools=[WEATHER])
    assert text.startswith("system: Be brief.\n\nYou may call functions.")
    assert f"<tools>\n{json.dumps(SHOWN)}\n</tools>" in text
    first = '<tool_call>\n{"name": "weather", "arguments": {"city": "서울"}}\n</tool_call>'
    assert f"user: ?\nassistant: {first}\n<tool_call>" in text
    results = "<tool_response>\n12\n</tool_response>\n<tool_response>\n15\n</tool_response>"
    assert text.endswith(f"\nuser: {results}\nassistant: ")


def test_without_tools_now_earlier_calls_are_still_told() -> None:
    text = prompt(PlainTemplate(), USER, CALLS, *RESULTS)
    assert "You may call" not in text
    assert text.count("<tool_call>") == text.count("<tool_response>") == 2


def test_the_older_role_of_results() -> None:
    message = {"role": "function", "name": "weather", "content": "12"}
    assert "<tool:weather>12" in prompt(template(HERMES_SOURCE), USER, message)
    assert "user: <tool_response>\n12\n" in prompt(PlainTemplate(), USER, message)


def test_a_message_is_continued_where_the_template_puts_it() -> None:
    source = template(
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
        "{{ 'never' if add_generation_prompt }}"
    )
    messages = [USER, {"role": "assistant", "content": "Once "}]
    assert prompt(source, *messages, continue_final_message=True) == "<user>?<end><assistant>Once "
    with pytest.raises(ParameterError, match="does not show the last message"):
        prompt(template("{{ messages[0].content }}"), *messages, continue_final_message=True)
    with pytest.raises(ParameterError, match="text of the assistant"):
        prompt(source, USER, CALLS, continue_final_message=True)


def test_variables_of_the_template() -> None:
    source = template("{{ 'on' if enable_thinking else 'off' }}")
    assert prompt(source, USER) == "off"
    assert prompt(source, USER, chat_template_kwargs={"enable_thinking": True}) == "on"
    with pytest.raises(ParameterError, match="chat_template_kwargs='messages'"):
        prompt(source, USER, chat_template_kwargs={"messages": []})

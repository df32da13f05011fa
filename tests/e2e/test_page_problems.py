"""The chat page when something goes wrong: it says what, where the answer would be, and goes on."""

from __future__ import annotations

import json
from typing import Any

from page_reader import CHAT_ROUTE, Reader, refused, streamed


def test_asks_for_a_key_where_the_server_wants_one(reader: Reader) -> None:
    reader.open()
    reader.allowed.add("401")
    keys: list[str | None] = []

    def check(route: Any) -> None:
        keys.append(route.request.headers.get("authorization"))
        (streamed(["Welcome."]) if keys[-1] == "Bearer secret" else refused(401, "no such API key"))(route)

    reader.page.route(CHAT_ROUTE, check)
    reader.send("Hello")
    reader.page.get_by_text("This server asks for an API key.").wait_for()
    for key in ("wrong", "secret"):
        reader.page.get_by_label("API key").fill(key)
        reader.button("Use key").click()
        reader.page.wait_for_function("count => !document.querySelector('.assistant[aria-busy]')", arg=0)
        if key == "wrong":
            reader.page.get_by_text("The server does not know this API key.").wait_for()
    reader.wait_for_answers(1)
    assert keys == [None, "Bearer wrong", "Bearer secret"]
    assert "secret" not in json.dumps(reader.page.evaluate("() => ({...localStorage})"))


def test_waits_as_long_as_a_busy_server_asks_for(reader: Reader) -> None:
    reader.open()
    reader.allowed.add("429")
    asked = reader.answer_with(refused(429, "full", Retry_After="2"), streamed(["Now."]))
    reader.send("Hello")
    reader.page.get_by_text("Trying again in 2 s").wait_for()
    reader.wait_for_answers(1)
    assert len(asked) == 2
    assert reader.answers.all_inner_texts() == ["Now."]
    assert reader.page.get_by_role("alert").count() == 0


def test_waits_until_a_loading_server_is_ready(reader: Reader) -> None:
    reader.open()
    reader.allowed.add("503")
    reader.answer_with(refused(503, "the model is still loading", code="model_loading"), streamed(["Now."]))
    reader.send("Hello")
    reader.page.get_by_text("goes out as soon as it is").wait_for()
    reader.wait_for_answers(1)


def test_a_lost_connection_is_told_and_can_be_tried_again(reader: Reader) -> None:
    reader.open()
    reader.allowed.add("ERR_FAILED")
    reader.answer_with(lambda route: route.abort(), streamed(["Half of i"], end=""), streamed(["Whole."]))
    reader.send("Hello")
    reader.button("Try again").click()
    reader.page.wait_for_function(
        "() => document.querySelector('.assistant .figures')?.textContent.includes('interrupted')"
    )
    assert reader.answers.all_inner_texts() == ["Half of i"]
    reader.button("Try again").click()
    reader.page.get_by_text("Whole.").wait_for()
    assert reader.answers.all_inner_texts() == ["Whole."]


def test_an_error_event_in_the_stream_is_told(reader: Reader) -> None:
    reader.open()
    error = 'event: error\ndata: {"error":{"message":"the engine broke","type":"server_error"}}\n\n'
    reader.answer_with(streamed(["Some"], end=error))
    reader.send("Hello")
    reader.page.get_by_text("the engine broke").wait_for()
    assert reader.answers.all_inner_texts() == ["Some"]


def test_a_refusal_says_why(reader: Reader) -> None:
    reader.allowed.add("400")
    reader.open(temperature=-1)  # no way to say so in the dialog
    reader.send("Hello")
    reader.page.get_by_text("The server refused the request.").wait_for()
    assert "temperature" in reader.page.locator(".detail").inner_text()


def test_too_long_a_conversation_goes_on_without_its_oldest_turns(reader: Reader) -> None:
    reader.allowed.add("400")
    reader.open()
    full = refused(400, "12000 tokens, 8192 allowed", code="context_length_exceeded")
    asked = reader.answer_with(streamed(["One."]), streamed(["Two."]), full, streamed(["Three."]), full)
    for question in ("First", "Second"):
        reader.ask(question)
    reader.send("Third")
    reader.button("Leave out the oldest turns").click()
    reader.page.get_by_text("Three.").wait_for()
    assert [message["content"] for message in asked[-1]["messages"]] == ["Third"]
    assert reader.page.get_by_text("is no longer sent to the model").is_visible()
    reader.page.keyboard.press("Control+k")
    reader.send("x" * 100)
    reader.page.get_by_text("Please shorten it.").wait_for()


def test_a_browser_that_keeps_nothing_still_chats(reader: Reader) -> None:
    reader.page.add_init_script(
        """for (const name of ['localStorage', 'sessionStorage'])
            Object.defineProperty(window, name, { get() { throw new DOMException('denied', 'SecurityError'); } });"""
    )
    reader.page.goto(reader.url)
    reader.answer_with(streamed(["Welcome."]))
    assert reader.ask("Hello") == "Welcome."
    assert reader.page.locator("#chats .open").all_inner_texts() == ["Hello"]
    reader.page.reload()
    assert reader.answers.count() == 0


def test_what_cannot_be_read_in_the_browser_is_as_if_it_were_not_there(reader: Reader) -> None:
    reader.open()
    reader.page.evaluate("() => ['paceline.settings', 'paceline.chats'].map(key => localStorage.setItem(key, '{half'))")
    reader.page.reload()
    reader.answer_with(streamed(["Welcome."]))
    assert reader.ask("Hello") == "Welcome."


def test_nothing_is_asked_for_while_the_page_cannot_be_seen(reader: Reader) -> None:
    asked: list[str] = []
    reader.page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/stats") else None)
    reader.open()
    reader.page.clock.install()
    reader.page.locator("#live-toggle").click()
    reader.page.clock.run_for(5_000)
    seen = len(asked)
    assert seen >= 5
    show = """isHidden => {
        Object.defineProperty(document, 'hidden', { value: isHidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    reader.page.evaluate(show, True)
    reader.page.clock.run_for(60_000)
    assert len(asked) == seen
    reader.page.evaluate(show, False)
    reader.page.clock.run_for(3_000)
    assert len(asked) > seen

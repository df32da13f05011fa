"""The chat page in a browser, on a real server: with a real model, and with made-up answers for what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess

pytest.importorskip("playwright.sync_api")

from page_reader import CHAT_ROUTE, SHORT, Reader, refused, streamed

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 800}
LONG = {"temperature": 0, "max_tokens": 2000, "repetition_penalty": 1.1}


@pytest.fixture
def reader(browser: Browser, server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Reader]:
    """Somebody in a browser without a past; the browser must have nothing to complain about."""
    options: dict[str, Any] = {"viewport": DESKTOP, "locale": "en-GB", **getattr(request, "param", {})}
    context = browser.new_context(**options)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    reader = Reader(context.new_page(), server.url)
    yield reader
    unknown_icons = reader.page.evaluate(
        "() => [...document.querySelectorAll('use')].map(use => use.getAttribute('href'))"
        ".filter(name => !document.querySelector(name))"
    )
    context.close()
    assert reader.complaints == []
    assert unknown_icons == []


def stored(reader: Reader, key: str) -> Any:
    return json.loads(reader.page.evaluate("key => localStorage.getItem(key)", key))


def focused(reader: Reader) -> str:
    """What the focus is on, by its name."""
    return str(
        reader.page.evaluate(
            "() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
        )
    )


# A real model


def test_an_answer_streams_and_tells_what_it_cost(reader: Reader) -> None:
    reader.open(temperature=0, max_tokens=120, repetition_penalty=1.1)
    reader.send("Tell me about rivers.")
    seen = reader.page.evaluate(
        """async () => {
            const lengths = new Set();
            const frame = () => new Promise(requestAnimationFrame);
            while (!document.querySelector('.assistant')) await frame();
            while (document.querySelector('.assistant[aria-busy]')) {
                lengths.add(document.querySelector('.assistant .body').textContent.length);
                await frame();
            }
            return [...lengths];
        }"""
    )
    assert len(seen) > 5, "the text came in pieces"
    figures = reader.page.locator(".assistant .figures").inner_text()
    for word in ("tok/s", "first token", "120 tokens", "cached", "cut at the token limit"):
        assert word in figures
    assert reader.questions.all_inner_texts() == ["Tell me about rivers."]


def test_a_second_question_finds_the_first_in_the_cache(reader: Reader) -> None:
    reader.open(**SHORT)
    reader.ask("Name one animal that can fly, please, and say in which places of the world it lives.")
    reader.ask("And one that can swim.")
    cached = reader.page.locator(".assistant .figures").last.inner_text()
    assert " of " in cached
    assert "0 of" not in cached.split("tokens")[1]


def test_escape_stops_an_answer_and_keeps_what_has_come(reader: Reader) -> None:
    reader.open(**LONG)
    reader.send("Write a long story about the sea.")
    reader.page.wait_for_function("() => document.querySelector('.assistant .body')?.textContent.length > 60")
    assert reader.button("Send").is_hidden()
    reader.page.keyboard.press("Escape")
    reader.wait_for_answers(1)
    text = reader.answers.last.inner_text()
    assert len(text) > 40
    assert "stopped" in reader.page.locator(".figures").last.inner_text()
    assert reader.button("Send").is_visible()
    reader.page.reload()
    assert reader.answers.last.inner_text() == text


def test_the_stop_button_stops_too(reader: Reader) -> None:
    reader.open(**LONG)
    reader.send("Write a long story about the sea.")
    reader.button("Stop").click()
    assert reader.button("Stop").is_hidden()
    assert reader.answering.count() == 0


def test_answers_again_with_the_same_words_at_temperature_0(reader: Reader) -> None:
    reader.open(**SHORT)
    first = reader.ask("What is the capital of France?")
    reader.button("Answer again").click()
    reader.wait_for_answers(1)
    assert reader.answers.all_inner_texts() == [first]


def test_the_system_prompt_and_the_sampling_go_along(reader: Reader) -> None:
    reader.open()
    asked = reader.answer_with(streamed(["Yes."]))
    reader.button("Settings").click()
    reader.page.get_by_label("System prompt").fill("Be brief.")
    given = {"Temperature": "0.5", "Top p": "0.9", "Top k": "40", "Min p": "0.05", "Longest answer": "16", "Seed": "7"}
    for name, value in given.items():
        reader.page.get_by_label(name, exact=True).fill(value)
    reader.page.get_by_label("Repetition penalty").fill("9")  # not allowed: is not sent
    reader.page.get_by_label("Repetition penalty").fill("1.1")
    reader.button("Done").click()
    reader.ask("Hello")
    reader.page.reload()
    reader.ask("Again")
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 16, "seed": 7}
    for request in asked:
        assert request["messages"][0] == {"role": "system", "content": "Be brief."}
        assert {name: request[name] for name in sampling} == sampling
        assert request["repetition_penalty"] == 1.1


def test_every_sampling_setting_is_one_that_the_server_takes(reader: Reader) -> None:
    reader.open(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, max_tokens=4, seed=7, repetition_penalty=1.1)
    assert len(reader.ask("Hello")) > 0


def test_the_panel_shows_figures(reader: Reader) -> None:
    stats = {"tokens_per_s": 123.4, "running": 2, "waiting": 1, "kv_use": 0.25, "prefix_hit_rate": 0.5}
    asked: list[str] = []

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(json=stats)

    reader.page.route("**/stats", answer)
    reader.open()
    values = reader.page.locator("#live output")
    reader.button("Live figures of the server").click()
    reader.page.wait_for_function("() => document.querySelector('#live path').getAttribute('d').includes('L')")
    assert values.all_inner_texts() == ["123", "2 + 1", "25 %", "50 %", "–"]
    reader.page.reload()
    assert reader.page.locator("#live").is_visible(), "it stays open"
    reader.page.wait_for_function("() => document.querySelector('#live path').getAttribute('d').includes('L')")
    reader.button("Live figures of the server").click()
    count = len(asked)
    reader.page.wait_for_timeout(1500)  # longer than a second, after which an open panel asks again
    assert len(asked) == count, "a panel that nobody sees asks for nothing"


# What stays


def test_chats_survive_and_can_be_renamed_deleted_and_brought_back(reader: Reader) -> None:
    reader.open()
    reader.answer_with(streamed(["One."]), streamed(["Two."]))
    reader.ask("First question")
    reader.page.keyboard.press("Control+k")
    reader.ask("Second question")
    reader.page.reload()
    assert reader.page.locator("#chats .open").all_inner_texts() == ["Second question", "First question"]
    assert reader.answers.all_inner_texts() == ["Two."]
    reader.button("Open First question").click()
    assert reader.answers.all_inner_texts() == ["One."]
    reader.page.locator("#chats li").last.hover()
    reader.button("Rename First question").click()
    reader.page.get_by_label("New title").fill("Rivers")
    reader.page.keyboard.press("Enter")
    assert reader.page.locator("#title").inner_text() == "Rivers"
    reader.page.locator("#chats li").last.hover()
    reader.button("Delete Rivers").click()
    assert reader.page.locator("#chats .open").all_inner_texts() == ["Second question"]
    assert reader.answers.count() == 0
    reader.button("Undo").click()
    assert reader.page.locator("#chats .open").all_inner_texts() == ["Second question", "Rivers"]
    assert reader.answers.all_inner_texts() == ["One."]


def test_chats_leave_and_come_back_as_a_file(reader: Reader, tmp_path: Path) -> None:
    reader.open()
    reader.answer_with(streamed(["**One**."]))
    reader.ask("First question")
    with reader.page.expect_download() as download:
        reader.button("Export").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    reader.page.locator("#chats li").hover()
    reader.button("Delete First question").click()
    reader.page.set_input_files("#import-file", file)
    reader.button("Open First question").click()
    assert reader.answers.all_inner_texts() == ["One."]
    file.write_text('{"kind": "something else"}')
    reader.page.set_input_files("#import-file", file)
    reader.page.get_by_text("This file holds no chats").wait_for()


def test_a_message_can_be_copied_edited_and_deleted(reader: Reader) -> None:
    reader.open()
    asked = reader.answer_with(streamed(["**One**."]), streamed(["Two."]), streamed(["Three."]))
    reader.ask("First")
    reader.page.locator(".assistant").hover()
    reader.page.locator(".assistant").get_by_role("button", name="Copy").click()
    reader.page.locator(".assistant").get_by_role("button", name="Copied").wait_for()
    assert reader.page.evaluate("() => navigator.clipboard.readText()") == "**One**."
    reader.ask("Second")
    reader.box.press("ArrowUp")
    assert reader.box.input_value() == "Second"
    assert reader.page.locator("#editing").is_visible()
    reader.page.keyboard.press("Escape")
    assert reader.box.input_value() == ""
    reader.box.press("ArrowUp")
    reader.send("Second, in other words")
    reader.wait_for_answers(2)
    assert [message["content"] for message in asked[-1]["messages"]] == ["First", "**One**.", "Second, in other words"]
    assert reader.answers.all_inner_texts() == ["One.", "Three."]
    reader.page.locator(".user").first.hover()
    reader.page.locator(".user").first.get_by_role("button", name="Delete").click()
    assert reader.questions.all_inner_texts() == ["Second, in other words"]
    assert reader.answers.all_inner_texts() == ["Three."]
    reader.page.reload()
    assert reader.answers.all_inner_texts() == ["Three."]


# Keys and languages


def test_everything_works_by_keyboard(reader: Reader) -> None:
    reader.open()
    reader.answer_with(streamed(["One."]))
    assert focused(reader) == "Message"
    reader.page.keyboard.type("one")
    reader.page.keyboard.press("Shift+Enter")
    reader.page.keyboard.type("two")
    reader.page.keyboard.press("Enter")
    reader.wait_for_answers(1)
    assert reader.questions.all_inner_texts() == ["one\ntwo"]
    reached = set()
    for _ in range(40):
        reader.page.keyboard.press("Tab")
        reached.add(focused(reader))
        is_marked = reader.page.evaluate(
            "() => document.activeElement === document.body || document.activeElement.id === 'box'"
            " || getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        )
        assert is_marked, f"the focus on {focused(reader)!r} cannot be seen"
    for name in (
        "Open one",
        "Rename one",
        "Delete one",
        "Export",
        "Import",
        "Settings",
        "Copy",
        "Edit",
        "Answer again",
    ):
        assert name in reached
    reader.page.keyboard.press("Control+k")
    assert focused(reader) == "Message"
    assert reader.answers.count() == 0


def test_enter_while_an_input_method_composes_sends_nothing(reader: Reader) -> None:
    reader.open()
    asked = reader.answer_with(streamed(["네."]))
    reader.box.focus()
    devtools = reader.page.context.new_cdp_session(reader.page)
    devtools.send("Input.imeSetComposition", {"text": "안녕", "selectionStart": 2, "selectionEnd": 2})
    devtools.send("Input.dispatchKeyEvent", {"type": "rawKeyDown", "key": "Enter", "windowsVirtualKeyCode": 229})
    reader.box.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    assert asked == []
    assert reader.box.input_value() == "안녕"
    devtools.send("Input.insertText", {"text": "안녕"})
    reader.box.press("Enter")
    reader.wait_for_answers(1)
    assert [request["messages"][-1]["content"] for request in asked] == ["안녕"]


def test_speaks_both_languages_and_remembers(reader: Reader) -> None:
    reader.open()
    reader.answer_with(streamed(["One."]))
    reader.ask("Hello")
    reader.button("한국어로 보기").click()
    for text in ("새 대화", "내보내기", "실시간", "설정"):
        assert reader.page.get_by_text(text, exact=True).first.is_visible()
    assert reader.page.locator("html").get_attribute("lang") == "ko"
    assert reader.box.get_attribute("placeholder") == "메시지를 입력하세요"
    assert reader.button("다시 답변받기").count() == 1
    reader.page.reload()
    assert reader.button("새 대화").count() + reader.page.get_by_text("새 대화", exact=True).count() > 0
    reader.button("Show in English").click()
    assert reader.page.get_by_text("New chat", exact=True).first.is_visible()


@pytest.mark.parametrize("reader", [{"locale": "ko-KR"}], indirect=True)
def test_begins_in_the_language_of_the_browser(reader: Reader) -> None:
    reader.page.goto(reader.url)
    assert reader.page.get_by_text("무엇이 궁금하신가요?").is_visible()


@pytest.mark.parametrize("reader", [{"color_scheme": "dark"}], indirect=True)
def test_is_dark_where_the_system_is_and_can_be_switched(reader: Reader) -> None:
    reader.open()

    def brightness() -> int:
        colour = reader.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))

    assert brightness() < 150
    reader.page.locator("#theme").click()
    assert brightness() > 600
    reader.page.reload()
    assert brightness() > 600
    reader.page.locator("#theme").click()
    assert brightness() < 150


@pytest.mark.parametrize("reader", [{"viewport": PHONE, "has_touch": True}], indirect=True)
def test_fits_on_a_phone(reader: Reader) -> None:
    reader.open()
    wide = "```\n" + "x" * 200 + "\n```\n\n| a | b |\n|--|--|\n| " + "y" * 90 + " | z |\n\n" + "w" * 300
    reader.answer_with(streamed([wide]))
    reader.ask("q" * 200)
    for language in ("en", "ko"):
        assert reader.page.locator("html").get_attribute("lang") == language
        assert not reader.scrolls_sideways()
        reader.page.locator("#live-toggle").click()
        assert not reader.scrolls_sideways()
        reader.page.locator("#open-history").click()
        reader.page.locator("#language").click()
        reader.page.keyboard.press("Escape")
        reader.page.locator("#new-chat").wait_for(state="hidden")


# What models may say


def test_markup_in_an_answer_is_only_text(reader: Reader) -> None:
    reader.open()
    evil = "<img src=x onerror=\"document.title='bad'\"> <script>document.title='bad'</script> [a](javascript:alert(1))"
    reader.answer_with(streamed([evil[:20], evil[20:50], evil[50:]]))
    assert reader.ask(evil) == evil
    assert reader.questions.last.inner_text() == evil
    assert reader.page.locator("#log :is(img, script, iframe, a)").count() == 0
    assert reader.page.title() == "Paceline"


def test_code_can_be_copied(reader: Reader) -> None:
    reader.open()
    reader.answer_with(streamed(["So:\n``", "`python\nprint(1)", "\n\nprint(2)\n", "```\nDone."]))
    assert reader.ask("Code, please.").endswith("Done.")
    reader.button("Copy code").click()
    reader.page.wait_for_function("() => document.querySelector('.code .is-done')")
    assert reader.page.evaluate("() => navigator.clipboard.readText()") == "print(1)\n\nprint(2)"


def test_drafted_text_is_marked_by_more_than_colour_where_it_is_asked_for(reader: Reader) -> None:
    reader.open()
    usage = {
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1},
        },
        "timings": {"ttft_s": 0.0123, "decode_tokens_per_s": 123.4},
    }
    reader.answer_with(streamed([[["The **river", False]], [[" Nile**", True], [" is", False]], " long."], usage=usage))
    reader.ask("Which river?")
    figures = reader.page.locator(".assistant .figures span").all_inner_texts()
    assert figures == ["123 tok/s", "first token 12 ms", "5 tokens", "16 of 20 cached", "2 of 3 drafted accepted"]
    mark = reader.page.locator("#log .drafted")
    assert mark.all_inner_texts() == [" Nile"]
    underline = "element => getComputedStyle(element).textDecorationLine"
    assert mark.evaluate(underline) == "none"
    reader.button("Show which text speculation drafted").click()
    assert mark.evaluate(underline) == "underline"
    assert reader.page.get_by_text("Marked text").is_visible()
    reader.page.reload()
    assert mark.evaluate(underline) == "underline"


def test_scrolling_up_is_not_undone_by_what_comes(reader: Reader) -> None:
    reader.open()
    reader.answer_with(streamed([f"Paragraph {number}.\n\n" for number in range(80)]))
    reader.ask("Much, please.")
    distance = (
        "() => { const l = document.querySelector('#log'); return l.scrollHeight - l.scrollTop - l.clientHeight; }"
    )
    assert reader.page.evaluate(distance) < 2
    reader.page.locator("#log").hover()
    reader.page.mouse.wheel(0, -600)
    reader.page.wait_for_function(f"() => ({distance})() > 300")
    reader.page.evaluate("() => document.querySelector('#log').append(document.createElement('hr'))")
    reader.page.set_viewport_size({"width": 1200, "height": 780})
    assert reader.page.evaluate(distance) > 300
    reader.button("To the end").click()
    assert reader.page.evaluate(distance) < 2
    assert reader.button("To the end").is_hidden()


# What goes wrong


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

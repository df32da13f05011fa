"""The chat page for whoever reads it: keys, languages, colours, a phone, and what models may say."""

from __future__ import annotations

import pytest
from page_reader import Reader, streamed

PHONE = {"width": 360, "height": 740}


def focused(reader: Reader) -> str:
    """What the focus is on, by its name."""
    return str(
        reader.page.evaluate(
            "() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
        )
    )


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

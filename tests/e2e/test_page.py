"""The chat page in a browser, on a real server: with a real model, and what the browser keeps of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page_reader import SHORT, Reader, streamed

LONG = {"temperature": 0, "max_tokens": 2000, "repetition_penalty": 1.1}


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


def test_the_panel_shows_the_figures_of_a_real_server(reader: Reader) -> None:
    reader.open(**SHORT)
    reader.button("Live figures of the server").click()
    reader.ask("Name three animals.")
    reader.page.wait_for_function(
        "() => [...document.querySelectorAll('#live output')].slice(0, 4).every(value => /\\d/.test(value.textContent))"
    )


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


def test_a_chat_that_is_deleted_while_it_is_answered_stays_deleted(reader: Reader) -> None:
    reader.open(**LONG)
    reader.send("Write a long story about the sea.")
    reader.page.wait_for_function("() => document.querySelector('.assistant .body')?.textContent.length > 20")
    reader.page.locator("#chats li").hover()
    reader.page.locator("#chats li .icon").last.click()
    assert reader.page.locator("#chats .open").count() == 0
    reader.page.reload()
    assert reader.page.locator("#chats .open").count() == 0

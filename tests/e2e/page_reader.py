"""Somebody who reads the chat page in a browser, and answers that are made up where no model would give them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

PATIENCE_MS = 45_000
CHAT_ROUTE = "**/v1/chat/completions"
SHORT = {"temperature": 0, "max_tokens": 24}


class Reader:
    """Uses the page by what it shows: names, roles, keys. ``complaints`` is what the browser found wrong."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        self.allowed: set[str] = set()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: self._complain(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", lambda request: self._check(request.url))

    def _complain(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(part in text for part in self.allowed):
            self.complaints.append(f"{kind}: {text}")

    def _check(self, url: str) -> None:
        if not url.startswith((self.url + "/", "data:", "blob:")):
            self.complaints.append(f"outside request: {url}")

    def open(self, **sampling: Any) -> Reader:
        """Opens the page; ``sampling`` are settings made before."""
        settings = json.dumps({"sampling": sampling})
        self.page.add_init_script(
            f"if (!localStorage.getItem('paceline.settings')) localStorage.setItem('paceline.settings', {settings!r});"
        )
        self.page.goto(self.url)
        return self

    @property
    def box(self) -> Locator:
        return self.page.locator("#box")

    @property
    def answers(self) -> Locator:
        return self.page.locator(".assistant .body")

    @property
    def questions(self) -> Locator:
        return self.page.locator(".user .body")

    @property
    def answering(self) -> Locator:
        return self.page.locator(".assistant[aria-busy]")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def send(self, text: str) -> None:
        self.box.fill(text)
        self.box.press("Enter")

    def ask(self, text: str) -> str:
        """Sends a message and waits for the whole answer."""
        count = self.answers.count()
        self.send(text)
        self.wait_for_answers(count + 1)
        return self.answers.last.inner_text()

    def wait_for_answers(self, count: int) -> None:
        """Waits until there are so many answers and none is under way."""
        self.page.wait_for_function(
            "count => document.querySelectorAll('.assistant').length === count"
            " && !document.querySelector('.assistant[aria-busy]')",
            arg=count,
        )

    def scrolls_sideways(self) -> bool:
        return bool(
            self.page.evaluate(
                "() => [document.documentElement, ...document.querySelectorAll('main, header, #log, #composer, #live')]"
                ".some(element => element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0)"
            )
        )

    def answer_with(self, *answers: Callable[[Route], None]) -> list[dict[str, Any]]:
        """Has the next requests answered by ``answers`` in turn, the last one from then on; returns what was asked."""
        asked: list[dict[str, Any]] = []

        def answer(route: Route) -> None:
            asked.append(route.request.post_data_json)
            answers[min(len(asked), len(answers)) - 1](route)

        self.page.route(CHAT_ROUTE, answer)
        return asked


def streamed(
    pieces: Iterable[str | list[list[Any]]], *, usage: dict[str, Any] | None = None, end: str = "data: [DONE]\n\n"
) -> Callable[[Route], None]:
    """An answer as a stream: a text a chunk, or a list of [text, whether it was drafted]."""
    chunks: list[dict[str, Any]] = []
    for piece in pieces:
        drafted = piece if isinstance(piece, list) else [[piece, False]]
        content = "".join(text for text, _ in drafted)
        chunks.append({"choices": [{"index": 0, "delta": {"content": content}, "drafted": drafted}]})
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if usage is not None:
        chunks.append({"choices": [], **usage})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)


def refused(status: int, message: str, *, code: str | None = None, **headers: str) -> Callable[[Route], None]:
    """An answer that is an error."""
    body = json.dumps({"error": {"message": message, "type": "", "param": None, "code": code}})
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda route: route.fulfill(status=status, content_type="application/json", body=body, headers=named)

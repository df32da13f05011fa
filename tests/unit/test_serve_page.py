"""The chat page as a document: complete in itself, and its texts in every language."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from importlib import resources

import httpx
import pytest

from paceline.serve.app import build_app
from paceline.serve.keys import KeyRing
from paceline.serve.page.document import page_document
from paceline.serve.service import Service
from paceline.serve.settings import ServeSettings

FOLDER = resources.files("paceline.serve.page")
LANGUAGES = ("en", "ko")


def source(name: str) -> str:
    return FOLDER.joinpath(name).read_text("utf-8")


def texts(language: str) -> dict[str, str]:
    """The texts of one language: a table of plain strings, a line each."""
    block = re.search(rf"^  {language}: \{{\n(.*?)^  \}},$", source("texts.js"), re.MULTILINE | re.DOTALL)
    assert block is not None
    found = dict(re.findall(r'^    (\w+): "(.*)",$', block[1], re.MULTILINE))
    assert len(found) == block[1].count("\n")
    return found


def served(keys: dict[str, str]) -> httpx.Response:
    """What a server answers at `/` while its model still loads."""
    app = build_app(Service(ServeSettings(), KeyRing(keys), model="none"))

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/")

    return asyncio.run(get())


@pytest.mark.parametrize("keys", [{}, {"somebody": "secret"}])
def test_is_served_without_a_key_and_before_the_model_is_there(keys: dict[str, str]) -> None:
    answer = served(keys)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == page_document().policy
    assert answer.text == page_document().html


def test_holds_all_its_styles_and_scripts() -> None:
    html = page_document().html
    for name in (path.name for path in FOLDER.iterdir() if path.name.endswith((".css", ".js"))):
        assert source(name) in html, f"{name} is not in the page"
        assert f'"{name}"' not in html


def test_asks_for_nothing_outside() -> None:
    html = page_document().html
    addresses = set(re.findall(r"https?://[\w.]+", html))
    assert addresses == {"http://www.w3.org"}  # the name space of SVG
    assert not re.search(r"@import|url\(|\bsrc=", html)


def test_the_policy_allows_exactly_the_code_of_the_page() -> None:
    document = page_document()
    policy = dict(part.split(" ", 1) for part in document.policy.split("; "))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        codes = re.findall(rf"<{tag}>(.*?)</{tag}>", document.html, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes]
        assert policy[directive] == " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"


def test_no_text_of_a_model_can_become_markup() -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", page_document().html
    )


def test_every_language_has_every_text_with_the_same_places() -> None:
    english, korean = (texts(language) for language in LANGUAGES)
    assert list(english) == list(korean)
    for key, text in english.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", korean[key])), key


def test_korean_is_korean() -> None:
    same_everywhere = {"top_p", "top_k", "min_p"}
    for key, text in texts("ko").items():
        if key not in same_everywhere | {"otherLanguage", "language"}:
            assert re.search("[가-힣]", text), key


def test_every_text_that_the_markup_names_exists_and_nothing_is_said_without_one() -> None:
    html = source("index.html")
    known = texts("en")
    for key in re.findall(r'data-(?:text|label|placeholder|hint)="(\w+)"', html):
        assert key in known, key
    body = re.sub(r"<(script|title)\b.*?</\1>", "", html.partition("<body>")[2], flags=re.DOTALL)
    words = {word.strip() for word in re.findall(r">([^<>]+)<", body)} - {""}
    assert words == {"Paceline"}


def test_every_text_is_used() -> None:
    code = source("index.html") + "".join(
        source(path.name) for path in FOLDER.iterdir() if path.name.endswith(".js") and path.name != "texts.js"
    )
    composed = {f"{name}Hint" for name in re.findall(r'name: "(\w+)", min', code)}
    composed |= {f"{key}Hint" for key in ("speed", "ttft", "cached", "accepted")} | {"chartQueueValue"}
    unused = {key for key in texts("en") if not re.search(rf"\b{key}\b", code)} - composed
    assert unused == set()


def test_every_icon_exists() -> None:
    html = page_document().html
    drawn = set(re.findall(r'id="icon-(\w+)"', html))
    used = set(re.findall(r'href="#icon-(\w+)"', html)) | set(re.findall(r'iconButton\("(\w+)"', html))
    assert used <= drawn
    assert drawn <= used | {"copy", "retry", "edit", "delete"}

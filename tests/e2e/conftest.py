"""One server for all end-to-end tests that need nothing special of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from page_reader import Reader
from server_process import MODEL, ServerProcess, running_server

from paceline.weights.catalog import resolve_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DESKTOP = {"width": 1280, "height": 800}


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server with SmolLM2 and default settings; shared, so tests must not count on being alone there."""
    resolve_model(MODEL)
    with running_server() as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium without a window; tests that need one are skipped where there is none.

    Ends with each module: while Playwright runs, no other test of the process can run an event loop.
    """
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


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

"""`GET /`: the chat page."""

from __future__ import annotations

from starlette.requests import Request

from paceline.serve.answers import Answer, TextAnswer
from paceline.serve.page.document import page_document
from paceline.serve.service import Exchange, Service


async def show_page(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """The page, with headers that keep everything foreign out of it. It needs no key: it asks for one."""
    document = page_document()
    headers = {
        "Content-Security-Policy": document.policy,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return TextAnswer(document.html, "text/html; charset=utf-8", headers=headers)

"""`/health/live` and `/health/ready`: whether the process answers, and whether it can serve."""

from __future__ import annotations

from starlette.requests import Request

from paceline.serve.answers import Answer, DocumentAnswer
from paceline.serve.service import Exchange, Service


async def live(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """200 while the event loop runs."""
    return DocumentAnswer({"status": "live"})


async def ready(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """200 while requests are taken, 503 while the model loads or the server stops."""
    status = "loading" if not service.is_loaded else "stopping" if service.is_stopping else "ready"
    return DocumentAnswer({"status": status}, status=200 if status == "ready" else 503)

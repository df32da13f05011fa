"""`/health/live` and `/health/ready`: whether the process answers, and whether it can serve."""

from __future__ import annotations

from starlette.requests import Request

from paceline.serve.answers import Answer, DocumentAnswer
from paceline.serve.service import Exchange, Service


async def live(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """200 while the event loop runs."""
    return DocumentAnswer({"status": "live"})


async def ready(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """200 while requests are taken, 503 while the model loads, the engine is broken or hangs in a step, or the server
    stops."""
    age_s = service.llm.progress_age_s() if service.is_loaded else None
    status = service.status
    return DocumentAnswer({"status": status, "progress_age_s": age_s}, status=200 if status == "ready" else 503)

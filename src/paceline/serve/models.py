"""`/v1/models`."""

from __future__ import annotations

from starlette.requests import Request

from paceline.serve.answers import Answer, DocumentAnswer
from paceline.serve.protocol.models import ModelCard, ModelList
from paceline.serve.service import Exchange, Service


async def list_models(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """The one model that is served."""
    card = ModelCard(id=service.model, created=service.started, max_model_len=service.llm.config.context_length)
    return DocumentAnswer(ModelList(data=[card]).model_dump())

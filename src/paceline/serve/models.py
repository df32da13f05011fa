"""`/v1/models`."""

from __future__ import annotations

from starlette.requests import Request

from paceline.serve.answers import Answer, DocumentAnswer
from paceline.serve.protocol.models import ModelCard, ModelList
from paceline.serve.service import Exchange, Service


async def list_models(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """The one model that is served."""
    return DocumentAnswer(ModelList(data=[_card(service)]).model_dump())


async def retrieve_model(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """That model by its name; 404 for another."""
    service.check_model(http.path_params["model"])
    return DocumentAnswer(_card(service).model_dump())


def _card(service: Service) -> ModelCard:
    return ModelCard(id=service.model, created=service.started, max_model_len=service.llm.config.context_length)

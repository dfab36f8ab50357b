"""The routes `GET /v1/models`.

They list the served model under each of its names, and its adapters.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from tandem.frontend.api.openapi import error_response, json_response
from tandem.frontend.api.request_scope import speaks_anthropic
from tandem.frontend.api.service import Service
from tandem.frontend.request.schema import STRING, closed
from tandem.protocol.events import AdapterFacts, ModelFacts


def _card(
    model: ModelFacts, name: str, sampling_defaults: Mapping[str, float], anthropic: bool, weight_version: str = ""
) -> dict[str, Any]:
    """Describe the model under one of its names, in OpenAI's or Anthropic's format.

    weight_version: "" if the weights cannot change; OpenAI's format has it.
    """
    if not anthropic:
        card = {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "tandem",
            "max_model_len": model.max_len,
            "default_sampling_params": sampling_defaults,
        }
        draft = {"draft_model": _draft(model)} if model.draft_model else {}
        return card | _version(weight_version) | draft
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "capabilities": None,
        "max_input_tokens": model.max_len,
        "max_tokens": model.max_len,
    }


def _draft(model: ModelFacts) -> dict[str, str]:
    """Describe the draft model."""
    return {"id": model.draft_model} | _version(model.draft_weight_version)


def _version(weight_version: str) -> dict[str, str]:
    return {"weight_version": weight_version} if weight_version else {}


def _adapter_card(
    model: ModelFacts, facts: AdapterFacts, base: str, sampling_defaults: Mapping[str, float], anthropic: bool
) -> dict[str, Any]:
    """Describe an adapter. base: name of the model that it adapts."""
    card = _card(model, facts.name, sampling_defaults, anthropic)
    if anthropic:
        return card
    return card | {"root": facts.path, "parent": base} | _version(facts.weight_version)


_CARD = closed(
    {
        "id": STRING,
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": STRING,
        "max_model_len": {"type": "integer"},
        "default_sampling_params": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    # The model has the version of its weights, as the last heartbeat reports it. Adapters have their folder, the model
    # that they adapt, and the version of its weights when they were loaded, which the draft model has too.
    {
        "root": STRING,
        "parent": STRING,
        "weight_version": STRING,
        "draft_model": closed({"id": STRING}, {"weight_version": STRING}),
    },
)
_ANTHROPIC_CARD = closed(
    {
        "type": {"const": "model"},
        "id": STRING,
        "display_name": STRING,
        "created_at": STRING,
        "lifecycle": {"const": "active"},
        "capabilities": {"type": "null"},
        "max_input_tokens": {"type": "integer"},
        "max_tokens": {"type": "integer"},
    }
)
_LIST = closed({"object": {"const": "list"}, "data": {"type": "array", "items": _CARD}})
_ANTHROPIC_LIST = closed(
    {
        "data": {"type": "array", "items": _ANTHROPIC_CARD},
        "has_more": {"const": False},
        "first_id": STRING,
        "last_id": STRING,
    }
)
_NOT_READY = error_response("Not ready; try again later.")


def models_router(service: Service) -> APIRouter:
    """Build the routes of `/v1/models`.

    Requests with the header `anthropic-version` get Anthropic's format.
    """
    router = APIRouter()

    def weight_version() -> str:
        weights = service.client.weights
        return "" if weights is None else weights.version

    @router.get(
        "/v1/models",
        openapi_extra={
            "responses": {
                "200": json_response("The served model.", {"anyOf": [_LIST, _ANTHROPIC_LIST]}),
                "503": _NOT_READY,
            }
        },
    )
    async def list_models(request: Request) -> dict[str, Any]:
        """List the names of the served model."""
        model, anthropic = service.ready().model, speaks_anthropic(request.scope)
        names = service.names.listed(model.name)
        version = weight_version()
        cards = [_card(model, name, service.sampling_defaults, anthropic, version) for name in names]
        cards += [
            _adapter_card(model, facts, names[0], service.sampling_defaults, anthropic)
            for facts in service.client.adapters.all
            if facts.name not in names
        ]
        if not anthropic:
            return {"object": "list", "data": cards}
        return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}

    @router.get(
        "/v1/models/{model:path}",
        openapi_extra={
            "responses": {
                "200": json_response("The served model.", {"anyOf": [_CARD, _ANTHROPIC_CARD]}),
                "404": error_response("The model does not exist."),
                "503": _NOT_READY,
            }
        },
    )
    async def get_model(model: str, request: Request) -> dict[str, Any]:
        """Describe the served model, given one of its names."""
        served, adapters = service.ready().model, service.client.adapters
        names = service.names.listed(served.name)
        service.names.resolve(model, served.name, adapters)
        for facts in adapters.all:
            if facts.name == model and model not in names:
                defaults = service.sampling_defaults
                return _adapter_card(served, facts, names[0], defaults, speaks_anthropic(request.scope))
        return _card(served, model, service.sampling_defaults, speaks_anthropic(request.scope), weight_version())

    return router

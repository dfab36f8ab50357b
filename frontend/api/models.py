"""The routes `GET /v1/models`: the one model that the engine serves."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from tandem.frontend.api.openapi import error_response, json_response
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError
from tandem.frontend.request.schema import STRING, closed
from tandem.protocol.events import ModelFacts


def _card(model: ModelFacts, sampling_defaults: Mapping[str, float]) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tandem",
        "max_model_len": model.max_len,
        "default_sampling_params": sampling_defaults,
    }


_CARD = closed(
    {
        "id": STRING,
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": STRING,
        "max_model_len": {"type": "integer"},
        "default_sampling_params": {"type": "object", "additionalProperties": {"type": "number"}},
    }
)
_LIST = closed({"object": {"const": "list"}, "data": {"type": "array", "items": _CARD}})
_NOT_READY = error_response("Not ready; try again later.")


def models_router(service: Service) -> APIRouter:
    """Build the routes of `/v1/models`."""
    router = APIRouter()

    @router.get(
        "/v1/models",
        openapi_extra={"responses": {"200": json_response("The served model.", _LIST), "503": _NOT_READY}},
    )
    async def list_models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [_card(service.ready().model, service.sampling_defaults)]}

    @router.get(
        "/v1/models/{model:path}",
        openapi_extra={
            "responses": {
                "200": json_response("The served model.", _CARD),
                "404": error_response("The model does not exist."),
                "503": _NOT_READY,
            }
        },
    )
    async def get_model(model: str) -> dict[str, Any]:
        """Describe the served model, given its name."""
        served = service.ready().model
        if model != served.name:
            raise ApiError(
                404, f"the model {model!r} does not exist; this server has {served.name!r}", "model", "model_not_found"
            )
        return _card(served, service.sampling_defaults)

    return router

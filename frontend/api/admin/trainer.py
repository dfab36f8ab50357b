"""Routes by which trainers drive a server, under vLLM's names: pause and resume, facts, and the prefix cache."""

from typing import Any, cast

from fastapi import APIRouter, Request

from tandem.frontend.api.admin.pause import DEFAULT_MODE, query_flag, query_word, record_unknown
from tandem.frontend.api.openapi import error_response, json_response
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError
from tandem.frontend.request.schema import closed
from tandem.protocol.commands import PAUSE_MODES, PauseMode
from tandem.protocol.events import ModelFacts

_FORMATS = ("json",)
_NOT_READY = error_response("Not ready; try again later.")
_STATUS = closed({"status": {"type": "string"}})


def vllm_config(model: ModelFacts) -> dict[str, Any]:
    """Return the part of vLLM's configuration that trainers read."""
    lora = {"max_lora_rank": model.max_lora_rank, "max_loras": model.max_loras} if model.max_loras else None
    return {
        "model_config": {
            "dtype": f"torch.{model.dtype}",
            "logprobs_mode": model.logprobs_mode,
            "max_model_len": model.max_len,
        },
        "lora_config": lora,
        "parallel_config": {"data_parallel_size": 1},
        "weight_transfer_config": {"backend": model.weight_transfer} if model.weight_transfer else None,
    }


def trainer_router(service: Service) -> APIRouter:
    """Build the routes."""
    router = APIRouter()
    calls = service.client.calls

    @router.post(
        "/pause",
        openapi_extra={
            "parameters": [
                {"name": "mode", "in": "query", "schema": {"enum": [*PAUSE_MODES], "default": DEFAULT_MODE}},
                {"name": "clear_cache", "in": "query", "schema": {"type": "boolean", "default": True}},
                {"name": "wait_for_inflight_requests", "in": "query", "schema": {"type": "boolean", "default": False}},
            ],
            "responses": {
                "200": json_response("The engine is paused.", _STATUS),
                "400": error_response("A parameter has another value than those allowed."),
                "409": error_response("The engine was resumed before it had paused."),
                "503": _NOT_READY,
            },
        },
    )
    async def pause(request: Request) -> dict[str, str]:
        """Pause the engine under vLLM's rules.

        Modes `abort` and `wait` refuse requests that arrive, `keep` lets them wait. After an update of the weights,
        requests that were kept are computed again, with `clear_cache=false` they continue with their KV.
        """
        record_unknown(service, request, "mode", "clear_cache", "wait_for_inflight_requests")
        mode = cast(PauseMode, query_word(request, "mode", PAUSE_MODES, DEFAULT_MODE))
        if query_flag(request, "wait_for_inflight_requests", default=False):
            mode = "wait"
        clear_cache = query_flag(request, "clear_cache", default=True)
        if refusal := await calls.pause(mode, mode != "keep", clear_cache):
            raise ApiError(409, refusal, None, "engine_resumed")
        return {"status": "paused"}

    @router.post(
        "/resume",
        openapi_extra={"responses": {"200": json_response("The engine runs.", _STATUS), "503": _NOT_READY}},
    )
    async def resume() -> dict[str, str]:
        """Have the engine go on where a pause stopped it."""
        await calls.resume()
        return {"status": "resumed"}

    is_paused_body = closed({"is_paused": {"type": "boolean"}})

    @router.get(
        "/is_paused",
        openapi_extra={"responses": {"200": json_response("The state.", is_paused_body), "503": _NOT_READY}},
    )
    async def is_paused() -> dict[str, bool]:
        """Tell whether the engine is paused or about to be."""
        return {"is_paused": (await calls.inspect_pause()).mode is not None}

    @router.get(
        "/server_info",
        openapi_extra={
            "parameters": [{"name": "config_format", "in": "query", "schema": {"enum": [*_FORMATS]}}],
            "responses": {
                "200": json_response("The configuration.", {"type": "object"}),
                "400": error_response("The format is unknown."),
                "503": _NOT_READY,
            },
        },
    )
    async def server_info(request: Request) -> dict[str, Any]:
        """Return the part of the configuration that trainers read, as `vllm_config`."""
        query_word(request, "config_format", _FORMATS, _FORMATS[0])
        return {"vllm_config": vllm_config(service.ready().model)}

    world_size = closed({"world_size": {"type": "integer"}})

    @router.get(
        "/get_world_size", openapi_extra={"responses": {"200": json_response("Number of receivers.", world_size)}}
    )
    async def get_world_size() -> dict[str, int]:
        """Return the number of processes that receive weights: one engine."""
        return {"world_size": 1}

    @router.post(
        "/reset_prefix_cache",
        openapi_extra={
            "responses": {
                "200": json_response("Whether it is empty now.", closed({"success": {"type": "boolean"}})),
                "503": _NOT_READY,
            }
        },
    )
    async def reset_prefix_cache() -> dict[str, bool]:
        """Drop the cached KV of prompts. Without success, running requests still hold some of it."""
        return {"success": not await calls.reset_prefix_cache()}

    return router

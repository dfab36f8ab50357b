"""`/admin/scheduler`: what the engine's scheduler holds, and by which policy it goes."""

from typing import Any

from fastapi import APIRouter, Request

from tandem.frontend.api.openapi import error_response, json_response, takes
from tandem.frontend.api.service import Service
from tandem.frontend.errors import unsupported
from tandem.frontend.formats.inspection import shown
from tandem.frontend.routes.intake import parse_body
from tandem.frontend.schemas.openapi_scheduler import INSPECTION, POLICY
from tandem.frontend.schemas.scheduler import parse_policy


def scheduler_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/admin/scheduler",
        openapi_extra={
            "responses": {
                "200": json_response("Its state at one moment.", INSPECTION),
                "503": error_response("Not ready; try again later."),
            }
        },
    )
    async def get_scheduler() -> dict[str, Any]:
        """Queue, rows, pages, prefix cache and sessions of the engine."""
        return shown(await service.client.calls.inspect(), service.ready().limits)

    @router.post("/admin/scheduler", openapi_extra=takes(POLICY, json_response("It is in force.", POLICY), False))
    async def set_scheduler(request: Request) -> dict[str, Any]:
        """Changes the scheduling policy from the next step on, for all that runs and waits."""
        async with service.arrivals.request() as share:
            policy = await parse_body(request, share, service, parse_policy)
        if refusal := await service.client.calls.set_policy(policy):
            raise unsupported(refusal, "policy")
        return {"policy": policy}

    return router

"""The route `DELETE /v1/sessions/{id}`.

It drops the KV cache that is kept for a session.
"""

from typing import Any

from fastapi import APIRouter, Request

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.openapi import error_response, json_response
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError
from tandem.frontend.request.schema import STRING, closed

_DELETED = closed({"id": STRING, "object": {"const": "session"}, "deleted": {"const": True}})


def sessions_router(service: Service) -> APIRouter:
    """Build the route that deletes a session."""
    router = APIRouter()

    # A name may contain slashes.
    @router.delete(
        "/v1/sessions/{session_id:path}",
        openapi_extra={
            "responses": {
                "200": json_response("The session is deleted.", _DELETED),
                "404": error_response("The session does not exist."),
                "503": error_response("Not ready; try again later."),
            }
        },
    )
    async def end_session(session_id: str, request: Request) -> dict[str, Any]:
        """Free the KV cache kept for a session.

        This happens at once, or when the session's turn in progress ends.
        """
        if not session_id:
            raise ApiError(404, "name the session to end: DELETE /v1/sessions/{id}", "session_id", "session_not_found")
        if not await service.client.calls.end_session(session_id, key_name(request.scope)):
            raise ApiError(404, f"the session {session_id[:300]!r} does not exist", "session_id", "session_not_found")
        return {"id": session_id, "object": "session", "deleted": True}

    return router

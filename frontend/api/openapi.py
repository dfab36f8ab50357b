"""Parts of `/openapi.json` that describe requests and responses of the routes."""

from collections.abc import Mapping

from tandem.frontend.request.schema import STRING, Schema, closed

ERROR_BODY = closed(
    {
        "error": closed(
            {name: {"type": ["string", "null"]} if name in ("param", "code") else STRING
             for name in ("message", "type", "param", "code")}
        )
    }
)  # fmt: skip


_OUTPUT: Schema = {
    "description": "The output, or its events if `stream` is true.",
    "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": STRING}},
}
_BUSY = "The session has a turn in progress; try again later."

ANTHROPIC_ERROR_BODY = closed(
    {"type": {"const": "error"}, "error": closed({"type": STRING, "message": STRING}), "request_id": STRING}
)
"""Body of an error in the shape of Anthropic's API."""


def error_response(description: str, body: Schema = ERROR_BODY) -> Schema:
    """Describe a response with an error body."""
    return {"description": description, "content": {"application/json": {"schema": body}}}


def json_response(description: str, schema: Schema) -> Schema:
    """Describe a response with a JSON body of this schema."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def takes(body: Schema, response: Schema, names_model: bool = True) -> Schema:
    """Describe a route that takes this body.

    `response` is its response of status 200.
    """
    errors = {
        "400": "The body is malformed, a value cannot be served, or it is more than the model can take.",
        **({"404": "The model does not exist."} if names_model else {}),
        "413": "The body is too large.",
        "415": "The body is compressed, or not JSON.",
        "429": "Too busy; try again after the seconds of Retry-After.",
        "503": "Not ready; try again later.",
    }
    return _takes(body, response, errors, ERROR_BODY)


def takes_anthropic(body: Schema, response: Schema) -> Schema:
    """Describe a route of Anthropic's API that takes this body.

    `response` is its response of status 200.
    """
    errors = {
        "400": "The body is malformed, not JSON, or more than the model can take; or a value is not supported.",
        "404": "The model does not exist.",
        "413": "The body is too large.",
        "529": "Not ready, or too busy; try again later.",
    }
    return _takes(body, response, errors, ANTHROPIC_ERROR_BODY)


def _takes(body: Schema, response: Schema, errors: Mapping[str, str], error_body: Schema) -> Schema:
    described = {status: error_response(text, error_body) for status, text in errors.items()}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": response, **described},
    }


def generates_anthropic(body: Schema) -> Schema:
    """Describe a route of Anthropic's API that answers with the model's output."""
    described = takes_anthropic(body, _OUTPUT)
    described["responses"]["409"] = error_response(_BUSY, ANTHROPIC_ERROR_BODY)
    return described


def generates(body: Schema) -> Schema:
    """Describe a route that takes this body and answers with the output of the model."""
    described = takes(body, _OUTPUT)
    described["responses"]["409"] = error_response(_BUSY)
    return described

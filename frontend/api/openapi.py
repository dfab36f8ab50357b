"""Parts of `/openapi.json` that describe requests and responses of the routes."""

from tandem.frontend.request.schema import STRING, Schema, closed

ERROR_BODY = closed(
    {
        "error": closed(
            {name: {"type": ["string", "null"]} if name in ("param", "code") else STRING
             for name in ("message", "type", "param", "code")}
        )
    }
)  # fmt: skip


def error_response(description: str) -> Schema:
    """Describe a response with an error body."""
    return {"description": description, "content": {"application/json": {"schema": ERROR_BODY}}}


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
        "503": "Not ready, or too busy; try again later.",
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": response, **{status: error_response(text) for status, text in errors.items()}},
    }


def generates(body: Schema) -> Schema:
    """Describe a route that takes this body and answers with the output of the model."""
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": STRING}}
    described = takes(body, {"description": "The output, or its events if `stream` is true.", "content": content})
    described["responses"]["409"] = error_response("The session has a turn in progress; try again later.")
    return described

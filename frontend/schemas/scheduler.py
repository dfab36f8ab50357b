"""The body of `POST /admin/scheduler`."""

from tandem.frontend.request.fields import BodyFormat, FieldReader

_BODY = BodyFormat(("policy",))


def parse_policy(body: bytes) -> str:
    """The name of a policy; which there are, the engine says. Raises ApiError 400, 422."""
    fields = FieldReader(_BODY.split(body))
    policy = fields.required_text("policy")
    fields.finish()
    return policy

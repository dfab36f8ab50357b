"""Flags of the limits on requests and connections."""

from typing import get_args

from tandem.frontend.config import DEFAULT_BODY_MIB, MEBIBYTE, FrontendConfig, UnknownFields
from tandem.frontend.flags.flag import COUNT, MAX_INT32, SECONDS, Flag
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.request.limits import RequestLimits
from tandem.frontend.request.options import MAX_N, MAX_STOPS
from tandem.protocol.engine_options import parse_count
from tandem.protocol.params import MAX_TOP_LOGPROBS

_LIMITS, _CONNECTIONS = "request limits", "connections"

# fmt: off
LIMIT_FLAGS = (
    Flag("max_body", _LIMITS, "maximum size of a request body in MiB", int, (1, 1024), struct=FrontendConfig,
         default=DEFAULT_BODY_MIB, to_field=lambda size: size * MEBIBYTE),
    Flag("max_n", _LIMITS, "maximum number of choices of a request", int, (1, MAX_N), struct=RequestLimits),
    Flag("max_top_logprobs", _LIMITS, "maximum number of alternatives reported for each token", int,
         (0, MAX_TOP_LOGPROBS), struct=RequestLimits),
    Flag("max_stop_strings", _LIMITS, "maximum number of stop strings of a request", int, (0, MAX_STOPS),
         struct=RequestLimits),
    Flag("max_queued_tokens", _LIMITS, "maximum number of prompt tokens that wait for their first output, of all "
         "frontends together; further requests get a 429; a frontend on its own can only lower its engine's limit",
         parse_count, COUNT, struct=FrontendConfig),
    Flag("unknown_fields", _LIMITS, "what to do with request fields that have no effect: ignore them and name them in "
         "the header x-tandem-ignored, or refuse the request", choices=get_args(UnknownFields), struct=FrontendConfig),
    Flag("max_prompt_tokens", _LIMITS, "maximum number of tokens of a prompt", parse_count, COUNT, struct=RequestLimits,
         default_text="the model's context length"),
    Flag("limit_concurrency", _CONNECTIONS, "maximum number of open connections, of which an eighth (1 to 64) is kept "
         "from requests; beyond it the oldest one without a request is closed", int, (2, MAX_INT32),
         struct=ConnectionLimits, field="max_connections", default_text="16384, or what ulimit -n has room for"),
    Flag("timeout_keep_alive", _CONNECTIONS, "seconds for which a connection waits for its next request", float,
         SECONDS, struct=ConnectionLimits, field="keep_alive_timeout"),
    Flag("client_header_timeout", _CONNECTIONS, "seconds in which all headers of a request, or a TLS handshake, must "
         "arrive", float, SECONDS, struct=ConnectionLimits, field="header_timeout"),
    Flag("client_body_timeout", _CONNECTIONS, "seconds in which a body must arrive, plus 1 s for each 16 KiB received",
         float, SECONDS, struct=ConnectionLimits, field="body_timeout"),
    Flag("send_timeout", _CONNECTIONS, "seconds after which a client that reads nothing of its answer is given up",
         float, SECONDS, struct=ConnectionLimits),
)
# fmt: on

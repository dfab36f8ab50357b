"""Flags of what the log and the traces tell of requests."""

from tandem.frontend.config import FrontendConfig
from tandem.frontend.flags.flag import Flag

_LOG = "log and traces of requests"
_MAX_LEN = 2**20

# fmt: off
LOG_FLAGS = (
    Flag("access_log", _LOG, "on: log a line at the end of each request, but for health checks and scrapes, which have "
         "one at --log-level debug", choices=("on", "off"), default="on", struct=FrontendConfig,
         to_field=lambda word: word == "on"),
    Flag("log_requests", _LOG, "on: log the prompt and the parameters of each request; off: log no part of a prompt"
         , choices=("on", "off"), default="off", struct=FrontendConfig, to_field=lambda word: word == "on"),
    Flag("max_log_len", _LOG, "maximum number of characters of a prompt that --log-requests logs", int, (1, _MAX_LEN),
         struct=FrontendConfig),
    Flag("otlp_traces_endpoint", _LOG, "http or https URL of an OpenTelemetry collector, which gets a trace of each "
         "sampled request over OTLP/HTTP; OTEL_TRACES_SAMPLER chooses among requests without traceparent",
         metavar="URL", struct=FrontendConfig, default_text="none"),
)
# fmt: on

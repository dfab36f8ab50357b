"""Flags of a process that watches the engine's heartbeat, and of its log."""

from typing import get_args

from tandem.frontend.config import FrontendConfig
from tandem.frontend.flags.flag import SECONDS, Flag
from tandem.protocol.logs import LOG_FORMATS, LogLevel

_WATCH, _LOG = "engine watchdog", "log"

# fmt: off
WATCH_FLAGS = (
    Flag("beat_timeout", _WATCH, "seconds without a heartbeat after which the engine counts as lost", float, SECONDS,
         struct=FrontendConfig),
    Flag("hang_timeout", _WATCH, "seconds without a heartbeat after which the engine or a frontend is killed and "
         "started again", float, SECONDS, struct=FrontendConfig),
    Flag("step_timeout", _WATCH, "seconds without a completed step, with work pending, after which the engine counts "
         "as hung", float, SECONDS, struct=FrontendConfig),
    Flag("log_level", _LOG, "least severe level of messages to log", choices=get_args(LogLevel), is_everyday=True,
         struct=FrontendConfig),
    Flag("log_format", _LOG, "form of the lines of the log, in all processes: text, or a JSON object a line",
         choices=LOG_FORMATS, struct=FrontendConfig),
)
# fmt: on

"""Log lines of every process: time, process, level and message."""

import logging
import sys
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
"""Least severe level that is written."""

_QUIET = {
    "asyncio": logging.INFO,
    "uvicorn.error": logging.WARNING,
    "httpx": logging.WARNING,
    "httpx2": logging.WARNING,
}
"""Loggers of libraries that say nothing of use below these levels, unless everything is asked for."""


def configure_logging(process: str, level: LogLevel) -> None:
    """Write the log of this process to stderr.

    `process` names it in each line, because all processes of a service share one terminal.
    """
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s {process} %(levelname)s %(message)s", stream=sys.stderr
    )
    if level != "debug":
        for name, least in _QUIET.items():
            logging.getLogger(name).setLevel(max(least, getattr(logging, level.upper())))

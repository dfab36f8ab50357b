"""Reload the settings of a running service on SIGHUP."""

import argparse
import logging

from tandem.frontend.supervisor.frontends.frontends import Frontends
from tandem.frontend.supervisor.service_manager import ServiceManager
from tandem.frontend.supervisor.supervised_engine import SupervisedEngine
from tandem.protocol.logs import AUDIT_LOGGER, LogLevel, set_log_level, with_fields

audit = logging.getLogger(AUDIT_LOGGER)


class Reloader:
    """Reload the log level, and have each frontend reload its files.

    These are API keys and TLS files. The engine core watches a file with the log level.

    arguments: the parsed flags, from which later frontends get the log level. Its attribute `reread` parses the command
    line and the `--config` file again.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        engine: SupervisedEngine | None,
        frontends: Frontends | None,
        manager: ServiceManager,
    ) -> None:
        self._engine = engine
        self._arguments = arguments
        self._frontends = frontends
        self._manager = manager

    def reload(self) -> None:
        """Reload everything; invalid settings are not applied."""
        self._manager.reloading()
        level = self._read_level()
        self._arguments.log_level = level
        set_log_level(level)
        if self._engine is not None:
            self._engine.set_log_level(level)
        message = "reload: each frontend reads its API keys and TLS files again"
        audit.info(message, extra=with_fields(log_level=level))
        if self._frontends is not None:
            self._frontends.reload(level)
        self._manager.reloaded()

    def _read_level(self) -> LogLevel:
        before: LogLevel = self._arguments.log_level
        try:
            level: LogLevel = self._arguments.reread().log_level
        except SystemExit:  # the parser has printed the reason
            message = "--config was not reloaded, its log level stays"
            audit.error(message, extra=with_fields(file=str(self._arguments.config), log_level=before))
            return before
        return level

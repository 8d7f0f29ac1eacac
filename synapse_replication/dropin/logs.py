"""A logger that writes to the host's log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from twisted.logger import formatEvent


class StandardLogger:
    """Writes to Python's ``logging``, which the host uses for its own log lines.

    Its methods are those of :class:`twisted.logger.Logger` that this package's
    observers call. Failures are logged with their tracebacks, but not through Twisted's
    log, because a test runner treats a failure in Twisted's log as a failure of the
    test.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def _write(self, level: int, format: str, fields: Mapping[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            text = formatEvent({"log_format": format, **fields})
            failure = fields.get("log_failure")
            error = None if failure is None else failure.value
            self._logger.log(level, "%s", text, exc_info=error)

    def debug(self, format: str, **fields: Any) -> None:
        """Write a line for debugging."""
        self._write(logging.DEBUG, format, fields)

    def info(self, format: str, **fields: Any) -> None:
        """Write an informational line."""
        self._write(logging.INFO, format, fields)

    def warn(self, format: str, **fields: Any) -> None:
        """Write a warning that an operator should check."""
        self._write(logging.WARNING, format, fields)

    def error(self, format: str, **fields: Any) -> None:
        """Write an error."""
        self._write(logging.ERROR, format, fields)

    def critical(self, format: str, **fields: Any) -> None:
        """Write an error that should never happen."""
        self._write(logging.CRITICAL, format, fields)

"""Our log lines in the logs of the host."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from twisted.logger import formatEvent

__all__ = ["StandardLogger"]


class StandardLogger:
    """Writes to Python's ``logging``, where the host's own log lines go.

    It takes what :class:`twisted.logger.Logger` takes. Failures go there directly,
    with their tracebacks, and not through Twisted: a test runner takes what
    Twisted logs as a failure for one of the test.
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
        """Write for who looks for a fault."""
        self._write(logging.DEBUG, format, fields)

    def info(self, format: str, **fields: Any) -> None:
        """Write what is good to know."""
        self._write(logging.INFO, format, fields)

    def warn(self, format: str, **fields: Any) -> None:
        """Write what an operator should look at."""
        self._write(logging.WARNING, format, fields)

    def error(self, format: str, **fields: Any) -> None:
        """Write what went wrong."""
        self._write(logging.ERROR, format, fields)

    def critical(self, format: str, **fields: Any) -> None:
        """Write what should never happen."""
        self._write(logging.CRITICAL, format, fields)

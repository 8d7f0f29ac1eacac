"""Text about failed connections, for log lines and the status page."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IConnector
from twisted.python.reflect import safe_str


def error_text(error: BaseException | None) -> str:
    """Return the text of an error as one line without a full stop.

    Twisted's connection errors rephrase the operating system's error; for these, only
    the operating system's text is returned.

    :param error: the ``value`` of a ``Failure``, whose type permits ``None``.
    """
    number = error.osError if isinstance(error, ConnectError) else None
    if isinstance(number, int):
        return os.strerror(number)
    text = " ".join(safe_str(error).split()).rstrip(".")
    return text or type(error).__name__


def destination(connector: IConnector) -> str:
    """Return a connector's destination: ``HOST:PORT`` or the path of a Unix socket.

    The result is empty while the destination is unknown, that is, until a Sentinel has
    returned the master's address.
    """
    address: Any = connector.getDestination()
    if hasattr(address, "host"):
        return f"{address.host}:{address.port}"
    return os.fsdecode(getattr(address, "name", None) or b"")


def with_location(where: str, why: str) -> str:
    """Return the reason for a failure, prefixed with its location.

    :param where: the location, for instance ``HOST:PORT``; empty for no prefix.
    """
    return f"{where}: {why}" if where else why

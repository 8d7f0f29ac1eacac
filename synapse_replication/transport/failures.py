"""Says why a connection could not be made, and where to, for log lines and pages."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IConnector
from twisted.python.reflect import safe_str

__all__ = ["at", "destination", "one_line"]


def one_line(error: BaseException | None) -> str:
    """Return the text of an error in one line, without a full stop.

    Errors of Twisted repeat that of the system in words of their own; only the
    system's is returned.

    :param error: that of a ``Failure``, typed as it is.
    """
    number = error.osError if isinstance(error, ConnectError) else None
    if isinstance(number, int):
        return os.strerror(number)
    text = " ".join(safe_str(error).split()).rstrip(".")
    return text or type(error).__name__


def destination(connector: IConnector) -> str:
    """Return the ``HOST:PORT``, or the path of the socket, that is connected to.

    Empty if it is not known: before a Sentinel has named the master.
    """
    address: Any = connector.getDestination()
    if hasattr(address, "host"):
        return f"{address.host}:{address.port}"
    return os.fsdecode(getattr(address, "name", None) or b"")


def at(where: str, why: str) -> str:
    """Return why something failed, after where it did, if that is known."""
    return f"{where}: {why}" if where else why

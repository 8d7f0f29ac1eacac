"""Text about failed connections, for log lines and the status page.

The text of a common TLS error says what the error means for the operator.
"""

from __future__ import annotations

import os
from typing import Any

from OpenSSL import SSL
from service_identity import VerificationError
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IConnector
from twisted.python.reflect import safe_str

#: Explanations of OpenSSL errors, by the end of the error's message.
_MEANINGS = {
    "certificate verify failed": "the peer's certificate was not issued by an "
    "authority that this process trusts, or has expired",
    "peer did not return a certificate": "the peer connected without a certificate; "
    "configure one for it",
    "alert certificate required": "the peer requires a certificate; configure one for "
    "this process",
    "alert unknown ca": "the peer does not trust the authority of this process's "
    "certificate",
    "alert bad certificate": "the peer rejects this process's certificate",
    "alert handshake failure": "the peer rejects the connection, perhaps because it "
    "requires a certificate",
    "alert certificate expired": "this process's certificate has expired",
    "wrong version number": "the peer does not speak TLS",
    "http request": "the peer speaks HTTP without TLS",
    "unexpected eof while reading": "the peer closed the connection during TLS",
}


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


def explain(error: BaseException | None) -> str:
    """Return the text of a connection error, with the meaning of common TLS errors.

    :param error: as for :func:`error_text`.
    """
    if isinstance(error, VerificationError):
        wanted = ", ".join(_show(e.mismatched_id) for e in error.errors)
        return (
            f"TLS: the peer's certificate is not for {wanted}; connect by a name that "
            "the certificate contains"
        )
    if not isinstance(error, SSL.Error):
        return error_text(error)
    text = messages(error)
    for end, meaning in _MEANINGS.items():
        if text.endswith(end):
            return f"TLS: {text}: {meaning}"
    return f"TLS: {text or error_text(error)}"


def _show(wanted: Any) -> str:
    name = getattr(wanted, "hostname", None) or getattr(wanted, "ip", "that name")
    return name.decode() if isinstance(name, bytes) else str(name)


def messages(error: BaseException) -> str:
    """Return the messages of an OpenSSL error as one text."""
    if error.args and isinstance(error.args[0], list):
        return "; ".join(str(entry[-1]) for entry in error.args[0])
    return ", ".join(str(part) for part in error.args)


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

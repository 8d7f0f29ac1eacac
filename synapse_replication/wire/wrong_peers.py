"""Detection of peers that speak another protocol, such as TLS or HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from synapse_replication.errors import RemoteProtocolError, excerpt

#: The number of bytes of an unexpected first word that the error quotes.
_FIRST_WORD: Final = 12
#: First words of HTTP lines, in upper case. No command has such a name.
HTTP_WORDS: Final = frozenset(
    [
        "GET",
        "POST",
        "PUT",
        "HEAD",
        "DELETE",
        "OPTIONS",
        "PATCH",
        "CONNECT",
        "TRACE",
        "PRI",
        "HOST:",
    ]
)
#: The first bytes of a TLS handshake record and of a TLS alert record.
_TLS_HANDSHAKE, _TLS_ALERT = b"\x16\x03", b"\x15\x03"


def find_tls(data: bytes) -> RemoteProtocolError | None:
    """Return an error if the first bytes of a connection are a TLS record."""
    if data.startswith((_TLS_HANDSHAKE, _TLS_ALERT)):
        return RemoteProtocolError(
            "the peer speaks TLS, and this end of the connection does not"
        )
    return None


def find_http(lines: Iterable[bytes]) -> RemoteProtocolError | None:
    """Return an error if one of the lines looks like an HTTP request line."""
    return http_error() if any(b" HTTP/1." in line for line in lines) else None


def find_wrong_greeting(lines: Iterable[bytes]) -> RemoteProtocolError | None:
    """Return an error if the first line that a client receives is not SERVER."""
    first = next(filter(None, lines), None)
    if first is None or first.startswith(b"SERVER "):
        return None
    # These bytes suffice to recognise HTTP or SSH, and are too few to reveal a secret.
    shown = excerpt(first.split(b" ")[0][:_FIRST_WORD])
    return RemoteProtocolError(
        f"the first line begins with '{shown}' instead of SERVER: is this the port of "
        "a replication listener?"
    )


def http_error() -> RemoteProtocolError:
    """Return the error for a peer that speaks HTTP."""
    return RemoteProtocolError(
        "this is a replication listener, which does not speak HTTP"
    )


def no_name_error() -> RemoteProtocolError:
    """Return the error for a command that a client must not send before NAME."""
    return RemoteProtocolError("send NAME first: it identifies the connection")

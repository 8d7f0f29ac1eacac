"""Explanations of TLS errors."""

from __future__ import annotations

from typing import Any

from OpenSSL import SSL
from service_identity import VerificationError

from synapse_replication.transport.error_text import error_text

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


def explain(error: BaseException) -> str:
    """Return the text of a connection error, with the meaning of common TLS errors."""
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

"""Text for display to users."""

from __future__ import annotations

import os
import re
import socket
from typing import Final

#: Matches a command that may contain an access token, from its name to the end.
_SECRETIVE: Final = re.compile(
    r"\b(USER_IP|INVALIDATE_CACHE|RDATA caches)\b.*", re.DOTALL
)

#: The units of durations, from the longest, in ms.
_UNITS: Final = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 stream``, ``1,024 streams``."""
    return f"{count:,} {noun}" + ("s" if count != 1 else "")


def duration(milliseconds: float) -> str:
    """Format a duration in ms with a unit, to three digits or the nearest integer."""
    longest = (each for each in _UNITS if abs(milliseconds) >= each[1])
    unit, size = next(longest, ("ms", 1))
    value = milliseconds / size
    digits = f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    return f"{digits} {unit}"


def printable(text: str) -> str:
    """Escape unprintable characters, so that text of a peer cannot control a terminal.

    The result is one line.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """Escape unprintable characters, as :func:`printable`, but leave the line ends."""
    return "\n".join(map(printable, text.split("\n")))


def without_lines(text: str) -> str:
    """Remove the part of a peer's text that may repeat a line with a secret."""
    return _SECRETIVE.sub(r"\1 (the rest is not shown)", text)


def process_label() -> str:
    """Return the label of this process for operators, ``machine:pid``."""
    machine = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return f"{machine[:200]}:{os.getpid()}"


def outgoing_label(where: str, peer: str = "") -> str:
    """Return the label of a direct link to a server.

    :param where: the server's address, or the description of its endpoint.
    :param peer: the server's instance name, if it is known.
    """
    address = where.removeprefix("tcp:")
    return f"to {peer} at {address}" if peer else f"to {address}"


def named_label(link: str, peer: str) -> str:
    """Return the name of a link; if it leads to a server, with the server's name.

    :param peer: the server's instance name, if it is known.
    """
    where = link.removeprefix(outgoing_label(""))
    return link if where == link else outgoing_label(where, peer)


def incoming_label(name: str, address: str) -> str:
    """Return the label of a link by its name and, if it is not empty, its address.

    :param address: of the client, if the peer is one.
    """
    return f"from {name} at {address}" if address else name

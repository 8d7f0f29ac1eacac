"""Listeners, and checks that no unauthenticated remote client can use them.

The wire protocol has no authentication: any client that connects over direct TCP can
read every row that the process sends, and can send any command. HTTP catch-up returns
rows to any client that has the secret, and to every client if no secret is set. A
listener for replication that requires neither a secret nor a client certificate must
therefore be reachable from this machine only, unless the operator allows it. See
docs/security.rst.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

import attrs

_OR_ELSE = (
    "or set allow_unprotected_listeners if no untrusted client can reach the listener"
)

#: The resources of HTTP listeners that this package serves. It ignores all others.
OUR_RESOURCES = frozenset({"replication", "health", "metrics"})


@attrs.frozen
class Listener:
    """A listener of this process, on a port or on the path of a Unix socket.

    :ivar addresses: the addresses on which the port is open.
    :ivar resources: which of ``replication``, ``health`` and ``metrics`` it serves;
        irrelevant for direct TCP.
    :ivar direct_tcp: whether it serves direct TCP instead of HTTP.
    :ivar tls: whether it uses TLS.
    :ivar mode: the permissions of the Unix socket; by default ``0o666``, because
        requests need the secret, and ``0o600`` for direct TCP, which has none.
    """

    port: int | None = None
    path: str | None = None
    addresses: tuple[str, ...] = ("127.0.0.1",)
    resources: frozenset[str] = OUR_RESOURCES
    direct_tcp: bool = False
    tls: bool = False
    mode: int | None = None


def why_unprotected(
    listener: Listener, *, has_secret: bool, verifies_clients: bool
) -> tuple[str, str] | None:
    """Return why any client on another machine may use a listener for replication.

    :param has_secret: whether HTTP requests must contain a secret.
    :param verifies_clients: whether TLS requires client certificates.
    :return: what is wrong, and the hint; ``None`` if the listener is protected.
    """
    open_to = [a for a in listener.addresses if not is_for_this_machine(a)]
    if listener.path is not None or not open_to:
        return None
    if listener.tls and verifies_clients:
        return None
    if listener.direct_tcp:
        return (
            f"direct TCP on {open_to[0]} sends every row to any client",
            "listen on 127.0.0.1 or on a path, or use TLS with a client_ca_file, "
            f"{_OR_ELSE}",
        )
    if "replication" in listener.resources and not has_secret:
        return (
            f"any client can request rows from {open_to[0]}",
            f"set a replication secret, listen on 127.0.0.1 or on a path, {_OR_ELSE}",
        )
    return None


def why_unguarded(description: str) -> tuple[str, str] | None:
    """Return why any client may use an endpoint for direct TCP.

    An endpoint rejects untrusted clients, although it has no secret, if it uses TCP or
    TLS and listens on a loopback address only, or if it uses TLS and requires client
    certificates. All other endpoints, for instance Unix sockets, are assumed to be
    protected by other means.

    :param description: a server endpoint description in Twisted's syntax.
    :return: what is wrong, and the hint; ``None`` if the endpoint is guarded.
    """
    kind, arguments, named = split_description(description)
    interface = interface_of(kind, arguments, named)
    if (
        kind not in ("tcp", "tcp6", "ssl")
        or (kind == "ssl" and "caCertsDir" in named)
        or (interface is not None and is_for_this_machine(interface))
    ):
        return None
    return (
        f"{description} sends every row to any client",
        f"add :interface=127.0.0.1, or write ssl: with caCertsDir, {_OR_ELSE}",
    )


def is_for_this_machine(address: str) -> bool:
    """Return whether an address is ``localhost`` or a loopback address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def interface_of(
    kind: str, arguments: Sequence[str], named: Mapping[str, str]
) -> str | None:
    """Return the interface in a split ``tcp``, ``tcp6`` or ``ssl`` description.

    :return: ``None`` if the endpoint listens on all interfaces by default.
    """
    if kind != "ssl" and len(arguments) > 1:
        return arguments[1]
    return named.get("interface")


def split_description(description: str) -> tuple[str, list[str], dict[str, str]]:
    """Split an endpoint description into kind, arguments and named arguments."""
    # A backslash escapes a colon within an argument.
    kind, *parts = (
        re.sub(r"\\(.)", r"\1", part) for part in re.split(r"(?<!\\):", description)
    )
    named, arguments = {}, []
    for part in parts:
        if re.match(r"[A-Za-z]\w*=", part):
            name, value = part.split("=", 1)
            named[name] = value
        else:
            arguments.append(part)
    return kind, arguments, named

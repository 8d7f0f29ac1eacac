"""Checks that no unauthenticated remote client can use listeners for replication.

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
from collections.abc import Iterator, Mapping, Sequence

from synapse_replication.config.files import OWN_SECTION, KeyPath
from synapse_replication.config.models import ListenerSection, SharedFile

_OR_ELSE = (
    f"or write {OWN_SECTION}: {{allow_unprotected_listeners: true}} if no untrusted "
    "client can reach the listener"
)


def unprotected_listeners(
    shared: SharedFile, key: str, has_secret: bool
) -> Iterator[tuple[KeyPath, str, str]]:
    """Find the listeners for replication that any client on another machine may use.

    :param key: the key of this process's listeners.
    :param has_secret: whether HTTP requests must contain a secret.
    :return: for each such listener, the key's path, what is wrong, and the hint; none
        if the operator allows unprotected listeners.
    """
    own = shared.synapse_replication
    if own.allow_unprotected_listeners:
        return
    sections: list[ListenerSection] = getattr(shared, key)
    for index, section in enumerate(sections):
        open_to = [a for a in section.addresses if not is_for_this_machine(a)]
        if section.path is not None or not open_to:
            continue
        if section.tls and own.tls.client_ca_file is not None:
            # Clients need a certificate.
            continue
        if section.type == "replication":
            yield (
                (key, index, "bind_addresses"),
                f"direct TCP on {open_to[0]} sends every row to any client",
                "write ['127.0.0.1'], use a path, or `tls: true` with "
                f"{OWN_SECTION}.tls.client_ca_file, {_OR_ELSE}",
            )
        elif "replication" in section.resource_names and not has_secret:
            yield (
                (key, index, "bind_addresses"),
                f"any client can request rows from {open_to[0]}",
                "set worker_replication_secret, write ['127.0.0.1'], use a path, "
                f"{_OR_ELSE}",
            )
    for index, description in enumerate(own.direct_tcp.listen):
        if not is_guarded(description):
            yield (
                (OWN_SECTION, "direct_tcp", "listen", index),
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


def is_guarded(description: str) -> bool:
    """Return whether an endpoint rejects untrusted clients, although it has no secret.

    A TCP or TLS endpoint does if it listens on a loopback address only, and a TLS
    endpoint also if it requires client certificates. All other endpoints, for instance
    Unix sockets, are assumed to be protected by other means.

    :param description: a server endpoint description in Twisted's syntax.
    """
    kind, arguments, named = split_description(description)
    if kind not in ("tcp", "tcp6", "ssl"):
        return True
    if kind == "ssl" and "caCertsDir" in named:
        return True
    interface = interface_of(kind, arguments, named)
    return interface is not None and is_for_this_machine(interface)


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

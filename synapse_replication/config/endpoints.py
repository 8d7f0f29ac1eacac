"""Creation of Twisted endpoints from the options of a process."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from OpenSSL import crypto
from twisted.internet import endpoints
from twisted.internet.interfaces import IStreamClientEndpoint, IStreamServerEndpoint

from synapse_replication.config.listener_safety import Listener, split_description
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.config.unix_sockets import UnixSocketEndpoint
from synapse_replication.errors import ConfigError
from synapse_replication.redis.options import CONNECT_TIMEOUT
from synapse_replication.transport.host_names import checked_host, checked_socket_path
from synapse_replication.transport.reactor import IReactor
from synapse_replication.transport.resolving import host_endpoint
from synapse_replication.transport.tls import TlsConfig

#: Exceptions of Twisted's parsers: a RuntimeError for a description that ends in a
#: backslash, and OpenSSL's error for a file without PEM data.
_PARSE_ERRORS: Final = (ValueError, TypeError, OSError, RuntimeError, crypto.Error)


def client_endpoint(
    reactor: IReactor, description: str, options: ReplicationOptions
) -> IStreamClientEndpoint:
    """Return the endpoint to which direct TCP connects.

    :param options: their ``tls`` is used for a description ``tls:HOST:PORT``, which
        does not contain any itself.
    :raises ConfigError: if Twisted cannot parse the description, if a file named in
        the description or in ``tls`` cannot be used, or if the server would not be
        verified.
    """
    kind, arguments, named = split_description(description)
    try:
        if kind in ("tcp", "tls") and len(arguments) == 2 and not named:
            arguments = [checked_host(arguments[0]), arguments[1]]
        if kind == "unix":
            checked_socket_path(named.get("path") or (arguments or [""])[0])
        if kind == "ssl" and "hostname" not in named:
            raise ValueError("it does not verify the server")
        if kind == "tls" and len(arguments) == 2 and not named:
            host, port = arguments
            context = options.tls.for_connecting(host)
            server = host_endpoint(reactor, host, int(port), CONNECT_TIMEOUT)
            return endpoints.wrapClientTLS(context, server)
        if kind == "tcp" and len(arguments) == 2 and not named:
            host, port = arguments
            return host_endpoint(reactor, host, int(port), CONNECT_TIMEOUT)
        endpoint: Any = endpoints.clientFromString(reactor, description)  # type: ignore[no-untyped-call]
        return cast(IStreamClientEndpoint, endpoint)
    except _PARSE_ERRORS as error:
        raise _bad_description("tcp_connect", description, options, error) from error


def server_endpoint(
    reactor: IReactor, description: str, options: ReplicationOptions
) -> IStreamServerEndpoint:
    """Return an endpoint to listen on.

    Only the process's own user can connect to a Unix socket, unless the description has
    a ``mode``.

    :raises ConfigError: if Twisted cannot parse the description, or if a file named in
        the description cannot be used.
    """
    kind, arguments, named = split_description(description)
    try:
        if kind == "ssl" and "caCertsDir" in named:
            return _client_verifying_endpoint(reactor, *arguments, **named)
        if kind == "unix":
            return _unix_endpoint(reactor, arguments, named)
        endpoint: Any = endpoints.serverFromString(reactor, description)  # type: ignore[no-untyped-call]
        return cast(IStreamServerEndpoint, endpoint)
    except _PARSE_ERRORS as error:
        raise _bad_description("tcp_listen", description, options, error) from error


def _unix_endpoint(
    reactor: IReactor, arguments: Sequence[str], named: Mapping[str, str]
) -> IStreamServerEndpoint:
    unknown = named.keys() - {"address", "mode", "backlog", "lockfile"}
    path = named.get("address") or (arguments[0] if arguments else "")
    if unknown or not path or len(arguments) > 1:
        raise ValueError(f"unknown arguments: {', '.join(sorted(unknown)) or path}")
    path = checked_socket_path(path)
    mode, backlog = int(named.get("mode", "600"), 8), int(named.get("backlog", "50"))
    return UnixSocketEndpoint(reactor, path, mode, backlog)


def _client_verifying_endpoint(
    reactor: IReactor,
    port: str,
    *,
    caCertsDir: str,
    privateKey: str = "server.pem",
    certKey: str | None = None,
    interface: str = "",
    backlog: str = "50",
) -> IStreamServerEndpoint:
    """Return a TLS server endpoint that verifies its clients.

    Twisted's own parser of server descriptions does not accept ``caCertsDir``.
    """
    files = TlsConfig(
        listener_certificate_file=certKey or privateKey,
        listener_private_key_file=privateKey,
        client_ca_file=caCertsDir,
    )
    return endpoints.SSL4ServerEndpoint(  # type: ignore[no-untyped-call]
        reactor, int(port), files.for_listening(), int(backlog), interface
    )


def _bad_description(
    option: str, description: str, options: ReplicationOptions, error: Exception
) -> ConfigError:
    why = str(error)
    if isinstance(error, crypto.Error):
        why = "a file that it names does not contain the expected PEM data"
    elif isinstance(error, RuntimeError):
        why = "it ends in a backslash"
    hint = {
        "tcp_connect": "write for instance tcp:HOST:PORT, tls:HOST:PORT or unix:PATH",
        "tcp_listen": "write for instance tcp:PORT, unix:PATH, or "
        "ssl:PORT:privateKey=FILE:certKey=FILE",
    }
    problem = f"{description!r} is not a usable endpoint: {why}"
    return options.error(option, problem, hint[option])


def listener_descriptions(listener: Listener) -> list[str]:
    """Return the endpoint descriptions of a listener.

    There is one for each address, or a single one for a Unix socket. IPv4 addresses are
    omitted beside ``::`` if the system also accepts IPv4 connections there: it would
    refuse a second listener on the same port. TLS is not part of the descriptions.
    """
    if listener.path is not None:
        # Pass the path as a named argument: quoteStringArgument() does not escape "=",
        # so an unnamed path that contains it would be parsed as a name and a value.
        mode = listener.mode
        if mode is None:
            # An HTTP client needs the secret, a direct TCP peer does not: by default,
            # only the process's own user connects to the latter.
            mode = 0o600 if listener.direct_tcp else 0o666
        return [f"unix:address={_quote(listener.path)}:mode={mode:o}"]
    addresses = listener.addresses
    if "::" in addresses and _accepts_ipv4_over_ipv6():
        addresses = tuple(address for address in addresses if ":" in address)
    return [
        f"{'tcp6' if ':' in address else 'tcp'}:{listener.port}"
        f":interface={_quote(address)}"
        for address in addresses
    ]


def _accepts_ipv4_over_ipv6() -> bool:
    """Return whether a new listener on ``::`` accepts IPv4 connections, too."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            return not probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    except OSError:
        return False


def _quote(text: str) -> str:
    return cast(str, endpoints.quoteStringArgument(text))  # type: ignore[no-untyped-call]

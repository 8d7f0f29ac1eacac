"""The forms of host names, IP addresses and socket paths in configurations."""

from __future__ import annotations

import ipaddress
import os
import re

from synapse_replication.options import InvalidValueError

#: The longest host name that DNS allows.
_MAX_LENGTH = 253
#: The longest path of a Unix socket in bytes, on Linux; unix(7).
_MAX_SOCKET_PATH = 107


def checked_host(text: str) -> str:
    """Return a host name or an IP address; an IPv6 address without its brackets.

    :raises InvalidValueError: if the text is neither.
    """
    hint = "write only the name or the IP address, for instance synapse-main"
    if not text.strip():
        raise InvalidValueError("is empty", hint)
    if "://" in text:
        problem = f"{_shown(text)} is a URL, not a host"
        raise InvalidValueError(problem, f"{hint}; other keys have the rest")
    host = text
    if text[0] == "[" and text[-1] == "]" and ":" in text:
        host = text[1:-1]
    if is_ip_address(host):
        return host
    name, colon, port = host.rpartition(":")
    if colon and port.isdigit():
        raise InvalidValueError(
            f"{_shown(text)} is a host with a port",
            f"write host: {name.strip('[]') or 'NAME'} and port: {port}",
        )
    if len(host) > _MAX_LENGTH or re.fullmatch(r"[\w.-]+", host) is None:
        raise InvalidValueError(f"{_shown(text)} is not a host name", hint)
    if ".." in host or host.startswith("."):
        raise InvalidValueError(f"{_shown(text)} has an empty label", hint)
    return host


def checked_socket_path(path: str) -> str:
    """Return the path of a Unix socket.

    :raises InvalidValueError: if no socket can have the path.
    """
    hint = "write a path such as /run/synapse/main.sock"
    if not path or "\0" in path:
        raise InvalidValueError("is not a path", hint)
    length = len(os.fsencode(path))
    if length > _MAX_SOCKET_PATH:
        raise InvalidValueError(
            f"{_shown(path)} has {length} bytes, but the path of a Unix socket has at "
            f"most {_MAX_SOCKET_PATH}",
            "use a folder with a shorter path",
        )
    return path


def _shown(text: str) -> str:
    # A URL may contain a password.
    text = re.sub(r"//[^/@]*@", "//...@", text)
    return repr(text if len(text) <= 80 else text[:80] + "...")


def is_ip_address(host: str) -> bool:
    """Return whether a text is an IP address, also with a zone: ``fe80::1%eth0``."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def needs_resolving(host: str) -> bool:
    """Return whether ``HostnameEndpoint``, like any URL, rejects a host's name."""
    return "_" in host


def host_port(host: str, port: int | None) -> str:
    """Return a host and port as text, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""Checks for common errors that the models of single sections do not detect.

They find mistyped keys in sections that Synapse defines, two listeners on one port or
socket, and replication secrets that are too short or contain control characters. They
also find secret files that every user can read; such a file causes only a warning, and
the process starts nevertheless.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from synapse_replication.config import listener_safety, models
from synapse_replication.config.yaml_files import (
    OWN_SECTION,
    KeyPath,
    MergedFiles,
    did_you_mean,
)
from synapse_replication.errors import ConfigProblem
from synapse_replication.http.location import InstanceLocation

#: A problem: the key's path, what is wrong, and the hint.
KeyProblem = tuple[KeyPath, str, str]

#: The least length of a replication secret; shorter secrets are easily guessed.
MIN_SECRET: Final = 4
#: Keys of Synapse that this package does not read, but that resemble keys it reads.
_OTHER_KEYS: Final = frozenset(
    {
        "additional_resources",
        "allow_unsafe_locale",
        "request_id_header",
        "tag",
        "worker_replication_http_tls",
    }
)

#: The least likeness of an unknown and a known top-level key. It is high, because
#: Synapse has hundreds of top-level keys.
_TOP_LEVEL_LIKENESS: Final = 0.8


def mistyped_keys(values: Mapping[str, Any]) -> Iterator[KeyProblem]:
    """Find unknown keys that resemble a known key.

    In a section, only the known keys that it lacks are considered; at the top level,
    all: several files contribute to it, and a key in one may be mistyped in another.

    The sections are the top level, ``redis``, ``database``, each entry of
    ``instance_map``, and each listener. Other unknown keys are ignored, because
    Synapse, or a later version of it, may use them. Some keys that Synapse is known to
    use are ignored even if they resemble a known key.
    """
    sections: list[tuple[KeyPath, Any, type[Any]]] = [
        ((), values, models.SynapseFile),
        (("redis",), values.get("redis"), models.RedisSection),
        (("database",), values.get("database"), models.DatabaseSection),
    ]
    instances = values.get("instance_map")
    if isinstance(instances, dict):
        sections += [
            (("instance_map", name), section, InstanceLocation)
            for name, section in instances.items()
        ]
    for key in ("listeners", "worker_listeners"):
        listeners = values.get(key)
        if isinstance(listeners, list):
            sections += [
                ((key, index), section, models.ListenerSection)
                for index, section in enumerate(listeners)
            ]
    for path, section, model in sections:
        if not isinstance(section, Mapping):
            continue
        likeness = 0.7 if path else _TOP_LEVEL_LIKENESS
        known = {attribute.name for attribute in attrs.fields(model)}
        if not path:
            known.add(OWN_SECTION)
        for key in section:
            candidates = known - set(section) if path else known
            meant = did_you_mean(str(key), candidates, likeness)
            # Compose and other tools reserve x- for what only anchors use.
            is_other = key in known | _OTHER_KEYS or str(key).startswith("x-")
            if not is_other and meant is not None:
                hint = f"did you mean {meant!r}?"
                yield (*path, str(key)), "there is no such key", hint


def clashing_listeners(
    key: str, listeners: Sequence[listener_safety.Listener], descriptions: Sequence[str]
) -> Iterator[KeyProblem]:
    """Find listeners of one process with the same socket, or address and port.

    A listener without an address uses its port on all addresses.

    :param key: the key of the listeners.
    :param listeners: the listeners of the process.
    :param descriptions: the endpoint descriptions of ``direct_tcp.listen``.
    """
    wanted: list[tuple[KeyPath, str | int | None, Sequence[str]]] = []
    for index, listener in enumerate(listeners):
        if listener.path is not None:
            wanted.append(((key, index, "path"), listener.path, []))
        else:
            wanted.append(((key, index, "port"), listener.port, listener.addresses))
    for index, description in enumerate(descriptions):
        kind, arguments, named = listener_safety.split_description(description)
        port = named.get("port") or (arguments[0] if arguments else "")
        if kind in ("tcp", "tcp6", "ssl") and port.isascii() and port.isdigit():
            path: KeyPath = (OWN_SECTION, "direct_tcp", "listen", index)
            every = "::" if kind == "tcp6" else "0.0.0.0"
            interface = listener_safety.interface_of(kind, arguments, named) or every
            wanted.append((path, int(port), [interface]))
    for index, (path, where, addresses) in enumerate(wanted):
        for _, other, others in wanted[:index]:
            if where == other and _overlap(addresses, others):
                yield (
                    path,
                    f"another listener already uses {where}",
                    "write another port or path, or remove one of the listeners",
                )
                break


def _overlap(one: Sequence[str], other: Sequence[str]) -> bool:
    if not one or not other:
        return True
    # "::" is compared with IPv6 addresses only. On Linux, a listener on
    # "::" usually accepts IPv4 connections, too; this is not detected.
    return any(a == b or _covers(a, b) or _covers(b, a) for a in one for b in other)


def _covers(address: str, other: str) -> bool:
    is_ipv6 = ":" in other
    return address == ("::" if is_ipv6 else "0.0.0.0") or not address


def find_bad_secret(secret: str) -> str | None:
    """Return why a replication secret is unusable; ``None`` if it is usable."""
    if any(not character.isprintable() for character in secret):
        return "it contains a line break or another control character"
    if len(secret.strip()) < MIN_SECRET:
        return (
            f"it has fewer than {MIN_SECRET} characters, not counting spaces at its "
            "ends, and is easily guessed"
        )
    return None


def readable_secrets(merged: MergedFiles) -> Iterator[ConfigProblem]:
    """Find the secret files whose mode allows every user to read them.

    Only files at the paths in keys such as ``password_path`` are examined, not the
    configuration files themselves.
    """
    for path, file in _secret_files((), merged.values):
        try:
            mode = Path(file).stat().st_mode
        except OSError:
            continue
        if mode & stat.S_IROTH:
            yield merged.problem(
                path, f"every user of this machine can read {file}", f"chmod o-r {file}"
            )


def _secret_files(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            is_secret = str(key) in (
                "password_path",
                "worker_replication_secret_path",
                "private_key_file",
                "tls_private_key_path",
            )
            if is_secret and isinstance(inner, str):
                yield (*path, key), inner
            elif key in ("redis", "sentinel", "tls", OWN_SECTION) or not path:
                yield from _secret_files((*path, key), inner)

"""The section ``redis``: the address of Redis, or of Sentinels that know it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from synapse_replication.config.models import RedisSection, SentinelSection
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.config.yaml_files import MergedFiles, read_secret
from synapse_replication.redis.options import (
    RedisOptions,
    RedisTlsOptions,
    SentinelOptions,
)

#: The default port of a Sentinel.
_SENTINEL_PORT = 26379
_ADDRESS = re.compile(
    r"(\[(?P<ip>[^]\s]+)]|(?P<host>[^[\s:][^\s:]*))(:(?P<port>[0-9]+))?"
)


def read_redis(section: RedisSection, merged: MergedFiles) -> RedisOptions | None:
    """Check the section, and read its passwords, which may be in files.

    :return: ``None`` if Redis is not enabled.
    """
    password = read_secret(section, ("redis", "password"), merged)
    if not section.enabled:
        return None
    for key in ("certificate_file", "private_key_file", "ca_file", "ca_path"):
        file = getattr(section, key)
        if section.use_tls and file is not None and not Path(file).exists():
            merged.report(
                ("redis", key), f"{file} does not exist", "name an existing file"
            )
    if section.username is not None and password is None:
        merged.report(
            ("redis", "username"),
            "a user name is of no use without its password",
            "add redis.password or redis.password_path",
        )
    if section.sentinel is not None and section.path is not None:
        merged.report(
            ("redis", "sentinel"),
            "redis.path is set, too, but Sentinels return a host and port",
            "remove redis.sentinel or redis.path",
        )
    tls = None
    if section.use_tls:
        tls = RedisTlsOptions(
            authority_file=_path(section.ca_file or section.ca_path),
            certificate_file=_path(section.certificate_file),
            private_key_file=_path(section.private_key_file),
        )
    sentinel = None
    if section.sentinel is not None:
        sentinel = _read_sentinel(section.sentinel, merged)
    return RedisOptions(
        host=section.host,
        port=section.port,
        path=section.path,
        username=section.username,
        password=password,
        dbid=section.dbid,
        tls=tls,
        sentinel=sentinel,
    )


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None


def _read_sentinel(section: SentinelSection, merged: MergedFiles) -> SentinelOptions:
    key = ("redis", "sentinel")
    password = read_secret(section, (*key, "password"), merged)
    if section.username is not None and password is None:
        merged.report(
            (*key, "username"),
            "a user name is of no use without its password",
            "add redis.sentinel.password or redis.sentinel.password_path",
        )
    addresses = []
    for index, text in enumerate(section.sentinels):
        address = _parse_address(text)
        if address is None:
            merged.report(
                (*key, "sentinels", index),
                f"{text!r} is not a host and port",
                "write HOST:PORT, for instance sentinel1.example.com:26379",
            )
        else:
            addresses.append(address)
    return SentinelOptions(section.master, tuple(addresses), section.username, password)


def _parse_address(text: str) -> tuple[str, int] | None:
    """Parse HOST, HOST:PORT, or an IPv6 address in brackets with or without a port.

    :return: ``None`` if the text has another form.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
    port = int(match["port"] or _SENTINEL_PORT)
    return (match["ip"] or match["host"], port) if 0 < port < 65536 else None


@contextmanager
def explained_redis_files(options: ReplicationOptions) -> Iterator[None]:
    """Convert the error of an invalid file of the Redis TLS options to a ConfigError.

    :raises ConfigError: if the block raises ``OSError`` or ``ValueError``.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        hint = "correct the file that the error names"
        raise options.error("redis", str(error), hint) from error

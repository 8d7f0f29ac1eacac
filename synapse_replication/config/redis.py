"""The section ``redis``: the address of Redis, or of Sentinels that know it."""

from __future__ import annotations

from pathlib import Path

import attrs

from synapse_replication.config.files import MergedFiles, read_secret
from synapse_replication.config.models import RedisSection, SentinelSection
from synapse_replication.errors import ConfigProblem

#: The default port of a Sentinel.
_SENTINEL_PORT = 26379


@attrs.frozen
class SentinelConfig:
    """The Sentinels to query for the address of the Redis master.

    :ivar master: the name of the master.
    :ivar addresses: the hosts and ports of the Sentinels.
    :ivar username: the user name for the Sentinels, not for Redis.
    :ivar password: the password for the Sentinels, not for Redis.
    """

    master: str
    addresses: tuple[tuple[str, int], ...]
    username: str | None = None
    password: str | None = attrs.field(default=None, repr=False)


@attrs.frozen
class RedisConfig:
    """The parameters for connecting to Redis, both to subscribe and to publish.

    :ivar path: the path of a Unix socket; takes precedence over host and port.
    :ivar sentinel: the Sentinels to query for the address; ``None`` to connect to the
        path, or to the host and port. Sentinels and a path cannot be combined.
    """

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    username: str | None = None
    password: str | None = attrs.field(default=None, repr=False)
    dbid: int | None = None
    use_tls: bool = False
    certificate_file: str | None = None
    private_key_file: str | None = None
    ca_file: str | None = None
    ca_path: str | None = None
    sentinel: SentinelConfig | None = None

    @property
    def address(self) -> str:
        """The address as text for display."""
        if self.sentinel is not None:
            at = ", ".join(f"{host}:{port}" for host, port in self.sentinel.addresses)
            return f"the master {self.sentinel.master} of the Sentinels at {at}"
        return self.path or f"{self.host}:{self.port}"


def read_redis(
    section: RedisSection, merged: MergedFiles, problems: list[ConfigProblem]
) -> RedisConfig | None:
    """Check the section, and read its passwords, which may be in files.

    :param problems: problems are added to this list.
    :return: ``None`` if Redis is not enabled.
    """

    def problem(key: str, text: str, hint: str) -> None:
        problems.append(merged.problem(("redis", *key.split(".")), text, hint))

    password = read_secret(
        section.password.get_secret_value() if section.password else None,
        section.password_path,
        ("redis", "password"),
        merged,
        problems,
    )
    if not section.enabled:
        return None
    for key in ("certificate_file", "private_key_file", "ca_file", "ca_path"):
        file = getattr(section, key)
        if section.use_tls and file is not None and not Path(file).exists():
            problem(key, f"{file} does not exist", "name an existing file")
    if section.username is not None and password is None:
        problem(
            "username",
            "a user name is of no use without its password",
            "add redis.password or redis.password_path",
        )
    if section.sentinel is not None and section.path is not None:
        problem(
            "sentinel",
            "redis.path is set, too, but Sentinels return a host and port",
            "remove redis.sentinel or redis.path",
        )
    return RedisConfig(
        host=section.host,
        port=section.port,
        path=section.path,
        username=section.username,
        password=password,
        dbid=section.dbid,
        use_tls=section.use_tls,
        certificate_file=section.certificate_file,
        private_key_file=section.private_key_file,
        ca_file=section.ca_file,
        ca_path=section.ca_path,
        sentinel=None
        if section.sentinel is None
        else _read_sentinel(section.sentinel, merged, problems),
    )


def _read_sentinel(
    section: SentinelSection, merged: MergedFiles, problems: list[ConfigProblem]
) -> SentinelConfig:
    key = ("redis", "sentinel")
    password = read_secret(
        section.password.get_secret_value() if section.password else None,
        section.password_path,
        (*key, "password"),
        merged,
        problems,
    )
    if section.username is not None and password is None:
        problems.append(
            merged.problem(
                (*key, "username"),
                "a user name is of no use without its password",
                "add redis.sentinel.password or redis.sentinel.password_path",
            )
        )
    addresses = []
    for index, text in enumerate(section.sentinels):
        address = _parse_address(text)
        if address is None:
            problems.append(
                merged.problem(
                    (*key, "sentinels", index),
                    f"{text!r} is not a host and port",
                    "write HOST:PORT, for instance sentinel1.example.com:26379",
                )
            )
        else:
            addresses.append(address)
    return SentinelConfig(section.master, tuple(addresses), section.username, password)


def _parse_address(text: str) -> tuple[str, int] | None:
    """Parse HOST, HOST:PORT, or an IPv6 address in brackets with or without a port.

    :return: ``None`` if the text has another form.
    """
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            return None
        port = rest[1:] if rest else str(_SENTINEL_PORT)
    else:
        host, colon, port = text.partition(":")
        port = port if colon else str(_SENTINEL_PORT)
    if not host or any(letter.isspace() for letter in host):
        return None
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    return host, int(port)

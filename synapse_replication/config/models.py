"""The shape of the keys that operators know, section by section.

Sections of Synapse's skip keys that we do not know: a real homeserver.yaml
has hundreds. Our own section does not: there, an unknown key is a mistake.

What a single section cannot tell (another section, a file, which process this
is) is checked in :mod:`synapse_replication.config.process`.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any, Literal

import attrs
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from synapse_replication.config.files import (
    OWN_SECTION,
    KeyPath,
    MergedFiles,
    did_you_mean,
)
from synapse_replication.errors import ConfigProblem, StreamConfigurationError
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.table import TableStream

__all__ = [
    "DatabaseSection",
    "DirectTcpSection",
    "ExtensionSection",
    "FactorySection",
    "HttpSection",
    "InstanceSection",
    "ListenerSection",
    "OwnSection",
    "RedisSection",
    "ResourceSection",
    "SentinelSection",
    "SharedFile",
    "TlsSection",
    "TracingSection",
    "drop_invalid_sections",
    "problems_of",
]

#: The resources of an http listener that we serve; others are skipped.
OUR_RESOURCES = ("health", "metrics", "replication")
LISTENER_TYPES = ("http", "metrics", "replication", "manhole")

Port = Annotated[int, Field(ge=1, le=65535)]


def invalid(problem: str, hint: str) -> PydanticCustomError:
    """Make the error of a validator, which carries its hint."""
    return PydanticCustomError(
        "invalid", "{problem}", {"problem": problem, "hint": hint}
    )


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class _OwnSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _empty_if_none(value: Any) -> Any:
    return {} if value is None else value


def _nothing_if_none(value: Any) -> Any:
    return [] if value is None else value


Names = Annotated[list[str], BeforeValidator(_one_or_many)]


class DatabaseSection(_Section):
    """``database``: ``args`` are libpq's, and the pool's ``cp_*``."""

    name: str = "psycopg2"
    args: dict[str, Any] = Field(default_factory=dict, repr=False)


class SentinelSection(_OwnSection):
    """``redis.sentinel``: ask Sentinels for the host and port of Redis.

    :ivar master: the name under which they watch it.
    :ivar sentinels: ``HOST:PORT`` of each.
    :ivar username: theirs, not that of Redis, as the password.
    """

    master: Annotated[str, Field(pattern=r"^\S+$")]
    sentinels: Annotated[Names, Field(min_length=1)]
    username: str | None = None
    password: SecretStr | None = None
    password_path: str | None = None


class RedisSection(_Section):
    """``redis``. A Unix socket (``path``) wins over ``host`` and ``port``."""

    enabled: bool = False
    host: str = "localhost"
    port: Port = 6379
    path: str | None = None
    username: str | None = None
    password: SecretStr | None = None
    password_path: str | None = None
    dbid: Annotated[int, Field(ge=0)] | None = None
    use_tls: bool = False
    certificate_file: str | None = None
    private_key_file: str | None = None
    ca_file: str | None = None
    ca_path: str | None = None
    sentinel: SentinelSection | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> RedisSection:
        if (self.certificate_file is None) != (self.private_key_file is None):
            raise invalid(
                "a client certificate needs its private key",
                "write both certificate_file and private_key_file, or neither",
            )
        return self


class InstanceSection(_Section):
    """One entry of ``instance_map``: host and port, or the path of a socket."""

    host: str | None = None
    port: Port | None = None
    tls: bool = False
    path: str | None = None

    @model_validator(mode="after")
    def _check_place(self) -> InstanceSection:
        if self.path is None and (self.host is None or self.port is None):
            raise invalid(
                "it does not say where the process listens",
                "write host and port, or path (of a Unix socket)",
            )
        if self.path is not None and (self.host or self.port):
            raise invalid(
                "it names a socket's path and a host too",
                "keep path, or host and port",
            )
        return self


class ResourceSection(_Section):
    """One entry of a listener's ``resources``."""

    names: Names

    @model_validator(mode="after")
    def _check_names(self) -> ResourceSection:
        for name in self.names:
            meant = did_you_mean(name, OUR_RESOURCES)
            if name not in OUR_RESOURCES and meant is not None:
                raise invalid(f"{name!r} is no resource", f"did you mean {meant!r}?")
        return self


class ListenerSection(_Section):
    """One entry of ``listeners`` or ``worker_listeners``."""

    type: str
    port: Port | None = None
    path: str | None = None
    bind_addresses: Names | None = None
    bind_address: str | None = None
    tls: bool = False
    resources: Annotated[list[ResourceSection], BeforeValidator(_nothing_if_none)] = (
        Field(default_factory=list)
    )

    @model_validator(mode="after")
    def _check_listener(self) -> ListenerSection:
        if self.type not in LISTENER_TYPES:
            meant = did_you_mean(self.type, LISTENER_TYPES)
            raise invalid(
                f"{self.type!r} is no type of listener",
                f"did you mean {meant!r}?"
                if meant
                else f"write one of {', '.join(LISTENER_TYPES)}",
            )
        if (self.port is None) == (self.path is None):
            raise invalid(
                "a listener has a port or a path, one of the two",
                "write port: 9093, or path: /run/synapse/main.sock",
            )
        return self

    @property
    def addresses(self) -> list[str]:
        """Where to listen; everywhere if nothing is said."""
        if self.bind_addresses:
            return self.bind_addresses
        return [self.bind_address] if self.bind_address else ["0.0.0.0"]

    @property
    def resource_names(self) -> frozenset[str]:
        """What it serves of what we can serve."""
        if self.type == "metrics":
            return frozenset({"metrics"})
        names = {name for section in self.resources for name in section.names}
        return frozenset(names.intersection(OUR_RESOURCES))


class FactorySection(_OwnSection):
    """A function of the user's: ``module`` is the dotted name of it."""

    module: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]
    config: Annotated[dict[str, Any], BeforeValidator(_empty_if_none)] = Field(
        default_factory=dict, repr=False
    )


class DirectTcpSection(_OwnSection):
    """Direct TCP by Twisted's endpoint descriptions, for TLS and Unix sockets.

    :ivar connect: one for each process whose rows are followed, for instance
        ``tls:main.example.com:9092``.
    :ivar listen: for instance ``ssl:9092:privateKey=key.pem:certKey=crt.pem``.
    :ivar max_pending_commands: commands that wait for a peer that does not read; one
        more ends its connection.
    :ivar max_pending_bytes: bytes of such commands.
    :ivar max_connections: connections of a listener that are open at a time.
    """

    connect: Names = Field(default_factory=list)
    listen: Names = Field(default_factory=list)
    max_pending_commands: Annotated[int, Field(ge=100)] = 10_000
    # Room for a round of the longest lines.
    max_pending_bytes: Annotated[int, Field(ge=64 * 1024)] = 16 * 1024 * 1024
    max_connections: Annotated[int, Field(ge=10)] = 500


class HttpSection(_OwnSection):
    """What the HTTP listeners accept.

    :ivar allowed_hosts: names under which clients reach them, besides ``localhost``,
        this machine's name and the hosts in ``instance_map``. Addresses are always
        accepted.
    :ivar max_connections: connections of a listener that are open at a time.
    """

    allowed_hosts: Names = Field(default_factory=list)
    max_connections: Annotated[int, Field(ge=10)] = 500


class TlsSection(_OwnSection):
    """TLS with the other processes; PEM files, or folders of authorities.

    :ivar ca_file: the authorities of those that this process connects to
        (``instance_map`` with ``tls``, and ``tls:HOST:PORT``); the system's if left out.
    :ivar certificate_file: shown by this process to those that ask for it, and by its
        listeners, in place of ``tls_certificate_path``.
    :ivar client_ca_file: listeners with ``tls`` let in only who has a certificate of
        these authorities.
    """

    ca_file: str | None = None
    certificate_file: str | None = None
    private_key_file: str | None = None
    client_ca_file: str | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> TlsSection:
        if (self.certificate_file is None) != (self.private_key_file is None):
            raise invalid(
                "a certificate needs its private key",
                "write both certificate_file and private_key_file, or neither",
            )
        return self


class ExtensionSection(_OwnSection):
    """What processes of this package tell one another besides the classic wire.

    :ivar enabled: tell it. Others never see it.
    :ivar backlog_rows: of each stream that this process writes, the rows that it sent
        last and keeps for readers that missed them; 0 for none.
    :ivar backlog_bytes: memory for each of these, at most.
    """

    enabled: bool = True
    backlog_rows: Annotated[int, Field(ge=0)] = 10_000
    backlog_bytes: Annotated[int, Field(ge=0)] = 4 * 1024 * 1024


class TracingSection(_OwnSection):
    """``tracing``: send spans to a collector, by OTLP over HTTP.

    :ivar endpoint: its URL; without a path, ``/v1/traces`` is added.
    :ivar headers: sent with each request.
    :ivar sample_ratio: the share of traces that is kept, 0 to 1.
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]
    headers: Annotated[dict[str, SecretStr], BeforeValidator(_empty_if_none)] = Field(
        default_factory=dict
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    service_name: Annotated[str, Field(min_length=1)] = "synapse_replication"


def _to_stream(value: Any) -> Any:
    """Read an entry of ``streams``: a standard stream's name, or a declaration."""
    if isinstance(value, (TableStream, str)):
        if isinstance(value, str) and value not in STANDARD_STREAMS:
            meant = did_you_mean(value, STANDARD_STREAMS)
            raise invalid(
                f"{value!r} is no standard stream",
                f"did you mean {meant!r}?"
                if meant
                else "declare it by its table, or write one of "
                + ", ".join(STANDARD_STREAMS),
            )
        return value
    if not isinstance(value, dict):
        raise invalid(
            "a stream is declared by a mapping, or by the name of a standard one",
            "write name, table, id_column, columns, sequence and writers",
        )
    fields = {
        field.name: field
        for field in attrs.fields(TableStream)
        if field.init and field.name != "row_type"
    }
    for key in value:
        if key not in fields:
            meant = did_you_mean(str(key), fields)
            raise invalid(
                f"{key!r} is no key of a stream",
                f"did you mean {meant!r}?"
                if meant
                else f"write only {', '.join(fields)}",
            )
    missing = [
        name
        for name, field in fields.items()
        if field.default is attrs.NOTHING and name not in value
    ]
    if missing:
        raise invalid(f"{', '.join(missing)} missing", "add it to the declaration")
    try:
        return TableStream(**value)
    except StreamConfigurationError as error:
        problem, _, hint = str(error).rpartition("; ")
        raise invalid(problem or str(error), hint or "see the documentation") from None


StreamEntry = Annotated[Any, BeforeValidator(_to_stream)]


class OwnSection(_OwnSection):
    """``synapse_replication``: what Synapse has no key for.

    :ivar streams: instead of the standard ones: names of standard streams, and
        declarations by table; ``None`` for all standard ones.
    :ivar row_sink: ``factory(host, config) -> RowSink``: where received rows go.
    :ivar command_sink: ``factory(host, config) -> CommandSink``: where received
        commands without rows go.
    :ivar modules: ``factory(host, config) -> IService | None``: code that runs
        inside this process, before replication starts.
    :ivar allow_unprotected_listeners: listen for replication beyond this machine even
        where nothing keeps strangers out.
    :ivar log_level: what is less than this is not logged.
    :ivar tracing: where spans are sent; ``None`` for nowhere.
    """

    streams: list[StreamEntry] | None = None
    row_sink: FactorySection | None = None
    command_sink: FactorySection | None = None
    modules: Annotated[list[FactorySection], BeforeValidator(_nothing_if_none)] = Field(
        default_factory=list
    )
    direct_tcp: DirectTcpSection = Field(default_factory=DirectTcpSection)
    http: Annotated[HttpSection, BeforeValidator(_empty_if_none)] = Field(
        default_factory=HttpSection
    )
    tls: Annotated[TlsSection, BeforeValidator(_empty_if_none)] = Field(
        default_factory=TlsSection
    )
    allow_unprotected_listeners: bool = False
    log_level: Literal["debug", "info", "warn", "error", "critical"] = "info"
    tracing: TracingSection | None = None
    extension: Annotated[ExtensionSection, BeforeValidator(_empty_if_none)] = Field(
        default_factory=ExtensionSection
    )


#: The longest delay for tests of races, in ms.
_MAX_TORTURE_MS = 60_000


class SharedFile(_Section):
    """All the keys that we read, of all the files."""

    server_name: Annotated[str, Field(pattern=r"^[^\s/]+$")]
    database: DatabaseSection | None = None
    redis: Annotated[RedisSection, BeforeValidator(_empty_if_none)] = Field(
        default_factory=RedisSection
    )
    stream_writers: Annotated[dict[str, Names], BeforeValidator(_empty_if_none)] = (
        Field(default_factory=dict)
    )
    instance_map: Annotated[
        dict[str, InstanceSection], BeforeValidator(_empty_if_none)
    ] = Field(default_factory=dict)
    listeners: Annotated[list[ListenerSection], BeforeValidator(_nothing_if_none)] = (
        Field(default_factory=list)
    )
    worker_name: Annotated[str, Field(pattern=r"^\S+$")] | None = None
    worker_app: str | None = None
    worker_listeners: Annotated[
        list[ListenerSection], BeforeValidator(_nothing_if_none)
    ] = Field(default_factory=list)
    worker_replication_host: str | None = None
    worker_replication_port: Port | None = None
    worker_replication_secret: SecretStr | None = None
    worker_replication_secret_path: str | None = None
    tls_certificate_path: str | None = None
    tls_private_key_path: str | None = None
    run_background_tasks_on: str | None = None
    replication_torture_level: (
        Annotated[int, Field(ge=0, le=_MAX_TORTURE_MS)] | None
    ) = None
    synapse_replication: Annotated[OwnSection, BeforeValidator(_empty_if_none)] = Field(
        default_factory=OwnSection
    )


#: How often what failed is left out, at most: parts hold parts, a few deep.
_MOST_ROUNDS = 8

#: What to do about pydantic's own findings, by the beginning of their type.
_MENDS: tuple[tuple[str, str], ...] = (
    ("missing", "add it"),
    ("bool", "write true or false"),
    ("int", "write a whole number, without quotes"),
    ("string_pattern", "write one word, without white space"),
    ("string", "write a text; in quotes if it looks like a number"),
    ("list", "write a list: one line for each entry, beginning with `- `"),
    ("dict", "write a mapping: indented `key: value` lines"),
    ("too_short", "write at least one"),
    ("literal", "write one of them"),
    ("model", "write a mapping: indented `key: value` lines"),
    ("greater", "write a number in the range"),
    ("less", "write a number in the range"),
)

#: What to write where a general rule would say too little.
_MENDS_OF_KEYS: dict[str, str] = {
    "server_name": "write the homeserver's name, for instance `server_name: "
    "example.com`",
    "port": "write a port number from 1 to 65535",
    "worker_replication_port": "write a port number from 1 to 65535",
    "module": "write the dotted name of a function, for instance "
    "my_package.my_module.make_sink",
    "endpoint": "write the URL of a collector, for instance http://localhost:4318",
    "sample_ratio": "write a number from 0 to 1",
    "type": f"write one of {', '.join(LISTENER_TYPES)}",
}


def problems_of(error: ValidationError, merged: MergedFiles) -> list[ConfigProblem]:
    """Say what pydantic found as mistakes with file, key and hint."""
    return [_problem_of(details, merged) for details in error.errors()]


def _problem_of(details: ErrorDetails, merged: MergedFiles) -> ConfigProblem:
    path: KeyPath = details["loc"]
    kind = details["type"]
    context = details.get("ctx", {})
    if kind == "invalid":
        return merged.problem(path, str(context["problem"]), str(context["hint"]))
    if kind == "extra_forbidden":
        known = _known_keys(path[:-1])
        meant = did_you_mean(str(path[-1]), known)
        hint = (
            f"did you mean {meant!r}?" if meant else f"write one of {', '.join(known)}"
        )
        return merged.problem(path, "there is no such key", hint)
    general = next((hint for start, hint in _MENDS if kind.startswith(start)), None)
    hint = _MENDS_OF_KEYS.get(str(path[-1])) or general or "see the documentation"
    problem = "is missing" if kind == "missing" else details["msg"]
    return merged.problem(path, problem[:1].lower() + problem[1:], hint)


def _known_keys(path: KeyPath) -> list[str]:
    sections: dict[str, type[BaseModel]] = {
        OWN_SECTION: OwnSection,
        "direct_tcp": DirectTcpSection,
        "extension": ExtensionSection,
        "http": HttpSection,
        "row_sink": FactorySection,
        "command_sink": FactorySection,
        "modules": FactorySection,
        "sentinel": SentinelSection,
        "tracing": TracingSection,
        "tls": TlsSection,
    }
    name = next(step for step in reversed(path) if isinstance(step, str))
    return sorted(sections[name].model_fields)


def drop_invalid_sections(
    merged: MergedFiles, error: ValidationError
) -> SharedFile | None:
    """Validate what is left of the files without the parts that failed.

    :return: ``None`` if nothing is left.
    """
    values = copy.deepcopy(dict(merged.values))
    # What a part that was left out makes of its section is no mistake of anybody.
    for _ in range(_MOST_ROUNDS):
        for details in error.errors():
            _leave_out(values, details["loc"])
        values.setdefault("server_name", "unknown")
        try:
            return SharedFile.model_validate(values)
        except ValidationError as next_error:
            error = next_error
    return None


def _leave_out(values: dict[str, Any], path: KeyPath) -> None:
    """Take the part at ``path`` out of its mapping; of a list, all of it."""
    if path[:2] in ((OWN_SECTION,), (OWN_SECTION, "streams")):
        # Who may write depends on the streams that are declared there.
        values.pop("stream_writers", None)
    mapping: Any = values
    last: tuple[Any, Any] = (values, path[0])
    for step in path:
        if isinstance(mapping, dict) and step in mapping:
            last = (mapping, step)
            mapping = mapping[step]
        else:
            break
    holder, key = last
    holder.pop(key, None)

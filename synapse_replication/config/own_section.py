"""The section ``synapse_replication``: settings for which Synapse has no key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import attrs
from hyperlink import URL
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from synapse_replication.config.section_types import (
    ListOf,
    Names,
    OrEmpty,
    StrictSection,
    invalid,
)
from synapse_replication.config.yaml_files import hint_for
from synapse_replication.errors import StreamConfigurationError
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.table import TableStream
from synapse_replication.streams.writer_positions import PLAUSIBLE_DISTANCE
from synapse_replication.wire.pending_lines import PendingLimit


class FactorySection(StrictSection):
    """A function that you provide."""

    module: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]
    """Dotted name of the function, for instance ``shop.sinks.make_sink``."""
    config: OrEmpty[dict[str, Any]] = Field(default_factory=dict, repr=False)
    """Mapping that is passed to the function unchanged."""


class DirectTcpSection(StrictSection):
    """Direct TCP endpoints in Twisted's syntax, for instance for TLS."""

    connect: Names = Field(default_factory=list)
    """Endpoints to connect to, one for each instance whose rows are read; for instance
    ``tls:main.example.com:9092``."""
    listen: Names = Field(default_factory=list)
    """Endpoints to listen on, in addition to the listeners of type ``replication``; for
    instance ``ssl:9092:privateKey=key.pem:certKey=crt.pem``."""
    max_pending_commands: Annotated[int, Field(ge=100)] = PendingLimit().lines
    """The most commands queued for a peer that reads too slowly; if there are more, the
    connection is closed."""
    # At least four lines of the maximum length.
    max_pending_bytes: Annotated[int, Field(ge=64 * 1024)] = PendingLimit().bytes
    """The most bytes queued for a peer that reads too slowly; if there are more, the
    connection is closed."""
    max_connections: Annotated[int, Field(ge=10)] = 500
    """The most connections of all direct TCP listeners together that are open at a
    time."""


class HttpSection(StrictSection):
    """Limits of the HTTP listeners."""

    allowed_hosts: Names = Field(default_factory=list)
    """Host names by which clients reach the listeners, in addition to ``localhost``,
    the name of the machine, the listeners' own addresses and the hosts of
    ``instance_map``. IP addresses are always accepted."""
    max_connections: Annotated[int, Field(ge=10)] = 500
    """The most connections of one listener that are open at a time."""


class ReceivingSection(StrictSection):
    """Limits of the data and positions that are accepted from peers."""

    # The default is far greater than the number of ids announced between two queries of
    # the sequence, and far smaller than the number of ids that the sequence has left.
    plausible_distance: Annotated[int, Field(ge=1000, le=2**40)] = PLAUSIBLE_DISTANCE
    """The most ids by which a position may exceed the last known value of its stream's
    sequence without being verified by a query to the database. For a stream held in
    memory, the position is compared with the writer's last known position, and the
    query goes to the writer. A sequence is never advanced to a position beyond this
    distance. The value must exceed the number of ids that a stream uses in one
    transaction."""
    # The minimum suffices for the largest row over Redis.
    max_queue_bytes: Annotated[int, Field(ge=1024 * 1024)] = 8 * 1024 * 1024
    """The most bytes of each stream that may be queued for a slow row sink, and the
    most bytes of an unfinished batch; if there are more, the rows of the queue or batch
    are dropped and fetched later."""
    position_check_seconds: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """The mean time between two reads of stream_positions, in s, which find rows that a
    writer has not announced. 0 disables the reads."""
    max_batch_rows: Annotated[int, Field(ge=100)] = 10_000
    """The most rows of an unfinished batch; a larger batch is dropped and fetched
    later."""


class TlsSection(StrictSection):
    """TLS between instances."""

    ca_file: str | None = None
    """PEM file, or folder, of the authorities that verify the instances to which this
    process connects (``instance_map`` with ``tls``, and ``tls:HOST:PORT``); by default,
    the authorities of the system."""
    certificate_file: str | None = None
    """Certificate (PEM) that this process presents: to servers that request one, and at
    its listeners, in place of ``tls_certificate_path``."""
    private_key_file: str | None = None
    """Private key (PEM) of ``certificate_file``."""
    client_ca_file: str | None = None
    """PEM file, or folder, of authorities. If set, listeners with ``tls`` accept only
    clients whose certificate one of these authorities has issued."""

    @model_validator(mode="after")
    def _check_pairs(self) -> TlsSection:
        if (self.certificate_file is None) != (self.private_key_file is None):
            raise invalid(
                "a certificate and its private key must be configured together",
                "write both certificate_file and private_key_file, or neither",
            )
        return self


class ExtensionSection(StrictSection):
    """The optional protocol between instances of this package."""

    enabled: bool = True
    """Whether to use the extension. Instances without it are not affected."""
    backlog_rows: Annotated[int, Field(ge=0)] = BacklogOptions().max_rows
    """The most rows that a writer retains of each stream, for readers that missed these
    rows; 0 for none."""
    backlog_bytes: Annotated[int, Field(ge=0)] = BacklogOptions().max_bytes
    """The approximate limit, in bytes, on the memory for the rows that a writer retains
    of each stream."""


#: The path to which spans are sent if the configured endpoint has none.
_TRACES_PATH = ("v1", "traces")


def _traces_url(endpoint: str) -> str:
    url = URL.from_text(endpoint)
    if not any(url.path):
        url = url.replace(path=_TRACES_PATH)
    return url.to_text()


class TracingSection(StrictSection):
    """A collector to which spans are sent, by OTLP over HTTP."""

    endpoint: Annotated[
        str, Field(pattern=r"^https?://[^\s/]+\S*$"), AfterValidator(_traces_url)
    ]
    """URL of the collector; ``/v1/traces`` is added to a URL without a path."""
    headers: OrEmpty[dict[str, SecretStr]] = Field(default_factory=dict)
    """Headers of each request."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The fraction of traces that are recorded, from 0 to 1. It applies to traces that
    begin in this process."""
    service_name: Annotated[str, Field(min_length=1)] = "synapse_replication"
    """``service.name`` of the spans."""


def _to_stream(value: Any) -> Any:
    """Read an entry of ``streams``: a standard stream's name, or a declaration.

    :raises PydanticCustomError: if the entry is invalid.
    """
    if isinstance(value, (TableStream, str)):
        if isinstance(value, str) and value not in STANDARD_STREAMS:
            known = ", ".join(STANDARD_STREAMS)
            otherwise = f"declare it by its table, or write one of {known}"
            raise invalid(
                f"{value!r} is not a standard stream",
                hint_for(value, STANDARD_STREAMS, otherwise),
            )
        return value
    if not isinstance(value, dict):
        raise invalid(
            "each entry must be a mapping, or the name of a standard stream",
            "write name, table, id_column, columns, sequence and writers",
        )
    fields = {
        field.name: field
        for field in attrs.fields(TableStream)
        if field.init and field.name != "row_type"
    }
    for key in value:
        if key not in fields:
            otherwise = f"write only {', '.join(fields)}"
            raise invalid(
                f"{key!r} is not a key of a stream",
                hint_for(str(key), fields, otherwise),
            )
    missing = [
        name
        for name, field in fields.items()
        if field.default is attrs.NOTHING and name not in value
    ]
    if missing:
        raise invalid(
            f"the declaration lacks {', '.join(missing)}", "add the missing keys"
        )
    try:
        return TableStream(**value)
    except StreamConfigurationError as error:
        problem, _, hint = str(error).rpartition("; ")
        raise invalid(problem or str(error), hint or "see the documentation") from None


StreamEntry = Annotated[Any, BeforeValidator(_to_stream)]


class OwnSection(StrictSection):
    """Settings of this package for which Synapse has no key."""

    streams: list[StreamEntry] | None = None
    """The streams that are replicated: names of standard streams, and declarations of
    your own tables. By default, all standard streams."""
    row_sink: FactorySection | None = None
    """``factory(host, config) -> RowSink``: the sink receives the rows."""
    writer_lock: bool = True
    """Whether a process that writes streams in PostgreSQL holds an advisory lock there.
    A second process with its name then waits for ten seconds and refuses to start. The
    lock has no effect behind a pooler in transaction mode."""
    fill_sink: bool = False
    """Whether a sink that has saved no position of a writer receives all rows of this
    writer from the beginning, instead of those that are written from now on."""
    command_sink: FactorySection | None = None
    """``factory(host, config) -> CommandSink``: the sink receives the commands for the
    host, such as ``USER_SYNC``."""
    modules: ListOf[FactorySection] = Field(default_factory=list)
    """``factory(host, config) -> IService | None``: each factory is called before
    replication starts; the service that it returns runs inside this process."""
    direct_tcp: OrEmpty[DirectTcpSection] = DirectTcpSection()
    """Direct TCP."""
    http: OrEmpty[HttpSection] = HttpSection()
    """HTTP listeners."""
    receiving: OrEmpty[ReceivingSection] = ReceivingSection()
    """Limits of the data and positions that are accepted from peers."""
    tls: OrEmpty[TlsSection] = TlsSection()
    """TLS between instances."""
    allow_unprotected_listeners: bool = False
    """Whether other machines may reach a listener for replication that requires neither
    a secret nor a client certificate."""
    log_level: Literal["debug", "info", "warn", "error", "critical"] = "info"
    """Lowest level that is logged."""
    tracing: TracingSection | None = None
    """The collector to which spans are sent; by default, none."""
    extension: OrEmpty[ExtensionSection] = ExtensionSection()
    """The optional protocol between instances of this package."""

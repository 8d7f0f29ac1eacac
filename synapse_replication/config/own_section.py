"""The section ``synapse_replication``: settings for which Synapse has no key."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import attrs
from msgspec import Meta, field
from msgspec.structs import force_setattr

from synapse_replication.config.sections import InvalidValueError, Secret, StrictSection
from synapse_replication.config.yaml_files import hint_for
from synapse_replication.errors import StreamConfigurationError
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.table import TableStream
from synapse_replication.streams.writer_positions import PLAUSIBLE_DISTANCE
from synapse_replication.wire.pending_lines import PendingLimit


class FactorySection(StrictSection, frozen=True):
    """A function that you provide.

    :ivar module: dotted name of the function, for instance ``shop.sinks.make_sink``.
    :ivar config: mapping that is passed to the function unchanged.
    """

    module: Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")]
    config: dict[str, Any] = field(default_factory=dict)


class DirectTcpSection(StrictSection, frozen=True):
    """Direct TCP endpoints in Twisted's syntax, for instance for TLS.

    :ivar connect: endpoints to connect to, one for each instance whose rows are read;
        for instance ``tls:main.example.com:9092``.
    :ivar listen: endpoints to listen on, in addition to the listeners of type
        ``replication``; for instance ``ssl:9092:privateKey=key.pem:certKey=crt.pem``.
    :ivar max_pending_commands: the most commands queued for a peer that reads too
        slowly; if there are more, the connection is closed.
    :ivar max_pending_bytes: the most bytes queued for a peer that reads too slowly; if
        there are more, the connection is closed.
    :ivar max_connections: the most connections of all direct TCP listeners together
        that are open at a time.
    """

    connect: list[str] = field(default_factory=list)
    listen: list[str] = field(default_factory=list)
    max_pending_commands: Annotated[int, Meta(ge=100)] = PendingLimit().lines
    # At least four lines of the maximum length.
    max_pending_bytes: Annotated[int, Meta(ge=64 * 1024)] = PendingLimit().bytes
    max_connections: Annotated[int, Meta(ge=10)] = 500


class HttpSection(StrictSection, frozen=True):
    """Limits of the HTTP listeners.

    :ivar allowed_hosts: host names by which clients reach the listeners, in addition to
        ``localhost``, the name of the machine, the listeners' own addresses and the
        hosts of ``instance_map``. IP addresses are always accepted.
    :ivar max_connections: the most connections of one listener that are open at a time.
    """

    allowed_hosts: list[str] = field(default_factory=list)
    max_connections: Annotated[int, Meta(ge=10)] = 500


class ReceivingSection(StrictSection, frozen=True):
    """Limits of the data and positions that are accepted from peers.

    :ivar plausible_distance: the most ids by which a position may exceed the last known
        value of its stream's sequence without being verified by a query to the
        database. For a stream held in memory, the position is compared with the
        writer's last known position, and the query goes to the writer. A sequence is
        never advanced to a position beyond this distance. The value must exceed the
        number of ids that a stream uses in one transaction.
    :ivar max_queue_bytes: the most bytes of each stream that may be queued for a slow
        row sink, and the most bytes of an unfinished batch; if there are more, the rows
        of the queue or batch are dropped and fetched later.
    :ivar position_check_seconds: the mean time between two reads of stream_positions,
        in s, which find rows that a writer has not announced. 0 disables the reads.
    :ivar max_batch_rows: the most rows of an unfinished batch; a larger batch is
        dropped and fetched later.
    """

    # The default is far greater than the number of ids announced between two queries of
    # the sequence, and far smaller than the number of ids that the sequence has left.
    plausible_distance: Annotated[int, Meta(ge=1000, le=2**40)] = PLAUSIBLE_DISTANCE
    # The minimum suffices for the largest row over Redis.
    max_queue_bytes: Annotated[int, Meta(ge=1024 * 1024)] = 8 * 1024 * 1024
    position_check_seconds: Annotated[float, Meta(ge=0, le=3600)] = 5.0
    max_batch_rows: Annotated[int, Meta(ge=100)] = 10_000


class TlsSection(StrictSection, frozen=True):
    """TLS between instances.

    :ivar ca_file: PEM file, or folder, of the authorities that verify the instances to
        which this process connects (``instance_map`` with ``tls``, and
        ``tls:HOST:PORT``); by default, the authorities of the system.
    :ivar certificate_file: certificate (PEM) that this process presents: to servers
        that request one, and at its listeners, in place of ``tls_certificate_path``.
    :ivar private_key_file: private key (PEM) of ``certificate_file``.
    :ivar client_ca_file: PEM file, or folder, of authorities. If set, listeners with
        ``tls`` accept only clients whose certificate one of these authorities has
        issued.
    """

    ca_file: str | None = None
    certificate_file: str | None = None
    private_key_file: str | None = None
    client_ca_file: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.private_key_file is None):
            raise InvalidValueError(
                "a certificate and its private key must be configured together",
                "write both certificate_file and private_key_file, or neither",
            )


class ExtensionSection(StrictSection, frozen=True):
    """The optional protocol between instances of this package.

    :ivar enabled: whether to use the extension. Instances without it are not affected.
    :ivar backlog_rows: the most rows that a writer retains of each stream, for readers
        that missed these rows; 0 for none.
    :ivar backlog_bytes: the approximate limit, in bytes, on the memory for the rows
        that a writer retains of each stream.
    """

    enabled: bool = True
    backlog_rows: Annotated[int, Meta(ge=0)] = BacklogOptions().max_rows
    backlog_bytes: Annotated[int, Meta(ge=0)] = BacklogOptions().max_bytes


def _traces_url(endpoint: str) -> str:
    problem = "is not a URL that begins with http:// or https://"
    hint = "write the URL of a collector, for instance http://localhost:4318"
    if re.fullmatch(r"https?://[^\s/]+\S*", endpoint) is None:
        raise InvalidValueError(problem, hint)
    # Imported here, because it takes 0.5 MiB and few processes send spans.
    from hyperlink import URL

    try:
        url = URL.from_text(endpoint)
    except ValueError:
        raise InvalidValueError(problem, hint) from None
    if not any(url.path):
        url = url.replace(path=("v1", "traces"))
    return url.to_text()


class TracingSection(StrictSection, frozen=True):
    """A collector to which spans are sent, by OTLP over HTTP.

    :ivar endpoint: URL of the collector; ``/v1/traces`` is added to a URL without a
        path.
    :ivar headers: headers of each request.
    :ivar sample_ratio: the fraction of traces that are recorded, from 0 to 1. It
        applies to traces that begin in this process.
    :ivar service_name: ``service.name`` of the spans.
    """

    endpoint: Annotated[str, _traces_url]
    headers: dict[str, Secret] = field(default_factory=dict)
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    service_name: Annotated[str, Meta(min_length=1)] = "synapse_replication"

    def __post_init__(self) -> None:
        force_setattr(self, "endpoint", _traces_url(self.endpoint))


def _to_stream(value: Any) -> Any:
    """Read an entry of ``streams``: a standard stream's name, or a declaration.

    :raises InvalidValueError: if the entry is invalid.
    """
    if isinstance(value, str):
        if value in STANDARD_STREAMS:
            return value
        known = ", ".join(STANDARD_STREAMS)
        otherwise = f"declare it by its table, or write one of {known}"
        raise InvalidValueError(
            f"{value!r} is not a standard stream",
            hint_for(value, STANDARD_STREAMS, otherwise),
        )
    if not isinstance(value, dict):
        raise InvalidValueError(
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
            raise InvalidValueError(
                f"{key!r} is not a key of a stream",
                hint_for(str(key), fields, otherwise),
            )
    missing = [
        name
        for name, field in fields.items()
        if field.default is attrs.NOTHING and name not in value
    ]
    if missing:
        raise InvalidValueError(
            f"the declaration lacks {', '.join(missing)}", "add the missing keys"
        )
    try:
        return TableStream(**value)
    except StreamConfigurationError as error:
        problem, _, hint = str(error).rpartition("; ")
        raise InvalidValueError(
            problem or str(error), hint or "see the documentation"
        ) from None


class OwnSection(StrictSection, frozen=True):
    """Settings of this package for which Synapse has no key.

    :ivar streams: the streams that are replicated: names of standard streams, and
        declarations of your own tables. By default, all standard streams.
    :ivar row_sink: ``factory(host, config) -> RowSink``: the sink receives the rows.
    :ivar writer_lock: whether a process that writes streams in PostgreSQL holds an
        advisory lock there. A second process with its name then waits for ten seconds
        and refuses to start. The lock has no effect behind a pooler in transaction
        mode.
    :ivar fill_sink: whether a sink that has saved no position of a writer receives all
        rows of this writer from the beginning, instead of those that are written from
        now on.
    :ivar command_sink: ``factory(host, config) -> CommandSink``: the sink receives the
        commands for the host, such as ``USER_SYNC``.
    :ivar modules: ``factory(host, config) -> IService | None``: each factory is called
        before replication starts; the service that it returns runs inside this process.
    :ivar direct_tcp: direct TCP.
    :ivar http: HTTP listeners.
    :ivar receiving: limits of the data and positions that are accepted from peers.
    :ivar tls: TLS between instances.
    :ivar allow_unprotected_listeners: whether other machines may reach a listener for
        replication that requires neither a secret nor a client certificate.
    :ivar log_level: lowest level that is logged.
    :ivar tracing: the collector to which spans are sent; by default, none.
    :ivar extension: the optional protocol between instances of this package.
    """

    streams: list[Annotated[Any, _to_stream]] | None = None
    row_sink: FactorySection | None = None
    writer_lock: bool = True
    fill_sink: bool = False
    command_sink: FactorySection | None = None
    modules: list[FactorySection] = field(default_factory=list)
    direct_tcp: DirectTcpSection = DirectTcpSection()
    http: HttpSection = HttpSection()
    receiving: ReceivingSection = ReceivingSection()
    tls: TlsSection = TlsSection()
    allow_unprotected_listeners: bool = False
    log_level: Literal["debug", "info", "warn", "error", "critical"] = "info"
    tracing: TracingSection | None = None
    extension: ExtensionSection = ExtensionSection()

"""The public API. Names that are neither here nor in the manual may change.

Names that Synapse introduced have the same meaning here. The names of the storage
package are imported on first use, because the database driver is an extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from synapse_replication.clock import BackgroundProcesses, ReactorClock
from synapse_replication.errors import (
    CatchUpError,
    ConfigError,
    ConfigProblem,
    HttpCatchUpError,
    ImplausiblePositionError,
    LineTooLongError,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    ReplicationError,
    RowDecodeError,
    SequenceBehindError,
    StorageError,
    StreamConfigurationError,
    TokenError,
    UnknownCommandError,
    UnparsableLineError,
    WaitTimeoutError,
)
from synapse_replication.handlers.data import ReplicationDataHandler
from synapse_replication.handlers.handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.host_parts import (
    StreamTable,
    SyncingUsers,
    WriteNotifier,
)
from synapse_replication.handlers.interfaces import (
    BackgroundRunner,
    Clock,
    ClosableSink,
    CommandSink,
    EpochSink,
    Identity,
    Notifier,
    PositionSink,
    ReplicationConnection,
    ReplicationHost,
    RowSink,
    StreamDirectory,
    SyncingUser,
)
from synapse_replication.handlers.observer import (
    CatchUpEvent,
    DiscardReason,
    ReplicationObserver,
)
from synapse_replication.handlers.sending.streamer import (
    ReplicationStreamer,
    StreamerOptions,
)
from synapse_replication.http.client import HttpCatchUpClient, make_agent
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.http.retry import with_retries
from synapse_replication.instrumentation.composite import CompositeObserver
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.instrumentation.tracing import TracingObserver
from synapse_replication.redis.external_cache import ExternalCache
from synapse_replication.redis.factory import SynapseRedisFactory
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions, RedisTlsOptions
from synapse_replication.redis.subscriber import RedisSubscriber
from synapse_replication.streams.between import (
    PositionedRow,
    RowsBetween,
    TokenStream,
)
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.rows import RawRowCodec, RowCodec
from synapse_replication.streams.standard.registry import (
    MAIN_INSTANCE,
    STANDARD_STREAMS,
    StandardStream,
)
from synapse_replication.streams.stream import (
    CheckedStream,
    JsonValue,
    Stream,
    StreamDescription,
    StreamUpdateResult,
    UpdateFunction,
)
from synapse_replication.streams.table import TableStream
from synapse_replication.streams.tokens import MultiWriterStreamToken, PersistedPosition
from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory,
)
from synapse_replication.tcp.protocol import (
    BaseReplicationStreamProtocol,
    ClientReplicationStreamProtocol,
    ServerReplicationStreamProtocol,
)
from synapse_replication.wire.commands.base import Command
from synapse_replication.wire.commands.legacy import (
    InvalidateCacheCommand,
    RemovePusherCommand,
)
from synapse_replication.wire.commands.standard import (
    CancelTaskCommand,
    ErrorCommand,
    FederationAckCommand,
    LockReleasedCommand,
    NameCommand,
    NewActiveTaskCommand,
    PingCommand,
    PositionCommand,
    RdataCommand,
    RemoteServerUpCommand,
    ReplicateCommand,
    ServerCommand,
    parse_command_from_line,
)
from synapse_replication.wire.commands.users import (
    ClearUserSyncsCommand,
    UserIpCommand,
    UserSyncCommand,
)
from synapse_replication.wire.connection import CloseReason

if TYPE_CHECKING:
    from synapse_replication.storage.database import Database
    from synapse_replication.storage.id_generators import (
        MultiWriterIdGenerator,
        load_id_generator,
    )
    from synapse_replication.storage.id_streams import IdStream
    from synapse_replication.storage.postgres_stream import (
        PostgresStream,
        standard_stream,
        table_stream,
    )

__all__ = [
    "MAIN_INSTANCE",
    "STANDARD_STREAMS",
    "BackgroundProcesses",
    "BackgroundRunner",
    "BaseReplicationStreamProtocol",
    "CancelTaskCommand",
    "CatchUpError",
    "CatchUpEvent",
    "CheckedStream",
    "ClearUserSyncsCommand",
    "ClientReplicationStreamProtocol",
    "Clock",
    "ClosableSink",
    "CloseReason",
    "Command",
    "CommandSink",
    "CompositeObserver",
    "ConfigError",
    "ConfigProblem",
    "Database",
    "DirectTcpReplicationClientFactory",
    "DiscardReason",
    "EpochSink",
    "ErrorCommand",
    "ExternalCache",
    "FederationAckCommand",
    "HandlerOptions",
    "HttpCatchUpClient",
    "HttpCatchUpError",
    "IdStream",
    "Identity",
    "ImplausiblePositionError",
    "InvalidateCacheCommand",
    "JsonValue",
    "LineTooLongError",
    "LocalProtocolError",
    "LockReleasedCommand",
    "LoggingObserver",
    "MemoryStream",
    "MultiWriterIdGenerator",
    "MultiWriterStreamToken",
    "NameCommand",
    "NewActiveTaskCommand",
    "Notifier",
    "PersistedPosition",
    "PingCommand",
    "PositionCommand",
    "PositionSink",
    "PositionedRow",
    "PostgresStream",
    "PrometheusObserver",
    "ProtocolError",
    "RawRowCodec",
    "RdataCommand",
    "ReactorClock",
    "RedisOptions",
    "RedisReplicationLink",
    "RedisSubscriber",
    "RedisTlsOptions",
    "RemoteProtocolError",
    "RemoteServerUpCommand",
    "RemovePusherCommand",
    "ReplicateCommand",
    "ReplicationCommandHandler",
    "ReplicationConnection",
    "ReplicationDataHandler",
    "ReplicationError",
    "ReplicationHost",
    "ReplicationMetrics",
    "ReplicationObserver",
    "ReplicationResource",
    "ReplicationStreamProtocolFactory",
    "ReplicationStreamer",
    "RowCodec",
    "RowDecodeError",
    "RowSink",
    "RowsBetween",
    "SequenceBehindError",
    "ServerCommand",
    "ServerReplicationStreamProtocol",
    "StandardStream",
    "StorageError",
    "Stream",
    "StreamConfigurationError",
    "StreamDescription",
    "StreamDirectory",
    "StreamTable",
    "StreamUpdateResult",
    "StreamerOptions",
    "SynapseRedisFactory",
    "SyncingUser",
    "SyncingUsers",
    "TableStream",
    "TokenError",
    "TokenStream",
    "TracingObserver",
    "UnknownCommandError",
    "UnparsableLineError",
    "UpdateFunction",
    "UserIpCommand",
    "UserSyncCommand",
    "WaitTimeoutError",
    "WriteNotifier",
    "load_id_generator",
    "make_agent",
    "parse_command_from_line",
    "standard_stream",
    "table_stream",
    "with_retries",
]

_STORAGE_NAMES = frozenset(
    {
        "Database",
        "IdStream",
        "MultiWriterIdGenerator",
        "PostgresStream",
        "load_id_generator",
        "standard_stream",
        "table_stream",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _STORAGE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from synapse_replication.storage import (
        database,
        id_generators,
        postgres_stream,
        sequences,
    )

    modules = (database, id_generators, postgres_stream, sequences)
    return next(getattr(module, name) for module in modules if hasattr(module, name))

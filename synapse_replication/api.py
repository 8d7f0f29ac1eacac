"""The public API. Names that are neither here nor in the manual may change.

Names that Synapse introduced have the same meaning here. Names that need the database
driver, which is an extra, are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from synapse_replication.app.journal import JournalSink
from synapse_replication.app.run import run_service, start_logging
from synapse_replication.clock import BackgroundProcesses, ReactorClock
from synapse_replication.config.deployment import DatabaseConfig
from synapse_replication.config.listener_safety import Listener
from synapse_replication.config.options import ReplicationOptions
from synapse_replication.config.tls import TlsConfig
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
from synapse_replication.handlers.data_handler import ReplicationDataHandler
from synapse_replication.handlers.events import CatchUpEvent, DiscardReason
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
    LateRowSink,
    Notifier,
    PositionSink,
    ReplicationConnection,
    ReplicationHost,
    RowSink,
    StreamDirectory,
    SyncingUser,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.handlers.sending.streamer import (
    ReplicationStreamer,
    StreamerOptions,
)
from synapse_replication.http.client import (
    HttpCatchUpClient,
    InstanceLocation,
    make_agent,
)
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
from synapse_replication.redis.options import (
    RedisOptions,
    RedisTlsOptions,
    SentinelOptions,
)
from synapse_replication.redis.subscriber import RedisSubscriber
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.between import (
    PositionedRow,
    RowsBetween,
    TokenStream,
)
from synapse_replication.streams.memory import InMemory, MemoryStream
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
from synapse_replication.wire.pending import PendingLimit

if TYPE_CHECKING:
    from synapse_replication.app.service import Replication
    from synapse_replication.storage.database import Database, Transaction
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
    "BacklogOptions",
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
    "DatabaseConfig",
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
    "InMemory",
    "InstanceLocation",
    "InvalidateCacheCommand",
    "JournalSink",
    "JsonValue",
    "LateRowSink",
    "LineTooLongError",
    "Listener",
    "LocalProtocolError",
    "LockReleasedCommand",
    "LoggingObserver",
    "MemoryStream",
    "MultiWriterIdGenerator",
    "MultiWriterStreamToken",
    "NameCommand",
    "NewActiveTaskCommand",
    "Notifier",
    "PendingLimit",
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
    "ReceiverOptions",
    "RedisOptions",
    "RedisReplicationLink",
    "RedisSubscriber",
    "RedisTlsOptions",
    "RemoteProtocolError",
    "RemoteServerUpCommand",
    "RemovePusherCommand",
    "ReplicateCommand",
    "Replication",
    "ReplicationCommandHandler",
    "ReplicationConnection",
    "ReplicationDataHandler",
    "ReplicationError",
    "ReplicationHost",
    "ReplicationMetrics",
    "ReplicationObserver",
    "ReplicationOptions",
    "ReplicationResource",
    "ReplicationStreamProtocolFactory",
    "ReplicationStreamer",
    "RowCodec",
    "RowDecodeError",
    "RowSink",
    "RowsBetween",
    "SentinelOptions",
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
    "TlsConfig",
    "TokenError",
    "TokenStream",
    "TracingObserver",
    "Transaction",
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
    "run_service",
    "standard_stream",
    "start_logging",
    "table_stream",
    "with_retries",
]

#: The modules of the names that need the database driver.
_NEED_DRIVER = {
    "Database": "storage.database",
    "IdStream": "storage.id_streams",
    "MultiWriterIdGenerator": "storage.id_generators",
    "PostgresStream": "storage.postgres_stream",
    "Replication": "app.service",
    "Transaction": "storage.database",
    "load_id_generator": "storage.id_generators",
    "standard_stream": "storage.postgres_stream",
    "table_stream": "storage.postgres_stream",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_DRIVER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"synapse_replication.{_NEED_DRIVER[name]}")
    except ModuleNotFoundError as error:
        if error.name != "psycopg2":
            raise
        raise ImportError(
            f"{name} needs the PostgreSQL driver: "
            "pip install 'synapse_replication[postgres-binary]'"
        ) from None
    return getattr(module, name)

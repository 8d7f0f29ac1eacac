"""The public API. Names that are neither here nor in the manual may change.

Names that Synapse introduced have the same meaning here. Names that need the database
driver, which is an extra, are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from synapse_replication.app.journal import JournalSink as JournalSink
from synapse_replication.app.service_runner import (
    run_service as run_service,
    start_logging as start_logging,
)
from synapse_replication.config.deployment import DatabaseConfig as DatabaseConfig
from synapse_replication.config.listener_safety import Listener as Listener
from synapse_replication.config.replication_options import (
    ReplicationOptions as ReplicationOptions,
)
from synapse_replication.errors import (
    CatchUpError as CatchUpError,
    CommitUnknownError as CommitUnknownError,
    ConfigError as ConfigError,
    ConfigProblem as ConfigProblem,
    DatabaseBehindError as DatabaseBehindError,
    DatabaseClosedError as DatabaseClosedError,
    HttpCatchUpError as HttpCatchUpError,
    ImplausiblePositionError as ImplausiblePositionError,
    LineTooLongError as LineTooLongError,
    LocalProtocolError as LocalProtocolError,
    NameLostError as NameLostError,
    ProtocolError as ProtocolError,
    RemoteProtocolError as RemoteProtocolError,
    ReplicationError as ReplicationError,
    RowDecodeError as RowDecodeError,
    SequenceBehindError as SequenceBehindError,
    StorageError as StorageError,
    StreamClosedError as StreamClosedError,
    StreamConfigurationError as StreamConfigurationError,
    TokenError as TokenError,
    TransactionRolledBackError as TransactionRolledBackError,
    UnknownCommandError as UnknownCommandError,
    UnparsableLineError as UnparsableLineError,
    WaitTimeoutError as WaitTimeoutError,
)
from synapse_replication.extras import explain_missing
from synapse_replication.handlers.command_handler import (
    HandlerOptions as HandlerOptions,
    ReplicationCommandHandler as ReplicationCommandHandler,
)
from synapse_replication.handlers.data_handler import (
    AdvancingStream as AdvancingStream,
    ReplicationDataHandler as ReplicationDataHandler,
)
from synapse_replication.handlers.events import (
    CatchUpEvent as CatchUpEvent,
    DiscardReason as DiscardReason,
)
from synapse_replication.handlers.host_parts import (
    BackgroundProcesses as BackgroundProcesses,
    ReactorClock as ReactorClock,
    StreamTable as StreamTable,
    SyncingUsers as SyncingUsers,
    WriteNotifier as WriteNotifier,
)
from synapse_replication.handlers.interfaces import (
    BackgroundRunner as BackgroundRunner,
    Clock as Clock,
    ClosableSink as ClosableSink,
    CommandSink as CommandSink,
    DamageSink as DamageSink,
    EpochSink as EpochSink,
    Identity as Identity,
    LateRowSink as LateRowSink,
    Notifier as Notifier,
    PositionSink as PositionSink,
    ReplicationConnection as ReplicationConnection,
    ReplicationHost as ReplicationHost,
    RowSink as RowSink,
    StreamDirectory as StreamDirectory,
    SyncingUser as SyncingUser,
)
from synapse_replication.handlers.observer import (
    CompositeObserver as CompositeObserver,
    ReplicationObserver as ReplicationObserver,
)
from synapse_replication.handlers.receiving.context import (
    ReceiverOptions as ReceiverOptions,
)
from synapse_replication.handlers.sending.streamer import (
    ReplicationStreamer as ReplicationStreamer,
    StreamerOptions as StreamerOptions,
)
from synapse_replication.http.client import (
    HttpCatchUpClient as HttpCatchUpClient,
    with_retries as with_retries,
)
from synapse_replication.http.location import InstanceLocation as InstanceLocation
from synapse_replication.http.resource import ReplicationResource as ReplicationResource
from synapse_replication.instrumentation.logs import LoggingObserver as LoggingObserver
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver as PrometheusObserver,
    ReplicationMetrics as ReplicationMetrics,
)
from synapse_replication.instrumentation.tracing import (
    TracingObserver as TracingObserver,
)
from synapse_replication.redis.external_cache import ExternalCache as ExternalCache
from synapse_replication.redis.factory import SynapseRedisFactory as SynapseRedisFactory
from synapse_replication.redis.link import RedisReplicationLink as RedisReplicationLink
from synapse_replication.redis.options import (
    RedisOptions as RedisOptions,
    RedisTlsOptions as RedisTlsOptions,
    SentinelOptions as SentinelOptions,
)
from synapse_replication.redis.subscriber import RedisSubscriber as RedisSubscriber
from synapse_replication.streams.backlog import BacklogOptions as BacklogOptions
from synapse_replication.streams.memory import (
    InMemory as InMemory,
    MemoryStream as MemoryStream,
)
from synapse_replication.streams.rows import (
    AttrsRowCodec as AttrsRowCodec,
    RawRowCodec as RawRowCodec,
    RowCodec as RowCodec,
)
from synapse_replication.streams.standard.registry import (
    MAIN_INSTANCE as MAIN_INSTANCE,
    STANDARD_STREAMS as STANDARD_STREAMS,
    StandardStream as StandardStream,
)
from synapse_replication.streams.stream import (
    CheckedStream as CheckedStream,
    JsonValue as JsonValue,
    PositionedRow as PositionedRow,
    RowsBetween as RowsBetween,
    Stream as Stream,
    StreamDescription as StreamDescription,
    StreamUpdateResult as StreamUpdateResult,
    TokenStream as TokenStream,
    UpdateFunction as UpdateFunction,
)
from synapse_replication.streams.table import TableStream as TableStream
from synapse_replication.streams.tokens import (
    MultiWriterStreamToken as MultiWriterStreamToken,
    PersistedPosition as PersistedPosition,
)
from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory as DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory as ReplicationStreamProtocolFactory,
)
from synapse_replication.tcp.protocol import (
    BaseReplicationStreamProtocol as BaseReplicationStreamProtocol,
    ClientReplicationStreamProtocol as ClientReplicationStreamProtocol,
    ServerReplicationStreamProtocol as ServerReplicationStreamProtocol,
)
from synapse_replication.transport.tls import TlsConfig as TlsConfig
from synapse_replication.wire.close_reason import CloseReason as CloseReason
from synapse_replication.wire.commands import (
    CancelTaskCommand as CancelTaskCommand,
    ClearUserSyncsCommand as ClearUserSyncsCommand,
    Command as Command,
    ErrorCommand as ErrorCommand,
    FederationAckCommand as FederationAckCommand,
    InvalidateCacheCommand as InvalidateCacheCommand,
    LockReleasedCommand as LockReleasedCommand,
    NameCommand as NameCommand,
    NewActiveTaskCommand as NewActiveTaskCommand,
    PingCommand as PingCommand,
    PositionCommand as PositionCommand,
    RdataCommand as RdataCommand,
    RemoteServerUpCommand as RemoteServerUpCommand,
    RemovePusherCommand as RemovePusherCommand,
    ReplicateCommand as ReplicateCommand,
    ServerCommand as ServerCommand,
    UserIpCommand as UserIpCommand,
    UserSyncCommand as UserSyncCommand,
    parse_command_from_line as parse_command_from_line,
)
from synapse_replication.wire.pending_lines import PendingLimit as PendingLimit

if TYPE_CHECKING:
    from synapse_replication.app.service import Replication as Replication
    from synapse_replication.http.agent import make_agent as make_agent
    from synapse_replication.storage.database import Database as Database
    from synapse_replication.storage.id_generators import (
        MultiWriterIdGenerator as MultiWriterIdGenerator,
        load_id_generator as load_id_generator,
    )
    from synapse_replication.storage.id_streams import IdStream as IdStream
    from synapse_replication.storage.postgres_stream import (
        PostgresStream as PostgresStream,
    )
    from synapse_replication.storage.transactions import Transaction as Transaction

#: The names here that are no part of the API.
_INTERNAL = frozenset(
    {"TYPE_CHECKING", "Any", "annotations", "explain_missing", "importlib"}
)
#: The modules that are imported when a name is used: those that need the database
#: driver, and those that load treq.
_LAZY = {
    "Database": "storage.database",
    "IdStream": "storage.id_streams",
    "MultiWriterIdGenerator": "storage.id_generators",
    "PostgresStream": "storage.postgres_stream",
    "Replication": "app.service",
    "Transaction": "storage.transactions",
    "load_id_generator": "storage.id_generators",
    "make_agent": "http.agent",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"synapse_replication.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        text = explain_missing(error)
        if text is None:
            raise
        raise ImportError(f"{name} needs the PostgreSQL driver: {text}") from None
    return getattr(module, name)


def __dir__() -> list[str]:
    names = globals().keys() | _LAZY.keys()
    return sorted(name for name in names - _INTERNAL if not name.startswith("_"))

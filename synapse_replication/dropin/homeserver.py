"""The part of a homeserver that this package uses, as protocols.

The homeserver's own classes are not imported for types, because its packages might not
be installed, and its versions differ. What is passed on without being used is an
``object``. ``Any`` is what no protocol can describe; docs/contributing.rst lists it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall

from synapse_replication.transport.reactor import IReactor

if TYPE_CHECKING:
    from psycopg2.extensions import connection
    from txredisapi import RedisFactory

    from synapse_replication.handlers.sending.streamer import ReplicationStreamer

T = TypeVar("T")


class HomeserverClock(Protocol):
    """The clock of a homeserver. The type of its durations depends on the version."""

    def time_msec(self) -> int:
        """Return wall-clock time in ms since 1970."""

    # Durations are objects: numbers in older versions.
    def call_later(
        self, delay: Any, callback: Callable[..., object], *args: object
    ) -> IDelayedCall:
        """Call a function after a duration."""

    def cancel_call_later(self, timer: IDelayedCall) -> None:
        """Cancel a call."""

    def sleep(self, duration: Any) -> Awaitable[None]:
        """Wait for a duration."""


class RedisSettings(Protocol):
    """The section ``redis`` of the configuration. Older versions lack a user name."""

    redis_enabled: bool
    redis_host: str
    redis_port: int
    redis_path: str | None
    redis_password: str | None
    redis_use_tls: bool


class WriterSettings(Protocol):
    """The writers of each stream: further attributes, by the name of the setting."""

    presence: Sequence[str]


class ListenerResource(Protocol):
    """What a listener serves."""

    names: Sequence[str]


class HttpOptions(Protocol):
    """The options of an HTTP listener."""

    resources: Sequence[ListenerResource]


class ListenerSettings(Protocol):
    """A listener; ``http_options`` is ``None`` if it does not speak HTTP."""

    http_options: HttpOptions | None


class WorkerSettings(Protocol):
    """The configuration of the processes.

    :ivar instance_map: the addresses of instances, by name.
    :ivar worker_listeners: the listeners of a worker.
    :ivar writers: the writers of each stream.
    :ivar run_background_tasks: whether this process runs background tasks.
    :ivar send_federation: whether this process sends to other servers.
    """

    instance_map: Mapping[str, object]
    worker_listeners: Sequence[ListenerSettings]
    worker_replication_secret: str | None
    writers: WriterSettings
    run_background_tasks: bool
    send_federation: bool


class ServerSettings(Protocol):
    """The configuration of the server; ``listeners`` are those of the main process."""

    listeners: Sequence[ListenerSettings]


class Configuration(Protocol):
    """The configuration of a homeserver."""

    @property
    def redis(self) -> RedisSettings:
        """The section ``redis``."""

    @property
    def worker(self) -> WorkerSettings:
        """The configuration of the processes."""

    @property
    def server(self) -> ServerSettings:
        """The configuration of the server."""


class DatabaseConnection(Protocol):
    """A connection to the database, for the constructors of a homeserver's parts."""

    @property
    def conn(self) -> connection:
        """The connection of the driver; of psycopg2 only if it is to PostgreSQL."""

    # Cursors of PostgreSQL and of SQLite have little in common.
    def cursor(self, *, txn_name: str) -> Any:
        """Return a cursor, which logs its statements with a name."""

    def commit(self) -> None:
        """Commit the transaction."""

    def rollback(self) -> None:
        """Roll the transaction back."""


class DatabasePool(Protocol):
    """The connection pool of a homeserver."""

    @property
    def engine(self) -> object:
        """The kind of database."""

    @property
    def hs(self) -> Homeserver:
        """The homeserver."""

    def runInteraction(
        self,
        desc: str,
        func: Callable[..., T],
        *args: object,
        db_autocommit: bool = False,
    ) -> Awaitable[T]:
        """Run a function in a transaction."""


class MainStore(Protocol):
    """The database with the replicated tables, and its caches as attributes."""

    @property
    def db_pool(self) -> DatabasePool:
        """The pool of its connections."""

    def insert_client_ip(
        self,
        user_id: str,
        access_token: str,
        ip: str,
        user_agent: str,
        device_id: str | None,
        now: int,
    ) -> Awaitable[None]:
        """Store that a client was seen."""

    def invalidate_cache_and_stream(
        self, cache_name: str, keys: tuple[object, ...]
    ) -> Awaitable[None]:
        """Invalidate an entry of a cache in all processes."""


class Datastores(Protocol):
    """The databases of a homeserver."""

    @property
    def main(self) -> MainStore:
        """The database with the replicated tables."""


class HomeserverStream(Protocol):
    """A stream of a homeserver, with its ``NAME`` on the wire."""

    NAME: str

    # Rows are values of JSON on the wire, and objects of the stream's own class.
    def parse_row(self, row: Any) -> Any:
        """Return the row of a JSON value."""

    def current_token(self, instance_name: str) -> int:
        """Return the token up to which this process has a writer's rows."""

    def minimal_local_current_token(self) -> int:
        """Return the position that this process may announce."""

    def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> Awaitable[tuple[Sequence[tuple[int, Any]], int, bool]]:
        """Return a page: rows with their tokens, its end, whether there are more."""


class HomeserverDataHandler(Protocol):
    """The part of a homeserver that receives rows."""

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None]:
        """Receive the rows of one token."""

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None]:
        """Receive the position of a writer."""


class FederationSender(Protocol):
    """The part of a homeserver that sends to other servers, or a proxy of it."""

    def federation_ack(self, instance_name: str | None, token: int) -> None:
        """Discard what was sent up to ``token``; older senders state no name."""


class PusherPool(Protocol):
    """The part of a homeserver that sends pushes."""

    def remove_pusher(self, app_id: str, pushkey: str, user_id: str) -> Awaitable[None]:
        """Remove a pusher."""


class ServerNoticesSender(Protocol):
    """The part of a homeserver that sends notices to users."""

    def on_user_ip(self, user_id: str) -> Awaitable[None]:
        """Send the pending notices of a user."""


class TaskScheduler(Protocol):
    """The part of a homeserver that runs tasks; older ones cannot cancel tasks."""

    def on_new_task(self, task_id: str) -> None:
        """Run a task."""


class ContextFactory(Protocol):
    """The TLS policy of a homeserver's requests."""

    def creatorForNetloc(self, hostname: bytes, port: int) -> object:
        """Return what creates TLS connections to a host."""


class ReplicationNotifier(Protocol):
    """The notifier of the streamer."""

    def notify_replication(self) -> None:
        """Report that a stream may have advanced."""


class CommandHandler(Protocol):
    """A command handler, of this package or of the homeserver.

    That of the homeserver has a method ``on_<COMMAND>(connection, command)`` for each
    command.
    """

    def new_connection(self, connection: Any) -> None:
        """Add a connection."""

    def lost_connection(self, connection: Any) -> None:
        """Remove a connection."""

    def send_positions_to_connection(self) -> None:
        """Announce the positions of the streams that this process writes."""


class CommandConnection(Protocol):
    """A connection of this package or of the homeserver."""

    def send_command(self, cmd: Any) -> None:
        """Send a command."""


class RedisHandler(Protocol):
    """A connection to Redis for publishing, of this package or of the homeserver."""

    # txredisapi has no public attribute for the factory.
    @property
    def _factory(self) -> RedisFactory:
        """The factory."""

    def publish(self, channel: str, message: str) -> object:
        """Publish a message."""


class HomeserverNotifier(Protocol):
    """The part of a homeserver that wakes requests for new rows."""

    def add_replication_callback(self, cb: Callable[[], None]) -> None:
        """Call ``cb`` when a stream may have advanced."""

    def add_lock_released_callback(self, callback: Callable[..., None]) -> None:
        """Call ``callback`` when a lock of this process was released."""

    def notify_remote_server_up(self, server: str) -> None:
        """Retry requests to a server."""

    def notify_lock_released(
        self, instance_name: str, lock_name: str, lock_key: str
    ) -> None:
        """Wake those that wait for a lock."""


class PresenceHandler(Protocol):
    """The part of a homeserver that tracks who is present."""

    def get_currently_syncing_users_for_replication(
        self,
    ) -> Iterable[tuple[str, str | None]]:
        """Return the users, with their devices, who sync with this process."""

    def update_external_syncs_row(
        self,
        process_id: str,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        sync_time_msec: int,
    ) -> Awaitable[None]:
        """Record that a user started or stopped syncing with another process."""

    def update_external_syncs_clear(self, process_id: str) -> Awaitable[None]:
        """Record that no user syncs with another process any more."""


class Homeserver(Protocol):
    """One homeserver object, of which a process usually has one."""

    @property
    def hostname(self) -> str:
        """The name of the server."""

    @property
    def config(self) -> Configuration:
        """The configuration."""

    def get_instance_name(self) -> str:
        """Return the name of this process; ``master`` for the main process."""

    def get_instance_id(self) -> str:
        """Return the random id of this start."""

    def get_reactor(self) -> IReactor:
        """Return the reactor."""

    def get_clock(self) -> HomeserverClock:
        """Return the clock."""

    def get_datastores(self) -> Datastores:
        """Return the databases; ``main`` is the one with the replicated tables."""

    def get_notifier(self) -> HomeserverNotifier:
        """Return the part that wakes requests."""

    def get_presence_handler(self) -> PresenceHandler:
        """Return the part that tracks who is present."""

    def get_federation_sender(self) -> FederationSender:
        """Return the part that sends to other servers, or a proxy of it."""

    def get_pusherpool(self) -> PusherPool:
        """Return the part that sends pushes."""

    def get_server_notices_sender(self) -> ServerNoticesSender:
        """Return the part that sends notices to users."""

    def get_task_scheduler(self) -> TaskScheduler:
        """Return the part that runs tasks; older ones cannot cancel tasks."""

    def get_replication_data_handler(self) -> HomeserverDataHandler:
        """Return the part that receives rows."""

    def get_http_client_context_factory(self) -> ContextFactory:
        """Return the TLS policy of requests."""

    # These are replaced, or may be.

    def get_replication_command_handler(self) -> CommandHandler:
        """Return the command handler."""

    def get_replication_streamer(self) -> ReplicationStreamer:
        """Return the streamer."""

    def get_replication_notifier(self) -> ReplicationNotifier:
        """Return the notifier that starts the streamer."""

    def get_outbound_redis_connection(self) -> RedisHandler:
        """Return the connection to Redis for publishing."""

    def run_as_background_process(
        self, desc: str, func: Callable[[], Awaitable[T]]
    ) -> Deferred[T | None]:
        """Start a background process of the homeserver."""

    def register_sync_shutdown_handler(
        self, *, phase: str, eventType: str, shutdown_func: Callable[..., object]
    ) -> None:
        """Call a function when the homeserver shuts down."""

"""The part of a homeserver that this package uses, as protocols.

The homeserver's own classes are not imported for types, because its packages might not
be installed, and its versions differ. What is replaced, or differs between versions,
remains untyped here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class RedisSettings(Protocol):
    """The section ``redis`` of the configuration. Older versions lack a user name."""

    redis_enabled: bool
    redis_host: str
    redis_port: int
    redis_path: str | None
    redis_password: str | None
    redis_use_tls: bool


class WorkerSettings(Protocol):
    """The configuration of the processes.

    :ivar instance_map: the addresses of instances, by name.
    :ivar worker_listeners: the listeners of a worker.
    :ivar writers: the writers of each stream, as attributes.
    :ivar run_background_tasks: whether this process runs background tasks.
    :ivar send_federation: whether this process sends to other servers.
    """

    instance_map: Mapping[str, Any]
    worker_listeners: Sequence[Any]
    worker_replication_secret: str | None
    writers: Any
    run_background_tasks: bool
    send_federation: bool


class ServerSettings(Protocol):
    """The configuration of the server; ``listeners`` are those of the main process."""

    listeners: Sequence[Any]


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


class DatabasePool(Protocol):
    """The connection pool of a homeserver.

    :ivar engine: the kind of database.
    """

    engine: Any

    def runInteraction(
        self,
        desc: str,
        func: Callable[..., T],
        *args: Any,
        db_autocommit: bool = False,
    ) -> Awaitable[T]:
        """Run a function in a transaction."""


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

    def get_reactor(self) -> Any:
        """Return the reactor, which has many interfaces; simulated in tests."""

    def get_clock(self) -> Any:
        """Return the clock, whose type of times depends on the version."""

    def get_datastores(self) -> Any:
        """Return the databases; ``main`` is the one with the replicated tables."""

    def get_notifier(self) -> HomeserverNotifier:
        """Return the part that wakes requests."""

    def get_presence_handler(self) -> PresenceHandler:
        """Return the part that tracks who is present."""

    def get_federation_sender(self) -> Any:
        """Return the part that sends to other servers, or a proxy of it."""

    def get_pusherpool(self) -> Any:
        """Return the part that sends pushes."""

    def get_server_notices_sender(self) -> Any:
        """Return the part that sends notices to users."""

    def get_task_scheduler(self) -> Any:
        """Return the part that runs tasks; older ones cannot cancel tasks."""

    def get_replication_data_handler(self) -> Any:
        """Return the part that receives rows."""

    def get_http_client_context_factory(self) -> Any:
        """Return the TLS policy of requests."""

    # These are replaced, or may be.

    def get_replication_command_handler(self) -> Any:
        """Return the command handler."""

    def get_replication_streamer(self) -> Any:
        """Return the streamer."""

    def get_replication_notifier(self) -> Any:
        """Return the notifier that starts the streamer."""

    def get_outbound_redis_connection(self) -> Any:
        """Return the connection to Redis for publishing."""

    def run_as_background_process(
        self, desc: Any, func: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any
    ) -> Any:
        """Start a background process of the homeserver."""

    def register_sync_shutdown_handler(
        self, *, phase: str, eventType: str, shutdown_func: Callable[..., object]
    ) -> None:
        """Call a function when the homeserver shuts down."""

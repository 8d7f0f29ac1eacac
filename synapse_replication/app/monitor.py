"""A monitor beside a deployment, stock or not, in which it does not take part.

Theory of operation: a monitor publishes nothing. It listens on the deployment's links
(:mod:`~synapse_replication.app.passive`), reads the database, and asks each instance of
``instance_map`` for its status over HTTP, as any client may. From this, it makes the
status of a process: the same page, JSON and metrics as those of an instance.

* An instance that does not answer twice in a row is down. A stock instance answers that
  it has no such path, which shows that it runs.
* What an instance of this package reports about itself is a problem here, too.
* A row that was committed and not announced is found by the
  :class:`~synapse_replication.app.loss_meter.LossMeter`.
* A transaction that has inserted into a stream and stays open for long delays the
  readers of all writers. It is looked for in the database: the writers are other
  processes. A transaction that deletes or updates old rows delays nobody.

Writers are not judged by their silence: on a stock deployment, most have nothing to
announce for hours, and none announces that it is idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.logger import Logger
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.app.announcements import AnnouncementReader
from synapse_replication.app.http_limits import BoundedSite, served_hosts
from synapse_replication.app.http_site import make_root
from synapse_replication.app.instances import (
    FetchStatus,
    InstanceReport,
    InstanceState,
    ask_instances,
)
from synapse_replication.app.loss_meter import LossFinding, LossMeter
from synapse_replication.app.passive import Follower
from synapse_replication.app.status_page import judge
from synapse_replication.app.stop_steps import StopSteps
from synapse_replication.config.process import ProcessConfig
from synapse_replication.errors import ConfigError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import CompositeObserver, ReplicationObserver
from synapse_replication.handlers.timer import Repeater
from synapse_replication.http.agent import make_agent
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.instrumentation.status import model
from synapse_replication.instrumentation.status.assessment import describe_process
from synapse_replication.instrumentation.status.stalls import StallLog
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.storage import id_streams
from synapse_replication.storage.database import Database, TransactionRunner
from synapse_replication.storage.id_streams import IdStream, row_stream_of
from synapse_replication.storage.open_transactions import Session, find_session
from synapse_replication.storage.stuck_id_watch import STUCK_AFTER
from synapse_replication.streams.stuck_ids import StuckId
from synapse_replication.text import printable
from synapse_replication.transport.reactor import IReactor
from synapse_replication.wire.commands import Command, PositionCommand, RdataCommand

_log = Logger()

#: The name under which a monitor shows itself; it never sends it.
MONITOR_NAME: Final = "monitor"
#: The interval at which the instances are asked, in s.
ASK_INTERVAL: Final = 3.0
#: How many answers in a row must be missing before an instance is down.
MISSES: Final = 2
#: The interval at which sessions with unfinished ids are looked for, in s.
SESSION_INTERVAL: Final = 5.0
#: How long a committed row may wait for its announcement, in s.
PATIENCE: Final = 30.0
#: How long a row that was not announced is a problem, in s, as in the alert.
UNANNOUNCED_FOR: Final = 900.0
#: The most writers and the most rows that are remembered.
MAX_WRITERS: Final = 1000
MAX_FINDINGS: Final = 10_000


@attrs.define
class _Instance:
    """The last status of an instance.

    :ivar since: when its state last changed, or its problem began or ended, in s.
    """

    status: model.InstanceStatus
    since: float


def _kind(status: model.InstanceStatus) -> tuple[str, bool]:
    return status.state, bool(status.problem)


@attrs.define(eq=False, repr=False)
class InstanceWatch:
    """Asks the instances of a deployment at intervals.

    :param fetch: requests the status of an instance.
    """

    _clock: Clock
    _fetch: FetchStatus
    _names: tuple[str, ...]
    _known: dict[str, _Instance] = attrs.field(factory=dict, init=False)
    #: How many answers in a row are missing, by instance.
    _misses: dict[str, int] = attrs.field(factory=dict, init=False)
    _repeater: Repeater = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._repeater = Repeater(self._clock, ASK_INTERVAL, self._ask)

    def start(self) -> None:
        """Begin to ask."""
        self._repeater.start()

    def stop(self) -> None:
        """Stop asking."""
        self._repeater.stop()

    def _ask(self) -> None:
        # Returns no Deferred: an instance that is frozen does not delay the next round.
        asking = Deferred.fromCoroutine(ask_instances(self._fetch, self._names))
        asking.addCallbacks(self._answered, self._failed)

    def _failed(self, failure: Failure) -> None:
        _log.failure("Cannot ask the instances", failure)

    def _answered(self, reports: list[InstanceReport]) -> None:
        now = self._clock.seconds()
        for report in reports:
            self._update(report, now)

    def _update(self, report: InstanceReport, now: float) -> None:
        is_missing = report.state is InstanceState.FAILED
        self._misses[report.name] = misses = (
            self._misses.get(report.name, 0) + 1 if is_missing else 0
        )
        if 0 < misses < MISSES:
            return
        problem = report.detail
        status = report.status if report.is_alive else None
        if status is not None and judge(status).tone == "bad":
            problem = describe_process(status)
        known = self._known.get(report.name)
        found = model.InstanceStatus(report.name, report.state.value, problem, 0.0)
        if known is None or _kind(known.status) != _kind(found):
            self._log_change(known, found)
            self._known[report.name] = _Instance(found, now)
        elif known.status != found:
            # A dead instance may refuse one connection and lose another.
            if not is_missing:
                self._log_change(known, found)
            known.status = found

    def _log_change(self, known: _Instance | None, found: model.InstanceStatus) -> None:
        if found.problem:
            _log.warn(
                "Instance {name} has a problem: {problem}",
                name=printable(found.instance_name),
                problem=printable(found.problem),
            )
        elif known is not None and known.status.problem:
            name = printable(found.instance_name)
            _log.info("Instance {name} is well again", name=name)

    def statuses(self) -> tuple[model.InstanceStatus, ...]:
        """Return what is known of each instance that has been asked."""
        now = self._clock.seconds()
        return tuple(
            replace(each.status, since=now - each.since)
            for _, each in sorted(self._known.items())
        )

    def not_ready(self) -> list[str]:
        """Return why the deployment is not ready, one text for each instance."""
        unknown = sorted(set(self._names) - set(self._known))
        down = [each for _, each in sorted(self._known.items()) if each.status.problem]
        return [
            *(f"{printable(name)} has not answered yet" for name in unknown),
            *(
                f"{printable(each.status.instance_name)}: "
                f"{printable(each.status.problem)}"
                for each in down
            ),
        ]


@attrs.define(eq=False, repr=False)
class SessionWatch:
    """Looks for sessions whose transactions hold unfinished ids of streams.

    :param streams: the ids of the streams in the database, by their names on the wire.
    """

    _clock: Clock
    _database: TransactionRunner
    _streams: Mapping[str, IdStream]
    _found: dict[str, tuple[int, StuckId]] = attrs.field(factory=dict, init=False)
    _repeater: Repeater = attrs.field(init=False)
    _has_tables: bool = attrs.field(default=False, init=False)
    #: Why the last query failed; empty if it did not.
    problem: str = attrs.field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self._repeater = Repeater(self._clock, SESSION_INTERVAL, self._query)

    def start(self) -> None:
        """Begin to query the database."""
        self._repeater.start()

    def stop(self) -> None:
        """Stop querying."""
        self._repeater.stop()

    def stuck(self) -> tuple[StuckId, ...]:
        """Return the ids that were found to be stuck twice in a row."""
        return tuple(each for times, each in self._found.values() if times > 1)

    def _query(self) -> Deferred[None]:
        querying = self._database.transact("find_stuck_sessions", self._read)
        return querying.addCallbacks(self._compare, self._failed)

    def _read(self, txn: Any) -> dict[str, tuple[Session, int]]:
        txn.execute("SET TRANSACTION READ ONLY")
        if not self._has_tables:
            self._streams = id_streams.with_existing_tables(txn, self._streams)
            self._has_tables = True
        found = {}
        for name, stream in self._streams.items():
            session = find_session(txn, stream, STUCK_AFTER) if stream.tables else None
            # What deletes or updates rows allocates no ids.
            changes = ("DELETE", "UPDATE", "VACUUM", "TRUNCATE")
            if session is None or not session.writes_stream:
                continue
            if not session.query.upper().startswith(changes):
                found[name] = session, (_last_token(txn, stream) + 1) * stream.sign
        return found

    def _compare(self, found: Mapping[str, tuple[Session, int]]) -> None:
        self.problem = ""
        times = {name: each[0] for name, each in self._found.items()}
        self._found = {
            name: (
                times.get(name, 0) + 1,
                StuckId(
                    name,
                    id_,
                    session.application or "an unknown writer",
                    session.open_for or STUCK_AFTER,
                    session.describe(),
                    session.hint(),
                ),
            )
            for name, (session, id_) in found.items()
        }

    def _failed(self, failure: Failure) -> None:
        self._found = {}
        text = " ".join(str(failure.value).split())
        if text != self.problem:
            _log.warn("Cannot read the database: {why}", why=text)
        self.problem = text


class MonitorStatus(StatusObserver):
    """The status that a monitor shows: links from events, the rest from its watches.

    :param sessions: the watch of the database; ``None`` without a database.
    """

    def __init__(
        self,
        server_name: str,
        instances: InstanceWatch,
        sessions: SessionWatch | None,
        *,
        needs_link: bool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            server_name, MONITOR_NAME, needs_link=needs_link, monotonic=monotonic
        )
        self._instances = instances
        self._sessions = sessions
        self._announced: dict[tuple[str, str], int] = {}
        #: When each row was found to be unannounced, in order.
        self._unannounced: dict[tuple[str, str, int], float] = {}

    def receive(self, command: Command) -> None:
        """Note the position of the writer that a line announces."""
        if isinstance(command, RdataCommand) and command.token is not None:
            token = command.token
        elif isinstance(command, PositionCommand):
            token = command.new_token
        else:
            return
        key = command.stream_name, command.instance_name
        if key in self._announced or len(self._announced) < MAX_WRITERS:
            self._announced[key] = token

    def row_unannounced(self, finding: LossFinding) -> None:
        """Note a finding of the loss meter."""
        row = finding.stream_name, finding.instance_name, finding.token
        if finding.is_announced:
            self._unannounced.pop(row, None)
        elif len(self._unannounced) < MAX_FINDINGS:
            self._unannounced[row] = self._monotonic()

    @override
    def snapshot(self) -> model.ProcessStatus:
        status = super().snapshot()
        oldest = self._monotonic() - UNANNOUNCED_FOR
        for row, found in list(self._unannounced.items()):
            if found >= oldest:
                break
            del self._unannounced[row]
        not_ready = self._instances.not_ready()
        is_up = any(link.up for link in status.links)
        since = [link.since for link in status.links] or [status.up_for]
        if self._needs_link and not is_up:
            not_ready.append("no link is up")
        stuck: tuple[StuckId, ...] = ()
        if self._sessions is not None:
            stuck = self._sessions.stuck()
            if problem := self._sessions.problem:
                not_ready.append(f"cannot read the database: {problem}")
        not_ready += [f"{model.describe_stuck_id(e)}: {e.session}" for e in stuck]
        return replace(
            status,
            writers=tuple(
                model.WriterStatus(*key, model.Condition.LIVE, token, token)
                for key, token in sorted(self._announced.items())
            ),
            not_ready=tuple(not_ready),
            cut_off_for=0.0 if is_up or not self._needs_link else min(since),
            stuck_ids=stuck,
            instances=self._instances.statuses(),
            unannounced=len(self._unannounced),
        )


def _last_token(txn: Any, stream: IdStream) -> int:
    """Return the greatest token that was committed, as far as it is known."""
    if stream.writers:
        return max(id_streams.read_tokens(txn, {"": stream}).values(), default=0)
    # Without writers of its own, a stream has no stored positions.
    ids = [id_streams.farthest_id(txn, stream, table) for table in stream.tables]
    return max((id_ or 0 for id_ in ids), default=0)


@attrs.frozen(eq=False, repr=False)
class _DatabaseWatch:
    """What a monitor looks for in the database."""

    database: Database
    meter: LossMeter
    sessions: SessionWatch
    stalls: Repeater

    def start(self) -> None:
        """Start all checks."""
        for check in (self.meter, self.sessions, self.stalls):
            check.start()

    def stop(self) -> None:
        """Stop all checks."""
        for check in (self.meter, self.sessions, self.stalls):
            check.stop()


class Monitor(Service):
    """Monitors a deployment, and serves what it finds over HTTP.

    :param host: the address on which to serve.
    :param port: the port on which to serve.
    :ivar started: fails if the monitor cannot start. Otherwise it never fires.
    :ivar unfinished: what a stop did not finish, for the exit status; empty if nothing.
    """

    def __init__(
        self, config: ProcessConfig, reactor: IReactor, *, host: str, port: int
    ) -> None:
        self._config = config
        self._reactor = reactor
        self._at = host, port
        self._clock = clock = ReactorClock(reactor)
        agent, self._pool = make_agent(
            reactor, config.instances, config.tls.for_connecting
        )
        client = HttpCatchUpClient(agent, config.instances, config.secret, reactor)
        self.registry = CollectorRegistry()
        self._instances = InstanceWatch(
            clock, client.get_status, tuple(sorted(config.instances))
        )
        database = self._make_database()
        sessions = None
        if database is not None:
            sessions = SessionWatch(clock, database, config.id_streams)
        self.status = MonitorStatus(
            config.server_name,
            self._instances,
            sessions,
            needs_link=config.redis is not None or bool(config.tcp_connect),
        )
        metrics = PrometheusObserver(
            ReplicationMetrics(self.registry), config.server_name, status=self.status
        )
        self._stops = StopSteps(reactor)
        self.unfinished = ""
        # The links log their own events.
        logged = CompositeObserver(
            [metrics, LoggingObserver(Logger("synapse_replication"))]
        )
        observers = [self.status, metrics]
        receivers = [self.status.receive]
        self._database_watch: _DatabaseWatch | None = None
        if database is not None and sessions is not None:
            watch = self._watch_database(database, sessions, logged)
            self._database_watch = watch
            observers.append(watch.meter)
            receivers.append(watch.meter.receive)

        def receive(command: Command) -> None:
            for each in receivers:
                each(command)

        self._follower = Follower(
            config,
            reactor,
            MONITOR_NAME,
            AnnouncementReader(config.declared, logged, receive).tap,
            lambda: None,
            observers=observers,
        )
        self.started: Deferred[None] = self._follower.started

    def _make_database(self) -> Database | None:
        options = self._config.database
        if options is None:
            _log.info(
                "There is no PostgreSQL database to compare with: rows that are not "
                "announced and stuck ids are not found"
            )
            return None
        return Database(options.conninfo, self._reactor, max_connections=2)

    def _watch_database(
        self, database: Database, sessions: SessionWatch, observer: ReplicationObserver
    ) -> _DatabaseWatch:
        """Return the watch of the database, with a meter."""
        config = self._config
        rows = {
            name: row_stream_of(stream, config.writers[name])
            for name, stream in config.stored.items()
        }
        meter = LossMeter(
            rows,
            database,
            self._clock,
            observer,
            self.status.row_unannounced,
            links=1 if config.redis is not None else len(config.tcp_connect),
            patience=PATIENCE,
        )
        stalls = StallLog(_log)
        report = Repeater(
            self._clock, SESSION_INTERVAL, lambda: stalls.update(self.status.snapshot())
        )
        return _DatabaseWatch(database, meter, sessions, report)

    @override
    def startService(self) -> None:
        """Start to listen, to ask and to serve.

        :raises ConfigError: if the port, a file of the Redis TLS options, or an
            endpoint for direct TCP cannot be used.
        """
        super().startService()  # type: ignore[no-untyped-call]
        stops, watch = self._stops, self._database_watch
        stops.add("closing HTTP connections", self._pool.closeCachedConnections)
        if watch is not None:
            stops.add("closing the database", watch.database.close)
        port = self._listen()
        stops.add("closing the port", port.stopListening)
        stops.add("closing the links", self._follower.stopService)
        self._follower.startService()
        stops.add("stopping the requests for statuses", self._instances.stop)
        self._instances.start()
        if watch is not None:
            stops.add("stopping the checks of the database", watch.stop)
            watch.start()
        at = port.getHost()
        _log.info(
            "Monitoring {server_name}: http://{host}:{port}/status",
            server_name=self._config.server_name,
            host=at.host,
            port=at.port,
        )

    def _listen(self) -> Any:
        """Return the port that serves the status.

        :raises ConfigError: if it cannot be opened.
        """
        host, port = self._at
        root = make_root(
            frozenset({"health", "metrics"}), self.registry, self.status.snapshot
        )
        site: Any = BoundedSite(
            root,
            served_hosts([host], self._config.allowed_hosts),
            guarded=None,
            max_connections=self._config.max_http_connections,
            refused=lambda status, why: None,
        )
        try:
            return self._reactor.listenTCP(port, site, interface=host)
        except CannotListenError as error:
            problem = self._config.problem(
                "listeners",
                f"cannot listen on {host}:{port}: {error.socketError}",
                "choose a free port with --port",
            )
            raise ConfigError([problem]) from error

    @override
    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        failed = await self._stops.run()
        self.unfinished = ", ".join(filter(None, [self._follower.unfinished, *failed]))

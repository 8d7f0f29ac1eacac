"""Tests for :mod:`synapse_replication.app.monitor`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg2
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.logger import capturedLogs
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from synapse_replication.app import monitor
from synapse_replication.app.loss_meter import LossFinding
from synapse_replication.app.monitor import (
    ASK_INTERVAL,
    SESSION_INTERVAL,
    UNANNOUNCED_FOR,
    InstanceWatch,
    Monitor,
    MonitorStatus,
    SessionWatch,
)
from synapse_replication.app.status_page import judge, render_page
from synapse_replication.app.stop_steps import DRAIN_TIMEOUT
from synapse_replication.config.process import load_config
from synapse_replication.errors import HttpCatchUpError, UnparsableLineError
from synapse_replication.handlers.events import DuplicateInstance, LinkDown, LinkUp
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.instrumentation.status.assessment import describe_process
from synapse_replication.instrumentation.status.model import (
    CUT_OFF_AFTER,
    encode_status,
)
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_streams import id_stream_of
from synapse_replication.storage.open_transactions import Session
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.stuck_ids import StuckId
from synapse_replication.testing.servers import shared_postgres
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.commands import PositionCommand, RdataCommand
from tests.storage.synapse_extract import ROWS, SCHEMA

_STOCK = HttpCatchUpError("GET", "u", 404, '{"errcode":"M_UNRECOGNIZED","error":"?"}')
_DEAD = HttpCatchUpError("GET", "u", None, "Connection refused")


class MonitorTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        clock = ReactorClock(self.clock)
        #: The answers of the instances.
        self.answers: dict[str, Any] = {"master": _STOCK, "w1": _STOCK}
        self.watch = InstanceWatch(clock, self.ask, ("master", "w1"))
        self.status = MonitorStatus(
            "x.test", self.watch, None, needs_link=False, monotonic=self.clock.seconds
        )

    async def ask(self, name: str) -> bytes:
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Deferred):
            await answer
        return encode_status(answer.snapshot())

    def states(self) -> dict[str, str]:
        return {each.instance_name: each.state for each in self.watch.statuses()}

    def troubled(self) -> list[str]:
        return [each.instance_name for each in self.status.snapshot().troubled]


class InstanceWatchTests(MonitorTestCase):
    def test_stock(self) -> None:
        """Stock instances that run are no problem, however long they are silent."""
        self.assertEqual(len(self.status.snapshot().not_ready), 2)
        self.watch.start()
        self.clock.advance(3600)
        self.assertEqual(self.states(), {"master": "stock", "w1": "stock"})
        status = self.status.snapshot()
        self.assertEqual(status.not_ready, ())
        self.assertEqual(judge(status).tone, "good")

    def test_killed(self) -> None:
        """An instance that misses two answers is named; one miss is no alarm."""
        self.watch.start()
        self.answers["w1"] = _DEAD
        self.clock.advance(ASK_INTERVAL)
        self.assertEqual(self.troubled(), [])
        self.clock.advance(ASK_INTERVAL)
        self.assertEqual(self.troubled(), ["w1"])
        status = self.status.snapshot()
        self.assertEqual(judge(status).text, "1 of 2 instances with a problem")
        self.assertIn("w1: GET u did not answer", describe_process(status))
        self.assertIn("w1: GET u did not answer", status.not_ready[0])
        self.assertIn('data-instance="w1"', render_page(status, "n", is_body=True))
        self.answers["w1"] = _STOCK
        self.clock.advance(ASK_INTERVAL)
        self.assertEqual(self.troubled(), [])
        self.answers["w1"] = _DEAD
        self.clock.advance(ASK_INTERVAL)
        self.assertEqual(self.troubled(), [])

    def test_how_long(self) -> None:
        """
        An instance is down since it was first found to be, however its answers fail.
        """
        lost = HttpCatchUpError("GET", "u", None, "Connection lost")
        self.watch.start()
        self.answers["w1"] = _DEAD
        with capturedLogs() as lines:
            self.clock.pump([ASK_INTERVAL] * 2)
            self.answers["w1"] = lost
            self.clock.pump([ASK_INTERVAL] * 3)
        (down,) = self.status.snapshot().troubled
        self.assertEqual(down.since, 3 * ASK_INTERVAL)
        self.assertIn("Connection lost", down.problem)
        self.assertEqual(len(lines), 1)

    def test_dead_from_the_start(self) -> None:
        """An instance that never answered is named, too."""
        self.answers["w1"] = _DEAD
        self.watch.start()
        self.assertEqual(self.states(), {"master": "stock"})
        self.clock.advance(ASK_INTERVAL)
        self.assertEqual(self.troubled(), ["w1"])

    def test_problem_of_ours(self) -> None:
        """What an instance of this package reports about itself is a problem."""
        ours = StatusObserver("x.test", "w1", monotonic=self.clock.seconds)
        self.answers["w1"] = ours
        self.watch.start()
        self.assertEqual(self.states()["w1"], "ours")
        self.assertEqual(self.troubled(), [])
        ours.observe(DuplicateInstance("w2", ""))
        self.clock.advance(ASK_INTERVAL)
        (found,) = self.status.snapshot().troubled
        self.assertEqual((found.state, found.is_up), ("ours", True))
        self.assertEqual(found.problem, "two processes are called w2")

    def test_wrong_instance(self) -> None:
        """An answer of another instance is a problem."""
        self.answers["w1"] = StatusObserver("x.test", "w9")
        self.watch.start()
        (found,) = self.status.snapshot().troubled
        self.assertEqual((found.state, found.is_up), ("misdirected", False))

    def test_stop(self) -> None:
        """A stopped watch asks nothing."""
        self.watch.start()
        self.watch.stop()
        self.answers.clear()
        self.clock.advance(100)
        self.assertEqual(self.flushLoggedErrors(), [])


class MonitorStatusTests(MonitorTestCase):
    def test_link(self) -> None:
        """A lost link is a problem after a few seconds, until it is up again."""
        status = MonitorStatus(
            "x.test", self.watch, None, needs_link=True, monotonic=self.clock.seconds
        )
        self.watch.start()
        self.assertEqual(status.snapshot().not_ready, ("no link is up",))
        status.observe(LinkUp("redis"))
        self.assertEqual(status.snapshot().not_ready, ())
        status.observe(LinkDown("redis", CloseReason.LOST, "gone"))
        self.clock.advance(CUT_OFF_AFTER)
        self.assertEqual(judge(status.snapshot()).text, "No link is up")
        status.observe(LinkUp("redis"))
        verdict = judge(status.snapshot())
        self.assertEqual((verdict.tone, verdict.text), ("good", "No problem found"))

    def test_stuck_id(self) -> None:
        """A stuck id is a problem that ``/ready`` names."""
        stuck = StuckId("caches", 6, "nightly", 42.0, "session 7", "End it.")
        sessions: Any = SimpleNamespace(problem="", stuck=lambda: (stuck,))
        status = MonitorStatus("x.test", self.watch, sessions, needs_link=False)
        self.assertIn(
            "id 6 of caches, written by nightly, is not finished: session 7",
            status.snapshot().not_ready,
        )

    def test_positions(self) -> None:
        """Positions that lines announce are shown."""
        self.status.receive(RdataCommand("events", "w1", 5, ["x"]))
        self.status.receive(PositionCommand("typing", "w1", 1, 7))
        found = [
            (each.stream_name, each.instance_name, each.position)
            for each in self.status.snapshot().writers
        ]
        self.assertEqual(found, [("events", "w1", 5), ("typing", "w1", 7)])

    def test_unannounced(self) -> None:
        """A row that was not announced is a problem for a while, or until it is."""
        for announced_late in (False, True):
            self.status.row_unannounced(LossFinding("events", "w1", 5, 30.0, False))
            status = self.status.snapshot()
            self.assertEqual(judge(status).text, "Committed rows were not announced")
            self.assertEqual(
                describe_process(status), "1 row committed and not announced"
            )
            self.assertIn(
                "1 in the last 15 minutes", render_page(status, "", is_body=True)
            )
            if announced_late:
                self.status.row_unannounced(LossFinding("events", "w1", 5, 40.0, True))
            else:
                self.clock.advance(UNANNOUNCED_FOR + 1)
            self.assertEqual(self.status.snapshot().unannounced, 0)

    def test_announced_after_the_while(self) -> None:
        """The late announcement of a row that is not shown any more hides no other."""
        self.status.row_unannounced(LossFinding("events", "w1", 5, 30.0, False))
        self.clock.advance(UNANNOUNCED_FOR + 1)
        self.status.row_unannounced(LossFinding("events", "w1", 6, 30.0, False))
        self.assertEqual(self.status.snapshot().unannounced, 1)
        self.status.row_unannounced(LossFinding("events", "w1", 5, 999.0, True))
        self.assertEqual(self.status.snapshot().unannounced, 1)


class RealSessionTests(SynchronousTestCase):
    """Tests with a real database."""

    def test_stream_without_positions(self) -> None:
        """The id of a session in a stream without stored positions follows its rows."""
        dsn = shared_postgres().new_database()
        observed, writing = psycopg2.connect(dsn), psycopg2.connect(dsn)
        self.addCleanup(observed.close)
        self.addCleanup(writing.close)
        with writing:
            writing.cursor().execute(SCHEMA + ROWS)
        writing.cursor().execute(
            "INSERT INTO cache_invalidation_stream_by_instance "
            "VALUES (6, 'p1', 'f', NULL, 8)"
        )

        def transact(what: str, work: Any) -> Deferred[Any]:
            observed.rollback()
            return succeed(work(observed.cursor()))

        database: Any = SimpleNamespace(transact=transact)
        self.patch(monitor, "STUCK_AFTER", 0.0)
        caches = id_stream_of(STANDARD_STREAMS["caches"], ())
        clock = Clock()
        watch = SessionWatch(ReactorClock(clock), database, {"caches": caches})
        watch.start()
        clock.advance(SESSION_INTERVAL)
        (stuck,) = watch.stuck()
        self.assertEqual((stuck.stream_name, stuck.id), ("caches", 6))


class SessionWatchTests(SynchronousTestCase):
    """Tests with a database whose answers are given."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.found: dict[str, tuple[Session, int]] | Exception = {}
        database: Any = self
        self.watch = SessionWatch(ReactorClock(self.clock), database, {})

    def transact(self, what: str, work: Any, **options: Any) -> Any:
        if isinstance(self.found, Exception):
            failed: Deferred[Any] = Deferred()
            failed.errback(self.found)
            return failed
        return succeed(self.found)

    def test_stuck(self) -> None:
        """A session is reported when it was found twice, and with its details."""
        session = Session(
            7,
            "synapse",
            "persister1",
            "",
            "idle in transaction",
            42.0,
            "INSERT",
            True,
            [],
        )
        self.found = {"events": (session, 12)}
        self.watch.start()
        self.assertEqual(self.watch.stuck(), ())
        self.clock.advance(SESSION_INTERVAL)
        (stuck,) = self.watch.stuck()
        self.assertEqual((stuck.id, stuck.instance_name), (12, "persister1"))
        self.assertIn("session 7 of synapse", stuck.session)
        self.found = {}
        self.clock.advance(SESSION_INTERVAL)
        self.assertEqual(self.watch.stuck(), ())

    def test_failure(self) -> None:
        """A database that cannot be read is a problem until it can."""
        self.found = OSError("gone")
        self.watch.start()
        self.assertEqual(self.watch.problem, "gone")
        self.found = {}
        self.clock.advance(SESSION_INTERVAL)
        self.assertEqual(self.watch.problem, "")


CONFIG = """
server_name: x.test
worker_name: w1
worker_replication_host: 127.0.0.1
worker_replication_port: 9092
instance_map: {main: {host: 127.0.0.1, port: 9093}}
"""
DATABASE = "database: {name: psycopg2, args: {dsn: host=nowhere.invalid}}"
IN_MEMORY = "synapse_replication: {streams: [typing]}"


class MonitorServiceTests(SynchronousTestCase):
    """A monitor with a link over direct TCP."""

    def make_monitor(self, text: str) -> None:
        path = Path(self.mktemp())
        path.write_text(text, encoding="utf-8")
        self.reactor = MemoryReactorClock()
        reactor: Any = self.reactor
        self.monitor = Monitor(load_config([str(path)]), reactor, host="::1", port=1)

    def test_row_that_is_not_json(self) -> None:
        """A row that cannot be parsed is counted, and was announced."""
        self.make_monitor(CONFIG + IN_MEMORY)
        self.monitor.startService()
        self.addCleanup(self.monitor.stopService)
        if not self.reactor.tcpClients:
            raise SkipTest("the memory reactor of this Twisted resolves no address")
        client: Any = self.reactor.tcpClients[0][2].buildProtocol(None)
        client.makeConnection(StringTransport())
        client.dataReceived(b"SERVER x.test\nRDATA typing main 7 [1\n")
        self.assertEqual(len(self.flushLoggedErrors(UnparsableLineError)), 1)
        (writer,) = self.monitor.status.snapshot().writers
        self.assertEqual((writer.stream_name, writer.position), ("typing", 7))
        labels = {
            "stream_name": "typing",
            "reason": "undecodable",
            "server_name": "x.test",
        }
        counted = self.monitor.registry.get_sample_value(
            "synapse_replication_discarded_total", labels
        )
        self.assertEqual(counted, 1)

    def test_every_step_runs(self) -> None:
        """A step of the stop that hangs or fails is named, and the others still run."""
        self.make_monitor(CONFIG + DATABASE)
        closed: list[str] = []

        class Port:
            def getHost(self) -> Any:
                return SimpleNamespace(host="::1", port=1)

            def stopListening(self) -> None:
                closed.append("port")

        self.patch(self.reactor, "listenTCP", lambda *args, **options: Port())
        self.patch(SessionWatch, "stop", lambda _: 1 // 0)
        self.patch(Database, "transact", lambda *_, **options: Deferred())
        self.patch(Database, "close", lambda _: Deferred())
        self.patch(
            self.monitor._pool, "closeCachedConnections", lambda: closed.append("pool")
        )
        self.monitor.startService()
        with capturedLogs() as lines:
            stopping = self.monitor.stopService()
            self.reactor.pump([DRAIN_TIMEOUT] * 2)
        self.successResultOf(stopping)
        self.assertEqual(closed, ["port", "pool"])
        self.assertEqual(
            [line["what"] for line in lines if "what" in line],
            ["stopping the checks of the database", "closing the database"],
        )
        self.assertIn("closing the database", self.monitor.unfinished)

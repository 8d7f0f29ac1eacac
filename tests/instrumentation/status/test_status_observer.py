"""Tests for :mod:`synapse_replication.instrumentation.status.status_observer`."""

from __future__ import annotations

from synapse_replication.handlers.events import (
    AnnouncedBy,
    CatchUpEvent,
    CatchUpFailed,
    CatchUpPage,
    ConnectFailed,
    ConnectionBuffers,
    Discarded,
    DiscardReason,
    DuplicateInstance,
    LinkDown,
    LinkUp,
    PeerNamed,
    PositionLowered,
    RemovedWriterDrained,
    Resync,
    Resynced,
    StreamAbsent,
    StreamReset,
)
from synapse_replication.instrumentation.status.assessment import describe_process
from synapse_replication.instrumentation.status.model import (
    Condition,
    StallReason,
    WriterStatus,
    describe_writer,
)
from synapse_replication.instrumentation.status.records import (
    MAX_NAMES,
    MAX_UNDELIVERED,
    RESYNC_SHOWN_FOR,
)
from synapse_replication.wire.close_reason import CloseReason
from tests.instrumentation.status.observer_case import (
    EVENT,
    StatusObserverTestCase,
    heartbeat_of,
)


class StatusObserverTests(StatusObserverTestCase):
    def test_undeclared_names_expire(self) -> None:
        """Names outside the configuration are forgotten after a time without events."""
        self.go_live()
        self.known.go_live("caches", "ghost", 5)
        self.observer.observe(LinkUp("ghost"))
        self.observer.observe(LinkDown("ghost", CloseReason.CLEAN, ""))
        self.observer.observe(heartbeat_of("ghost"))
        for _ in range(200):
            self.clock.advance(5)
            self.observer.sample()
        status = self.snapshot()
        self.assertEqual([w.instance_name for w in status.writers], ["w1"])
        self.assertEqual([link.name for link in status.links], ["redis"])
        self.assertEqual(status.peers, ())
        self.observer.position_changed("caches", "ghost", 6)
        self.assertEqual(self.snapshot().writers[0].condition, Condition.LIVE)

    def test_invented_names_hide_no_link(self) -> None:
        """However many names were seen, the current links and instances are shown."""
        for number in range(MAX_NAMES + 10):
            self.observer.observe(LinkUp(f"ghost{number}"))
            self.observer.observe(LinkDown(f"ghost{number}", CloseReason.CLEAN, ""))
            self.observer.observe(heartbeat_of(f"ghost{number}"))
        self.observer.observe(LinkUp("w1"))
        self.observer.observe(heartbeat_of("w1"))
        status = self.snapshot()
        self.assertIn("w1", [link.name for link in status.links if link.up])
        self.assertIn("w1", [instance.instance_name for instance in status.peers])
        self.assertEqual(len(status.links), MAX_NAMES)
        self.assertEqual(len(status.peers), MAX_NAMES)

    def test_events_during_a_snapshot(self) -> None:
        """A snapshot is unaffected by events that another thread handles meanwhile."""
        self.go_live()

        def own_positions() -> dict[str, int]:
            self.observer.observe(LinkUp("late"))
            self.observer.observe(heartbeat_of("late"))
            return {}

        self.known.connect(own_positions=own_positions)
        status = self.observer.snapshot()
        self.assertNotIn("late", [link.name for link in status.links])
        self.assertNotIn("late", [peer.instance_name for peer in status.peers])

    def test_waiting(self) -> None:
        """An expected writer first waits for its POSITION."""
        self.known.link_up()
        self.assertEqual(
            self.writer(), WriterStatus("events", "w1", Condition.WAITING, None, None)
        )

    def test_absent_stream(self) -> None:
        """Nothing is expected in a stream that the database does not have."""
        self.known.link_up()
        self.observer.observe(StreamAbsent("events"))
        self.assertEqual(self.snapshot().writers, ())
        self.assertEqual(self.snapshot().not_ready, ())
        self.observer.sample()

    def test_live(self) -> None:
        """A writer whose POSITION was handled is live and has no lag."""
        self.go_live()
        self.assertEqual(
            self.writer(),
            WriterStatus(
                *("events", "w1", Condition.LIVE, 100, 100),
                link="redis",
                heard_by="POSITION",
            ),
        )

    def test_catching_up(self) -> None:
        """A catch-up shows its start, its current position and its end."""
        self.go_live()
        self.known.fetch(EVENT)
        self.observer.observe(CatchUpPage(EVENT, 10, 120))
        writer = self.writer()
        self.assertEqual(writer.condition, Condition.CATCHING_UP)
        self.assertEqual(
            (writer.started_from, writer.position, writer.announced), (100, 120, 150)
        )
        self.known.finish("events", "w1", 150)
        self.assertEqual(self.writer().condition, Condition.LIVE)
        self.assertIsNone(self.writer().started_from)

    def test_partial_resync(self) -> None:
        """A partial resync is shown for a minute, unless the next one is full."""
        self.go_live()
        for kind, is_shown in ((Resync.PARTIAL, True), (Resync.FULL, False)):
            self.observer.observe(Resynced("events", "w1", kind))
            self.assertEqual(self.writer().was_resynced, is_shown)
        self.observer.observe(Resynced("events", "w1", Resync.PARTIAL))
        self.clock.advance(RESYNC_SHOWN_FOR - 1)
        self.assertTrue(self.writer().was_resynced)
        self.clock.advance(1)
        self.assertFalse(self.writer().was_resynced)

    def test_draining(self) -> None:
        """
        A removed writer is draining while some of its rows are missing; then it is
        forgotten.
        """
        self.go_live()
        self.known.drain("events", "gone", 5, 9)
        status = self.observer.snapshot()
        writer = next(w for w in status.writers if w.instance_name == "gone")
        self.assertEqual(writer.condition, Condition.DRAINING)
        self.assertEqual((writer.position, writer.announced, writer.lag), (5, 9, 4))
        text = "events/gone draining a removed writer, 4 behind"
        self.assertEqual(status.not_ready, (text,))
        self.assertEqual(describe_writer(writer), text)
        self.assertEqual(
            describe_process(status), "draining removed writer events/gone, 4 behind"
        )
        event = CatchUpEvent("events", "gone", 5, 9)
        self.known.fetch(event)
        self.observer.observe(CatchUpPage(event, 2, 7))
        self.assertIn(
            Condition.DRAINING, [w.condition for w in self.observer.snapshot().writers]
        )
        self.observer.observe(RemovedWriterDrained("events", "gone", 9))
        self.assertEqual(
            [w.instance_name for w in self.observer.snapshot().writers], ["w1"]
        )

    def test_drain_fails(self) -> None:
        """A drain whose catch-up fails is stalled with that reason."""
        self.go_live()
        self.known.drain("events", "gone", 5, 9)
        event = CatchUpEvent("events", "gone", 5, 9)
        self.observer.observe(CatchUpFailed(event, ValueError("no database"), 1, 1.0))
        self.clock.advance(60)
        (writer,) = self.observer.snapshot().stalled
        self.assertEqual(writer.reason, StallReason.CATCH_UP_FAILS)

    def test_removed_writer_returns(self) -> None:
        """A removed writer that announces itself again is live."""
        self.known.link_up()
        self.known.drain("events", "w1", 5, 9)
        self.known.go_live("events", "w1", 9)
        self.assertEqual(self.writer().condition, Condition.LIVE)

    def test_rows_in_transit(self) -> None:
        """
        A writer is catching up only if the missing rows were announced more than 2 s
        ago.
        """
        self.go_live()
        self.known.announce("events", "w1", 9999)
        self.clock.advance(1.9)
        self.assertEqual(self.writer().condition, Condition.LIVE)
        self.assertGreater(self.writer().lag, 0)
        self.clock.advance(0.2)
        self.assertEqual(self.writer().condition, Condition.CATCHING_UP)

    def test_catch_up_in_parts(self) -> None:
        """
        A catch-up that is interrupted and resumed is shown with its original start.
        """
        self.go_live()
        self.known.fetch(EVENT)
        self.observer.observe(CatchUpPage(EVENT, 10, 120))
        self.known.fetch(CatchUpEvent("events", "w1", 120, 180))
        writer = self.writer()
        self.assertEqual((writer.started_from, writer.announced), (100, 180))

    def test_reset(self) -> None:
        """
        After a reset, the new position and the new announcement are shown, without lag.
        """
        self.go_live(5000)
        self.known.announce("events", "w1", 6000)
        self.observer.observe(StreamReset("events", "w1", 5000, 0))
        writer = self.writer()
        self.assertEqual((writer.position, writer.announced, writer.lag), (0, 0, 0))

    def test_reset_ends_what_was_lost_before(self) -> None:
        """After a reset, the rows that were lost or skipped before do not matter."""
        self.go_live(50)
        for reason in (DiscardReason.LOST, DiscardReason.SKIPPED):
            self.observer.observe(Discarded("events", "w1", reason, 1))
            self.assertEqual(self.writer().condition, Condition.STALLED)
            self.observer.observe(StreamReset("events", "w1", 50, 0))
            self.assertEqual(self.writer().condition, Condition.LIVE)

    def test_position_lowered(self) -> None:
        """
        If a position moves back, the one that was announced is forgotten; what was lost
        or skipped is not.
        """
        self.go_live(50)
        self.known.announce("events", "w1", 60)
        self.observer.observe(Discarded("events", "w1", DiscardReason.SKIPPED, 1))
        self.observer.observe(PositionLowered("events", "w1", 50, 40))
        writer = self.writer()
        self.assertEqual((writer.position, writer.announced, writer.lag), (40, 40, 0))
        self.assertEqual(writer.condition, Condition.STALLED)

    def test_undeclared_writer_is_drained(self) -> None:
        """A removed writer whose rows were delivered hides no undeclared writer."""
        self.go_live(50)
        for name in ("gone", "other"):
            self.observer.observe(
                Discarded("events", name, DiscardReason.UNDECLARED_WRITER, 1)
            )
            stalled = [writer.instance_name for writer in self.snapshot().stalled]
            self.assertEqual(stalled, [name])
            self.observer.observe(RemovedWriterDrained("events", name, 9))
            self.assertEqual(self.snapshot().stalled, ())

    def test_written_here(self) -> None:
        """A stream written here is listed with its announced position."""
        self.known.connect(own_positions=lambda: {"typing": 7})
        own = self.snapshot().writers[1]
        self.assertEqual(
            own, WriterStatus("typing", "me", Condition.WRITTEN_HERE, 7, 7)
        )
        self.observer.observe(Discarded("typing", "me", DiscardReason.SKIPPED, 2))
        own = self.snapshot().writers[1]
        self.assertEqual(
            (own.condition, own.reason, own.detail[:8]),
            (Condition.STALLED, StallReason.ROWS_SKIPPED, "2 row(s)"),
        )

    def test_lag_in_seconds_by_heartbeat(self) -> None:
        """The age of a write is taken from the writer's heartbeat."""
        self.go_live()
        self.observer.observe(heartbeat_of(events=(150, 42.0)))
        self.clock.advance(3)
        writer = self.writer()
        self.assertEqual((writer.lag, writer.lag_seconds), (50, 45.0))

    def test_heartbeat_overrides_estimate(self) -> None:
        """
        If a POSITION announced a write late, the age in the heartbeat takes precedence.
        """
        self.go_live()
        self.known.announce("events", "w1", 150)
        self.observer.observe(heartbeat_of(events=(150, 600.0)))
        self.assertEqual(self.writer().lag_seconds, 600.0)

    def test_lag_in_seconds_without_heartbeats(self) -> None:
        """Without heartbeats, a write is as old as its first announcement."""
        self.go_live()
        self.known.announce("events", "w1", 101)
        self.clock.advance(5)
        self.known.announce("events", "w1", 102)
        self.clock.advance(1)
        self.assertEqual(self.writer().lag_seconds, 6)
        self.observer.position_changed("events", "w1", 101)
        self.assertEqual(self.writer().lag_seconds, 1)
        self.observer.position_changed("events", "w1", 102)
        self.assertEqual(self.writer().lag_seconds, 0)

    def test_many_announcements(self) -> None:
        """
        The number of stored announcements is bounded, and the oldest age stays exact.
        """
        self.go_live()
        for token in range(101, 101 + 3 * MAX_UNDELIVERED):
            self.known.announce("events", "w1", token)
            self.clock.advance(1)
        self.assertEqual(self.writer().lag_seconds, 3 * MAX_UNDELIVERED)
        undelivered = self.observer._writers["events", "w1"].undelivered
        self.assertLessEqual(len(undelivered), MAX_UNDELIVERED)
        self.observer.position_changed("events", "w1", 100 + 3 * MAX_UNDELIVERED - 1)
        self.assertEqual((self.writer().lag, self.writer().lag_seconds), (1, 1))

    def test_a_burst_of_announcements(self) -> None:
        """
        Announcements in quick succession are stored as one, with the age of the first.
        """
        self.go_live()
        for token in range(101, 110):
            self.known.announce("events", "w1", token)
            self.clock.advance(0.01)
        self.assertEqual(len(self.observer._writers["events", "w1"].undelivered), 1)
        self.assertAlmostEqual(self.writer().lag_seconds, 0.09)

    def test_history(self) -> None:
        """Only the lags of the last samples are stored."""
        self.go_live()
        for token in range(101, 201):
            self.known.announce("events", "w1", token)
            self.observer.sample()
        self.assertEqual(self.writer().history, tuple(range(41, 101)))

    def test_links(self) -> None:
        """Links show their age, the size of their queue, and why they are down."""
        self.observer.observe(ConnectFailed("w2", "refused", 1.0))
        self.observer.observe(LinkUp("w1"))
        self.observer.watch_buffers(lambda: [ConnectionBuffers("w1", 1, 20, 300, 4)])
        self.clock.advance(3)
        up, down = self.snapshot().links
        self.assertEqual(
            (up.name, up.up, up.since, up.detail, up.commands_queued, up.bytes_queued),
            ("w1", 1, 3, "", 1, 320),
        )
        self.assertEqual((down.up, down.since, down.detail), (0, 3, "refused"))

    def test_cut_off(self) -> None:
        """The status says for how long the process has had no link."""
        self.known.link_up()
        self.clock.advance(5)
        self.assertEqual(self.snapshot().cut_off_for, 0)
        self.known.link_lost()
        self.clock.advance(11)
        self.assertEqual(self.snapshot().cut_off_for, 11)

    def test_incoming_link(self) -> None:
        """An incoming link has the address of its client, which may change."""
        for port in (40112, 40113):
            self.observer.observe(LinkUp("w2", f"127.0.0.1:{port}"))
            names = [each.name for each in self.snapshot().links]
            self.assertIn(f"from w2 at 127.0.0.1:{port}", names)

    def test_direct_links(self) -> None:
        """A link to a server shows the name of the only writer that is heard on it."""
        self.known.link_up("to 127.0.0.1:9001")
        self.assertEqual(self.snapshot().links[0].name, "to 127.0.0.1:9001")
        for link, writers, expected in (
            ("to 127.0.0.1:9001", ["w1"], "to w1 at 127.0.0.1:9001"),
            ("to 127.0.0.1:9001", ["w1", "w2"], "to 127.0.0.1:9001"),
            ("redis", ["w1", "w2"], "redis"),
        ):
            for name in writers:
                self.observer.position_announced(
                    "events", name, 7, link, AnnouncedBy.POSITION
                )
            self.observer.observe(LinkUp(link))
            self.assertIn(expected, [each.name for each in self.snapshot().links])

    def test_server_states_its_name(self) -> None:
        """A link to a server shows the name that the server has stated itself."""
        link = "to 127.0.0.1:9001"
        for name in ("w1", "w2"):
            self.observer.position_announced(
                "events", name, 7, link, AnnouncedBy.POSITION
            )
        for name in ("hub", ""):
            self.observer.observe(LinkUp(link))
            if name:
                self.observer.observe(PeerNamed(link, name))
                self.observer.observe(LinkDown(link, CloseReason.LOST, "lost"))
            label = f"to {name} at 127.0.0.1:9001" if name else link
            self.assertEqual([each.name for each in self.snapshot().links], [label])

    def test_instances(self) -> None:
        """
        An instance is listed after a heartbeat, with its version, its epoch and the
        time since its last heartbeat.
        """
        self.known.link_up()
        self.observer.observe(heartbeat_of("w2"))
        self.clock.advance(4)
        (instance,) = self.snapshot().peers
        self.assertEqual(
            (instance.instance_name, instance.epoch, instance.version, instance.where),
            ("w2", "abc", "0.1.0", "host:1"),
        )
        self.assertEqual((instance.last_seen, instance.is_gone), (4, False))
        self.clock.advance(12)
        self.assertTrue(self.snapshot().peers[0].is_gone)

    def test_instances_that_leave(self) -> None:
        """
        An instance that leaves is forgotten with its streams, unless it is configured.
        """
        self.observer.position_changed("receipts", "w2", 5)
        self.observer.observe(heartbeat_of("w2"))
        self.observer.observe(heartbeat_of("w2", is_leaving=True))
        self.observer.observe(heartbeat_of("w1", is_leaving=True))
        status = self.snapshot()
        self.assertEqual([m.instance_name for m in status.peers], ["w1"])
        self.assertEqual([w.instance_name for w in status.writers], ["w1"])

    def test_duplicates(self) -> None:
        """A duplicate name is shown until a minute after it was last seen."""
        self.observer.observe(DuplicateInstance("w1", "host:1 and host:2"))
        self.clock.advance(59)
        (duplicate,) = self.snapshot().duplicates
        self.assertEqual(duplicate.places, "host:1 and host:2")
        self.assertEqual(duplicate.last_seen, 59)
        self.clock.advance(1)
        self.assertEqual(self.snapshot().duplicates, ())

    def test_names_are_bounded(self) -> None:
        """The number of names that peers can make up is bounded."""
        for number in range(MAX_NAMES + 10):
            name = f"w{number}"
            self.observer.position_changed("events", name, 1)
            self.observer.observe(LinkUp(name))
            self.observer.observe(heartbeat_of(name))
            self.observer.observe(DuplicateInstance(name, "here"))
        status = self.snapshot()
        for kept in (status.writers, status.links, status.peers, status.duplicates):
            self.assertEqual(len(kept), MAX_NAMES)
        self.observer.observe(heartbeat_of("another", is_leaving=True))

    def test_own_rows(self) -> None:
        """This instance is never listed as a writer that it follows."""
        self.observer.position_changed("events", "me", 5)
        self.assertEqual(len(self.snapshot().writers), 1)

"""Tests for stalled streams in the status."""

from __future__ import annotations

from attrs import evolve

from synapse_replication.errors import CatchUpError, DatabaseBehindError
from synapse_replication.handlers.events import (
    AheadOfWriter,
    AnnouncedBy,
    CatchUpEvent,
    CatchUpFailed,
    CatchUpPage,
    ConnectFailed,
    LinkDown,
    LinksChanged,
    LinkUp,
    PeerNamed,
    PeerSilent,
    PositionRefuted,
)
from synapse_replication.instrumentation.status.model import (
    Condition,
    StallReason,
)
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.wire.close_reason import CloseReason
from tests.instrumentation.status.observer_case import (
    EVENT,
    StatusObserverTestCase,
    heartbeat_of,
)


class StalledTests(StatusObserverTestCase):
    """Tests for the conditions of stalled and of ready."""

    def test_no_link(self) -> None:
        """
        After ten seconds without a link the writer is stalled with the link's error.
        """
        self.go_live()
        self.known.link_lost(why="reset by peer")
        self.observer.observe(ConnectFailed("redis", "refused", 5.0))
        self.clock.advance(9)
        self.assertEqual(self.writer().condition, Condition.WAITING)
        self.clock.advance(1)
        self.assertEqual(self.stalled(), (StallReason.NO_LINK, 10, "redis: refused"))
        self.known.link_up()
        self.known.go_live("events", "w1", 100)
        self.assertEqual(self.writer().condition, Condition.LIVE)

    def test_no_position(self) -> None:
        """A writer that announces no POSITION for ten seconds on a link is stalled."""
        self.known.link_up()
        self.clock.advance(10)
        reason, stalled_for, detail = self.stalled()
        self.assertEqual((reason, stalled_for), (StallReason.NO_POSITION, 10))
        self.assertIn("is it running?", detail)

    def test_one_of_two_connections(self) -> None:
        """A writer stays live while one of two connections of the same name is up."""
        self.go_live()
        self.known.link_up()
        self.known.link_lost(why="gone")
        self.assertEqual(self.writer().condition, Condition.LIVE)
        self.known.link_lost(why="gone")
        self.assertEqual(self.writer().condition, Condition.WAITING)

    def test_goodbye(self) -> None:
        """
        A writer that announced its exit is stalled after ten seconds, until it returns.
        """
        self.go_live()
        self.observer.observe(heartbeat_of(is_leaving=True))
        self.clock.advance(9)
        self.assertEqual(self.writer().condition, Condition.LIVE)
        self.clock.advance(1)
        self.assertEqual(
            self.stalled(), (StallReason.WRITER_GONE, 10, "w1 announced its exit")
        )
        self.observer.observe(heartbeat_of())
        self.assertEqual(self.writer().condition, Condition.LIVE)

    def test_silence_while_the_link_was_down(self) -> None:
        """After an outage of the link, a writer gets a new grace period."""
        self.go_live()
        self.observer.observe(heartbeat_of())
        self.known.link_lost(why="gone")
        self.clock.advance(30)
        self.known.link_up()
        self.clock.advance(15)
        self.assertEqual(self.stalled()[0], StallReason.NO_POSITION)
        self.clock.advance(1)
        self.assertEqual(self.stalled()[0], StallReason.WRITER_GONE)

    def test_watched_writer_fell_silent(self) -> None:
        """A watcher says that a writer is silent whose heartbeats are rare."""
        self.go_live()
        rare = evolve(heartbeat_of(), every=400)
        self.observer.observe(rare)
        self.clock.advance(100)
        self.observer.observe(PeerSilent("w1", "an earlier epoch", 15))
        self.assertIsNone(self.stalled()[0])
        self.assertTrue(self.observer.is_quiet())
        self.observer.observe(PeerSilent("w1", "abc", 15))
        self.clock.advance(0.1)
        self.assertFalse(self.observer.is_quiet())
        self.assertEqual(self.stalled()[0], StallReason.WRITER_GONE)
        self.observer.observe(rare)
        self.assertIsNone(self.stalled()[0])

    def test_rare_heartbeats_after_a_pause(self) -> None:
        """After a pause of this process, no writer has been asked to answer."""
        self.go_live()
        self.observer.observe(evolve(heartbeat_of(), every=400, answers=True))
        self.observer.sample()
        self.clock.advance(30)
        self.observer.sample()
        self.clock.advance(60)
        self.assertIsNone(self.stalled()[0])

    def test_writer_that_cannot_be_asked(self) -> None:
        """A writer is not expected to answer before this process can publish."""
        self.observer.observe(LinkUp("redis_out"))
        self.go_live()
        self.observer.observe(evolve(heartbeat_of(), every=400, answers=True))
        self.clock.advance(1)
        self.observer.observe(LinkDown("redis_out", CloseReason.LOST, "gone"))
        self.known.link_lost()
        self.known.link_up()
        self.known.go_live("events", "w1", 100)
        self.clock.advance(60)
        self.assertIsNone(self.stalled()[0])
        self.observer.observe(LinkUp("redis_out"))
        self.clock.advance(14)
        self.assertIsNone(self.stalled()[0])
        self.assertFalse(self.observer.is_quiet())
        self.clock.advance(2)
        self.assertEqual(self.stalled()[0], StallReason.WRITER_GONE)

    def test_writer_without_answer(self) -> None:
        """A writer that does not answer after this process reconnected is gone."""
        self.go_live()
        self.observer.observe(evolve(heartbeat_of(), every=400, answers=True))
        self.known.link_lost()
        self.clock.advance(1)
        self.known.link_up()
        self.clock.advance(15)
        self.assertEqual(self.stalled()[0], StallReason.NO_POSITION)
        self.clock.advance(1)
        self.assertFalse(self.observer.is_quiet())
        self.assertEqual(self.stalled()[0], StallReason.WRITER_GONE)

    def test_silence(self) -> None:
        """A writer whose heartbeats cease is stalled since its last heartbeat."""
        self.go_live()
        self.observer.observe(heartbeat_of())
        self.clock.advance(15)
        self.assertEqual(self.writer().condition, Condition.LIVE)
        self.clock.advance(1)
        self.assertEqual(self.stalled()[:2], (StallReason.WRITER_GONE, 16))

    def test_gone_and_wrote_nothing(self) -> None:
        """
        An instance that may write, has written nothing and is gone stalls nobody.

        Every instance may write ``caches``, so a reader announces a position in it,
        which advances with those of the others.
        """
        self.go_live()
        self.known.go_live("caches", "reader1", 7)
        self.known.announce("caches", "reader1", 8, by=AnnouncedBy.POSITION)
        self.observer.position_changed("caches", "reader1", 8)
        self.observer.observe(heartbeat_of("reader1"))
        for _ in range(20):
            self.clock.advance(5)
            self.observer.observe(heartbeat_of())
            stalled = [each.stream_name for each in self.snapshot().stalled]
            self.assertEqual(stalled, [])

    def test_gone_and_wrote(self) -> None:
        """An instance that has written rows, and is gone, may have written more."""
        for by in (AnnouncedBy.ROW, AnnouncedBy.POSITION):
            name = f"writer_{by.name}"
            self.go_live()
            self.known.go_live("caches", name, 7)
            self.known.announce("caches", name, 8, by=by)
            if by is AnnouncedBy.POSITION:
                fetched = CatchUpEvent("caches", name, 7, 8)
                self.observer.observe(CatchUpPage(fetched, 1, 8))
            self.observer.position_changed("caches", name, 8)
            self.observer.observe(heartbeat_of(name))
            self.clock.advance(16)
            self.observer.observe(heartbeat_of())
            stalled = [each.instance_name for each in self.snapshot().stalled]
            self.assertIn(name, stalled)

    def test_killed_after_its_first_heartbeat(self) -> None:
        """
        A writer whose links broke is on no link, even if only its heartbeat has been
        heard.
        """
        links = ("w1", "to 127.0.0.1:9001")
        self.known.link_up()
        for link in links:
            self.observer.observe(LinkUp(link))
        self.observer.observe(PeerNamed(links[1], "w1"))
        self.clock.advance(1)
        self.observer.observe(heartbeat_of(events=(100, 0.0)))
        self.clock.advance(1)
        for link in links:
            self.observer.observe(LinkDown(link, CloseReason.CLEAN, "closed"))
        self.clock.advance(11)
        reason, stalled_for, detail = self.stalled()
        self.assertEqual((reason, stalled_for), (StallReason.NO_LINK, 11))
        self.assertEqual(detail, "w1: closed")

    def test_everybody_is_silent(self) -> None:
        """If several instances fall silent at once, none of them is said to be gone."""
        self.go_live()
        for name in ("w1", "w2"):
            self.observer.observe(heartbeat_of(name))
        self.clock.advance(16)
        reason, stalled_for, detail = self.stalled()
        self.assertEqual((reason, stalled_for), (StallReason.NO_LINK, 16))
        self.assertIn("it may be dead", detail)
        self.assertFalse(any(peer.is_gone for peer in self.snapshot().peers))
        self.observer.observe(heartbeat_of("w2"))
        self.assertEqual(self.stalled()[0], StallReason.WRITER_GONE)

    def test_two_of_many_fell_silent(self) -> None:
        """If watchers report two instances, the link is not suspect: others speak."""
        self.go_live()
        for name in ("w1", "r1", "r2", "r3"):
            self.observer.observe(evolve(heartbeat_of(name), every=400))
        self.clock.advance(20)
        for name in ("r1", "r2"):
            self.observer.observe(PeerSilent(name, "abc", 15))
        for _ in range(4):
            self.clock.advance(10)
            self.observer.observe(evolve(heartbeat_of("r3"), every=400))
            self.assertIsNone(self.stalled()[0])
            self.assertEqual(
                [peer.instance_name for peer in self.snapshot().peers if peer.is_gone],
                ["r1", "r2"],
            )

    def test_catch_up_fails(self) -> None:
        """A catch-up that keeps failing is stalled since its first failure."""
        self.go_live()
        self.known.fetch(EVENT)
        for attempt in (1, 2, 3):
            error = CatchUpError("the database is away")
            self.known.fail(EVENT, error, attempt)
            self.clock.advance(5)
        reason, stalled_for, detail = self.stalled()
        self.assertEqual((reason, stalled_for), (StallReason.CATCH_UP_FAILS, 15))
        self.assertIn("attempt 3: the database is away", detail)
        self.observer.observe(CatchUpPage(EVENT, 1, 101))
        self.assertEqual(self.writer().condition, Condition.CATCHING_UP)

    def test_database_behind(self) -> None:
        """A standby that lacks rows is not a failure, and is shown after 2 s."""
        self.go_live()
        self.known.fetch(EVENT)
        for seconds in (1, 2):
            error = DatabaseBehindError(f"{seconds} s behind")
            self.known.fail(EVENT, error, seconds)
            self.clock.advance(1)
        self.assertEqual(self.stalled(), (StallReason.DATABASE_BEHIND, 2, "2 s behind"))
        self.observer.observe(CatchUpPage(EVENT, 1, 101))
        self.assertEqual(self.writer().condition, Condition.CATCHING_UP)

    def test_a_new_link_forgets_failures(self) -> None:
        """For a writer that is live on a new link, no failure is reported any more."""
        self.go_live(150)
        self.observer.observe(CatchUpFailed(EVENT, CatchUpError("no"), 1, 5.0))
        self.clock.advance(20)
        self.assertEqual(self.stalled()[0], StallReason.CATCH_UP_FAILS)
        self.known.go_live("events", "w1", 100)
        self.assertEqual(self.writer().condition, Condition.LIVE)

    def test_ahead_of_writer(self) -> None:
        """A process ahead of a writer is stalled until the writer has overtaken it."""
        self.go_live(150)
        for _ in range(3):
            self.observer.observe(AheadOfWriter("events", "w1", 150, 120))
            self.clock.advance(5)
        reason, stalled_for, detail = self.stalled()
        self.assertEqual((reason, stalled_for), (StallReason.AHEAD_OF_WRITER, 15))
        self.assertIn(
            "this process is at 150, but w1 reports that it is at 120", detail
        )
        self.known.announce("events", "w1", 149)
        self.assertEqual(self.writer().condition, Condition.STALLED)
        self.known.announce("events", "w1", 151)
        self.observer.position_changed("events", "w1", 151)
        self.assertEqual(self.writer().condition, Condition.LIVE)

    def test_refuted_position(self) -> None:
        """A refuted position does not count as lag."""
        self.go_live(150)
        self.known.announce("events", "w1", 2**62)
        self.observer.observe(PositionRefuted("events", "w1", 2**62, 150))
        self.assertEqual(self.writer().lag, 0)

    def test_no_progress(self) -> None:
        """
        Rows announced but not delivered are stalled ten seconds after their
        announcement.
        """
        self.go_live()
        self.clock.advance(100)
        self.known.announce("events", "w1", 101)
        self.clock.advance(9)
        self.assertEqual(self.writer().condition, Condition.CATCHING_UP)
        self.clock.advance(1)
        self.assertEqual(self.stalled()[:2], (StallReason.NO_PROGRESS, 10))

    def test_slow_is_not_stalled(self) -> None:
        """A catch-up that takes long but advances is not stalled."""
        self.go_live()
        self.known.fetch(EVENT)
        for token in range(101, 150):
            self.clock.advance(5)
            self.observer.observe(CatchUpPage(EVENT, 1, token))
            self.known.fetch(EVENT)
            self.assertEqual(self.writer().condition, Condition.CATCHING_UP)

    def test_ready(self) -> None:
        """A process is ready once every writer that it follows has been caught up."""
        self.known.link_up()
        self.assertEqual(self.snapshot().not_ready, ("events/w1 waiting for POSITION",))
        self.known.fetch(EVENT)
        self.observer.observe(CatchUpPage(EVENT, 10, 120))
        self.assertEqual(
            self.snapshot().not_ready, ("events/w1 catching up, 20 of 50",)
        )
        self.known.go_live("events", "w1", 150)
        self.assertEqual(self.snapshot().not_ready, ())
        self.known.announce("events", "w1", 200)
        self.assertEqual(self.snapshot().not_ready, ())

    def test_not_ready_without_links(self) -> None:
        """A process that loses its last link is no longer ready."""
        self.go_live()
        self.known.link_lost(why="gone")
        self.assertEqual(self.snapshot().not_ready, ("no link is up",))

    def test_not_ready_before_the_first_link(self) -> None:
        """
        A process that needs a link is not ready before one is up, even if it follows no
        writer.
        """
        self.observer = StatusObserver(
            "x.test", "me", needs_link=True, monotonic=self.clock.seconds
        )
        self.assertEqual(self.snapshot().not_ready, ("no link is up",))
        self.observer.observe(LinksChanged(1))
        self.assertEqual(self.snapshot().not_ready, ())

    def test_absent_writers_do_not_prevent_readiness(self) -> None:
        """A writer that is not running does not prevent readiness."""
        self.known.link_up()
        self.clock.advance(10)
        self.assertEqual(self.snapshot().not_ready, ())

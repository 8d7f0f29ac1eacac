"""Tests for :mod:`synapse_replication.instrumentation.logs`."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.task import Clock
from twisted.logger import ILogObserver, Logger, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    CatchUpError,
    HttpCatchUpError,
    UnknownCommandError,
)
from synapse_replication.handlers.events import (
    BacklogRequested,
    CatchUpEvent,
    CatchUpFailed,
    CatchUpPage,
    CommandDropReason,
    CommandsDropped,
    ConnectFailed,
    Discarded,
    DiscardReason,
    DuplicateInstance,
    EpochChanged,
    ExtraFields,
    FeatureUnavailable,
    GapFound,
    LateRows,
    LineRefused,
    LinkDown,
    LinkUp,
    PeerNamed,
    PositionLowered,
    RequestRefused,
    RowsUnannounced,
    SendingFailed,
    StreamConnected,
    StreamReset,
    UnannouncedFound,
    UnknownFields,
)
from synapse_replication.instrumentation.logs import (
    CHANGES_OF_STATE,
    MAX_KEYS,
    MAX_OF_GROUP,
    REPEAT_AFTER,
    LoggingObserver,
    RateLimit,
)
from synapse_replication.wire.close_reason import CloseReason


class LoggingObserverTests(SynchronousTestCase):
    """Tests for the content and the frequency of log lines."""

    def test_the_extension(self) -> None:
        """
        Events of the extension are logged; a duplicate name with its hosts and a hint.
        """
        self.observer.observe(DuplicateInstance("w1", "a:1 and b:2"))
        self.observer.observe(GapFound("events", "w1", 1, 5))
        self.observer.observe(UnannouncedFound("events", "w1", 5, 6))
        self.observer.observe(RowsUnannounced("events", "w1", (3, 4)))
        self.observer.observe(LateRows("events", "w1", (3,)))
        self.observer.observe(EpochChanged("w1"))
        self.observer.observe(UnknownFields("redis", 1))
        self.observer.observe(BacklogRequested("events", "w1", None))
        self.observer.observe(BacklogRequested("events", "w1", CatchUpError("gone")))
        self.assertEqual(
            [(level, line.partition(":")[0]) for level, line in self.lines()],
            [
                ("critical", "Two processes are called w1 (a"),
                (
                    "warn",
                    "Rows of events of w1 in (1, 5] were sent but did not arrive; "
                    "fetching them",
                ),
                (
                    "warn",
                    "w1 has stored position 6 of events, but announced only 5; "
                    "fetching the rows in between",
                ),
                (
                    "warn",
                    "w1 did not announce 2 tokens of events that it committed; the "
                    "first is 3",
                ),
                (
                    "warn",
                    "Delivered 1 token of events of w1 late, after greater ones; the "
                    "first is 3",
                ),
                (
                    "info",
                    "w1 has a new current epoch, usually because it restarted",
                ),
                (
                    "info",
                    "Ignored unknown fields in messages of the extension; a newer peer "
                    "sends them",
                ),
                (
                    "info",
                    "w1 did not return rows of events from its backlog, so they are "
                    "fetched from the stream's source",
                ),
            ],
        )
        self.assertIn("give it another name", self.lines()[0][1])

    def test_backlog_of_a_restarted_writer(self) -> None:
        """An answer that a restart explains does not look like a failure."""
        error = HttpCatchUpError("GET", "u", 410, "gone")
        self.observer.observe(BacklogRequested("events", "w1", error))
        ((level, line),) = self.lines()
        self.assertEqual(level, "info")
        self.assertIn("as after a restart", line)
        self.assertNotIn("410", line)

    def setUp(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.clock = Clock()
        logger = Logger(
            namespace="test", observer=cast(ILogObserver, self.events.append)
        )
        self.observer = LoggingObserver(logger, self.clock.seconds)

    def lines(self) -> list[tuple[str, str]]:
        return [(event["log_level"].name, formatEvent(event)) for event in self.events]

    def test_refused_lines_are_limited_and_counted(self) -> None:
        """Ten thousand rejected lines cause two log lines, the second with a count."""
        for _ in range(10_000):
            self.observer.observe(LineRefused("redis", UnknownCommandError("WHAT")))
        self.clock.advance(REPEAT_AFTER)
        self.observer.observe(LineRefused("redis", UnknownCommandError("WHAT")))
        text = "Rejected input from redis: unknown command WHAT"
        self.assertEqual(
            self.lines(),
            [
                ("warn", text),
                ("warn", text + " (and 9999 similar lines since the last one)"),
            ],
        )

    def test_dropped_commands(self) -> None:
        """Dropped commands cause one line per minute for each name and reason."""
        for _ in range(1000):
            self.observer.observe(
                CommandsDropped("USER_SYNC", CommandDropReason.QUEUE_FULL, 1)
            )
        self.observer.observe(
            CommandsDropped("USER_SYNC", CommandDropReason.STOPPED, 7)
        )
        dropped = "dropped, and will not be sent"
        self.assertEqual(
            self.lines(),
            [
                (
                    "warn",
                    f"1 USER_SYNC command {dropped}: too many were waiting for a link; "
                    "check why no link is up",
                ),
                (
                    "warn",
                    f"7 USER_SYNC commands {dropped}: the process stopped while it "
                    "had no link",
                ),
            ],
        )

    def test_refused_requests(self) -> None:
        """A request without the secret is logged once; 409 and 410 are not logged."""
        for status in (401, 401, 409, 410):
            self.observer.observe(RequestRefused(status, "why it is"))
        self.assertEqual(
            self.lines(), [("warn", "Refused an HTTP request with 401: why it is")]
        )

    def test_each_unknown_stream_makes_no_line(self) -> None:
        """Stream names made up by a peer cannot fill the log."""
        for number in range(100):
            self.observer.observe(
                Discarded(f"made{number}\nup", "w1", DiscardReason.UNKNOWN_STREAM, 1)
            )
        self.assertEqual(
            self.lines(),
            [
                (
                    "warn",
                    r"Discarded 1 rows or positions of stream made0\nup of w1: "
                    "unknown_stream",
                )
            ],
        )

    def test_client_ips_that_are_not_stored(self) -> None:
        """A peer whose client IPs end here is named once."""
        reason = DiscardReason.NOT_RESPONSIBLE
        self.observer.observe(Discarded("USER_IP", "", reason, 1))
        self.assertEqual(self.lines(), [])
        for peer in ("w2", "w2", "w3"):
            self.observer.observe(Discarded("USER_IP", "", reason, 1, peer))
        self.assertEqual(
            [text.partition(": ")[0] for _, text in self.lines()],
            ["Discarded USER_IP of w2", "Discarded USER_IP of w3"],
        )

    def test_everyday_discards_make_no_line(self) -> None:
        """Discarding our own echo or old tokens is not logged."""
        self.observer.observe(Discarded("events", "w1", DiscardReason.OWN_ECHO, 1))
        self.observer.observe(Discarded("events", "w1", DiscardReason.OLD_TOKEN, 1))
        self.assertEqual(self.lines(), [])

    def test_failed_connection_has_reason(self) -> None:
        """
        A failed connection is logged with the reason and the time to the next attempt.
        """
        # Nothing was tried yet.
        self.observer.observe(ConnectFailed("redis", "", 0.1))
        self.observer.observe(ConnectFailed("redis", "refused", 2.5))
        self.assertEqual(
            self.lines(),
            [("warn", "Cannot connect: redis: refused; retrying in 2.5 s")],
        )

    def test_the_end_of_a_connection_has_its_level(self) -> None:
        """An orderly disconnect is logged as information, a loss as a warning."""
        self.observer.observe(LinkUp("redis"))
        self.observer.observe(LinkDown("redis", CloseReason.SHUTDOWN, "told to"))
        self.observer.observe(
            LinkDown("redis", CloseReason.TIMED_OUT, "25 s of silence")
        )
        self.observer.observe(LinkUp("w1", "127.0.0.1:9001"))
        self.observer.observe(
            LinkDown("w1", CloseReason.CLEAN, "closed", "127.0.0.1:9001")
        )
        self.assertEqual(
            self.lines(),
            [
                ("info", "Connected: redis"),
                ("info", "Disconnected: redis, shutdown: told to"),
                ("warn", "Disconnected: redis, timed_out: 25 s of silence"),
                ("info", "Connected: from w1 at 127.0.0.1:9001"),
                ("info", "Disconnected: from w1 at 127.0.0.1:9001, clean: closed"),
            ],
        )

    def test_server_is_named(self) -> None:
        """The server of a link is named as soon as it has stated its name."""
        server, client = "to 127.0.0.1:9001", "w2"
        self.observer.observe(LinkUp(server))
        self.observer.observe(PeerNamed(server, "w1"))
        self.observer.observe(LinkDown(server, CloseReason.CLEAN, "closed"))
        self.observer.observe(LinkUp(server))
        self.observer.observe(LinkUp(client, "127.0.0.1:40112"))
        self.observer.observe(PeerNamed(client, "w2"))
        self.assertEqual(
            [text for _, text in self.lines()],
            [
                "Connected: to 127.0.0.1:9001",
                "The server of the link to 127.0.0.1:9001 is w1",
                "Disconnected: to w1 at 127.0.0.1:9001, clean: closed",
                "Connected: to 127.0.0.1:9001",
                "Connected: from w2 at 127.0.0.1:40112",
            ],
        )

    def test_flapping_connection(self) -> None:
        """
        Every change of state is logged, so that the last line is current; a flapping
        link has a bounded number of lines a minute, with a count.
        """
        for _ in range(480):
            self.observer.observe(LinkUp("redis"))
            self.observer.observe(LinkDown("redis", CloseReason.LOST, "reset by peer"))
            self.clock.advance(0.125)
        self.observer.observe(LinkUp("redis"))
        up = ("info", "Connected: redis")
        down = ("warn", "Disconnected: redis, lost: reset by peer")
        self.assertEqual(
            self.lines(),
            [
                *([up, down] * (CHANGES_OF_STATE // 2)),
                (
                    "info",
                    "Connected: redis (and 900 similar lines since the last one)",
                ),
            ],
        )

    def test_second_outage_within_a_minute(self) -> None:
        """After a second outage, the last line reports that the link is up."""
        for _ in range(2):
            self.observer.observe(LinkUp("redis"))
            self.observer.observe(LinkDown("redis", CloseReason.LOST, "reset by peer"))
            self.observer.observe(ConnectFailed("redis", "refused", 2.5))
            self.clock.advance(10)
        self.observer.observe(LinkUp("redis"))
        self.assertEqual(self.lines()[-1], ("info", "Connected: redis"))

    def test_all_connections_change(self) -> None:
        """When the network returns, each of 500 connections is logged."""
        names = [f"w{number}" for number in range(500)]
        for name in names:
            self.observer.observe(LinkUp(name))
        # The first round is limited, since a peer can invent as many names.
        first = len(self.lines())
        self.assertEqual(first, MAX_OF_GROUP)
        self.clock.advance(REPEAT_AFTER)
        for name in names:
            self.observer.observe(LinkDown(name, CloseReason.LOST, "reset by peer"))
        for name in names:
            self.observer.observe(LinkUp(name))
        self.assertEqual(len(self.lines()) - first, 1000)

    def test_rejected_feature(self) -> None:
        """A feature that the server rejects is a warning with a hint."""
        self.observer.observe(FeatureUnavailable("the extension", "NOPERM; allow it"))
        self.assertEqual(
            self.lines(),
            [("warn", "Continuing without the extension: NOPERM; allow it")],
        )

    def test_failed_catch_up_is_logged_with_range(self) -> None:
        """A failed catch-up is logged with stream, writer, range and retry."""
        event = CatchUpEvent("events", "w1", 3, 9)
        self.observer.observe(CatchUpPage(event, 4, 7))
        self.observer.observe(CatchUpFailed(event, CatchUpError("no answer"), 2, 1.5))
        self.assertEqual(
            self.lines(),
            [
                ("debug", "Fetched 4 rows of events of w1, up to 7 of 9"),
                (
                    "warn",
                    "Cannot fetch or deliver rows of events of w1 in (3, 9], attempt "
                    "2: no answer; retrying in 1.5 s",
                ),
            ],
        )

    def test_failures_carry_their_traceback(self) -> None:
        """A background failure is logged with its traceback, once a minute."""
        error = ValueError("no")
        self.observer.failure("drain", error)
        self.observer.failure("drain", error)
        self.observer.observe(SendingFailed("events", error))
        self.assertEqual(
            self.lines(),
            [
                ("critical", "drain failed: no"),
                (
                    "error",
                    "Cannot send rows of events: no; they are sent later, or fetched "
                    "by the readers",
                ),
            ],
        )
        for event in self.events:
            self.assertIs(event["log_failure"].value, error)

    def test_stream_events_are_logged(self) -> None:
        """Streams that become live or are reset, and unknown fields, are logged."""
        self.observer.observe(StreamConnected("redis", "typing", "w1"))
        self.observer.observe(StreamReset("typing", "w1", 90, 2))
        self.observer.observe(PositionLowered("events", "w1", 9, 5))
        self.observer.observe(ExtraFields("typing", 3))
        self.assertEqual(
            self.lines(),
            [
                ("debug", "Stream typing of w1 is live on redis"),
                (
                    "info",
                    "Stream typing of w1 moved back from 90 to 2: its writer "
                    "has (or may have) restarted",
                ),
                (
                    "info",
                    "Stream events of w1 is at 5, not at 9 as was announced; no row "
                    "was delivered in between",
                ),
                (
                    "info",
                    "Ignored unknown fields in rows of stream typing; a newer peer "
                    "sends them",
                ),
            ],
        )


class RateLimitTests(SynchronousTestCase):
    def test_repetitions_are_counted(self) -> None:
        """
        The first line of a kind is admitted, then one per minute, with the number of
        suppressed lines.
        """
        clock = Clock()
        limit = RateLimit(clock.seconds)
        self.assertEqual(limit.admit("a"), 0)
        self.assertIsNone(limit.admit("a"))
        self.assertIsNone(limit.admit("a"))
        self.assertEqual(limit.admit("b"), 0)
        clock.advance(60)
        self.assertEqual(limit.admit("a"), 2)
        clock.advance(60)
        self.assertEqual(limit.admit("a"), 0)

    def test_kinds_are_bounded(self) -> None:
        """The number of kinds remembered is bounded; the oldest is forgotten."""
        limit = RateLimit(Clock().seconds)
        for kind in range(MAX_KEYS + 1):
            limit.admit(str(kind), kind)
        self.assertEqual(limit.admit("0", 0), 0)
        self.assertIsNone(limit.admit(str(MAX_KEYS), MAX_KEYS))

    def test_groups_are_bounded(self) -> None:
        """
        A group has a limited number of lines a minute, however many names are made up.
        """
        clock = Clock()
        limit = RateLimit(clock.seconds)
        admitted = [limit.admit("made", f"peer {n}") for n in range(3000)]
        self.assertEqual(admitted.count(0), MAX_OF_GROUP)
        self.assertEqual(limit.admit("lost", "peer 1"), 0)
        clock.advance(60)
        self.assertEqual(limit.admit("made", "another"), 3000 - MAX_OF_GROUP)

"""Tests for partial resyncs and the messages of the extension."""

from __future__ import annotations

import json

from synapse_replication.errors import ExtensionMessageError, UnknownExtensionError
from synapse_replication.handlers.events import Resync
from synapse_replication.streams.backlog import BacklogOptions
from tests.handlers.extended import ExtensionProcess, Published
from tests.handlers.extension.extension_case import ExtensionTests, row, rows_of


class ResyncTests(ExtensionTests):
    def miss_rows(self, *tokens: int) -> None:
        """Write rows while the reader is disconnected, then reconnect it."""
        self.reader.leave()
        for token in tokens:
            self.writer.write(token, f"row {token}")
            self.reader.events.persist("w", token, [f"row {token}"])
        self.bus.deliver()
        self.reader.join()
        self.bus.advance(0.5)

    def test_partial(self) -> None:
        """
        A reader that reconnects fetches its rows from the writer, not the database.
        """
        self.write(1)
        self.miss_rows(2, 3, 4)
        self.assertEqual(self.reader.texts(), [row(n) for n in (1, 2, 3, 4)])
        self.assertEqual(self.reader.events.requests, [])
        self.assertEqual(
            self.reader.observer.resyncs, {("events", "w", Resync.PARTIAL): 1}
        )
        self.assertEqual(self.reader.observer.backlog_answers, [("events", "w", None)])

    def test_restarted_reader(self) -> None:
        """A restarted reader receives the epochs first and resumes from the backlog."""
        self.write(1, 2)
        self.bus.advance(1)
        reader = ExtensionProcess(self.bus, "r2")
        reader.events.advance("w", 1)
        reader.events.persist("w", 2, ["row 2"])
        self.bus.deliver()
        self.bus.advance(0.25)
        self.assertEqual(reader.texts(), [row(2)])
        self.assertEqual(reader.events.requests, [])

    def test_outside_the_backlog(self) -> None:
        """Rows that the backlog has dropped come from the database: a full resync."""
        self.writer.leave()
        self.writer = ExtensionProcess(
            self.bus,
            "w",
            epoch="b",
            writes=["events"],
            backlog=BacklogOptions(max_rows=2),
        )
        self.bus.deliver()
        self.write(1)
        self.miss_rows(2, 3, 4, 5)
        self.assertEqual(self.reader.texts(), [row(n) for n in (1, 2, 3, 4, 5)])
        self.assertEqual(self.reader.events.requests, [("w", 1, 5)])
        self.assertEqual(
            self.reader.observer.resyncs, {("events", "w", Resync.FULL): 1}
        )

    def test_another_epoch(self) -> None:
        """A writer refuses a backlog request for another epoch with status 409."""
        self.write(1)
        self.bus.drop = lambda message: message.is_extension
        self.writer.leave()
        self.writer = ExtensionProcess(self.bus, "w", epoch="b", writes=["events"])
        self.writer.events.local_token = 1
        self.miss_rows(2)
        self.assertEqual(self.reader.texts(), [row(1), row(2)])
        self.assertEqual(self.reader.events.requests, [("w", 1, 2)])
        error = self.reader.observer.backlog_answers[0][2]
        self.assertEqual(getattr(error, "status", None), 409)

    def test_writer_that_hangs(self) -> None:
        """
        A writer that did not answer a backlog request receives no further one for 30 s.
        """
        self.write(1)
        self.writer.refusal = 0
        self.miss_rows(2)
        self.miss_rows(3)
        self.assertEqual(self.reader.texts(), [row(1), row(2), row(3)])
        self.assertEqual(len(self.writer.backlog_requests), 1)
        self.assertEqual(len(self.reader.events.requests), 2)
        self.writer.refusal = None
        self.bus.advance(30)
        self.miss_rows(4)
        self.assertEqual(len(self.reader.events.requests), 2)

    def test_failed(self) -> None:
        """
        If both the backlog and the database fail, the resync counts as failed and is
        retried.
        """
        self.write(1)
        self.writer.refusal = 410
        self.reader.events.is_held = True
        self.miss_rows(2)
        self.reader.events.is_held = False
        self.reader.events.fail(RuntimeError("no database"))
        self.bus.advance(2)
        self.assertEqual(self.reader.texts(), [row(1), row(2)])
        self.assertEqual(
            self.reader.observer.resyncs,
            {("events", "w", Resync.FAILED): 1, ("events", "w", Resync.FULL): 1},
        )

    def test_promotion(self) -> None:
        """
        When a stream is moved to another instance, readers resume from their positions.
        """
        self.write(1, 2)
        assert self.writer.extension is not None
        self.writer.extension.stop()
        self.bus.deliver()
        self.writer.leave()
        promoted = ExtensionProcess(self.bus, "w2", epoch="p")
        promoted.leave()
        promoted.events.local_token = 2
        promoted = ExtensionProcess(self.bus, "w2", epoch="p2", writes=["events"])
        promoted.skip(2)
        # For a new writer, a reader starts at the position that the stream had.
        self.reader.events.advance("w2", 2)
        self.bus.deliver()
        self.reader.leave()
        promoted.write(3, "row 3")
        self.reader.events.persist("w2", 3, ["row 3"])
        self.bus.deliver()
        self.reader.join()
        self.bus.advance(0.5)
        self.assertEqual(self.reader.texts(), [row(1), row(2), row(3, "w2")])
        self.assertEqual(self.reader.events.requests, [])
        self.assertEqual(
            self.reader.observer.resyncs, {("events", "w2", Resync.PARTIAL): 1}
        )

    def test_goodbye(self) -> None:
        """
        A goodbye reports the last position; no backlog is requested from its sender.
        """
        self.bus.drop = rows_of(2)
        self.write(1, 2)
        assert self.writer.extension is not None
        self.writer.extension.stop()
        self.bus.deliver()
        self.assertEqual(self.reader.texts(), [row(1), row(2)])
        self.assertIsNone(self.reader.epochs.epoch_of("w"))

    def test_nothing_is_sent_after_goodbye(self) -> None:
        """
        After a goodbye, nothing is sent before the links close, since peers would treat
        any message as proof of life. No timer is left.
        """
        assert self.writer.extension is not None
        self.bus.advance(1)
        self.writer.extension.stop()
        ExtensionProcess(self.bus, "another")
        self.writer.extension.sending_resumed()
        self.writer.leave()
        self.writer.join()
        self.write(1)
        self.bus.advance(10)
        kinds = [
            json.loads(message.payload)["type"]
            for message in self.bus.seen
            if message.is_extension and message.sender == "w"
        ]
        self.assertEqual(kinds[kinds.index("goodbye") :], ["goodbye"])
        self.assertIsNone(self.reader.epochs.epoch_of("w"))


class MessageTests(ExtensionTests):
    def test_bad_messages(self) -> None:
        """
        Malformed messages are refused; those of a newer version or type count as
        unknown.
        """
        self.bus.publish(Published("w", True, b"\xff{"))
        self.inject(v=2)
        self.inject(type="tomorrow")
        self.inject(instance=5)
        self.inject(more=1, still_more=2)
        self.assertEqual(
            [type(error) for _, error in self.reader.observer.refused],
            [
                ExtensionMessageError,
                UnknownExtensionError,
                UnknownExtensionError,
                ExtensionMessageError,
            ],
        )
        self.assertEqual(self.reader.observer.unknown, 2)

    def test_unknown_streams(self) -> None:
        """A heartbeat's position of an unknown stream is skipped."""
        self.inject(positions={"tomorrow": [5, 0]})
        self.assertEqual(self.reader.observer.failures, [])

    def test_lost_link(self) -> None:
        """Nothing is sent on a lost link."""
        self.writer.leave()
        self.bus.deliver()
        before = len(self.bus.seen)
        self.writer.host.reactor.advance(20)
        self.bus.deliver()
        self.assertEqual(len(self.bus.seen), before)

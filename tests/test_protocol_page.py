"""Tests that the manual's annotated session matches a real deployment."""

from __future__ import annotations

import json
import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.recordings.reader import read_recording, shipped_recording
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from synapse_replication.wire.rdata import read_lines
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost

PAGE = Path(__file__).parents[1] / "docs" / "protocol.rst"


def session() -> list[str]:
    """Return the lines of the session in order."""
    blocks = re.findall(
        r"^\.\. code-block:: text\n   :class: session\n\n((?:   .+\n)+)",
        PAGE.read_text(),
        re.MULTILINE,
    )
    return [line.strip() for block in blocks for line in block.splitlines()]


PERSISTERS = ("event_persister1", "event_persister2")


class AnnotatedSessionTests(SynchronousTestCase):
    def test_recorded(self) -> None:
        """The recording has every line of the session, in the same order."""
        lines = session()
        self.assertGreater(len(lines), 10)
        recorded = (
            record.line.decode().strip()
            for record in read_recording(shipped_recording())
            if not isinstance(record, Exception)
        )
        for line in lines:
            self.assertIn(line, recorded, f"{line} is not there, or not in this order")

    def receive(self, introduction: str, *streams: SourceStream) -> RecordingHost:
        """Return a host that has received the lines below an introduction."""
        (block,) = re.findall(rf"{introduction}::\n\n((?:    .+\n)+)", PAGE.read_text())
        host = RecordingHost(*streams)
        handler = ReplicationCommandHandler(host, host.observer)
        connection = MemoryConnection()
        handler.new_connection(connection)
        handler.received(
            connection,
            read_lines([line.strip().encode() for line in block.splitlines()]),
        )
        host.reactor.advance(0)
        self.assertEqual(connection.closed_with, [])
        return host

    def test_older_peers(self) -> None:
        """The lines of older peers are understood as the page says."""
        events, typing = (SourceStream(name, Row) for name in ("events", "typing"))
        for stream in (events, typing):
            name = stream.description.name
            stream.description = STANDARD_STREAMS[name].description
        events.advance("master", 1)
        host = self.receive("never sends them", events, typing)
        self.assertEqual(
            [(*where, len(rows)) for *where, rows in host.rows.rows],
            [
                ("events", "master", 2, 1),
                ("events", "master", 4, 2),
                ("typing", "stream_writer1", 1, 1),
            ],
        )
        self.assertEqual(events.requests + typing.requests, [])

    def test_tags_of_older_peers(self) -> None:
        """The lines of the stream of tags are understood as the page says."""
        tags = SourceStream("tag_account_data", Row)
        tags.description = STANDARD_STREAMS["tag_account_data"].description
        tags.advance("master", 7)
        host = self.receive("is a text of JSON", tags)
        ((*where, (row,)),) = host.rows.rows
        self.assertEqual(where, ["tag_account_data", "master", 8])
        self.assertEqual(json.loads(row.data), {"m.favourite": {"order": 0.5}})
        self.assertEqual(tags.requests, [])

    def test_delivers_documented_rows(self) -> None:
        """A reader of the session delivers what the page says, and fetches nothing."""
        events, typing = (SourceStream(name, Row) for name in ("events", "typing"))
        for stream in (events, typing):
            name = stream.description.name
            stream.description = STANDARD_STREAMS[name].description
        for writer in PERSISTERS:
            events.advance(writer, 1)
        host = RecordingHost(events, typing)
        handler = ReplicationCommandHandler(host, host.observer)
        connection = MemoryConnection()
        handler.new_connection(connection)
        handler.received(connection, read_lines([line.encode() for line in session()]))
        host.reactor.advance(0)
        one, other = PERSISTERS
        self.assertEqual(
            [(*where, len(rows)) for *where, rows in host.rows.rows],
            [
                ("events", one, 3, 2),
                ("events", other, 2, 2),
                ("typing", "stream_writer1", 1, 1),
            ],
        )
        self.assertEqual(events.current_token(other), 4)
        self.assertEqual(events.requests + typing.requests, [])
        self.assertEqual(host.observer.refused, [])
        self.assertEqual(
            [command.NAME for command in host.commands.received],
            ["LOCK_RELEASED", "USER_SYNC"],
        )

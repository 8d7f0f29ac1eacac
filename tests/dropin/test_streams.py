"""Tests for the host's streams as ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.streams import (
    HostRowCodec,
    HostStream,
    HostStreams,
    writes,
)
from synapse_replication.errors import RowDecodeError
from synapse_replication.streams.stream import StreamUpdateResult
from tests.dropin.host import FakeHomeserver, FakeStream, fake_modules


class HostRowCodecTests(SynchronousTestCase):
    """Tests for HostRowCodec."""

    codec = HostRowCodec("letters", FakeStream.parse_row)

    def test_rows(self) -> None:
        """
        Rows are parsed by the host, from JSON text or from values.
        """
        self.assertEqual(self.codec.decode([b'["a"]', b'["b"]']).rows, ["A", "B"])
        self.assertEqual(self.codec.from_json(["c"]), "C")
        self.assertEqual(self.codec.to_json(["d"]), ["d"])

    def test_wrong_row(self) -> None:
        """
        A row that the host cannot parse is reported with its place.
        """
        error = self.assertRaises(RowDecodeError, self.codec.decode, [b'["a"]', b"[]"])
        self.assertEqual(error.index, 1)
        self.assertRaises(RowDecodeError, self.codec.decode, [b"[NaN]"])
        self.assertRaises(RowDecodeError, self.codec.from_json, [1])


class HostStreamTests(SynchronousTestCase):
    """Tests for HostStream."""

    def setUp(self) -> None:
        fake_modules(self)

    def test_updates(self) -> None:
        """
        A page of the host's is one of ours.
        """
        original = FakeStream("events", updates=[(2, ["a"]), (3, ["b"]), (4, ["c"])])
        stream = HostStream(original, "w")
        result = self.successResultOf(
            Deferred.fromCoroutine(stream.get_updates_since("w", 2, 4))
        )
        self.assertEqual(
            result, StreamUpdateResult([(3, ["b"]), (4, ["c"])], 4, limited=False)
        )

    def test_announced(self) -> None:
        """
        C11: what may be announced is the host's own position, and rows are asked for
        whatever its ids say of them, unless they are ours.
        """
        stream = HostStream(FakeStream("events", {"w": 7}, local_token=5), "w")
        self.assertEqual(stream.minimal_local_current_token(), 7)
        self.assertTrue(stream.has_local_updates(5, 7))

    def test_undeclared_writers(self) -> None:
        """
        C52: what this process wrote to ``caches`` does not count as heard of others.
        """
        original = FakeStream("caches", {"other": 5, "w": 5})
        stream = HostStream(original, "w")
        self.assertEqual(stream.current_token("other"), 5)
        original.tokens = {"other": 9, "w": 9}
        self.assertEqual(stream.current_token("w"), 9)
        self.assertEqual(stream.current_token("other"), 5)
        stream.heard_of("other", 8, is_position=False)
        self.assertEqual(stream.current_token("other"), 8)
        stream.heard_of("other", 6, is_position=True)
        self.assertEqual(stream.current_token("other"), 8)

    def test_begun_again(self) -> None:
        """
        C48: the queue for other servers may begin again, by its writer's POSITION.
        """
        stream = HostStream(FakeStream("federation"), "sender")
        stream.heard_of("master", 12, is_position=False)
        stream.heard_of("master", 3, is_position=False)
        self.assertEqual(stream.current_token("master"), 12)
        stream.heard_of("master", 0, is_position=True)
        self.assertEqual(stream.current_token("master"), 0)

    def test_rules(self) -> None:
        """
        Streams in memory may begin again; those in the database may not.
        """
        typing = HostStream(FakeStream("typing"), "w").description
        self.assertTrue(typing.resettable and typing.held_in_memory)
        caches = HostStream(FakeStream("caches"), "w").description
        self.assertTrue(caches.idempotent and caches.announce_own_moves_only)
        self.assertFalse(caches.resettable)
        unknown = HostStream(FakeStream("new_one"), "w").description
        self.assertFalse(unknown.resettable or unknown.idempotent)


class HostStreamsTests(SynchronousTestCase):
    """Tests for HostStreams and writes."""

    def test_written(self) -> None:
        """
        A process writes what it is configured to write, and the caches.
        """
        names = ("events", "typing", "caches", "presence")

        def make(name: str) -> Callable[[Any], FakeStream]:
            return lambda hs: FakeStream(name)

        fake_modules(self, {name: make(name) for name in names})
        for instance_name, written in (
            ("master", ["caches", "presence"]),
            ("w", ["events", "typing", "caches"]),
            ("reader", ["caches"]),
        ):
            streams = HostStreams(FakeHomeserver(instance_name))
            self.assertEqual(
                [s.description.name for s in streams.get_streams_to_replicate()],
                written,
            )
            self.assertEqual(list(streams.get_streams()), list(names))

    def test_federation(self) -> None:
        """
        Only a main process that does not send to other servers itself has a queue.
        """
        passes_on = SimpleNamespace(send_federation=False, writers=SimpleNamespace())
        sends = SimpleNamespace(send_federation=True, writers=SimpleNamespace())
        self.assertTrue(writes(passes_on, "master", "federation"))
        self.assertFalse(writes(sends, "master", "federation"))
        self.assertFalse(writes(passes_on, "w", "federation"))

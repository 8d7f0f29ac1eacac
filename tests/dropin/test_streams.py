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
        What may be announced is the host's own position, and rows are asked for
        whatever its ids say of them, unless they are ours.
        """
        stream = HostStream(FakeStream("events", {"w": 7}, local_token=5), "w")
        self.assertEqual(stream.minimal_local_current_token(), 7)
        self.assertTrue(stream.has_local_updates(5, 7))

    def test_shared_token(self) -> None:
        """
        A token that all writers share does not count as received from one of
        them, whether it is a declared writer of ``events`` or an undeclared one of
        ``caches``.
        """
        for name, writers in (("events", ["other", "w"]), ("caches", [])):
            original = FakeStream(name, {"other": 5, "w": 5})
            original.shared_token = 5
            stream = HostStream(original, "w", writers)
            original.shared_token = 9
            self.assertEqual(stream.current_token("w"), 9)
            self.assertEqual(stream.current_token("other"), 5)
            stream.advance("other", 8, is_position=False)
            self.assertEqual(stream.current_token("other"), 8)
            stream.advance("other", 6, is_position=False)
            self.assertEqual(stream.current_token("other"), 8)
            # The position before was false: the reader goes back.
            stream.advance("other", 6, is_position=True)
            self.assertEqual(stream.current_token("other"), 6)

    def test_baseline(self) -> None:
        """
        The baseline of a writer, declared or not, is what the host knew when the
        stream was made: of a writer that is asked about late, no row is skipped.
        """
        original = FakeStream("caches", shared_token=2204)
        stream = HostStream(original, "w")
        original.shared_token = 2208
        self.assertEqual(stream.current_token("stream_writer1"), 2204)
        original = FakeStream("events", {"p1": 7, "p2": 9}, shared_token=6)
        stream = HostStream(original, "w", ["p1", "p2"])
        original.shared_token = 20
        tokens = [stream.current_token(name) for name in ("p1", "p2", "p3")]
        self.assertEqual(tokens, [7, 9, 6])

    def test_typing(self) -> None:
        """
        The host resets the tokens of typing itself: they are its own.
        """
        original = FakeStream("typing", {"w2": 5})
        stream = HostStream(original, "w", ["w2"])
        original.tokens["w2"] = 3
        self.assertEqual(stream.current_token("w2"), 3)

    def test_begun_again(self) -> None:
        """
        The queue for other servers may begin again, by its writer's POSITION.
        """
        stream = HostStream(FakeStream("federation"), "sender")
        stream.advance("master", 12, is_position=False)
        stream.advance("master", 3, is_position=False)
        self.assertEqual(stream.current_token("master"), 12)
        stream.advance("master", 0, is_position=True)
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

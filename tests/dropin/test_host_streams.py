"""Tests for the adapters of the host's streams."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.host_streams import (
    KEEP_SECONDS,
    REUSE_SECONDS,
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

    def test_encoding(self) -> None:
        """Rows to send are JSON values."""
        self.assertEqual(self.codec.encode(["a", 1]), b'["a",1]')
        self.assertEqual(self.codec.encode_new(["a", 1]), b'["a",1]')

    def test_rows(self) -> None:
        """Rows are parsed by the host, from JSON text or from values."""
        self.assertEqual(self.codec.decode([b'["a"]', b'["b"]']).rows, ["A", "B"])
        self.assertEqual(self.codec.from_json(["c"]), "C")
        self.assertEqual(self.codec.to_json(["d"]), ["d"])

    def test_wrong_row(self) -> None:
        """A row that the host cannot parse is reported with its index."""
        error = self.assertRaises(RowDecodeError, self.codec.decode, [b'["a"]', b"[]"])
        self.assertEqual(error.index, 1)
        self.assertRaises(RowDecodeError, self.codec.decode, [b"[NaN]"])
        self.assertRaises(RowDecodeError, self.codec.from_json, [1])


class FakeIds:
    """An id generator.

    :ivar reads: for each read of the token, whether it follows other writers.
    """

    def __init__(self) -> None:
        self.token = 7
        self.mark = 0
        self.reads: list[bool] = []

    def get_announceable_token(self, *, follows_others: bool = True) -> int:
        self.reads.append(follows_others)
        return self.token

    def get_mark(self) -> tuple[int | None, ...]:
        return (self.mark,)

    async def get_max_allocated_token(self) -> int:
        return self.token


class HostStreamTests(SynchronousTestCase):
    """Tests for HostStream."""

    def setUp(self) -> None:
        fake_modules(self)

    def test_updates(self) -> None:
        """A page of the host's stream is returned as a StreamUpdateResult."""
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
        The announceable token is the host's current token, and its rows are always
        queried, whatever its id generator reports as finished.
        """
        stream = HostStream(FakeStream("events", {"w": 7}, local_token=5), "w")
        self.assertEqual(stream.minimal_local_current_token(), 7)
        self.assertTrue(stream.has_local_updates(5, 7))

    def test_announced_is_reused(self) -> None:
        """
        The announceable token is read again only after the mark of the ids has changed,
        or after some time, which is shorter while the sequence must be read.
        """
        ids: Any = FakeIds()
        now = [5.0]
        original = FakeStream("events", {"w": 7})
        stream = HostStream(original, "w", ids=ids, seconds=lambda: now[0])
        self.assertEqual(stream.minimal_local_current_token(), 7)
        original.tokens["w"] = ids.token = 8
        self.assertEqual(stream.minimal_local_current_token(), 7)
        ids.mark += 1
        self.assertEqual(stream.minimal_local_current_token(), 8)
        original.tokens["w"] = 9
        now[0] += REUSE_SECONDS
        self.assertEqual(stream.minimal_local_current_token(), 8)
        self.assertEqual(ids.reads, [True] * 2)
        now[0] += KEEP_SECONDS - REUSE_SECONDS
        # The announceable token does not exceed that of the generator.
        self.assertEqual(stream.minimal_local_current_token(), 8)
        self.assertEqual(ids.reads, [True] * 3)
        ids.token = 9
        now[0] += REUSE_SECONDS
        self.assertEqual(stream.minimal_local_current_token(), 9)
        self.assertEqual(ids.reads, [True] * 4)
        caches = HostStream(FakeStream("caches"), "w", ids=ids)
        caches.minimal_local_current_token()
        self.assertEqual(ids.reads[4:], [False])

    def test_shared_token(self) -> None:
        """
        A token shared by all writers does not count as received from a single writer,
        whether that writer is declared, as in ``events``, or not, as in ``caches``.
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
            # The previous position was wrong: the reader rewinds.
            stream.advance("other", 6, is_position=True)
            self.assertEqual(stream.current_token("other"), 6)

    def test_baseline(self) -> None:
        """
        The baseline of each writer is the host's token when the adapter was created, so
        that no row of a writer is skipped if its token is first read later.
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
        """The host resets the tokens of typing itself, so its own tokens are used."""
        original = FakeStream("typing", {"w2": 5})
        stream = HostStream(original, "w", ["w2"])
        original.tokens["w2"] = 3
        self.assertEqual(stream.current_token("w2"), 3)

    def test_reset(self) -> None:
        """A POSITION may reset the stream ``federation``; a row may not."""
        stream = HostStream(FakeStream("federation"), "sender")
        stream.advance("master", 12, is_position=False)
        stream.advance("master", 3, is_position=False)
        self.assertEqual(stream.current_token("master"), 12)
        stream.advance("master", 0, is_position=True)
        self.assertEqual(stream.current_token("master"), 0)

    def test_rules(self) -> None:
        """Streams in memory may be reset; streams in the database may not."""
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
        """An instance writes the streams that are configured for it, and ``caches``."""
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
        Only a main process that does not send federation itself writes ``federation``.
        """
        passes_on = SimpleNamespace(send_federation=False, writers=SimpleNamespace())
        sends = SimpleNamespace(send_federation=True, writers=SimpleNamespace())
        self.assertTrue(writes(passes_on, "master", "federation"))
        self.assertFalse(writes(sends, "master", "federation"))
        self.assertFalse(writes(passes_on, "w", "federation"))

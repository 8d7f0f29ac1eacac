"""Tests for :mod:`synapse_replication.streams.memory`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, settings, strategies
from twisted.internet import defer
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    CatchUpError,
    LocalProtocolError,
    StreamClosedError,
    StreamConfigurationError,
)
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.standard.row_types import (
    FederationStreamRow,
    TypingStreamRow,
)
from synapse_replication.streams.stream import Stream, StreamUpdateResult
from synapse_replication.streams.tokens import MultiWriterStreamToken

if TYPE_CHECKING:
    _: type[Stream] = MemoryStream

TYPING = STANDARD_STREAMS["typing"].description


def typing(room: str, *users: str) -> TypingStreamRow:
    return TypingStreamRow(room, list(users))


class MemoryStreamTests(SynchronousTestCase):
    """Tests for a stream held in memory, at its writer."""

    def make(self, **options: Any) -> MemoryStream:
        return MemoryStream(TYPING, instance_name="w", **options)

    def test_not_a_writer(self) -> None:
        """An instance that is not among the writers cannot write, and is told so."""
        self.assertEqual(self.make(writers=["v", "w"]).write([typing("!r")]), 1)
        error = self.assertRaises(
            StreamConfigurationError,
            self.make(writers=["v"]).write,
            [typing("!r")],
        )
        self.assertIn("w does not write typing; add it to the writers", str(error))

    def test_closed(self) -> None:
        """A row is refused after the end: no reader would receive it."""
        stream = self.make()
        stream.close()
        self.assertRaises(StreamClosedError, stream.write, [typing("!r")])
        self.assertEqual(stream.current_token("w"), 0)

    def fetch(
        self,
        stream: MemoryStream,
        from_token: int,
        upto_token: int,
        instance_name: str = "w",
    ) -> StreamUpdateResult:
        result = stream.get_updates_since(instance_name, from_token, upto_token)
        return self.successResultOf(defer.ensureDeferred(result))

    def fetch_all(self, stream: MemoryStream, upto: int) -> list[tuple[int, Any]]:
        """Fetch all pages from 0; each must make progress."""
        updates: list[tuple[int, Any]] = []
        at = 0
        while True:
            page = self.fetch(stream, at, upto)
            self.assertGreater(page.upto_token, at)
            updates += page.updates
            at = page.upto_token
            if not page.limited:
                return updates

    def test_acknowledged(self) -> None:
        """Rows are dropped when all expected readers have acknowledged them."""
        for expected, free_after in (((), 1), (("s1", "s2"), 2)):
            stream = self.make(acknowledged_by=expected)
            for name in "abc":
                stream.write([typing(f"!{name}")])
            stream.acknowledge("s1", 2)
            stream.acknowledge("stranger", 1)
            if free_after == 2:
                self.assertEqual(len(stream._log), 3)
                stream.acknowledge("s2", 3)
                self.assertEqual(len(stream._log), 1)
                stream.acknowledge("s1", 3)
                self.assertEqual((len(stream._log), stream._bytes), (0, 0))
            reading = defer.ensureDeferred(stream.get_updates_since("w", 1, 3))
            tokens = [token for token, _ in self.successResultOf(reading).updates]
            self.assertEqual(tokens, [] if free_after == 2 else [3])

    def test_too_much_for_a_response(self) -> None:
        """Rows that no response may contain are refused, and nothing is written."""
        stream = self.make()
        for rows in (
            [typing("!a", "x" * (15 * 1024 * 1024))] * 3,
            [typing("!a", *[""] * 100_000)] * 5,
            [typing("!a")] * 100_000,
        ):
            with self.assertRaisesRegex(LocalProtocolError, "write fewer rows"):
                stream.write(rows)
        self.assertEqual(stream.minimal_local_current_token(), 0)
        self.assertEqual(stream.write([typing("!a", "x" * (15 * 1024 * 1024))] * 2), 1)

    def test_page_bytes(self) -> None:
        """A page ends after some MiB, but a larger row has a page of its own."""
        stream = self.make(max_bytes=2**30)
        for _ in range(3):
            stream.write([typing("!a", "x" * (10 * 1024 * 1024))])
        stream.write([typing("!b")])
        ends, at = [], 0
        while at < 4:
            at = self.fetch(stream, at, 4).upto_token
            ends.append(at)
        self.assertEqual(ends, [1, 2, 3, 4])

    def test_rows_between(self) -> None:
        """
        ``get_rows_between`` returns each writer's rows between two tokens, in pages.
        """
        fetches: list[tuple[str, int, int]] = []

        async def fetch(
            writer: str, after: int, upto: int, limit: int
        ) -> StreamUpdateResult:
            fetches.append((writer, after, upto))
            rows = [(token, [f"!{writer}{token}", []]) for token in (after + 1, upto)]
            return StreamUpdateResult(rows, upto, False)

        stream = self.make(fetch=fetch, page_rows=2)
        for name in "abcde":
            stream.write([typing(f"!{name}")])
        stream.advance("v", 9)
        self.assertEqual(
            stream.current_stream_token(), MultiWriterStreamToken(0, {"w": 5, "v": 9})
        )
        low = MultiWriterStreamToken(0, {"w": 2, "v": 6})
        found, upto, limited = [], low, True
        pages = 0
        while limited:
            page = self.successResultOf(
                defer.ensureDeferred(stream.get_rows_between(upto, None, limit=2))
            )
            found += [(each.position.stream, each.row.room_id) for each in page.rows]
            upto, limited = page.upto, page.limited
            pages += 1
        self.assertEqual(
            found, [(7, "!v7"), (9, "!v9"), (3, "!c"), (4, "!d"), (5, "!e")]
        )
        self.assertEqual(pages, 3)
        self.assertEqual(fetches, [("v", 6, 9)])
        self.assertEqual(upto, stream.current_stream_token())
        page = self.successResultOf(
            defer.ensureDeferred(stream.get_rows_between(low, None))
        )
        self.assertEqual(
            ([each.row.room_id for each in page.rows], page.limited),
            (["!v7", "!v9", "!c", "!d", "!e"], False),
        )

    def test_rows_between_without_progress(self) -> None:
        """A writer whose pages make no progress raises an error instead of a loop."""

        async def fetch(
            writer: str, after: int, upto: int, limit: int
        ) -> StreamUpdateResult:
            return StreamUpdateResult([], after, True)

        stream = self.make(fetch=fetch)
        stream.advance("v", 9)
        reading = defer.ensureDeferred(stream.get_rows_between(None, None))
        self.failureResultOf(reading, CatchUpError)

    def test_written_rows_are_fetched(self) -> None:
        """
        Rows are fetched with their tokens, above the lower bound up to the upper one.
        """
        stream = self.make()
        self.assertEqual(stream.write([typing("!a", "@u:x")]), 1)
        self.assertEqual(stream.write([typing("!b"), typing("!c")]), 2)
        self.assertEqual(stream.write([typing("!d")]), 3)

        self.assertEqual(
            self.fetch(stream, 0, 2),
            StreamUpdateResult(
                [(1, ["!a", ["@u:x"]]), (2, ["!b", []]), (2, ["!c", []])], 2, False
            ),
        )
        self.assertEqual(self.fetch(stream, 2, 3).updates, [(3, ["!d", []])])
        self.assertEqual(self.fetch(stream, 3, 3), StreamUpdateResult([], 3, False))
        self.assertEqual(stream.minimal_local_current_token(), 3)
        self.assertEqual(stream.current_token("w"), 3)

    def test_tokens_that_do_not_exist(self) -> None:
        """A page ends at the writer's last token, which it states, after a restart."""
        stream = self.make()
        stream.write([typing("!a")])
        self.assertEqual(
            self.fetch(stream, 0, 9),
            StreamUpdateResult([(1, ["!a", []])], 1, False, 1),
        )
        self.assertEqual(self.fetch(stream, 5, 9), StreamUpdateResult([], 1, False, 1))

    def test_has_local_updates(self) -> None:
        """A range has local updates if it contains an own token."""
        stream = self.make()
        self.assertFalse(stream.has_local_updates(0, 5))
        stream.write([typing("!a")])

        self.assertTrue(stream.has_local_updates(0, 1))
        self.assertFalse(stream.has_local_updates(1, 1))
        self.assertFalse(stream.has_local_updates(1, 5))

    def test_pages_never_split_a_token(self) -> None:
        """The pages together contain each row once, and no token is split."""
        stream = self.make(page_rows=2)
        for count in (1, 3, 1, 1, 2, 5):
            stream.write([typing(f"!{n}") for n in range(count)])

        first = self.fetch(stream, 0, 6)
        self.assertEqual([token for token, _ in first.updates], [1, 2, 2, 2])
        self.assertEqual((first.upto_token, first.limited), (2, True))
        tokens = [token for token, _ in self.fetch_all(stream, 6)]
        self.assertEqual(tokens, [1, 2, 2, 2, 3, 4, 5, 5, 6, 6, 6, 6, 6])

    def test_log_is_bounded_by_rows(self) -> None:
        """
        Old tokens are evicted; the error of a request for them names the lost range.
        """
        stream = self.make(max_rows=3)
        for n in range(5):
            stream.write([typing(f"!{n}")])

        self.assertEqual([t for t, _ in self.fetch(stream, 2, 5).updates], [3, 4, 5])
        error = self.failureResultOf(
            defer.ensureDeferred(stream.get_updates_since("w", 1, 5)), CatchUpError
        )
        self.assertIn("typing in (1, 2]", error.getErrorMessage())

    def test_log_is_bounded_by_bytes(self) -> None:
        """Long rows evict older ones, too; the newest token always stays."""
        stream = self.make(max_bytes=100)
        stream.write([typing("!a")])
        stream.write([typing("!" + "b" * 90)])
        stream.write([typing("!" + "c" * 200)])

        self.assertEqual([t for t, _ in self.fetch(stream, 0, 3).updates], [3])

    def test_new_reader_gets_retained_rows(self) -> None:
        """
        The request of a reader at 0 is not refused: it returns the rows that are still
        retained.
        """
        stream = self.make(max_rows=1)
        stream.write([typing("!a")])
        stream.write([typing("!b")])

        self.assertEqual(self.fetch(stream, 0, 2).updates, [(2, ["!b", []])])

    def test_full_resync_by_key(self) -> None:
        """A reader that needs evicted rows gets the newest row of each key."""
        stream = self.make(max_rows=2, key=lambda row: row.room_id)
        stream.write([typing("!a", "@1:x"), typing("!b", "@2:x")])
        stream.write([typing("!a")])
        stream.write([typing("!c", "@3:x")])
        stream.write([typing("!d", "@4:x")])

        self.assertEqual(
            self.fetch(stream, 0, 4).updates,
            [
                (1, ["!b", ["@2:x"]]),
                (2, ["!a", []]),
                (3, ["!c", ["@3:x"]]),
                (4, ["!d", ["@4:x"]]),
            ],
        )
        self.assertEqual(
            [t for t, _ in self.fetch(stream, 1, 4).updates],
            [2, 3, 4],
        )

    def test_full_resync_is_paged(self) -> None:
        """Evicted rows of one token stay together in a page, too."""
        stream = self.make(max_rows=3, page_rows=1, key=lambda row: row.room_id)
        stream.write([typing("!a"), typing("!b"), typing("!c")])
        stream.write([typing("!d")])

        first = self.fetch(stream, 0, 2)
        self.assertEqual([t for t, _ in first.updates], [1, 1, 1])
        self.assertEqual((first.upto_token, first.limited), (1, True))

    def test_keys_are_bounded(self) -> None:
        """
        Beyond the limit of keys, the oldest are evicted, and requests for them fail.
        """
        stream = self.make(max_rows=2, key=lambda row: row.room_id)
        for n in range(6):
            stream.write([typing(f"!{n}")])

        self.assertEqual([t for t, _ in self.fetch(stream, 2, 6).updates], [3, 4, 5, 6])
        self.failureResultOf(
            defer.ensureDeferred(stream.get_updates_since("w", 1, 6)), CatchUpError
        )

    def test_write_is_atomic(self) -> None:
        """
        If one row cannot be encoded as JSON, no row is written and no token is used.
        """
        stream = MemoryStream(
            STANDARD_STREAMS["federation"].description, instance_name="w"
        )
        self.assertRaises(
            LocalProtocolError,
            stream.write,
            [
                FederationStreamRow("k", {}),
                FederationStreamRow("k", {"x": float("nan")}),
            ],
        )
        self.assertRaises(LocalProtocolError, stream.write, [])

        self.assertEqual(stream.minimal_local_current_token(), 0)
        self.assertEqual(self.fetch(stream, 0, 1).updates, [])

    def test_rows_are_as_they_were_written(self) -> None:
        """Changing a row after it was written does not change what is sent."""
        stream = self.make()
        row = typing("!a", "@u:x")
        stream.write([row])
        row.user_ids.append("@later:x")

        self.assertEqual(self.fetch(stream, 0, 1).updates, [(1, ["!a", ["@u:x"]])])

    def test_write_notifies_the_streamer(self) -> None:
        """Each write calls ``on_write`` once its rows can be fetched."""
        seen: list[int] = []
        stream: MemoryStream = self.make(
            on_write=lambda: seen.append(stream.minimal_local_current_token())
        )
        stream.write([typing("!a")])
        stream.write([typing("!b")])

        self.assertEqual(seen, [1, 2])

    def test_bounds_are_checked(self) -> None:
        """A limit of 0 is refused by an error that names it."""
        for name in ("max_rows", "max_bytes", "page_rows"):
            error = self.assertRaises(StreamConfigurationError, self.make, **{name: 0})
            self.assertIn(f"{name} is 0", str(error))

    @settings(derandomize=True, deadline=None, max_examples=300)
    @given(
        writes=strategies.lists(
            strategies.lists(strategies.integers(0, 4), min_size=1, max_size=4),
            max_size=12,
        ),
        from_token=strategies.integers(0, 12),
        max_rows=strategies.integers(1, 12),
        page_rows=strategies.integers(1, 5),
        with_key=strategies.booleans(),
    )
    def test_no_row_is_lost_in_silence(
        self,
        writes: list[list[int]],
        from_token: int,
        max_rows: int,
        page_rows: int,
        with_key: bool,
    ) -> None:
        """
        After any writes and evictions, a reader that is not new gets all rows above its
        token, or the newest row of each key, or an error.
        """
        stream = self.make(
            max_rows=max_rows,
            page_rows=page_rows,
            key=(lambda row: row.room_id) if with_key else None,
        )
        written: list[tuple[int, list[Any]]] = []
        for token, rooms in enumerate(writes, 1):
            stream.write([typing(str(room), str(token)) for room in rooms])
            written += [(token, [str(room), [str(token)]]) for room in rooms]
        missed = [update for update in written if update[0] > from_token]
        upto = len(writes)

        fetched: list[tuple[int, Any]] = []
        at = from_token
        while at < upto:
            result = defer.ensureDeferred(stream.get_updates_since("w", at, upto))
            if isinstance(result.result, Failure):
                self.failureResultOf(result, CatchUpError)
                self.assertGreater(from_token, 0)
                self.assertGreater(len(written), max_rows)
                return
            page = self.successResultOf(result)
            self.assertTrue(all(at < t <= page.upto_token for t, _ in page.updates))
            self.assertEqual(page.limited, page.upto_token < upto)
            fetched += page.updates
            at = page.upto_token

        self.assertEqual([t for t, _ in fetched], sorted(t for t, _ in fetched))
        if from_token > 0 or len(written) <= max_rows:
            newest = {row[0]: row for _, row in fetched}
            self.assertEqual(newest, {row[0]: row for _, row in missed})
            if not with_key:
                self.assertEqual(fetched, missed)


class MemoryStreamReaderTests(SynchronousTestCase):
    """Tests for a stream held in another instance's memory."""

    def test_remote_rows_are_fetched_from_writer(self) -> None:
        """Rows of another instance are fetched from it."""
        calls: list[tuple[str, int, int, int]] = []
        answer = StreamUpdateResult([(5, ["!a", []])], 5, False)

        async def fetch(name: str, after: int, upto: int, limit: int) -> Any:
            calls.append((name, after, upto, limit))
            return answer

        stream = MemoryStream(TYPING, instance_name="r", fetch=fetch, page_rows=7)
        result = stream.get_updates_since("w", 3, 5)

        self.assertIs(self.successResultOf(defer.ensureDeferred(result)), answer)
        self.assertEqual(calls, [("w", 3, 5, 7)])

    def test_writer_unreachable(self) -> None:
        """If the writer cannot be reached, a catch-up fails with a hint."""
        stream = MemoryStream(TYPING, instance_name="r")
        result = defer.ensureDeferred(stream.get_updates_since("w", 3, 5))

        failure = self.failureResultOf(result, CatchUpError)
        self.assertIn("add it to the addresses", failure.getErrorMessage())

    def test_writer_starts_again(self) -> None:
        """A reader follows its writer to a lower token."""
        stream = MemoryStream(TYPING, instance_name="r")
        self.assertEqual(stream.current_token("w"), 0)
        stream.advance("w", 649)
        stream.advance("w", 0)

        self.assertEqual(stream.current_token("w"), 0)

    def test_advance_rejects_own_position(self) -> None:
        """A writer's own position cannot be set with ``advance``."""
        stream = MemoryStream(TYPING, instance_name="w")

        self.assertRaises(LocalProtocolError, stream.advance, "w", 5)

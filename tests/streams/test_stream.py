"""Tests of the description of a stream."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.rows import RawRowCodec
from synapse_replication.streams.stream import (
    EncodedUpdates,
    Stream,
    StreamDescription,
    StreamUpdateResult,
)
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row


class StreamTests(SynchronousTestCase):
    """The description of a stream."""

    def test_promises_nothing_by_default(self) -> None:
        """By default, a stream is in the database, ordered and not resettable."""
        description = StreamDescription("s", RawRowCodec("s"))
        self.assertEqual(
            (
                description.idempotent,
                description.resettable,
                description.held_in_memory,
                description.announce_own_moves_only,
            ),
            (False, False, False, False),
        )

    def test_is_a_value(self) -> None:
        """Two results with the same rows are equal and immutable."""
        result = StreamUpdateResult([(1, ["a"])], 1, False)
        self.assertEqual(result, StreamUpdateResult([(1, ["a"])], 1, False))
        with self.assertRaises(AttributeError):
            result.upto_token = 2  # type: ignore[misc]

    def test_text_looks_like_rows(self) -> None:
        """Encoded updates behave like a list of decoded rows."""
        updates = EncodedUpdates([(1, '["a"]'), (2, b"{}")])
        self.assertEqual(list(updates), [(1, ["a"]), (2, {})])
        self.assertEqual((len(updates), updates[-1]), (2, (2, {})))
        self.assertEqual(updates, [(1, ["a"]), (2, {})])
        self.assertEqual(updates[1:], [(2, {})])
        self.assertNotEqual(updates, [(1, ["a"])])
        self.assertIn("['a']", repr(updates))

    def test_a_double_is_a_stream(self) -> None:
        """The test double implements the stream protocol."""
        stream: Stream = SourceStream("s", Row, idempotent=True)
        self.assertTrue(stream.description.idempotent)
        self.assertEqual(stream.current_token("w"), 0)

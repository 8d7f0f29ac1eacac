"""Tests for synapse_replication.app.reader_ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.reader_ids import ReaderIds
from synapse_replication.errors import StreamConfigurationError
from synapse_replication.storage.postgres_stream import WriterIds

if TYPE_CHECKING:
    _ids: type[WriterIds] = ReaderIds


class FakeIdGenerator:
    """An id generator that is far ahead of the delivered rows."""

    def __init__(self) -> None:
        self.advanced: list[tuple[str, int]] = []

    def get_next_txn(self, txn: Any) -> int:
        raise NotImplementedError

    def get_current_token_for_writer(self, instance_name: str) -> int:
        return 100

    def get_announceable_token(self) -> int:
        return 98

    def get_minimal_local_current_token(self) -> int:
        return 99

    def advance(self, instance_name: str, new_id: int) -> None:
        self.advanced.append((instance_name, new_id))


class ReaderIdsTests(SynchronousTestCase):
    def make(self, own: FakeIdGenerator | None = None, sign: int = 1) -> ReaderIds:
        return ReaderIds("s", "me", {"a": 5, "me": 4}, 2, own, sign=sign)

    def test_reader(self) -> None:
        """
        A reader starts at the given positions, and for an unknown writer at the
        minimum.
        """
        ids = self.make()
        self.assertEqual(ids.get_current_token_for_writer("a"), 5)
        self.assertEqual(ids.get_current_token_for_writer("b"), 2)
        ids.advance("a", 9)
        self.assertEqual(ids.get_current_token_for_writer("a"), 9)

    def test_reset(self) -> None:
        """If a stream is reset, its position decreases."""
        ids = self.make()
        ids.advance("a", 0)
        self.assertEqual(ids.get_current_token_for_writer("a"), 0)

    def test_writer(self) -> None:
        """
        The position of this instance is the generator's; that of another instance is
        its delivered one.
        """
        generator = FakeIdGenerator()
        ids = self.make(generator)
        self.assertEqual(ids.get_current_token_for_writer("me"), 100)
        self.assertEqual(ids.get_minimal_local_current_token(), 99)
        self.assertEqual(ids.get_announceable_token(), 98)
        self.assertEqual(ids.get_current_token_for_writer("a"), 5)
        ids.advance("a", 7)
        self.assertEqual(generator.advanced, [("a", 7)])

    def test_negative(self) -> None:
        """The ids of a stream that counts down are negative."""
        ids = self.make(sign=-1)
        self.assertEqual(ids.get_current_token_for_writer("a"), -5)
        self.assertEqual(ids.get_current_token_for_writer("b"), -2)

    def test_reader_does_not_write(self) -> None:
        """
        If the instance is not a writer of the stream, the error says what to configure.
        """
        ids = self.make()
        with self.assertRaises(StreamConfigurationError) as caught:
            ids.get_next_txn(None)  # type: ignore[arg-type]
        self.assertIn("me does not write s; add it to", str(caught.exception))
        self.assertRaises(StreamConfigurationError, ids.get_minimal_local_current_token)

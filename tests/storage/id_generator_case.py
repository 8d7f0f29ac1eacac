"""Fixtures for the tests of id generators."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.storage.id_generators import MultiWriterIdGenerator
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.writer_positions import WriterPositions
from tests.storage.doubles import (
    FakeReactor,
    SteppedDatabase,
)
from tests.support.recording_observer import RecordingObserver


def foobar(*writers: str, negative: bool = False) -> IdStream:
    return IdStream(
        stream_name="foobar",
        sequence="foobar_seq",
        tables=(IdColumn("foobar", "stream_id", "instance_name"),),
        writers=writers,
        negative=negative,
    )


class SteppedTestCase(SynchronousTestCase):
    """One process on a database that advances only when a test requests it."""

    def setUp(self) -> None:
        self.database = SteppedDatabase()
        self.reactor = FakeReactor()
        self.observer = RecordingObserver()
        self.poked = 0
        self.ids = self.make(["master"], {"master": 7})

    def make(
        self,
        writers: list[str],
        stored: dict[str, int],
        negative: bool = False,
        allocated: int | None = None,
    ) -> MultiWriterIdGenerator:
        def poke() -> None:
            self.poked += 1

        return MultiWriterIdGenerator(
            self.database,
            foobar(*writers, negative=negative),
            WriterPositions("master", writers, stored, allocated=allocated),
            self.reactor,  # type: ignore[arg-type]
            self.reactor,
            on_finished=poke,
            observer=self.observer,
        )

    def start(
        self, gate: Deferred[None] | None = None, fail: bool = False
    ) -> tuple[Deferred[int], Coroutine[Any, Any, int]]:
        """Begin a block that ends when ``gate`` fires."""
        coroutine = self.block(gate or defer.succeed(None), fail)
        return Deferred.fromCoroutine(coroutine), coroutine

    async def block(self, gate: Deferred[None], fail: bool) -> int:
        async with self.ids.get_next() as id_:
            await gate
            if fail:
                raise RuntimeError("rolled back")
        return id_

    def assert_position_advances(self) -> None:
        """
        Assert that the next write moves the position to its id, whatever happened
        before.
        """
        done, _ = self.start()
        self.database.settle()
        self.reactor.run_thread_calls()
        self.database.settle()
        id_ = self.successResultOf(done)
        self.assertEqual(self.ids.get_current_token(), id_)
        self.assertEqual(self.ids.get_minimal_local_current_token(), id_)
        self.assertEqual(self.database.persisted[-1], id_)

    def with_sequence(self) -> None:
        """Use a generator that compares positions with the sequence, which is at 7."""
        stored = {"master": 7, "other": 7}
        self.ids = self.make(["master", "other"], stored, allocated=7)

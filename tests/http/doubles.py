"""Doubles of a stream and its directory for the tests of this folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred

from synapse_replication.handlers.events import OperationFailed, RequestRefused
from synapse_replication.handlers.interfaces import StreamDirectory
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.http.location import InstanceLocation
from synapse_replication.streams.rows import RawRowCodec
from synapse_replication.streams.stream import (
    Stream,
    StreamDescription,
    StreamUpdateResult,
)


class ListStream:
    """A stream whose rows are in a list, in pages of two rows.

    :ivar blocked_until: a Deferred that every fetch waits for.
    """

    def __init__(self, name: str, rows: Sequence[tuple[int, Any]] = ()) -> None:
        self.description = StreamDescription(
            name, RawRowCodec(name), held_in_memory=name == "typing"
        )
        self.rows = list(rows)
        self.fetches: list[tuple[str, int, int]] = []
        self.error: Exception | None = None
        self.blocked_until: Deferred[StreamUpdateResult] | None = None

    def current_token(self, instance_name: str) -> int:
        return self.rows[-1][0]

    def minimal_local_current_token(self) -> int:
        return self.rows[-1][0]

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        return True

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        self.fetches.append((instance_name, from_token, upto_token))
        if self.error is not None:
            raise self.error
        if self.blocked_until is not None:
            return await self.blocked_until
        found = [row for row in self.rows if from_token < row[0] <= upto_token]
        if len(found) > 2:
            return StreamUpdateResult(found[:2], found[1][0], True)
        return StreamUpdateResult(found, upto_token, False)


class Directory:
    """A directory of streams, some of which this process writes."""

    def __init__(self, *streams: Stream, writes: Sequence[Stream] = ()) -> None:
        self._streams = {stream.description.name: stream for stream in streams}
        self._writes = writes

    def get_streams(self) -> Mapping[str, Stream]:
        return self._streams

    def get_streams_to_replicate(self) -> Sequence[Stream]:
        return self._writes


class FailureObserver(ReplicationObserver):
    """Records failures, and counts rejected requests by status."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.refusals: Counter[int] = Counter()

    @handles(OperationFailed)
    def _operation_failed(self, event: OperationFailed) -> None:
        self.failures.append(event.error)

    @handles(RequestRefused)
    def _request_refused(self, event: RequestRefused) -> None:
        self.refusals[event.status] += 1


#: The address of a process.
WRITER = InstanceLocation("writer.example", 9093)


_: StreamDirectory = Directory(ListStream("events"))

"""Comparison of the stored positions of all writers with what they announced.

Theory of operation: a writer persists its position in ``stream_positions`` after each
write, and announces it on its links. If an announcement is lost, and the writer sends
nothing afterwards, readers cannot know of the row. Therefore each reader reads the
table: one query for all streams, every few seconds. A stored position that is ahead of
the reader for longer than a grace time was not announced; the rows up to it are
fetched. While all is well, nothing else is queried.

A row can also be lost below a later row, which leaves no trace in positions. For a
writer without the extension, the delivered tokens up to its stored position are
therefore compared with the committed ones, with one scan of an index per table. Rows
that are missing are delivered late. While a writer writes nothing, nothing is scanned.
Only the tokens of these writers are recorded at delivery.

A stream that any instance may write (``caches``) has no stored positions. The newest
tokens of its writers in the table take their place, unless a transaction that has
inserted into the table is open: it may hold a lower id. A writer that reports its
position needs neither.

A writer that speaks the extension reports its position every few seconds. If all
writers do, only every sixth read takes place.

Stored positions only move forward. If one is lower than before, PostgreSQL's timeline
has changed, or the table is a new one, the database was restored from a backup, or a
standby was promoted that lagged. Readers may then have delivered rows that do not exist
any more. The ids below this process's recent positions show which: writers continue
above all ids that were seen, and leave a gap.

A stored position carries less weight than an announced one: it never rewinds a reader,
and a position that is implausibly far ahead is verified like any other claim.

A hot standby may show any earlier state, and different ones if several are listed. So
nothing that a standby shows counts as a loss. It does not show open transactions, so
streams without stored positions are not compared there.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.python.failure import Failure

from synapse_replication.errors import StorageError
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.events import DatabaseSetBack
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.timer import Timer, until_next
from synapse_replication.storage.committed_tokens import (
    Key,
    TokenReader,
    TokenReading,
    Tokens,
    read_timeline,
)
from synapse_replication.storage.id_streams import (
    IdStream,
    committed_tokens,
    row_stream_of,
)

if TYPE_CHECKING:
    from synapse_replication.handlers.interfaces import Clock
    from synapse_replication.storage.database import TransactionRunner
    from synapse_replication.streams.standard.registry import StandardStream
    from synapse_replication.streams.table import TableStream

#: How long a stored position must be ahead before its rows are fetched, in s.
GRACE: Final = 2.0

#: The fraction of the interval by which a query is delayed at most, at random, so that
#: the processes of a deployment do not query at the same time.
JITTER: Final = 0.4

#: The number of reads that are skipped in a row if all writers report their positions.
SKIPPED: Final = 5

#: After the database was set back, tokens are looked for from this distance below the
#: lowest of this process's recent positions, and the most that are read of a writer.
GONE_WINDOW: Final = 10_000
MAX_IN_WINDOW: Final = 100_000


@attrs.frozen
class _Found:
    """The result of one read.

    :ivar timeline: PostgreSQL's timeline; ``None`` if it cannot be read.
    :ivar gone: if the timeline has changed: for each writer, the exclusive lower and
        the inclusive upper bound of the tokens that do not exist any more.
    """

    reading: TokenReading
    timeline: str | None
    gone: Mapping[Key, tuple[int, int]]


@attrs.define(eq=False, repr=False, slots=False)
class StoredPositionCheck:
    """Reads ``stream_positions`` periodically, and reports positions that are ahead.

    Use it in the reactor's thread.

    :param streams: the ids of each stream's rows, by its name on the wire, with its
        declared writers; none if every instance may write, in which case no positions
        are stored.
    :param instances: the instances that may write such streams.
    :param me: this process, which is not checked.
    :param handler: knows what arrived, and fetches or delivers what did not.
    :param is_reporting: returns whether a writer reports its positions by the
        extension.
    :param interval: the mean time between two reads, in s.
    :param uniform: returns a random number between its arguments.
    """

    _database: TransactionRunner
    _streams: Mapping[str, IdStream]
    _instances: Sequence[str]
    _handler: ReplicationCommandHandler
    _is_reporting: Callable[[str], bool]
    _clock: Clock
    _observer: ReplicationObserver
    _me: str = attrs.field(kw_only=True)
    _interval: float = attrs.field(kw_only=True)
    _uniform: Callable[[float, float], float] = attrs.field(
        default=random.uniform, kw_only=True
    )

    def __attrs_post_init__(self) -> None:
        #: The writers whose positions are stored, by stream and name.
        self._writers = [
            (name, writer)
            for name, stream in self._streams.items()
            for writer in stream.writers
            if writer != self._me
        ]
        self._peers = [name for name in self._instances if name != self._me]
        self._others = {writer for _, writer in self._writers}
        if not all(stream.writers for stream in self._streams.values()):
            self._others.update(self._peers)
        self._reader = TokenReader(self._streams, self._peers)
        #: The names of the streams whose rows are compared.
        self._compared = {
            name
            for name, stream in self._streams.items()
            if stream.tells_apart(stream.writers or self._instances)
        }
        # The first read always takes place: later ones are compared with it.
        self._skipped = SKIPPED
        #: The result of the last read.
        self._stored: Tokens = {}
        self._timeline: str | None = None
        self._is_standby = False
        #: This process's positions at the last reads, and at those that were skipped.
        self._samples: deque[Tokens] = deque(maxlen=SKIPPED + 2)
        self._timer = Timer(self._clock)
        self._is_running = False
        self._has_failed = False

    def start(self) -> None:
        """Begin to read; the first read is due after the interval."""
        self._is_running = True
        self._record_tokens()
        self._schedule()

    def stop(self) -> None:
        """Stop reading. A read that is in progress reports nothing."""
        self._is_running = False
        self._timer.stop()

    def _schedule(self) -> None:
        if self._is_running:
            delay = until_next(self._clock, self._interval)
            self._timer.start(delay, self._run, self._sample)

    def _run(self, step: Callable[..., Deferred[None] | None], *args: Any) -> None:
        """Take a step, which schedules the next one; if it fails, schedule a read."""
        maybeDeferred(step, *args).addErrback(self._failed)

    def _record_tokens(self) -> None:
        """Have the tokens recorded that are to be compared with the committed ones."""
        for name in self._compared:
            # A standby shows no newest tokens.
            peers = () if self._is_standby else self._peers
            recorded = {
                each
                for each in self._streams[name].writers or peers
                if each != self._me and not self._is_reporting(each)
            }
            self._handler.receivers[name].record_tokens(recorded)

    def _sample(self) -> None:
        self._record_tokens()
        sample = {key: self._claimed_position(*key) for key in self._writers}
        self._samples.append(sample)
        if self._skipped < SKIPPED and all(map(self._is_reporting, self._others)):
            self._skipped += 1
            self._schedule()
            return
        self._skipped = 0
        delay = self._uniform(0, JITTER * self._interval)
        self._timer.start(delay, self._run, self._read)

    def _claimed_position(self, stream_name: str, instance_name: str) -> int:
        return self._handler.receivers[stream_name].claimed_position(instance_name)

    def _read(self) -> Deferred[None]:
        ranges, samples = self._ranges_to_verify(), list(self._samples)
        return self._database.transact(
            "read_stored_positions",
            lambda txn: self._query(txn, ranges, samples),
            autocommit=True,
        ).addCallback(self._compare)

    def _query(
        self,
        txn: Any,
        ranges: Mapping[Key, tuple[int, int]],
        samples: Sequence[Tokens],
    ) -> _Found:
        reading = self._reader.read(txn, ranges)
        timeline = None if reading.is_standby else read_timeline(txn)
        gone: Mapping[Key, tuple[int, int]] = {}
        if self._changes(timeline):
            gone = _find_gone(txn, self._reader.streams, samples)
        return _Found(reading, timeline, gone)

    def _changes(self, timeline: str | None) -> bool:
        return None not in (self._timeline, timeline) and self._timeline != timeline

    def _ranges_to_verify(self) -> dict[Key, tuple[int, int]]:
        found = {}
        for (stream_name, instance_name), stored in self._stored.items():
            if stream_name in self._compared:
                range_ = self._handler.receivers[stream_name].range_to_verify(
                    instance_name, stored
                )
                if range_ is not None:
                    found[stream_name, instance_name] = range_
        return found

    def _compare(self, found: _Found) -> None:
        reading = found.reading
        self._is_standby = reading.is_standby
        stored = {
            key: reading.stored[key] for key in self._writers if key in reading.stored
        }
        if not reading.is_standby:
            self._report_set_back(found, stored)
            self._timeline = found.timeline
        self._stored = tokens = stored | {
            key: token
            for key, token in reading.newest.items()
            # A writer that reports its position knows which ids are finished.
            if not self._is_reporting(key[1])
        }
        if self._is_running:
            for (stream_name, writer), (complete, upto) in reading.committed.items():
                self._handler.receivers[stream_name].verify(writer, complete, upto)
        ahead = self._still_ahead(tokens)
        if ahead and self._is_running:
            self._timer.start(GRACE, self._run, self._report_ahead, ahead)
        else:
            self._schedule()
        self._has_failed = False

    def _report_set_back(self, found: _Found, stored: Tokens) -> None:
        lower = {
            key: (token, self._claimed_position(*key))
            for key, token in stored.items()
            if token < self._stored.get(key, token)
        }
        for key, (token, position) in (lower | dict(found.gone)).items():
            if token < position:
                self._observer.observe(DatabaseSetBack(*key, token, position))
        if self._changes(found.timeline):
            self._observer.failure(
                "comparing the database with its earlier state",
                StorageError(
                    "PostgreSQL's timeline changed, or its table stream_positions is a "
                    f"new one ({self._timeline}, now {found.timeline}): a standby was "
                    "promoted, or a backup was restored; see database_set_back in the "
                    "runbook"
                ),
            )

    def _report_ahead(self, tokens: Tokens) -> None:
        for (stream_name, instance_name), token in self._still_ahead(tokens).items():
            self._handler.stored_position(stream_name, instance_name, token)
        self._schedule()

    def _still_ahead(self, tokens: Tokens) -> Tokens:
        return {
            key: token
            for key, token in tokens.items()
            if token > self._claimed_position(*key)
        }

    def _failed(self, failure: Failure) -> None:
        assert failure.value is not None
        if not self._has_failed:
            self._has_failed = True
            self._observer.failure("reading the stored positions", failure.value)
        self._schedule()


def _find_gone(
    txn: Any, streams: Mapping[str, IdStream], samples: Sequence[Tokens]
) -> dict[Key, tuple[int, int]]:
    """Return the ranges in which each writer's rows do not exist any more.

    The positions of all writers of a stream follow its last committed id. If there is
    none for a while below a position that this process had, that id is gone.

    :param samples: this process's positions at some times.
    """
    gone = {}
    for name, stream in streams.items():
        of_stream = [
            {key: token for key, token in sample.items() if key[0] == name}
            for sample in samples
        ]
        tops = [max(sample.values(), default=0) for sample in of_stream]
        floor = max(0, min(tops, default=0) - GONE_WINDOW)
        committed = {floor}
        for _, writer in of_stream[-1] if of_stream else ():
            committed.update(
                committed_tokens(txn, stream, writer, floor, max(tops), MAX_IN_WINDOW)[
                    0
                ]
            )
        ids = sorted(committed)
        widest = 0
        for sample, top in zip(of_stream, tops, strict=True):
            newest = ids[bisect(ids, top) - 1]
            if top - newest > widest:
                widest = top - newest
                for key, position in sample.items():
                    gone[key] = newest, position
    return {key: (low, high) for key, (low, high) in gone.items() if low < high}


def start_position_check(
    database: TransactionRunner,
    handler: ReplicationCommandHandler,
    epochs: PeerEpochs,
    streams: Mapping[str, StandardStream | TableStream],
    writers: Mapping[str, Sequence[str]],
    instances: Iterable[str],
    *,
    interval: float,
) -> StoredPositionCheck | None:
    """Start to read the stored positions of all writers but this process.

    :param streams: the streams in the database, by name. Those that this process does
        not receive are not checked.
    :param writers: the declared writers of each stream; none if every instance writes.
    :param instances: the instances of the deployment.
    :param interval: the mean time between two reads, in s; 0 for no reads.
    :return: ``None`` if nothing is read.
    """
    me = handler.host.identity.instance_name
    checked = {
        name: row_stream_of(stream, writers[name])
        for name, stream in streams.items()
        if name in handler.receivers and set(writers[name]) != {me}
    }
    if not interval or not checked:
        return None
    clock = handler.host.clock
    check = StoredPositionCheck(
        database,
        checked,
        list(instances),
        handler,
        lambda name: epochs.is_reporting(name, clock.seconds()),
        clock,
        handler.observer,
        me=me,
        interval=interval,
    )
    check.start()
    return check

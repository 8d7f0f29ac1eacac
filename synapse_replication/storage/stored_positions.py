"""Comparison of the stored positions of all writers with what they announced.

Theory of operation: a writer persists its position in ``stream_positions`` after each
write, and announces it on its links. If an announcement is lost, and the writer sends
nothing afterwards, readers cannot know of the row. Therefore each reader reads the
table: one query for all streams, every few seconds. A stored position that is ahead of
the reader for longer than a grace time was not announced; the rows up to it are
fetched. While all is well, nothing else is queried.

A stored position carries less weight than an announced one: it never rewinds a reader,
and a position that is implausibly far ahead is verified like any other claim.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from twisted.python.failure import Failure

from synapse_replication.handlers.interfaces import Clock, DelayedCall
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.storage import queries
from synapse_replication.storage.database import TransactionRunner

#: How long a stored position must be ahead before its rows are fetched, in s.
GRACE: Final = 2.0

#: The fraction of the interval by which it varies at random, so that the processes of
#: a deployment do not query at the same time.
JITTER: Final = 0.2

#: ``(stream, writer) -> token``; streams have their names on the wire.
Tokens: TypeAlias = dict[tuple[str, str], int]


def read_tokens(txn: Any, writers: Mapping[tuple[str, str], str]) -> Tokens:
    """Return the stored positions of writers, as tokens.

    :param writers: the names of streams on the wire, by the stream's name in
        ``stream_positions`` and the writer. Other rows of the table are ignored.
    """
    txn.execute(queries.ALL_POSITIONS)
    return {
        # The ids of a stream that counts down are negative, its tokens are not.
        (writers[stream_name, instance_name], instance_name): abs(id_)
        for stream_name, instance_name, id_ in txn.fetchall()
        if (stream_name, instance_name) in writers
    }


class StoredPositionCheck:
    """Reads ``stream_positions`` periodically, and reports positions that are ahead.

    Use it in the reactor's thread.

    :param writers: see :func:`read_tokens`.
    :param known: ``(stream, writer)``; returns the token up to which the writer's rows
        were delivered here or are being fetched.
    :param report: ``(stream, writer, token)``; called with a position that is ahead.
    :param interval: the mean time between two reads, in s.
    :param uniform: returns a random number between its arguments.
    """

    def __init__(
        self,
        database: TransactionRunner,
        writers: Mapping[tuple[str, str], str],
        known: Callable[[str, str], int],
        report: Callable[[str, str, int], None],
        clock: Clock,
        observer: ReplicationObserver,
        *,
        interval: float,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._database = database
        self._writers = writers
        self._known = known
        self._report = report
        self._clock = clock
        self._observer = observer
        self._interval = interval
        self._uniform = uniform
        self._timer: DelayedCall | None = None
        self._is_running = False
        self._has_failed = False

    def start(self) -> None:
        """Begin to read; the first read is due after the interval."""
        self._is_running = True
        self._schedule()

    def stop(self) -> None:
        """Stop reading. A read that is in progress reports nothing."""
        self._is_running = False
        if self._timer is not None and self._timer.active():
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._is_running:
            factor = self._uniform(1 - JITTER, 1 + JITTER)
            self._timer = self._clock.call_later(self._interval * factor, self._read)

    def _read(self) -> None:
        self._database.transact(
            "read_stored_positions",
            lambda txn: read_tokens(txn, self._writers),
            autocommit=True,
        ).addCallbacks(self._compare, self._failed)

    def _compare(self, tokens: Tokens) -> None:
        self._has_failed = False
        ahead = self._still_ahead(tokens)
        if ahead and self._is_running:
            self._timer = self._clock.call_later(GRACE, self._report_ahead, ahead)
        else:
            self._schedule()

    def _report_ahead(self, tokens: Tokens) -> None:
        self._schedule()
        for (stream_name, instance_name), token in self._still_ahead(tokens).items():
            self._report(stream_name, instance_name, token)

    def _still_ahead(self, tokens: Tokens) -> Tokens:
        return {
            key: token for key, token in tokens.items() if token > self._known(*key)
        }

    def _failed(self, failure: Failure) -> None:
        assert failure.value is not None
        if not self._has_failed:
            self._has_failed = True
            self._observer.failure("reading the stored positions", failure.value)
        self._schedule()

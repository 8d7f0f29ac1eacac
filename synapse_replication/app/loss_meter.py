"""Reports rows that were committed and never announced, beside any deployment.

Theory of operation: a writer persists its position in ``stream_positions`` after each
write. Every :data:`LOSS_CHECK_INTERVAL` s, the meter reads these positions, and the
tokens that are committed between the positions of the last two checks; for the writers
that wrote something, that is one scan of an index per table. A committed token that no
RDATA line has carried yet is *waiting*. If it is still waiting after the patience, it
was never announced. A line that arrives later still is reported as late. A POSITION
beyond what was announced makes readers fetch the rows in between, which then count as
announced.

A stream that any instance may write (``caches``) has no stored positions; the newest
tokens of its writers take their place. Rows that were in flight longer than the
interval of the checks are then not verified.

The meter only knows what it observes itself: while its link is down, nothing is
verified, and what was written meanwhile is not counted. Streams held in memory are not
verified; of a table that stores only the newest row of an object, only that row is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from synapse_replication.handlers.events import LinkDown, LinkUp, RowsUnannounced
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.handlers.timer import Repeater
from synapse_replication.storage.committed_tokens import (
    Key,
    TokenReader,
    TokenReading,
)
from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.streams.token_ledger import TokenLedger
from synapse_replication.wire.commands import Command, PositionCommand, RdataCommand

_log = Logger()

#: The interval of the checks, in s.
LOSS_CHECK_INTERVAL: Final = 5.0
#: The most waiting or lost tokens of a writer that are stored. While as many are
#: waiting, further ones are not verified yet.
MAX_MISSING: Final = 10_000
#: The most writers, over all streams.
MAX_WRITERS: Final = 1000


@attrs.frozen
class LossFinding:
    """A committed token whose announcement is missing or late.

    :ivar seconds: the time since the row was found in the database, in s.
    :ivar is_announced: whether it was announced after all.
    """

    stream_name: str
    instance_name: str
    token: int
    seconds: float
    is_announced: bool


@attrs.define
class LossTally:
    """The findings about one writer of one stream.

    :ivar verified: the number of committed tokens that were compared.
    :ivar lost: the number of tokens that were never announced.
    :ivar late: the number of tokens that were announced after the patience.
    :ivar slowest: the longest time that a late announcement took, in s.
    """

    verified: int = 0
    lost: int = 0
    late: int = 0
    slowest: float = 0.0


@attrs.define
class _Writer:
    """The tokens of one writer of one stream that arrived, and those that did not.

    :ivar bound: its stored position at the last check; ``None`` before the first, and
        after more tokens arrived than are recorded.
    :ivar position: the greatest token that a line has announced, if any.
    :ivar missing: the time at which each token was found to be missing, in s, the
        oldest first.
    :ivar lost: those of them that were reported as never announced.
    """

    ledger: TokenLedger = attrs.Factory(lambda: TokenLedger(0))
    bound: int | None = None
    tally: LossTally = attrs.Factory(LossTally)
    missing: dict[int, float] = attrs.Factory(dict)
    position: int | None = None
    lost: set[int] = attrs.Factory(set)

    def record(self, tokens: Sequence[int]) -> None:
        """Record tokens that arrived; if there are too many, verify only later ones."""
        if not self.ledger.add(tokens):
            self.ledger, self.bound = TokenLedger(0), None

    def room(self) -> int:
        """Return how many further missing tokens can be stored.

        A lost token is stored only so that its late announcement is noticed: the oldest
        one makes room for one that was not reported yet.
        """
        return MAX_MISSING - (len(self.missing) - len(self.lost))

    def verify(self, committed: Sequence[int], upto: int, now: float) -> None:
        """Compare committed tokens with those that arrived, as far as there is room.

        :param committed: all committed tokens up to ``upto``, in order; see
            :meth:`TokenLedger.verify`.
        :param now: the time, in s.
        """
        for token in self.ledger.verify(committed, upto, self.room()):
            if len(self.missing) >= MAX_MISSING:
                # It is a lost one: those that are still waiting are newer.
                oldest = next(iter(self.missing))
                self.lost.discard(oldest)
                del self.missing[oldest]
            self.missing[token] = now
        self.tally.verified += bisect_right(committed, self.ledger.verified)


@attrs.define(eq=False, repr=False, slots=False)
class LossMeter(ReplicationObserver):
    """Compares the announced tokens with the committed ones.

    Use it in the reactor's thread. As an observer of the links, it notices when one of
    them is down.

    :param streams: the ids of the rows of each stream, by its name on the wire. One
        that declares no writers has no stored positions.
    :param links: the number of links.
    :param observer: notified of rows that were never announced, and of failures.
    :param report: called with each finding.
    :param patience: how long a committed row may wait for its announcement, in s.
    """

    _streams: Mapping[str, IdStream]
    _database: TransactionRunner
    _clock: Clock
    _observer: ReplicationObserver
    _report: Callable[[LossFinding], object]
    _links_down: int = attrs.field(default=1, alias="links", kw_only=True)
    _patience: float = attrs.field(kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._reader = TokenReader(self._streams)
        self._writers: dict[Key, _Writer] = {}
        self._checks = Repeater(self._clock, LOSS_CHECK_INTERVAL, self._check)
        self._observing_since: float | None = None
        self._observed = 0.0
        #: Incremented when a link is lost: what was read before is not compared.
        self._link_losses = 0
        #: Its value when the baseline was read: the positions from which to verify.
        self._link_losses_at_baseline: int | None = None

    # -- starting and stopping --------------------------------------------------------

    def start(self) -> None:
        """Begin to check."""
        self._checks.start()

    def stop(self) -> None:
        """Stop checking."""
        self._checks.stop()

    def tallies(self) -> dict[Key, LossTally]:
        """Return what was found about each writer of which anything was verified."""
        return {
            key: writer.tally
            for key, writer in sorted(self._writers.items())
            if writer.tally.verified
        }

    def waiting(self) -> int:
        """Return the number of committed tokens that may still be announced."""
        return sum(len(w.missing) - len(w.lost) for w in self._writers.values())

    def observed(self) -> float:
        """Return for how long all links were up, in s."""
        if self._observing_since is None:
            return self._observed
        return self._observed + self._clock.seconds() - self._observing_since

    # -- links ------------------------------------------------------------------------

    @handles(LinkUp)
    def _link_up(self, event: LinkUp) -> None:
        """Record that a link is up."""
        self._links_down -= 1
        if not self._links_down:
            self._observing_since = self._clock.seconds()
            self._checks.hurry()

    @handles(LinkDown)
    def _link_down(self, event: LinkDown) -> None:
        """Record that a link is down: what is announced meanwhile is not observed."""
        self._links_down += 1
        self._link_losses += 1
        self._observed, self._observing_since = self.observed(), None
        for writer in self._writers.values():
            writer.missing = {
                token: since
                for token, since in writer.missing.items()
                if token in writer.lost
            }

    # -- announcements ----------------------------------------------------------------

    def receive(self, command: Command) -> None:
        """Record a line; only RDATA and POSITION matter."""
        if isinstance(command, RdataCommand):
            self.announced(command)
        elif isinstance(command, PositionCommand):
            self.announced_position(command)

    def announced(self, command: RdataCommand) -> None:
        """Record an RDATA line."""
        key = command.stream_name, command.instance_name
        token = command.token
        if token is None or key[0] not in self._streams:
            return
        writer = self._writers.get(key)
        if writer is None:
            if len(self._writers) >= MAX_WRITERS:
                return
            writer = self._writers[key] = _Writer()
        writer.position = max(token, writer.position or 0)
        if token in writer.missing:
            self._announced_late(key, writer, token)
        else:
            writer.record([token])

    def announced_position(self, command: PositionCommand) -> None:
        """Record a POSITION line: readers below its range fetch the rows up to it."""
        key = command.stream_name, command.instance_name
        writer = self._writers.get(key)
        if writer is None:
            return
        at, new = writer.position, command.new_token
        if at is not None and at < command.prev_token:
            for token in [each for each in writer.missing if at < each <= new]:
                self._announced_late(key, writer, token)
            writer.record(range(at + 1, new + 1))
        writer.position = max(new, at or 0)

    def _announced_late(self, key: Key, writer: _Writer, token: int) -> None:
        seconds = self._clock.seconds() - writer.missing.pop(token)
        if token in writer.lost:
            writer.lost.discard(token)
            writer.tally.lost -= 1
            writer.tally.late += 1
            writer.tally.slowest = max(writer.tally.slowest, seconds)
            self._report(LossFinding(*key, token, seconds, is_announced=True))

    # -- checks -----------------------------------------------------------------------

    def _check(self) -> Deferred[None] | None:
        if self._links_down:
            return None
        link_losses = self._link_losses
        ledgers = {key: writer.ledger for key, writer in self._writers.items()}
        ranges = {
            key: (writer.ledger.verified, writer.bound)
            for key, writer in self._writers.items()
            if link_losses == self._link_losses_at_baseline
            and writer.bound is not None
            and writer.bound > writer.ledger.verified
            and writer.room()
            and self._streams[key[0]].tells_apart(self._writers_of(key[0]))
        }
        return self._database.transact(
            "read_committed_tokens", lambda txn: self._read(txn, ranges)
        ).addCallbacks(self._compare, self._failed, callbackArgs=(link_losses, ledgers))

    def _writers_of(self, stream_name: str) -> list[str]:
        return [writer for name, writer in self._writers if name == stream_name]

    def _read(self, txn: Any, ranges: Mapping[Key, tuple[int, int]]) -> TokenReading:
        txn.execute("SET TRANSACTION READ ONLY")
        return self._reader.read(txn, ranges)

    def _compare(
        self,
        reading: TokenReading,
        link_losses: int,
        ledgers: Mapping[Key, TokenLedger],
    ) -> None:
        """Compare what was read with what arrived.

        :param ledgers: those in which tokens were recorded when the read began.
        """
        if link_losses != self._link_losses:
            return
        now = self._clock.seconds()
        for key, (tokens, upto) in reading.committed.items():
            writer = self._writers[key]
            if writer.ledger is not ledgers[key]:
                continue
            writer.verify(tokens, upto, now)
        positions = reading.stored | reading.newest
        for key, position in positions.items():
            writer = self._writers.setdefault(key, _Writer())
            if ledgers.get(key, writer.ledger) is not writer.ledger:
                continue
            if writer.bound is None or link_losses != self._link_losses_at_baseline:
                writer.ledger.skip_to(position)
            writer.bound = position
        if link_losses != self._link_losses_at_baseline:
            self._link_losses_at_baseline = link_losses
            _log.info("Verifying all rows that are committed from now on")
        self._report_lost(now)

    def _report_lost(self, now: float) -> None:
        for key, writer in self._writers.items():
            tokens = [
                token
                for token, since in writer.missing.items()
                if now - since >= self._patience and token not in writer.lost
            ]
            if not tokens:
                continue
            writer.lost.update(tokens)
            writer.tally.lost += len(tokens)
            self._observer.observe(RowsUnannounced(*key, tuple(tokens)))
            for token in tokens:
                seconds = now - writer.missing[token]
                self._report(LossFinding(*key, token, seconds, is_announced=False))

    def _failed(self, failure: Failure) -> None:
        assert failure.value is not None
        self._observer.failure("verifying the announced rows", failure.value)

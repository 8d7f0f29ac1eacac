"""The invariants that must hold during a simulation, checked by the :class:`Ledger`.

For each stream in tables, each writer, and each epoch of each reader:

- rows are delivered exactly as they were committed: each token once, in order, with
  all of its rows (idempotent streams: at least once);
- a position advances past a token only if the token's rows were delivered, and no row
  is committed at or below a position that a process has reached or announced;
- a homeserver never treats a stream as complete up to a token before all rows that
  other writers committed up to that token were delivered (idempotent: not checked);
- a POSITION on the wire never declares a range to be empty that contains a committed
  row.

For a stream in memory: no row is delivered twice, or after a newer row of the same key.
(At the end, the cluster compares each reader's newest row of each key with the
writer's.)

A position moves back only if the writer has started since it last did, and the stream
is one in memory, or idempotent, or the position is an id without rows. A writer
announces such an id if the database refused its transaction, or, if it is the only
writer, if a killed process did not use it. When it starts again as one of several
writers, it knows only the ids of rows and of stored positions. A process that resumes
after it was replaced states its last position until it ends, to which an idle
successor's, which advances with the positions of others, may move back. A position also
moves back once after a link was lost, but not below a delivered row of a stream in
tables: a lower POSITION that was sent before and arrives later, on a slower link, could
be that of a restarted writer. If the reader knows the epoch of a writer of a stream in
memory, that shows the difference. Such a position also moves back

- if the delivered rows are of an earlier process of the writer: a slow link shows
  several starts long after they happened;
- if the reader learns the writer's epoch, and did not know it when one of its links
  changed: the writer may have restarted meanwhile.

The initial position of a reader of an idempotent stream may be greater than the
writer's own, so it may move back, too.

A reader that received a false position, or whose database was set back, is *doubted*:
it may skip rows, which are then *owed* to it, or *excused* if it cannot know of them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import attrs


class ViolationError(AssertionError):
    """An invariant does not hold."""


@attrs.frozen
class SimulatedRow:
    """The row type of all simulated streams.

    :ivar row_id: a unique number.
    :ivar key: the writer's epoch, a colon, and the key; used only by streams in memory.
    """

    row_id: int
    key: str


@attrs.define
class _Written:
    """The rows that one writer committed in one stream."""

    tokens: list[int] = attrs.Factory(list)
    rows: dict[int, list[int]] = attrs.Factory(dict)
    #: The greatest token that the writer announced in a POSITION.
    announced: int = 0

    def next_after(self, token: int) -> int | None:
        """Return the first committed token above ``token``."""
        index = bisect_right(self.tokens, token)
        return self.tokens[index] if index < len(self.tokens) else None


_Key = tuple[str, str]


@attrs.define(eq=False)
class Reader:
    """One epoch of a reading process.

    :ivar positions: the reader's positions, by (stream, writer).
    :ivar received_from: the (stream, writer) pairs from which something arrived.
    :ivar applied: the delivered tokens of idempotent streams.
    :ivar views: the newest row of each key of streams in memory.
    :ivar epochs: the writer's epoch of each view.
    :ivar hidden_resets: streams in memory whose writer restarted without the reader
        being able to detect it (a stock peer announces no epoch).
    :ivar delivered: the greatest delivered token, by (stream, writer). A rewind below
        it would deliver rows again, which only an idempotent stream allows.
    :ivar owed: tokens that the reader skipped because of a false position, and whose
        rows must still be delivered.
    :ivar late: discarded tokens that the reader passed, and whose rows must still be
        delivered.
    :ivar found: each writer's greatest committed token when this epoch began.
    :ivar began: the positions when this epoch began.
    :ivar excused: tokens that are no longer owed: their rows may be delivered, but need
        not be.
    :ivar starts: the number of the writer's starts when the position last moved back;
        except for idempotent streams, also when this epoch began.
    :ivar resumed: the number of the writer's processes that had resumed when the
        position last moved back.
    :ivar left: the writer's epoch of the view that the last move back emptied.
    :ivar epoch_of: returns the number of a writer's epoch, if the reader knows it.
    :ivar unsure: the (stream, writer) pairs whose epoch it did not know when one of its
        links changed.
    :ivar severed: the greatest position that may have arrived when the process last
        lost a link, by (stream, writer): a lower POSITION on a slower link looks like
        that of a restarted writer.
    """

    name: str
    positions: dict[_Key, int] = attrs.Factory(dict)
    received_from: set[_Key] = attrs.Factory(set)
    applied: dict[_Key, set[int]] = attrs.Factory(dict)
    views: dict[str, dict[str, int]] = attrs.Factory(dict)
    epochs: dict[str, int] = attrs.Factory(dict)
    hidden_resets: set[str] = attrs.Factory(set)
    delivered: dict[_Key, int] = attrs.Factory(dict)
    owed: dict[_Key, set[int]] = attrs.Factory(dict)
    late: dict[_Key, set[int]] = attrs.Factory(dict)
    found: dict[_Key, int] = attrs.Factory(dict)
    began: dict[_Key, int] = attrs.Factory(dict)
    excused: dict[_Key, set[int]] = attrs.Factory(dict)
    starts: dict[_Key, int] = attrs.Factory(dict)
    resumed: dict[_Key, int] = attrs.Factory(dict)
    left: dict[str, int] = attrs.Factory(dict)
    epoch_of: Callable[[str], int | None] = lambda _: None
    unsure: set[_Key] = attrs.Factory(set)
    severed: dict[_Key, int] = attrs.Factory(dict)


class Ledger:
    """Records commits, announcements and deliveries; raises :exc:`ViolationError`.

    :param idempotent: the names of the idempotent streams.
    :param in_memory: the names of the streams in memory.
    :param trace: called with a text for each event.
    :ivar on_standby: the readers whose database is a standby. They are not given the
        discarded rows of an idempotent stream, which has no stored positions.
    :ivar resumed: how often a process of a writer resumed after it had been replaced.
        It may state its last position, and repeat rows in memory, before it ends.
    :ivar violations: the texts of all violations, even of those that a caller caught.
    :ivar committed_rows: the number of committed rows.
    :ivar applied_rows: the number of delivered rows, summed over all processes.
    :ivar doubted: the (reader, stream, writer) triples for which a plausible false
        position was announced. After :meth:`doubt_all`, all triples count as doubted.
    :ivar disputed: the streams of which any false position was announced.
    :ivar forged: the forged row ids that may be delivered, by (stream, writer, token).
    :ivar discarded_tokens: the number of tokens that their writers discarded.
    :ivar late_tokens: the number of their deliveries after greater tokens.
    :ivar excused_rows: the number of tokens whose rows may be missing: a false position
        hid them from a reader that was disconnected before the position was corrected,
        or they are not above a token that was delivered already.
    :ivar excused_resets: the number of moves back that only a lost link explains.
    """

    def __init__(
        self,
        idempotent: frozenset[str],
        in_memory: frozenset[str],
        trace: Callable[[str], object],
    ) -> None:
        self._idempotent = idempotent
        self._in_memory = in_memory
        self._trace = trace
        self._written: dict[_Key, _Written] = {}
        self.readers: dict[str, Reader] = {}
        self._starts: Counter[str] = Counter()
        self._epochs: dict[str, int] = {}
        self.on_standby: set[str] = set()
        self.resumed: Counter[str] = Counter()
        self.violations: list[str] = []
        self.committed_rows = 0
        self.applied_rows = 0
        self.doubted: set[tuple[str, str, str]] = set()
        self.disputed: set[str] = set()
        self._all_are_doubted = False
        self._shown_doubted: set[str] = set()
        self.forged: dict[tuple[str, str, int], set[int]] = {}
        self.excused_rows = self.excused_resets = 0
        self._discarded: dict[_Key, set[int]] = {}
        self._late: dict[_Key, set[int]] = {}
        self.discarded_tokens = 0
        self.late_tokens = 0

    def discard(self, stream: str, writer: str, token: int) -> None:
        """Record that a writer discarded the rows of a token instead of sending them.

        Readers may pass the token, and must receive the rows later.
        """
        self._discarded.setdefault((stream, writer), set()).add(token)
        self.discarded_tokens += 1

    def commit_late(self, stream: str, writer: str, token: int) -> None:
        """Record that the commit of a row takes seconds, because its answer was lost.

        All that time, the row is in transit below a false position.
        """
        self._late.setdefault((stream, writer), set()).add(token)

    def _are_discarded(self, key: _Key, after: int, before: int) -> bool:
        """Return whether all committed tokens between two were discarded."""
        written, at = self.written(*key), after
        while (at := written.next_after(at) or 0) and at < before:
            if at not in self._discarded.get(key, ()):
                return False
        return True

    def forget_settled(
        self,
        kept: int,
        declared: Container[_Key],
        position_of: Callable[[str, _Key], int],
    ) -> None:
        """Forget what is settled when all positions agree: old rows, and doubts.

        :param kept: the number of each writer's newest tokens to keep.
        :param declared: the writers of each stream. A process need not know how far it
            has delivered the rows of others, such as removed ones.
        :param position_of: returns a process's own position of a writer: a doubted
            position does not move back here.
        """
        for key, written in self._written.items():
            del written.tokens[:-kept]
            written.rows = {token: written.rows[token] for token in written.tokens}
            # Ids that a database lost when it was set back are allocated again.
            if key in declared:
                written.announced = min(written.announced, position_of(key[1], key))
            for reader in self.readers.values():
                if key in reader.applied:
                    reader.applied[key].intersection_update(written.rows)
        for name, reader in self.readers.items():
            reader.excused.clear()
            for key, known in reader.positions.items():
                if key not in declared:
                    continue
                settled = min(known, position_of(name, key))
                reader.positions[key] = settled
                if key in reader.delivered:
                    reader.delivered[key] = min(reader.delivered[key], settled)
        # An id generator does not move back: what it shows may depend on a false
        # position until its process restarts, or rows pass that position.
        for stream in {key[0] for key in self._written}:
            if self._is_stream_doubted(stream):
                self._shown_doubted.add(stream)
        self.doubted.clear()
        self.disputed.clear()
        self.forged.clear()
        self._all_are_doubted = False

    def _violation(self, text: str) -> ViolationError:
        # Record the violation, because a caller may catch the exception.
        self.violations.append(text)
        self._trace(f"VIOLATION: {text}")
        return ViolationError(text)

    def written(self, stream: str, writer: str) -> _Written:
        """Return the rows that a writer committed."""
        return self._written.setdefault((stream, writer), _Written())

    def last_token(self, stream: str, writer: str) -> int:
        """Return the greatest token that a writer committed; 0 if there is none."""
        return max(self.written(stream, writer).tokens, default=0)

    # -- writers ----------------------------------------------------------------------

    def committed(
        self, stream: str, writer: str, token: int, rows: list[tuple[Any, ...]]
    ) -> None:
        """Record a commit.

        :raises ViolationError: if the writer or a reader is already at or beyond
            ``token``, and its position is not doubted. Readers of an idempotent stream
            are exempt until they receive something from the writer.
        """
        self._trace(f"commit {stream} {writer} {token}: {len(rows)} rows")
        written = self.written(stream, writer)
        insort(written.tokens, token)
        written.rows[token] = [row[0] for row in rows]
        self.committed_rows += len(rows)
        # A database that was set back may have lost an announced position; readers that
        # received the announcement must still get the row.
        if written.announced >= token and not self._all_are_doubted:
            raise self._violation(
                f"{writer} announced {stream} up to {written.announced} before it "
                f"committed {token}"
            )
        key = stream, writer
        for reader in self.readers.values():
            if (
                reader.name != writer
                and reader.positions.get(key, 0) >= token
                and (stream not in self._idempotent or key in reader.received_from)
            ):
                if self._is_doubted(reader, key):
                    self._owe(reader, key, token)
                    continue
                raise self._violation(
                    f"{reader.name} is at {reader.positions[key]} of {stream} of "
                    f"{writer}, which now commits {token}"
                )

    def _is_never_late(self, reader: Reader, stream: str) -> bool:
        return stream in self._idempotent and reader.name in self.on_standby

    def cut_off(self, name: str, *, is_lost: bool = False) -> None:
        """Excuse the rows owed to a process of which a link changed.

        While the process is disconnected, the rows that a false position hides from it
        are announced to others. When the process reconnects, the writer may have
        reached the false position, which is then no longer recognisable as false.

        :param is_lost: whether the process lost the link.
        """
        reader = self.readers.get(name)
        if reader is not None:
            if is_lost:
                reader.severed = {
                    # What arrived may still wait to be handled.
                    key: max(position, self._written[key].announced)
                    if key in self._written
                    else position
                    for key, position in reader.positions.items()
                }
            for key in list(reader.owed):
                self._excuse(reader, key)
            reader.unsure.update(
                key
                for key, token in reader.positions.items()
                if key[0] in self._in_memory
                and token > 0
                and reader.epoch_of(key[1]) is None
            )

    def _excuse(self, reader: Reader, key: _Key) -> None:
        owed = reader.owed.pop(key, set())
        self.excused_rows += len(owed)
        reader.excused.setdefault(key, set()).update(owed)

    def doubt_all(self) -> None:
        """Record that sequences were set back: true positions may seem false."""
        self._all_are_doubted = True

    def _is_doubted(self, reader: Reader, key: _Key) -> bool:
        return self._all_are_doubted or (reader.name, *key) in self.doubted

    def _is_stream_doubted(self, stream: str) -> bool:
        """Return whether any position of a stream may be false.

        A writer whose own rows are all sent announces the greatest position of the
        others.
        """
        return (
            self._all_are_doubted
            or stream in self._shown_doubted
            or any(doubted == stream for _, doubted, _ in self.doubted)
        )

    def _owe(self, reader: Reader, key: _Key, token: int) -> None:
        """Record that a doubted reader skipped the rows of a token."""
        if token in self._discarded.get(key, ()):
            if key[0] in self._idempotent and token <= reader.found.get(key, 0):
                # The reader began after the commit, beyond the token.
                self.excused_rows += 1
                return
            reader.late.setdefault(key, set()).add(token)
        elif token in self._late.get(key, ()) or (
            reader.name in self.on_standby and token <= reader.began.get(key, 0)
        ):
            # The reader may have restarted, or lost its link, meanwhile. One that reads
            # a standby cannot compare its position with the sequence when it starts.
            self.excused_rows += 1
            reader.excused.setdefault(key, set()).add(token)
        elif token <= reader.delivered.get(key, 0):
            # A greater token, such as that of a forged row, was delivered already.
            self.excused_rows += 1
        else:
            reader.owed.setdefault(key, set()).add(token)

    def announced(self, stream: str, writer: str, prev: int, new: int) -> None:
        """Record a POSITION on the wire.

        :raises ViolationError: if its range contains a committed row.
        """
        if stream in self._in_memory:
            return
        written = self.written(stream, writer)
        written.announced = max(written.announced, new)
        token = written.next_after(prev)
        if prev < new and token is not None and token <= new:
            raise self._violation(
                f"POSITION {stream} {writer} {prev} {new} covers the committed {token}"
            )

    # -- readers ----------------------------------------------------------------------

    def begin_epoch(
        self, name: str, positions: dict[_Key, int], last: Reader | None, epoch: int = 0
    ) -> Reader:
        """Begin an epoch of a process at these positions.

        :param epoch: its number, which the rows that it writes in memory state.
        :param last: the last epoch of the process, if the process retains delivered
            rows across a crash; otherwise ``None``.
        """
        reader = self.readers[name] = Reader(name, dict(positions))
        reader.began = dict(positions)
        self._starts[name] += 1
        self._epochs[name] = epoch
        for key in positions:
            if key[0] not in self._idempotent:
                reader.starts[key] = self._starts[key[1]]
        for key, written in self._written.items():
            reader.found[key] = written.tokens[-1] if written.tokens else 0
        if last is not None:
            reader.applied, reader.received_from = last.applied, last.received_from
            reader.views, reader.epochs = last.views, last.epochs
            reader.hidden_resets = last.hidden_resets
            reader.delivered = last.delivered
            reader.owed, reader.excused = last.owed, last.excused
            reader.starts = last.starts
            reader.unsure = last.unsure
            self.cut_off(name)
        return reader

    def end_epoch(self, name: str) -> None:
        """End an epoch of a process."""
        self.readers.pop(name, None)

    def delivered(
        self,
        reader: Reader,
        stream: str,
        writer: str,
        token: int,
        rows: list[SimulatedRow],
    ) -> None:
        """Record rows that were delivered to a process.

        :raises ViolationError: if the rows violate an invariant of the module's
            docstring, unless they end with a forged row.
        """
        self._trace(f"{reader.name} gets {stream} {writer} {token}: {len(rows)} rows")
        self.applied_rows += len(rows)
        key = stream, writer
        if stream in self._in_memory:
            self._view(reader, stream, writer, rows)
            reader.positions[key] = token
            return
        written = self.written(stream, writer)
        expected = written.rows.get(token)
        forged = self.forged.get((stream, writer, token), ())
        # Check only the last row: a forged row may have ended a batch of real rows.
        if rows and rows[-1].row_id in forged:
            self._accept_forged(reader, key, token)
            return
        if expected != [row.row_id for row in rows]:
            raise self._violation(
                f"{reader.name} got rows {[row.row_id for row in rows]} as {token} of "
                f"{stream} of {writer}, which committed {expected}"
            )
        position = reader.positions.get(key, 0)
        if token in (late := reader.late.get(key, set())):
            self.late_tokens += 1
            late.discard(token)
            if stream in self._idempotent:
                reader.applied.setdefault(key, set()).add(token)
            return
        if stream not in self._idempotent or token > position:
            # A late row does not confirm the writer's position.
            reader.received_from.add(key)
        if stream in self._idempotent:
            reader.applied.setdefault(key, set()).add(token)
            reader.owed.get(key, set()).discard(token)
            if token > position:
                self._passes(reader, key, token)
            return
        if self._was_hidden(reader, key, token):
            return
        if token != written.next_after(position) and not (
            token > position
            and (
                self._is_doubted(reader, key)
                or self._are_discarded(key, position, token)
            )
        ):
            raise self._violation(
                f"{reader.name}, at {position} of {stream} of {writer}, got {token} "
                f"and not {written.next_after(position)}"
            )
        reader.delivered[key] = token
        self._owe_skipped(reader, key, token)
        reader.positions[key] = token

    def _owe_skipped(self, reader: Reader, key: tuple[str, str], token: int) -> None:
        """Record the rows below ``token`` that the reader has skipped.

        A false position may have caused a fetch before these rows were committed.
        """
        written, at = self.written(*key), reader.positions.get(key, 0)
        while (at := written.next_after(at) or 0) and at < token:
            self._owe(reader, key, at)

    def _accept_forged(self, reader: Reader, key: tuple[str, str], token: int) -> None:
        self._trace(f"{reader.name} accepts a forged row")
        reader.delivered[key] = max(token, reader.delivered.get(key, 0))
        self._excuse(reader, key)
        self._passes(reader, key, max(token, reader.positions.get(key, 0)))

    def _was_hidden(self, reader: Reader, key: tuple[str, str], token: int) -> bool:
        """Return whether a false position hid these rows, and forget that it did.

        Lower rows that were committed later can no longer be delivered in order.
        """
        owed = reader.owed.get(key, set())
        excused = reader.excused.setdefault(key, set())
        if token not in excused:
            if token not in owed:
                return False
            committed = list(self.written(*key).rows)
            later = owed.intersection(committed[committed.index(token) + 1 :])
            passed = {each for each in later if each < token}
            owed -= passed
            excused |= passed
            self.excused_rows += len(passed)
            if token != min(owed):
                return False
        owed.discard(token)
        excused.discard(token)
        reader.delivered[key] = max(token, reader.delivered.get(key, 0))
        return True

    def position(self, reader: Reader, stream: str, writer: str, token: int) -> None:
        """Record a position that was delivered to a process.

        :raises ViolationError: if rows at or below it were not delivered, or if rows
            above it were delivered and the stream is not idempotent.
        """
        self._trace(f"{reader.name} is at {token} of {stream} of {writer}")
        key = stream, writer
        before = reader.positions.get(key, 0)
        reader.received_from.add(key)
        if stream in self._in_memory:
            if token < before:
                reader.views[stream] = {}
                if (epoch := reader.epochs.pop(stream, None)) is not None:
                    reader.left[stream] = epoch
            reader.positions[key] = token
            return
        if token < before:
            if token < reader.delivered.get(key, 0) and stream not in self._idempotent:
                raise self._violation(
                    f"{reader.name} goes back from {before} to {token} of {stream} of "
                    f"{writer}"
                )
            reader.positions[key] = token
            # Rows above the new position must be delivered in order again.
            owed = reader.owed.get(key, set())
            reader.owed[key] = {each for each in owed if each <= token}
            excused = reader.excused.get(key, set())
            reader.excused[key] = {each for each in excused if each <= token}
            late = reader.late.get(key, set())
            reader.late[key] = {each for each in late if each <= token}
            return
        self._passes(reader, key, token)

    def reset(self, name: str, stream: str, writer: str) -> None:
        """Record that a process reported that the rows of a writer became void.

        :raises ViolationError: if the rows are in tables, or nothing explains it.
        """
        if not self._is_resettable(stream):
            raise self._violation(f"{name} resets {stream} of {writer}")
        self._explain_move_back(name, stream, writer, may_restart=True)

    def moved_back(self, name: str, stream: str, writer: str, left: int) -> None:
        """Record that a process reported that a writer's position moved back.

        :param left: the position before.
        :raises ViolationError: if nothing explains it.
        """
        may_restart = (
            self._is_resettable(stream)
            or not self._has_rows(stream, left)
            or writer in self.resumed
        )
        self._explain_move_back(name, stream, writer, may_restart=may_restart)

    def _is_resettable(self, stream: str) -> bool:
        return stream in self._in_memory or stream in self._idempotent

    def _explain_move_back(
        self, name: str, stream: str, writer: str, *, may_restart: bool
    ) -> None:
        """Check that something explains why a position moved back.

        :param may_restart: whether a start of the writer explains it.
        """
        reader, key = self.readers[name], (stream, writer)
        starts, current = self._starts[writer], self._epochs.get(writer)
        has_started = may_restart and starts != reader.starts.get(key, 0)
        known = reader.epoch_of(writer) if stream in self._in_memory else None
        is_unsure = key in reader.unsure and known is not None
        # It may have heard of an earlier epoch, and then again of the current one.
        resumed = self.resumed[writer]
        follows_replaced = resumed > 0 and (
            known not in (None, current) or resumed != reader.resumed.get(key, 0)
        )
        reader.unsure.discard(key)
        severed = reader.severed.pop(key, None)
        may_be_late = (
            known is None
            and severed is not None
            and reader.positions.get(key, 0) <= severed
        )
        if (
            self._is_stream_doubted(stream)
            or stream in self.disputed
            or has_started
            or is_unsure
            or follows_replaced
            or reader.left.pop(stream, current) != current
        ):
            # With an earlier epoch, it has not learned of the last start yet.
            reader.starts[key] = starts - (known not in (None, current))
            reader.resumed[key] = resumed
            return
        if may_be_late:
            self.excused_resets += 1
            return
        raise self._violation(
            f"{name} moves back in {stream} of {writer}, which did not start anew"
        )

    def _has_rows(self, stream: str, token: int) -> bool:
        """Return whether any writer has committed rows at a token."""
        return any(
            token in written.rows
            for (name, _), written in self._written.items()
            if name == stream
        )

    def shown(self, reader: Reader, stream: str, token: int) -> None:
        """Check the token up to which a homeserver treats a stream as complete.

        :raises ViolationError: if a row at or below the token was not delivered: users
            who sync from this token on would never receive the row.
        """
        if stream in self._in_memory or stream in self._idempotent:
            return
        if self._is_stream_doubted(stream):
            # The token may depend on a false position.
            return
        for (of_stream, writer), written in self._written.items():
            if of_stream != stream or writer == reader.name:
                continue
            position = reader.positions.get((stream, writer), 0)
            # When the id generator starts, it considers all ids in the table finished,
            # including those beyond an id that is in flight.
            found = reader.found.get((stream, writer), 0)
            missed = written.next_after(max(position, found))
            while missed in self._discarded.get((stream, writer), ()):
                missed = written.next_after(missed or 0)
            if missed is not None and missed <= token:
                raise self._violation(
                    f"{reader.name} shows {stream} up to {token}, and did not get "
                    f"{missed} of {writer}"
                )

    def _passes(self, reader: Reader, key: _Key, token: int) -> None:
        written = self.written(*key)
        applied = reader.applied.get(key, ())
        at = reader.positions.get(key, 0)
        while (at := written.next_after(at) or 0) and at <= token:
            if at not in applied:
                if self._is_doubted(reader, key) or at in self._discarded.get(key, ()):
                    self._owe(reader, key, at)
                    continue
                raise self._violation(
                    f"{reader.name} passes {at} of {key[0]} of {key[1]} on its way to "
                    f"{token}, and did not get its rows"
                )
        reader.positions[key] = token

    def _view(
        self, reader: Reader, stream: str, writer: str, rows: list[SimulatedRow]
    ) -> None:
        view = reader.views.setdefault(stream, {})
        for row in rows:
            epoch, _, key = row.key.partition(":")
            known = reader.epochs.setdefault(stream, int(epoch))
            if int(epoch) != known:
                # The writer restarted and is already beyond the reader's position.
                reader.hidden_resets.add(stream)
                reader.epochs[stream] = int(epoch)
                if (
                    int(epoch) < known
                    and writer in self.resumed
                    and reader.epoch_of(writer) is None
                ):
                    # Without epochs, a replaced process that resumes looks like its
                    # successor, and its last rows look new.
                    view.clear()
            if row.row_id <= view.get(key, 0):
                raise self._violation(
                    f"{reader.name} got row {row.row_id} of {stream} twice, or after a "
                    "newer one of the same key"
                )
            view[key] = row.row_id

    # -- at the end --------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Describe the committed rows that were not delivered to running readers."""
        lacks = []
        for reader in self.readers.values():
            for (stream, writer), written in self._written.items():
                if reader.name == writer:
                    continue
                if owed := reader.owed.get((stream, writer)):
                    lacks.append(
                        f"{reader.name} lacks {sorted(owed)} of {stream} of {writer}, "
                        "which a false position hid"
                    )
                late = reader.late.get((stream, writer))
                if late and not self._is_never_late(reader, stream):
                    lacks.append(
                        f"{reader.name} lacks {sorted(late)} of {stream} of {writer}, "
                        "which their writer discarded"
                    )
                token = written.next_after(reader.positions.get((stream, writer), 0))
                if token is not None:
                    lacks.append(
                        f"{reader.name} lacks {token} of {stream} of {writer}; it is "
                        f"at {reader.positions.get((stream, writer), 0)}"
                    )
        return lacks

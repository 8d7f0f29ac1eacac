"""What must hold at every moment, whatever goes wrong: the :class:`Ledger`.

Of each stream that is kept in tables, for each writer and each life of each process
that reads it:

- rows are delivered exactly as they were committed: each token once, in order, with
  all of its rows (idempotent streams: at least once);
- a position passes a token only if its rows were delivered, and nothing is committed
  at or below a position that anybody holds or announced;
- a homeserver never shows a stream as seen up to a token before it was delivered
  what others committed up to there;
- a POSITION on the wire never says "nothing between" of a range with a commit.

Of a stream in memory: tokens go up within one life of its writer, and in the end
every reader has the newest row of each key.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Any

import attrs

__all__ = ["Ledger", "Reader", "SimulatedRow", "ViolationError"]


class ViolationError(AssertionError):
    """An invariant does not hold."""


@attrs.frozen
class SimulatedRow:
    """A row of every simulated stream.

    :ivar row_id: no two rows have the same.
    :ivar key: of a stream in memory: its writer's life, a colon, the key.
    """

    row_id: int
    key: str


@attrs.define
class _Written:
    """What one writer committed in one stream."""

    tokens: list[int] = attrs.Factory(list)
    rows: dict[int, list[int]] = attrs.Factory(dict)
    #: The newest token that it announced on the wire.
    announced: int = 0

    def next_after(self, token: int) -> int | None:
        """Return the first committed token above ``token``."""
        index = bisect_right(self.tokens, token)
        return self.tokens[index] if index < len(self.tokens) else None


_Key = tuple[str, str]


@attrs.define(eq=False)
class Reader:
    """One life of a process that reads.

    :ivar positions: by (stream, writer).
    :ivar heard: the writers of which anything was heard in this life.
    :ivar applied: the tokens delivered of idempotent streams.
    :ivar views: the newest row of each key of streams in memory, with its writer's
        life.
    :ivar hidden_resets: streams in memory that began again without the reader's
        being able to see it (a stock peer says no epoch).
    :ivar delivered: the greatest token delivered; going back further would double it.
    :ivar owed: tokens that it passed by a position that was false, and whose rows it
        must get all the same.
    :ivar found: the newest token of each writer that was in the table at the start.
    :ivar excused: those of them that it may, but need not, get.
    """

    name: str
    positions: dict[_Key, int] = attrs.Factory(dict)
    heard: set[_Key] = attrs.Factory(set)
    applied: dict[_Key, set[int]] = attrs.Factory(dict)
    views: dict[str, dict[str, int]] = attrs.Factory(dict)
    epochs: dict[str, int] = attrs.Factory(dict)
    hidden_resets: set[str] = attrs.Factory(set)
    delivered: dict[_Key, int] = attrs.Factory(dict)
    owed: dict[_Key, set[int]] = attrs.Factory(dict)
    found: dict[_Key, int] = attrs.Factory(dict)
    excused: dict[_Key, set[int]] = attrs.Factory(dict)


class Ledger:
    """Knows what was committed, announced and delivered; raises :exc:`ViolationError`.

    :param idempotent: the names of the idempotent streams.
    :param in_memory: the names of the streams in memory.
    :param trace: told of what happens.
    :ivar violations: what was raised, whether or not somebody caught it.
    :ivar committed_rows: how many rows were committed.
    :ivar applied_rows: how many rows were delivered, in all processes.
    :ivar doubted: (reader, stream, writer) that may stand at a false position: one that
        was made up, or one that the database has forgotten.
    :ivar forged: rows that were made up and may have been delivered, by (stream,
        writer, token).
    :ivar excused_rows: how many may be missing: those that a false position hid from a
        reader that crashed before it heard better, or that lie below a forged row.
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
        self.violations: list[str] = []
        self.committed_rows = 0
        self.applied_rows = 0
        self.doubted: set[tuple[str, str, str]] = set()
        self._all_are_doubted = False
        self.forged: dict[tuple[str, str, int], int] = {}
        self.excused_rows = 0

    def _violation(self, text: str) -> ViolationError:
        # Whoever catches what a host raises would hide it.
        self.violations.append(text)
        self._trace(f"VIOLATION: {text}")
        return ViolationError(text)

    def written(self, stream: str, writer: str) -> _Written:
        """Return what a writer committed."""
        return self._written.setdefault((stream, writer), _Written())

    def last_token(self, stream: str, writer: str) -> int:
        """Return the greatest token that a writer committed; 0 if there is none."""
        return max(self.written(stream, writer).tokens, default=0)

    # -- writers ----------------------------------------------------------------------

    def committed(
        self, stream: str, writer: str, token: int, rows: list[tuple[Any, ...]]
    ) -> None:
        """Record a commit.

        :raises ViolationError: if somebody has passed it already.
        """
        self._trace(f"commit {stream} {writer} {token}: {len(rows)} rows")
        written = self.written(stream, writer)
        insort(written.tokens, token)
        written.rows[token] = [row[0] for row in rows]
        self.committed_rows += len(rows)
        # What a database that went back has forgotten may have been announced; the
        # readers that heard of it must get the row all the same.
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
                and (stream not in self._idempotent or key in reader.heard)
            ):
                if self._is_doubted(reader, key):
                    self._owe(reader, key, token)
                    continue
                raise self._violation(
                    f"{reader.name} is at {reader.positions[key]} of {stream} of "
                    f"{writer}, which now commits {token}"
                )

    def cut_off(self, name: str) -> None:
        """Record that a process has crashed or lost its link.

        What a false position hides from it is announced to others meanwhile; once it is
        back, the false position may be the true one.
        """
        reader = self.readers.get(name)
        if reader is not None:
            for key in list(reader.owed):
                self._excuse(reader, key)

    def _excuse(self, reader: Reader, key: _Key) -> None:
        owed = reader.owed.pop(key, set())
        self.excused_rows += len(owed)
        reader.excused.setdefault(key, set()).update(owed)

    def doubt_all(self) -> None:
        """Record that the database went back: it may have forgotten positions."""
        self._all_are_doubted = True

    def _is_doubted(self, reader: Reader, key: _Key) -> bool:
        return self._all_are_doubted or (reader.name, *key) in self.doubted

    def _owe(self, reader: Reader, key: _Key, token: int) -> None:
        """Record that a reader passed a row and must get it all the same."""
        if token <= reader.delivered.get(key, 0):
            # It lies below a row that was made up.
            self.excused_rows += 1
        else:
            reader.owed.setdefault(key, set()).add(token)

    def announced(self, stream: str, writer: str, prev: int, new: int) -> None:
        """Record a POSITION on the wire.

        :raises ViolationError: if it covers a committed row.
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

    def begins(
        self, name: str, positions: dict[_Key, int], kept: Reader | None
    ) -> Reader:
        """Begin with a life of a process, at these positions.

        :param kept: its last life, if it keeps what it was handed.
        """
        reader = self.readers[name] = Reader(name, dict(positions))
        for key, written in self._written.items():
            reader.found[key] = written.tokens[-1] if written.tokens else 0
        if kept is not None:
            reader.applied, reader.heard = kept.applied, kept.heard
            reader.views, reader.epochs = kept.views, kept.epochs
            reader.hidden_resets = kept.hidden_resets
            reader.delivered = kept.delivered
            reader.owed, reader.excused = kept.owed, kept.excused
            self.cut_off(name)
        return reader

    def ends(self, name: str) -> None:
        """End with a life of a process."""
        self.readers.pop(name, None)

    def handed_on(
        self,
        reader: Reader,
        stream: str,
        writer: str,
        token: int,
        rows: list[SimulatedRow],
    ) -> None:
        """Record rows that a process was given.

        :raises ViolationError: if they are not the ones that come next.
        """
        self._trace(f"{reader.name} gets {stream} {writer} {token}: {len(rows)} rows")
        self.applied_rows += len(rows)
        key = stream, writer
        if stream in self._in_memory:
            self._view(reader, stream, token, rows)
            reader.positions[key] = token
            return
        written = self.written(stream, writer)
        expected = written.rows.get(token)
        forged = self.forged.get((stream, writer, token))
        # It may also have ended a batch of which more was to come.
        if rows and forged is not None and forged == rows[-1].row_id:
            self._trace(f"{reader.name} believes a row that was made up")
            reader.delivered[key] = max(token, reader.delivered.get(key, 0))
            self._excuse(reader, key)
            self._passes(reader, key, max(token, reader.positions.get(key, 0)))
            return
        if expected != [row.row_id for row in rows]:
            raise self._violation(
                f"{reader.name} got rows {[row.row_id for row in rows]} as {token} of "
                f"{stream} of {writer}, which committed {expected}"
            )
        position = reader.positions.get(key, 0)
        if stream not in self._idempotent or token > position:
            # A late row does not say that the position is the writer's.
            reader.heard.add(key)
        if stream in self._idempotent:
            reader.applied.setdefault(key, set()).add(token)
            if token > position:
                self._passes(reader, key, token)
            return
        owed, excused = reader.owed.get(key, set()), reader.excused.get(key, set())
        if token in excused or (token in owed and token == min(owed)):
            # A false position hid it, and it comes all the same.
            owed.discard(token)
            excused.discard(token)
            return
        if token != written.next_after(position) and not (
            token > position and self._is_doubted(reader, key)
        ):
            raise self._violation(
                f"{reader.name}, at {position} of {stream} of {writer}, got {token} "
                f"and not {written.next_after(position)}"
            )
        reader.delivered[key] = token
        # A false position had them fetched while one of them was not yet committed.
        at = reader.positions.get(key, 0)
        while (at := written.next_after(at) or 0) and at < token:
            self._owe(reader, key, at)
        reader.positions[key] = token

    def position(self, reader: Reader, stream: str, writer: str, token: int) -> None:
        """Record a position that a process was given.

        :raises ViolationError: if it passes rows that were not delivered.
        """
        self._trace(f"{reader.name} is at {token} of {stream} of {writer}")
        key = stream, writer
        before = reader.positions.get(key, 0)
        reader.heard.add(key)
        if stream in self._in_memory:
            if token < before:
                reader.views[stream] = {}
                reader.epochs.pop(stream, None)
            reader.positions[key] = token
            return
        if token < before:
            if token < reader.delivered.get(key, 0) and stream not in self._idempotent:
                raise self._violation(
                    f"{reader.name} goes back from {before} to {token} of {stream} of "
                    f"{writer}"
                )
            reader.positions[key] = token
            # What is above is to be delivered in its order again.
            owed = reader.owed.get(key, set())
            reader.owed[key] = {each for each in owed if each <= token}
            excused = reader.excused.get(key, set())
            reader.excused[key] = {each for each in excused if each <= token}
            return
        self._passes(reader, key, token)

    def shown(self, reader: Reader, stream: str, token: int) -> None:
        """Record the token up to which a homeserver's users have seen all.

        :raises ViolationError: if a row at or below it was not delivered: who asks
            from here on is never shown it.
        """
        if stream in self._in_memory or stream in self._idempotent:
            return
        if self._all_are_doubted or (reader.name, stream) in {
            doubted[:2] for doubted in self.doubted
        }:
            # A false position counts among those that it has heard of.
            return
        for (of_stream, writer), written in self._written.items():
            if of_stream != stream or writer == reader.name:
                continue
            position = reader.positions.get((stream, writer), 0)
            # Ids that were found in the table count as finished from the start, also
            # those beyond an id that was open then.
            found = reader.found.get((stream, writer), 0)
            missed = written.next_after(max(position, found))
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
                if self._is_doubted(reader, key):
                    self._owe(reader, key, at)
                    continue
                raise self._violation(
                    f"{reader.name} passes {at} of {key[0]} of {key[1]} on its way to "
                    f"{token}, and did not get its rows"
                )
        reader.positions[key] = token

    def _view(
        self, reader: Reader, stream: str, token: int, rows: list[SimulatedRow]
    ) -> None:
        view = reader.views.setdefault(stream, {})
        for row in rows:
            epoch, _, key = row.key.partition(":")
            known = reader.epochs.setdefault(stream, int(epoch))
            if int(epoch) != known:
                # Its writer began again and is past our position already.
                reader.hidden_resets.add(stream)
                reader.epochs[stream] = int(epoch)
            if row.row_id < view.get(key, 0):
                raise self._violation(
                    f"{reader.name} got row {row.row_id} of {stream} after a newer one "
                    f"of the same key"
                )
            view[key] = row.row_id

    # -- in the end --------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Return what was committed and not delivered to those who live."""
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
                token = written.next_after(reader.positions.get((stream, writer), 0))
                if token is not None:
                    lacks.append(
                        f"{reader.name} lacks {token} of {stream} of {writer}, it is "
                        f"at {reader.positions.get((stream, writer), 0)}"
                    )
        return lacks

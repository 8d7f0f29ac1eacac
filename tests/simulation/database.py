"""A double of PostgreSQL: tables, sequences and ``stream_positions``, in memory.

The double has these properties of a real server: ``nextval`` takes effect immediately
and is never rolled back; rows are visible from their commit on, in the order of
commits; a transaction may have to be retried; the response to a commit may be lost, and
the commit completed seconds later, or not at all; after a failover to a standby a
sequence may be behind. The steps of a transaction take place at different simulated
times: its function runs, inserted rows are committed, and the response arrives. Other
code may run before each step.

The double recognises the statements of ``storage/`` by their text; any other statement
is an error.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, TypeVar

import attrs
import psycopg2
import psycopg2.errors
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from synapse_replication.errors import CommitUnknownError, NameLostError
from synapse_replication.handlers.waiters import wait_for_all
from synapse_replication.storage import queries
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.database import OUTCOME_WAIT
from synapse_replication.storage.lost_answers import LostAnswer
from synapse_replication.storage.row_queries import declared_query, insert_sql
from synapse_replication.storage.standby import knowledge_sql
from synapse_replication.streams.table import TableStream
from tests.simulation.clock import SimulatedClock
from tests.simulation.reactor import ProcessReactor
from tests.simulation.topology import CACHES

T = TypeVar("T")

#: The maximum additional time of a commit whose process is killed when it begins, in s.
MAX_ORPHANED_SECONDS = 3.0

#: The longest time from the loss of an answer to the commit until its end, in s.
MAX_LATE_SECONDS = 8.0

#: The maximum number of attempts of a transaction, as in ``storage/database.py``.
MAX_ATTEMPTS = 6

#: The rows of each table, the stored positions and the sequences.
_State = tuple[dict[str, list["StoredRow"]], dict[tuple[str, str], int], dict[str, int]]
_Params = Mapping[str, Any]
_Statement = Callable[["_Cursor", _Params], Sequence[tuple[Any, ...]]]


@attrs.frozen
class StoredRow:
    """A committed row."""

    stream_id: int
    instance_name: str
    values: tuple[Any, ...]


class SimulatedDatabase:
    """A simulated PostgreSQL server.

    :param tables: the tables of the stored streams.
    :param committed: called with (stream, writer, id, rows) for each committed INSERT.
    :param is_late: called with (stream, writer, id) for each INSERT of a commit whose
        answer is lost, when the commit begins.
    :ivar is_up: whether the server is running; if not, every transaction fails.
    :ivar retry_chance: the probability that a transaction must be retried.
    :ivar lost_answer_chance: the probability that the response to a commit is lost.
    :ivar slowness: the factor of all latencies.
    """

    is_standby = False

    def __init__(
        self,
        clock: SimulatedClock,
        random: Random,
        tables: Sequence[TableStream],
        committed: Callable[[str, str, int, list[tuple[Any, ...]]], object],
        is_late: Callable[[str, str, int], object] = lambda *_: None,
    ) -> None:
        self.clock = clock
        self.random = random
        self.is_up = True
        self.retry_chance = 0.0
        self.lost_answer_chance = 0.0
        self.slowness = 1.0
        self.generation = 0
        #: The states that a standby has not replayed, with their times; ``None`` if
        #: there is no standby.
        self.unreplayed: deque[tuple[float, _State]] | None = None
        #: The tables to which each open transaction has written.
        self.open_transactions: dict[int, set[str]] = {}
        #: The process of each open transaction.
        self.committing: dict[int, str] = {}
        #: How often each name was acquired.
        self.terms: Counter[str] = Counter()
        self.transactions = 0
        self.sequences = {table.sequence: 1 for table in tables}
        self.rows: dict[str, list[StoredRow]] = {table.table: [] for table in tables}
        self.positions: dict[tuple[str, str], int] = {}
        self.point: Callable[[str, str], object] = lambda point, process: None
        self._committed = committed
        self._is_late = is_late
        self._streams = {table.table: table.name for table in tables}
        self.statements: dict[str, _Statement] = {
            queries.SQL["next_ids"]: self._next_ids,
            queries.SQL["txn_ids"]: lambda cursor, params: [
                (*row, "1") for row in self._next_ids(cursor, params)
            ],
            "; ".join([queries.SQL["next_id"], queries.SQL["id_and_term"]]): (
                lambda cursor, params: [
                    (*row, self.terms[params["writer"]])
                    for row in self._next_ids(cursor, {**params, "count": 1})
                ]
            ),
            "; ".join([queries.SQL["next_id"], queries.SQL["txn_id_and_term"]]): (
                lambda cursor, params: [
                    (*row, "1", self.terms[params["writer"]])
                    for row in self._next_ids(cursor, {**params, "count": 1})
                ]
            ),
            queries.SQL["admitted_ids"]: self._checked(self._next_ids),
            queries.SQL["admit"]: self._checked(lambda cursor, params: []),
            queries.upsert_position(False, is_admitted=True): self._checked(
                self._upsert_position
            ),
            queries.SQL["skip_ids"]: self._skip_ids,
            queries.SQL["positions"]: self._read_positions,
            queries.SQL["all_positions"]: lambda cursor, params: [
                (*key, id_) for key, id_ in self.positions.items()
            ],
            queries.SQL["sequence_options"]: lambda cursor, params: [(1, 1, False)],
            queries.SQL["role"]: lambda cursor, params: [
                (self.is_standby, self.is_standby)
            ],
            queries.SQL["timeline"]: lambda cursor, params: [("00000001",)],
            queries.SQL["table_exists"]: lambda cursor, params: [(True,)],
            queries.SQL["insert_position"]: self._insert_position,
            queries.SQL["delete_positions_of_others"]: self._delete_positions,
            queries.SQL["indexes"]: self._read_indexes,
            queries.SQL["inserting_transactions"]: self._read_open_transactions,
            queries.upsert_position(False, is_admitted=False): self._upsert_position,
        }
        for table in tables:
            self._add_table(table)

    # More than 50 lines, because it defines one small function for each statement of
    # the table.
    def _add_table(self, table: TableStream) -> None:  # noqa: C901
        name, (column,) = table.table, table.id_columns
        rows = self.rows[name]
        columns = table.column_names

        def page(cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
            found: list[tuple[Any, ...]] = []
            for row in sorted(rows, key=lambda row: row.stream_id):
                if row.instance_name != params["instance_name"]:
                    continue
                if not params["after"] < row.stream_id <= params["up_to"]:
                    continue
                if len(found) >= params["limit"] and found[-1][0] != row.stream_id:
                    break
                found.append((row.stream_id, json.dumps(row.values)))
            return found

        def insert(cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
            values = [
                tuple(row[column] for column in columns)
                for row in json.loads(params["rows"])
            ]
            cursor.inserts.append((name, params["id"], params["instance_name"], values))
            return []

        def greatest(cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
            return [(max((row.stream_id for row in rows), default=None),)]

        def writers_beyond(cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
            found = sorted(
                (r for r in rows if r.stream_id > params["low"]),
                key=lambda row: row.stream_id,
            )[: params["limit"]]
            return [
                (
                    writer,
                    max(r.stream_id for r in found if r.instance_name == writer),
                    n,
                )
                for writer, n in Counter(row.instance_name for row in found).items()
            ]

        def writers(cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
            return [(writer,) for writer in sorted({row.instance_name for row in rows})]

        def greatest_of(cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
            return [
                (
                    writer,
                    max(
                        (r.stream_id for r in rows if r.instance_name == writer),
                        default=None,
                    ),
                )
                for writer in params["writers"]
            ]

        def committed(cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
            found = sorted(
                row.stream_id
                for row in rows
                if params["instance_name"] in (None, row.instance_name)
                and params["after"] < row.stream_id <= params["up_to"]
            )
            return [(id_,) for id_ in found[: params["limit"]]]

        def state(cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
            return [(self.sequences[table.sequence], True)]

        def page_with_knowledge(cursor: _Cursor, params: _Params) -> list[Any]:
            knowledge = json.dumps(self._knowledge(table.name))
            return [(None, knowledge), *page(cursor, params)]

        query = declared_query(table).sql
        self.statements[query] = page
        for positions_name in (None, table.positions_name):
            knowledge = knowledge_sql(positions_name, of_writer=True)
            self.statements[f"{knowledge} UNION ALL ({query})"] = page_with_knowledge
        self.statements[insert_sql(table.id_columns[0], table.column_names)] = insert
        for of_writer in (False, True):
            statement = queries.ids_between(column, False, of_writer=of_writer)
            self.statements[statement] = committed
        self.statements[queries.for_table("no_ids", column)] = lambda cursor, params: []
        self.statements[queries.for_table("greatest_id", column)] = greatest
        self.statements[queries.for_table("writers_beyond", column)] = writers_beyond
        self.statements[queries.for_table("writers_of_table", column)] = writers
        self.statements[queries.for_table("greatest_ids_of_writers", column)] = (
            greatest_of
        )
        self.statements[queries.sequence_state(table.sequence)] = state
        checked = queries.admitted_sequence_state(table.sequence)
        self.statements[checked] = self._checked(state)

    def refresh(self) -> None:
        """Bring the state up to date before a transaction."""

    def _changed(self) -> None:
        if self.unreplayed is not None:
            rows = {name: list(of_table) for name, of_table in self.rows.items()}
            state = rows, dict(self.positions), dict(self.sequences)
            self.unreplayed.append((self.clock.rightNow, state))

    # -- names ------------------------------------------------------------------------

    def acquire_name(self, name: str) -> int | None:
        """Acquire a name; ``None`` while commits of its holder are in progress."""
        if name in self.committing.values():
            return None
        self.terms[name] += 1
        return self.terms[name]

    def check_name(self, name: str, term: int) -> None:
        """Check that no other process has acquired a name.

        :raises NameLostError: if one has.
        """
        if self.terms[name] != term:
            raise NameLostError(name, f"term {self.terms[name]}")

    def _checked(self, statement: _Statement) -> _Statement:
        def execute(cursor: _Cursor, params: _Params) -> Sequence[tuple[Any, ...]]:
            found = statement(cursor, params)
            self.check_name(params["writer"], params["term"])
            return found

        return execute

    # -- statements -------------------------------------------------------------------

    def _next_ids(self, cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
        sequence = params["sequence"].strip('"')
        first = self.sequences[sequence] + 1
        self.sequences[sequence] += params["count"]
        self._changed()
        return [(id_,) for id_ in range(first, first + params["count"])]

    def _skip_ids(self, cursor: _Cursor, params: _Params) -> list[tuple[Any, ...]]:
        sequence = params["sequence"].strip('"')
        self.sequences[sequence] += params["count"]
        self._changed()
        return [(self.sequences[sequence],)]

    def _read_indexes(self, cursor: _Cursor, params: _Params) -> list[Any]:
        by_id: list[Any] = [(["stream_id"], False)]
        if params["table"] != '"receipts"':
            return by_id
        return [*by_id, (["instance_name", "stream_id"], False)]

    def _read_open_transactions(self, cursor: _Cursor, params: _Params) -> list[Any]:
        wanted = {table.strip('"') for table in params["tables"]}
        return [
            (str(number),)
            for number, tables in self.open_transactions.items()
            if tables & wanted
        ]

    def _knowledge(self, stream_name: str) -> list[Any]:
        stored = {
            writer: id_
            for (stream, writer), id_ in self.positions.items()
            if stream == stream_name
        }
        return [self.is_standby, stored, None]

    def _read_positions(self, cursor: _Cursor, params: _Params) -> list[Any]:
        return [
            (writer, id_)
            for (stream, writer), id_ in self.positions.items()
            if stream == params["stream_name"]
        ]

    def _insert_position(self, cursor: _Cursor, params: _Params) -> list[Any]:
        key = params["stream_name"], params["instance_name"]
        self.positions.setdefault(key, params["stream_id"])
        self._changed()
        return []

    def _upsert_position(self, cursor: _Cursor, params: _Params) -> list[Any]:
        key = params["stream_name"], params["instance_name"]
        self.positions[key] = max(self.positions.get(key, 0), params["stream_id"])
        self._changed()
        return []

    def _delete_positions(self, cursor: _Cursor, params: _Params) -> list[Any]:
        for stream, writer in list(self.positions):
            if stream == params["stream_name"] and writer not in params["writers"]:
                del self.positions[stream, writer]
        self._changed()
        return []

    # -- commit and faults -------------------------------------------------------------

    def lose_answer(self, inserts: Sequence[_Insert]) -> float:
        """Lose the answer to a commit; return after how many s it is completed."""
        for table, id_, writer, _ in inserts:
            self._is_late(self._streams[table], writer, id_)
        # PostgreSQL may be waiting for a synchronous standby, or for a trigger.
        return self.random.random() * MAX_LATE_SECONDS

    def commit(self, inserts: Sequence[_Insert]) -> None:
        """Commit rows, which makes them visible.

        :raises psycopg2.IntegrityError: if a committed row already has one of the ids.
        """
        for table, id_, _, _ in inserts:
            if any(row.stream_id == id_ for row in self.rows[table]):
                raise psycopg2.IntegrityError(f"{table}: id {id_} is used")
        for table, id_, writer, values in inserts:
            self.rows[table] += [StoredRow(id_, writer, row) for row in values]
            self._committed(self._streams[table], writer, id_, values)
        self._changed()

    def stop(self) -> None:
        """Stop the server: open transactions are never committed."""
        self.is_up = False
        self.generation += 1

    def start(self) -> None:
        """Restart the server, with all committed data."""
        self.is_up = True

    def fall_behind(self, ids: int) -> None:
        """Set every sequence back, as after a failover to a standby that was behind."""
        for sequence, value in self.sequences.items():
            self.sequences[sequence] = max(1, value - ids)
        self._changed()

    def set_sequence(self, sequence: str, value: int) -> None:
        """Advance a sequence, as the hint of a ``SequenceBehindError`` advises."""
        self.sequences[sequence] = max(self.sequences[sequence], value)
        self._changed()

    def latency(self) -> float:
        """Return the duration of one step of a transaction, in s."""
        return (0.001 + self.random.random() * 0.03) * self.slowness


class SimulatedStandby(SimulatedDatabase):
    """A hot standby, which replays what its primary does, after some time.

    :param primary: the primary. Streams without stored positions are read from it.
    :ivar lag: the time after which a change is visible, in s.
    """

    is_standby = True

    def __init__(
        self, primary: SimulatedDatabase, random: Random, tables: Sequence[TableStream]
    ) -> None:
        super().__init__(primary.clock, random, tables, lambda *_: None)
        self.primary = primary
        self.lag = 0.05
        self._states: deque[tuple[float, _State]] = deque()
        primary.unreplayed = self._states
        primary._changed()

    def refresh(self) -> None:
        """Replay the changes that are old enough."""
        while self._states and self._states[0][0] + self.lag <= self.clock.rightNow:
            _, (rows, positions, sequences) = self._states.popleft()
            for name, of_table in rows.items():
                # The statements refer to these lists.
                self.rows[name][:] = of_table
            self.positions.clear()
            self.positions.update(positions)
            self.sequences.update(sequences)


_Insert = tuple[str, int, str, list[tuple[Any, ...]]]


class _Cursor:
    """The cursor that is passed to a transaction's function."""

    def __init__(self, database: SimulatedDatabase) -> None:
        self.xid: str | None = None
        self.inserts: list[_Insert] = []
        self.settled_callbacks: list[Callable[[], object]] = []
        self.after_callbacks: list[Callable[[], object]] = []
        self.exception_callbacks: list[Callable[[], object]] = []
        self._database = database
        self._found: list[tuple[Any, ...]] = []

    def execute(self, sql: str, params: _Params | None = None) -> None:
        statement = self._database.statements.get(sql)
        if statement is None:
            raise AssertionError(f"the simulated database does not know: {sql}")
        self._found = list(statement(self, params or {}))

    def fetchall(self) -> list[tuple[Any, ...]]:
        found, self._found = self._found, []
        return found

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._found.pop(0) if self._found else None

    def call_when_settled(self, func: Callable[..., object], *args: object) -> None:
        self.settled_callbacks.append(lambda: func(*args))

    def call_after(self, func: Callable[..., object], *args: object) -> None:
        self.after_callbacks.append(lambda: func(*args))

    def call_on_exception(self, func: Callable[..., object], *args: object) -> None:
        self.exception_callbacks.append(lambda: func(*args))


class DatabaseClient:
    """The connections of one process to the database.

    It implements :class:`~synapse_replication.storage.database.TransactionRunner`.
    """

    def __init__(self, database: SimulatedDatabase, reactor: ProcessReactor) -> None:
        self._database = database
        self._reactor = reactor
        self._requested = 0
        self.admission: Admission | None = None
        self._on_name_lost: Callable[[NameLostError], object] = lambda error: None
        #: The transactions that are not known to have ended, by their numbers.
        self._running: dict[int, _Transaction] = {}

    def admit(
        self, admission: Admission, on_lost: Callable[[NameLostError], object]
    ) -> None:
        """See :meth:`synapse_replication.storage.database.Database.admit`."""
        self.admission, self._on_name_lost = admission, on_lost

    def confirm_name(self) -> Deferred[None]:
        """See :meth:`synapse_replication.storage.database.Database.confirm_name`."""
        assert self.admission is not None
        return self.transact("confirm_name", self.admission.confirm, autocommit=True)

    def _note_lost_name(self, failure: Failure) -> Failure:
        if isinstance(failure.value, NameLostError):
            self._on_name_lost(failure.value)
        return failure

    def mark(self) -> int:
        """Return a mark for :meth:`settled`, before all later transactions."""
        return self._requested

    def settled(self, since: int = 0, *, only_lost: bool = False) -> Deferred[None]:
        """Return a Deferred that fires when transactions are known to have ended."""
        waiting = []
        for number, transaction in self._running.items():
            if number >= since and (transaction.is_lost or not only_lost):
                waiting.append(ended := Deferred[None]())
                transaction.when_ended.append(partial(ended.callback, None))
        return wait_for_all(waiting)

    def lost_answers(self) -> list[LostAnswer]:
        """Return no transaction: only the watch for stuck ids shows them."""
        return []

    def transact(
        self,
        description: str,
        func: Callable[[Any], T],
        *,
        autocommit: bool = False,
    ) -> Deferred[T]:
        """Run ``func(cursor)`` in a transaction, whose response arrives later."""
        database = self._database
        if isinstance(database, SimulatedStandby) and description.endswith(CACHES):
            database = database.primary
        transaction = _Transaction(
            database, self._reactor, description, func, self.admission, autocommit
        )
        self._running[self._requested] = transaction
        transaction.when_ended.append(partial(self._running.pop, self._requested))
        self._requested += 1
        transaction.answered.addErrback(self._note_lost_name)
        transaction.begin()
        return transaction.answered


class _Transaction:
    def __init__(
        self,
        database: SimulatedDatabase,
        reactor: ProcessReactor,
        description: str,
        func: Callable[[Any], Any],
        admission: Admission | None,
        autocommit: bool,
    ) -> None:
        self._database = database
        self._reactor = reactor
        self._description = description
        self._func = func
        self._admission = admission
        self._autocommit = autocommit
        self._attempts = 0
        self._number = 0
        self._callbacks: list[Callable[[], object]] = []
        #: Whether the answer to the COMMIT was lost.
        self.is_lost = False
        self.when_ended: list[Callable[[], object]] = []
        self.answered: Deferred[Any] = Deferred()

    def begin(self) -> None:
        self._later(self._reactor.when_running, self._run)

    def _later(self, step: Callable[..., None], *args: object) -> None:
        self._database.clock.callLater(self._database.latency(), step, *args)

    def _run(self) -> None:
        database = self._database
        if not self._reactor.is_alive:
            return
        if not database.is_up:
            self._answer_down()
            return
        database.refresh()
        self._attempts += 1
        generation = database.generation
        cursor = _Cursor(database)
        try:
            result = self._func(cursor)
            if self._admission is not None and not self._autocommit:
                database.check_name(self._admission.instance_name, self._admission.term)
        except Exception:  # noqa: BLE001 -- passed to the caller
            self._roll_back(cursor)
            self._answer(Failure())
            return
        if cursor.inserts:
            database.transactions += 1
            self._number = database.transactions
            tables = {table for table, *_ in cursor.inserts}
            database.open_transactions[self._number] = tables
            database.committing[self._number] = self._reactor.name
            database.point("before commit", self._reactor.name)
            self._commit_later(cursor, generation, result)
            return
        # PostgreSQL cancels a page that conflicts with a change, and it is read again.
        if self._autocommit and not self._description.startswith("catch_up_"):
            database.point(self._description, self._reactor.name)
        elif self._has_conflict(cursor):
            return
        self._callbacks += [*cursor.settled_callbacks, *cursor.after_callbacks]
        self._answer(result)

    def _roll_back(self, cursor: _Cursor) -> None:
        self._callbacks += [*cursor.settled_callbacks, *cursor.exception_callbacks]

    def _has_conflict(self, cursor: _Cursor) -> bool:
        """Simulate a conflict with the probability ``retry_chance``.

        :return: whether there was a conflict. In that case, the transaction has been
            scheduled again, or has failed after the last attempt.
        """
        database = self._database
        if database.random.random() >= database.retry_chance:
            return False
        self._roll_back(cursor)
        if self._attempts < MAX_ATTEMPTS:
            self.begin()
        else:
            self._fail(psycopg2.errors.SerializationFailure("concurrent transaction"))
        return True

    def _commit_later(self, cursor: _Cursor, generation: int, result: Any) -> None:
        database = self._database
        delay = database.latency()
        if not self._reactor.is_alive:
            delay += database.random.random() * MAX_ORPHANED_SECONDS
        database.clock.callLater(delay, self._commit, cursor, generation, result)

    def _commit(self, cursor: _Cursor, generation: int, result: Any) -> None:
        database = self._database
        if not self.is_lost and generation == database.generation:
            if not self._reactor.is_alive and database.random.random() < 0.5:
                # The server detected that the client had disconnected, and rolled back.
                self._end()
                return
            if self._has_conflict(cursor):
                self._end()
                return
            if database.random.random() < database.lost_answer_chance:
                self.is_lost = True
                late = database.lose_answer(cursor.inserts)
                database.clock.callLater(late, self._commit, cursor, generation, result)
                self._reactor.callLater(OUTCOME_WAIT, self._answer_unknown)
                return
        self._end()
        if generation != database.generation:
            self._roll_back(cursor)
            self._answer_down()
            return
        try:
            database.commit(cursor.inserts)
        except psycopg2.Error as error:
            self._roll_back(cursor)
            self._fail(error)
            return
        database.point("after commit", self._reactor.name)
        self._callbacks += [*cursor.settled_callbacks, *cursor.after_callbacks]
        self._answer(result)

    def _end(self) -> None:
        del self._database.open_transactions[self._number]
        del self._database.committing[self._number]

    def _answer_unknown(self) -> None:
        """Let the caller fail, because the outcome is not known."""
        if not self.answered.called:
            error = CommitUnknownError(self._description, "its answer was lost")
            self.answered.errback(Failure(error))

    def _answer_down(self) -> None:
        self._fail(psycopg2.OperationalError("the server is down"))

    def _fail(self, error: Exception) -> None:
        self._answer(Failure(error))

    def _answer(self, result: Any) -> None:
        self._later(self._reactor.when_running, self._arrive, result)

    def _arrive(self, result: Any) -> None:
        if not self._reactor.is_alive:
            return
        for callback in [*self._callbacks, *self.when_ended]:
            callback()
        if self.answered.called:
            return
        if isinstance(result, Failure):
            self.answered.errback(result)
        else:
            self.answered.callback(result)

"""Tests that no value in any table of any stream stops the archive.

PostgreSQL accepts each value. All rows are read in this process, without Spark.
"""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import psycopg2
from deltalake import DeltaTable
from psycopg2 import sql
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.archive.job import (
    ArchiveProgress,
    ArchiveSettings,
    Numbers,
    run_archive,
)
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.schemas import standard_tables
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.storage.row_queries import STANDARD_QUERIES, RowQuery
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.archives import keys_of
from tests.pipeline.shared_session import shared_session
from tests.storage.synapse_extract import SCHEMA
from tests.support.archive_database import Key

#: Texts, and whether PostgreSQL converts them to JSON.
_TEXTS = {
    "": False,
    "\x01\x1b[31m\x7f": False,
    "\u202e\ufffe\uffff\U0010ffff": False,
    "NaN": False,
    '{"a": 1, "a": ': False,
    '"\\ud800"': True,
    '"\\u0000"': True,
    "-1e400": True,
    "7" * 500: True,
    "[" * 300 + "]" * 300: True,
}
#: Numbers, and whether the archive can store them as times in ms since 1970.
_NUMBERS = {
    2**63 - 1: False,
    -(2**63): False,
    2**62: False,
    2**53 + 1: True,
    10**15: True,
    -(10**15): True,
    -1: True,
}
#: Arrays and JSON, and the list of texts that is archived.
_ARRAYS = {
    "{}": [],
    "{NULL}": [None],
    "{{a,b},{c,d}}": ["a", "b", "c", "d"],
    '{NULL,"\x01\u202e"}': [None, "\x01\u202e"],
}
_JSON = {
    "null": None,
    "7": None,
    '"a"': None,
    "{}": None,
    "[null]": [None],
    "[1e1000]": ["1" + 1000 * "0"],
    '[["a"], {"b": 1}]': ['["a"]', '{"b": 1}'],
}
#: The values of each type of column, and its usual value.
_POISON: Mapping[str, Mapping[Any, Any]] = {
    "text": _TEXTS,
    "int8": _NUMBERS,
    "bool": {False: False},
    "_text": _ARRAYS,
    "jsonb": _JSON,
}
#: The archive's columns of each stream.
_TABLES = standard_tables()
_USUAL = {"text": "{}", "int8": 1767225600000, "bool": True, "_text": "{a}"}


@attrs.frozen
class _Case:
    """A row with one unusual value, in its own table or in one that it refers to."""

    stream: str
    query: RowQuery
    table: str
    column: str
    type_: str
    value: Any

    @property
    def is_refused(self) -> bool:
        """Whether PostgreSQL cannot convert the value to what the archive stores."""
        times = [name for name in self.query.columns if name.endswith("_ts")]
        converted = {*times, self.query.written_ms_column, "data"}
        return self.column in converted and not _POISON[self.type_][self.value]

    @property
    def archived(self) -> tuple[str, Any] | None:
        """The archive's column and value; ``None`` if it stores none, or a time."""
        names = dict(_TABLES[self.stream].kinds)[self.query.kind]
        aliases = {detail.table: detail.alias for detail in self.query.details}
        forms = (
            self.column,
            f"{aliases.get(self.table, 'e')}.{self.column}",
            f"{self.column}::json",
            f"to_jsonb({self.column})",
        )
        is_list = self.type_ in ("_text", "jsonb")
        for name, expression in zip(names, self.query.columns, strict=True):
            if expression in forms or (is_list and forms[-1] in expression):
                lists = _POISON[self.type_]
                return name, lists[self.value] if is_list else self.value
        return None


class PoisonRowTests(SynchronousTestCase):
    """Tests for a row with each unusual value in each column of all tables."""

    def setUp(self) -> None:
        """Create the tables, with the columns that only the archive reads."""
        shared_session()
        self.dsn = shared_postgres().new_database()
        self.folder = Path(self.mktemp()).absolute()
        self.output = io.StringIO()
        self.connection = psycopg2.connect(self.dsn)
        self.addCleanup(self.connection.close)
        self.cursor = self.connection.cursor()
        self.cursor.execute(
            f"{SCHEMA}; CREATE SEQUENCE cache_invalidation_stream_seq; "
            "SELECT setval('cache_invalidation_stream_seq', 10000); "
            "CREATE TABLE stream_positions "
            "(stream_name text, instance_name text, stream_id bigint)"
        )
        for query in itertools.chain(*STANDARD_QUERIES.values()):
            if query.written_ms_column is not None:
                self.cursor.execute(
                    f"ALTER TABLE {query.ids.table} "
                    f"ADD COLUMN IF NOT EXISTS {query.written_ms_column} bigint"
                )
        self.cursor.execute(
            "SELECT table_name, column_name, udt_name FROM information_schema.columns "
            "WHERE table_schema = 'public'"
        )
        self.types: dict[str, dict[str, str]] = {}
        for table, column, type_ in self.cursor.fetchall():
            self.types.setdefault(table, {})[column] = type_

    def tables_of(self, query: RowQuery) -> list[str]:
        """Return the tables with the columns of a query's rows, its own one first."""
        events = ["events"] if query.joined else []
        return [query.ids.table, *events, *(detail.table for detail in query.details)]

    def cases(self) -> Iterator[_Case]:
        for stream, queries in STANDARD_QUERIES.items():
            for query in queries:
                keys = {query.ids.id_column, "stream_ordering", "instance_name"}
                if query.details:
                    keys.add("event_id")
                for table in self.tables_of(query):
                    for column, type_ in self.types[table].items():
                        if column not in keys:
                            for value in _POISON[type_]:
                                yield _Case(stream, query, table, column, type_, value)

    def add(self, query: RowQuery, id_: int, case: _Case | None = None) -> None:
        """Write a row, and the rows of other tables about the same event."""
        id_ = -id_ if query.negative else id_
        for table in self.tables_of(query):
            row: dict[str, Any] = {
                column: _USUAL.get(type_)
                for column, type_ in self.types[table].items()
                if column not in ("stream_ordering", "instance_name")
            }
            if query.details:
                row["event_id"] = f"${query.ids.table}{id_}"
            if table == query.ids.table:
                row |= {query.ids.id_column: id_, "instance_name": "w1"}
            if case is not None and table == case.table:
                row[case.column] = case.value
            self.cursor.execute(
                sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
                    sql.Identifier(table),
                    sql.SQL(", ").join(map(sql.Identifier, row)),
                    sql.SQL(", ").join([sql.Placeholder()] * len(row)),
                ),
                list(row.values()),
            )

    def archive(self) -> Numbers:
        source = PipelineSettings.of_dsn(self.dsn)
        return run_archive(
            ArchiveSettings(str(self.folder), source, once=True),
            ArchiveProgress(self.output),
        )

    def test_each_column(self) -> None:
        """
        A value is archived as it is, or PostgreSQL cannot convert it, and its row is
        skipped, counted and named. All rows between them are archived.
        """
        cases: dict[tuple[str, int], _Case] = {}
        keys: list[Key] = []
        last: Counter[str] = Counter()
        for case in self.cases():
            last[case.stream] += 2
            id_ = last[case.stream]
            cases[case.stream, id_] = case
            self.add(case.query, id_, case)
            self.add(case.query, id_ + 1)
            keys += [(case.stream, "w1", id_), (case.stream, "w1", id_ + 1)]
        for stream, id_ in last.items():
            standard = STANDARD_STREAMS[stream]
            sign = -1 if standard.description.negative else 1
            self.cursor.execute(
                "INSERT INTO stream_positions VALUES (%s, 'w1', %s)",
                (standard.positions_name, sign * (id_ + 1)),
            )
        self.connection.commit()

        numbers = self.archive()
        refused = {key for key, case in cases.items() if case.is_refused}
        self.assertEqual(numbers.skipped, len(refused))
        self.assertEqual(
            keys_of(self.folder),
            sorted(key for key in keys if (key[0], key[2]) not in refused),
        )
        for stream, id_ in refused:
            query = cases[stream, id_].query
            stored = -id_ if query.negative else id_
            named = f"{query.ids.table}.{query.ids.id_column} = {stored}"
            self.assertIn(named, self.output.getvalue())
        self._check_values(cases)
        again = self.archive()
        self.assertEqual((again.rows, again.skipped), (0, 0))

    def _check_values(self, cases: Mapping[tuple[str, int], _Case]) -> None:
        store, checked = ArchiveStore.at(self.folder), Counter[str]()
        for stream in STANDARD_QUERIES:
            table = DeltaTable(store.stream_uri(stream)).to_pyarrow_table()
            # Python's dates end in the year 9999.
            names = [name for name in table.column_names if not name.endswith("_ts")]
            for row in table.select(names).to_pylist():
                case = cases.get((stream, row["stream_id"]))
                if case is not None and case.archived is not None:
                    name, value = case.archived
                    if name in row:
                        self.assertEqual(row[name], value, case)
                        checked[case.type_] += 1
        self.assertEqual(set(checked), _POISON.keys() - {"int8"})

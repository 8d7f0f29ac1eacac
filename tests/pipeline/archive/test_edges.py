"""Tokens at the edges of their types in the archive, by Hypothesis, in Spark."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import attrs
import psycopg2
from hypothesis import strategies as st
from psycopg2.extensions import parse_dsn
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.archive.job import (
    ArchiveProgress,
    ArchiveSettings,
    Numbers,
    run_archive,
)
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.streams.table import TableStream
from synapse_replication.streams.tokens import MAX_TOKEN
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.archives import keys_of
from tests.pipeline.shared_session import shared_session
from tests.support.archive_database import Key
from tests.support.examples import draw_examples

_WRITERS = ("w1", "w2")
#: Tokens at and beside the edges of int32, of JSON's integers and of int64.
_TOKENS = st.one_of(
    st.tuples(st.sampled_from([2**31, 2**32, 2**53, 2**62]), st.integers(-70, 70)).map(
        sum
    ),
    st.integers(1, 70),
    st.integers(MAX_TOKEN - 70, MAX_TOKEN),
    st.integers(1, MAX_TOKEN),
)


@attrs.frozen
class _History:
    """A stream's rows, and what is known to be complete when it is first archived.

    :ivar rows: the writer of each token.
    :ivar positions: the first position of each writer.
    :ivar negative: whether the table stores the tokens as negative ids.
    :ivar index: the columns of the table's index.
    """

    rows: Mapping[int, str]
    positions: Sequence[int]
    negative: bool
    index: str

    def keys(self, stream: str, positions: Sequence[int]) -> list[Key]:
        """Return the rows up to the positions of their writers."""
        upto = dict(zip(_WRITERS, positions, strict=True))
        return [
            (stream, writer, token)
            for token, writer in self.rows.items()
            if token <= upto[writer]
        ]


_HISTORIES = st.builds(
    _History,
    st.dictionaries(_TOKENS, st.sampled_from(_WRITERS), max_size=12),
    st.tuples(_TOKENS, _TOKENS),
    st.booleans(),
    st.sampled_from(["id", "writer, id"]),
)


class EdgeTests(SynchronousTestCase):
    def setUp(self) -> None:
        shared_session()
        self.histories = {
            f"s{n}": each for n, each in enumerate(draw_examples(_HISTORIES, 8))
        }
        self.dsn = shared_postgres().new_database()
        self.folder = Path(self.mktemp()).absolute()
        statements = [
            "CREATE TABLE stream_positions "
            "(stream_name text, instance_name text, stream_id bigint)"
        ]
        for stream, history in self.histories.items():
            sign = -1 if history.negative else 1
            statements += [
                f"CREATE TABLE {stream} (id bigint, writer text NOT NULL, v bigint)",
                f"CREATE INDEX ON {stream} ({history.index})",
                f"CREATE SEQUENCE {stream}_seq",
                f"SELECT setval('{stream}_seq', {MAX_TOKEN})",
            ]
            statements += [
                f"INSERT INTO {stream} VALUES ({sign * token}, '{writer}', {token})"
                for token, writer in history.rows.items()
            ]
        self.execute(*statements)

    def execute(self, *statements: str) -> None:
        with closing(psycopg2.connect(self.dsn)) as connection, connection:
            for statement in statements:
                connection.cursor().execute(statement)

    def set_positions(self, positions: Mapping[str, Sequence[int]]) -> None:
        self.execute(
            "DELETE FROM stream_positions",
            *(
                f"INSERT INTO stream_positions VALUES ('{stream}', '{writer}', "
                f"{-position if self.histories[stream].negative else position})"
                for stream, both in positions.items()
                for writer, position in zip(_WRITERS, both, strict=True)
            ),
        )

    def archive(self) -> Numbers:
        declared = tuple(
            TableStream(
                name=stream,
                table=stream,
                id_column="id",
                writer_column="writer",
                sequence=f"{stream}_seq",
                columns={"v": int},
                writers=_WRITERS,
                negative=history.negative,
            )
            for stream, history in self.histories.items()
        )
        source = PipelineSettings(parse_dsn(self.dsn), declared=declared)
        return run_archive(
            ArchiveSettings(str(self.folder), source, once=True),
            ArchiveProgress(io.StringIO()),
        )

    def test_each_row_once(self) -> None:
        """
        Rows are archived up to the positions of their writers, and the others once the
        positions have passed them, wherever their tokens are.
        """
        first = {stream: each.positions for stream, each in self.histories.items()}
        last = dict.fromkeys(self.histories, (MAX_TOKEN, MAX_TOKEN))
        for positions in (first, last):
            self.set_positions(positions)
            self.archive()
            self.assertEqual(
                keys_of(self.folder),
                sorted(
                    key
                    for stream, each in self.histories.items()
                    for key in each.keys(stream, positions[stream])
                ),
            )
        self.assertEqual(self.archive().rows, 0)

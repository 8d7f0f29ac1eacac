"""Runs the queries of docs/questions.rst on the archive of a real deployment."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any

import duckdb
from deltalake import DeltaTable
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.archive.job import (
    ArchiveProgress,
    ArchiveSettings,
    run_archive,
)
from synapse_replication.pipeline.archive.snapshot import read_archive
from synapse_replication.pipeline.schemas import OBJECTS, standard_tables
from synapse_replication.pipeline.settings import PipelineSettings
from tests.pipeline.audit.test_job import real_dsn
from tests.pipeline.shared_session import shared_session
from tests.support.recordings import FULL_RECORDING

PAGE = Path(__file__).parents[2] / "docs" / "questions.rst"

_KEYS = ", ".join(OBJECTS["receipts"])

_QUESTION = re.compile(
    r"\.\. code-block:: sql\n\n((?:    .*\n|\n)+?)\n::\n\n((?:    .*\n)+)"
)


@functools.cache
def real_archive() -> Path:
    """Archive the database and the recording of the real deployment."""
    folder = Path("archive-of-questions").absolute()
    source = PipelineSettings.of_dsn(real_dsn())
    recordings = [str(FULL_RECORDING)]
    settings = ArchiveSettings(str(folder), source, recordings, once=True)
    run_archive(settings, ArchiveProgress(io.StringIO()))
    return folder


def code_blocks(language: str) -> list[str]:
    """Return the page's code in a language, with the path of the real archive."""
    found = re.findall(
        rf"\.\. code-block:: {language}\n\n((?:    .*\n|\n)+)", PAGE.read_text()
    )
    return [
        re.sub(r"(?m)^    ", "", block).replace("/srv/archive", str(real_archive()))
        for block in found
    ]


def run(code: str, **names: Any) -> dict[str, Any]:
    """Run Python code, and return its variables."""
    exec(compile(code, str(PAGE), "exec"), names)
    return names


class QuestionsTests(SynchronousTestCase):
    """Tests for the answers, and for the newest rows in each program."""

    def test_answers(self) -> None:
        """Each query has the answer on the page, in Spark and in DuckDB."""
        session = shared_session()
        in_spark, in_duckdb = code_blocks("python")[:2]
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            run(in_spark)
        self.assertIn("4931", shown.getvalue())
        names = run(in_duckdb)
        questions = _QUESTION.findall(PAGE.read_text())
        self.assertEqual(len(questions), 10)
        for query, answer in questions:
            expected = [line.strip() for line in answer.splitlines()]
            for rows in (
                names["duckdb"].sql(query).fetchall(),
                session.sql(query).collect(),
            ):
                lines = [" | ".join(map(str, row)) for row in rows]
                self.assertEqual(lines, expected)

    def test_notebook(self) -> None:
        """The manual's notebook plots the events of both writers by the hour."""
        shared_session()
        text = (PAGE.parent / "pipeline.rst").read_text()
        (block,) = re.findall(
            r"From a notebook\n-+\n\n\.\. code-block:: python\n\n((?:    .*\n|\n)+)",
            text,
        )
        code = re.sub(r"(?m)^    ", "", block)
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            names = run(code.replace("/srv/archive", str(real_archive())))
        table = names["table"]
        self.assertEqual(list(table.columns), ["event_persister1", "event_persister2"])
        self.assertGreater(table.to_numpy().sum(), 3000)
        self.assertIn("receipts", shown.getvalue())

    def test_objects(self) -> None:
        """The page lists the streams with objects, and their columns, which exist."""
        self.assertIn("/pipeline/columns/objects.csv\n", PAGE.read_text())
        tables = standard_tables()
        for stream, keys in OBJECTS.items():
            names = {column.name for column in tables[stream].columns}
            self.assertEqual(set(keys) - names, set())

    def test_newest_rows(self) -> None:
        """
        For each stream, DuckDB and Polars agree on the newest row of each object; for
        one stream, so does Spark.
        """
        in_sql = code_blocks("sql")[-1]
        in_polars = code_blocks("python")[-1]
        for stream, keys in OBJECTS.items():
            path = real_archive() / "streams" / stream
            if not path.exists():
                continue
            changes = {"receipts": stream, _KEYS: ", ".join(keys)}
            names = '", "'.join(OBJECTS["receipts"]), '", "'.join(keys)
            with duckdb.connect() as connection:
                connection.register(stream, DeltaTable(path).to_pyarrow_dataset())
                sql = in_sql
                for old, new in changes.items():
                    sql = sql.replace(old, new)
                found = connection.sql(f"SELECT stream_id FROM ({sql})").fetchall()
            expected = sorted(token for (token,) in found)
            self.assertTrue(expected)
            code = in_polars.replace(*names).replace("receipts", stream)
            self.assertEqual(sorted(run(code)["newest"]["stream_id"]), expected, stream)
            if stream == "receipts":
                session = shared_session()
                read_archive(session, real_archive()).create_views()
                tokens = sorted(row["stream_id"] for row in session.sql(sql).collect())
                self.assertEqual(tokens, expected)

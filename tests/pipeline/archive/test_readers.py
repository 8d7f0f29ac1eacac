"""Runs the snippets of docs/pipeline.rst that read an archive with other programs."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import duckdb
import polars
import yaml
from deltalake import DeltaTable
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.source.offsets import StreamOffset
from tests.pipeline.archives import add_rows_to, make_archive, open_table, receipts
from tests.pipeline.shared_session import shared_session

_DOCS = Path(__file__).parents[3] / "docs" / "pipeline.rst"


class ReadersTests(SynchronousTestCase):
    """Tests for DuckDB, Polars, pandas and pyarrow, also while a driver commits."""

    def setUp(self) -> None:
        self.folder = make_archive(Path(self.mktemp()).absolute())
        self.receipts = str(self.folder / "streams" / "receipts")

    def test_snippets(self) -> None:
        """Each snippet of the page runs without an error."""
        page = _DOCS.read_text()
        (block,) = re.findall(
            r"\.\. code-block:: python\n\n((?:    .*\n|\n)+?)\nFor an object", page
        )
        code = re.sub(r"(?m)^    ", "", block)
        code = code.replace("/srv/archive", str(self.folder))
        # Use a version and a timestamp that this archive has.
        code = code.replace("version=5", "version=1")
        now = datetime.datetime.now(datetime.timezone.utc).isoformat()
        code = code.replace("2026-01-31T00:00:00Z", now)
        names: dict[str, object] = {}
        exec(compile(code, str(_DOCS), "exec"), names)

    def test_while_it_is_written(self) -> None:
        """
        An open dataset reads one complete version; a new dataset reads the next
        version.
        """
        table = open_table(self.folder)
        before = DeltaTable(self.receipts).to_pyarrow_dataset()
        lazy = polars.scan_delta(self.receipts)
        add_rows_to(self.folder, "receipts", receipts(5, 9, day=3), table=table)
        table.compact(2, shared_session)
        with duckdb.connect() as connection:
            connection.register("receipts", before)
            query = "SELECT count(*), count(DISTINCT user_id) FROM receipts"
            self.assertEqual(connection.execute(query).fetchall(), [(4, 4)])
            connection.register(
                "receipts", DeltaTable(self.receipts).to_pyarrow_dataset()
            )
            self.assertEqual(connection.execute(query).fetchall(), [(9, 9)])
        # A lazy frame resolves the version when it is collected.
        self.assertEqual(lazy.collect().height, 9)
        found = (
            polars.scan_delta(self.receipts)
            .filter(polars.col("day") == datetime.date(2026, 1, 3))
            .collect()
        )
        self.assertEqual(sorted(found["stream_id"]), [5, 6, 7, 8, 9])

    def test_conditions(self) -> None:
        """
        A condition on any column finds its rows, although only the token has
        statistics; before and after a compaction.
        """
        table = open_table(self.folder)
        add_rows_to(self.folder, "receipts", receipts(5, 9, day=1), table=table)
        for _ in range(2):
            dataset = DeltaTable(self.receipts).to_pyarrow_dataset()
            with duckdb.connect() as connection:
                connection.register("receipts", dataset)
                for condition, count in (
                    ("user_id = '@user3'", 1),
                    ("stream_id > 6", 3),
                    ("written_ts >= '2026-01-02'", 2),
                    ("thread_id IS NULL", 9),
                ):
                    sql = f"SELECT count(*) FROM receipts WHERE {condition}"
                    self.assertEqual(connection.execute(sql).fetchall(), [(count,)])
            self.assertEqual(
                polars.scan_delta(self.receipts)
                .filter(polars.col("user_id") == "@user3")
                .collect()
                .height,
                1,
            )
            table.compact(2, shared_session)

    def test_time_travel(self) -> None:
        """A past version has the rows and the offset of its commit."""
        versions = {}
        for commit in DeltaTable(self.receipts).history():
            if "synapse_replication.offset" in commit:
                table = DeltaTable(self.receipts, version=commit["version"])
                versions[commit["version"]] = table.to_pyarrow_table().num_rows
        self.assertEqual(versions, {1: 2, 2: 4})
        frame = DeltaTable(self.receipts, version=1).to_pandas(columns=["stream_id"])
        self.assertEqual(sorted(frame["stream_id"]), [1, 2])
        self.assertEqual(open_table(self.folder).state.offset, StreamOffset(4))

    def test_dbt_source(self) -> None:
        """The dbt source is valid YAML, and its path is a table of the archive."""
        page = _DOCS.read_text()
        (block,) = re.findall(
            r"\.\. code-block:: yaml\n\n(    sources:(?:.*\n)+?)\n\w", page
        )
        (source,) = yaml.safe_load(re.sub(r"(?m)^    ", "", block))["sources"]
        path = source["tables"][0]["meta"]["delta_table_path"]
        self.assertTrue(
            DeltaTable.is_deltatable(path.replace("/srv/archive", str(self.folder)))
        )

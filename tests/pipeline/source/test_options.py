"""Tests for :mod:`synapse_replication.pipeline.source.options`."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.options import (
    SourceOptions,
    parse_token,
    reader_options,
)

CONFIG = """
server_name: example.org
database:
  name: psycopg2
  args: {dbname: synapse, user: synapse_user, password: "hush hush"}
stream_writers:
  receipts: [r1, r2]
instance_map:
  main: {host: localhost, port: 9093}
  r1: {host: localhost, port: 9101}
  r2: {host: localhost, port: 9102}
synapse_replication:
  streams:
    - receipts
    - {name: orders, table: shop.orders, id_column: id,
       columns: {item: text, n: integer}, sequence: orders_seq,
       writers: [r1, r2], writer_column: writer, negative: true}
"""


def parse(**options: str) -> SourceOptions:
    """Parse options, with a database added."""
    return SourceOptions.parse({"dsn": "dbname=x", **options})


class SourceOptionsTests(SynchronousTestCase):
    """Tests for the options of the data source."""

    def refuse(self, *parts: str, **options: str) -> None:
        """Check that options are rejected with a message that contains these parts."""
        error = self.assertRaises(PipelineError, parse, **options)
        for part in parts:
            self.assertIn(part, str(error))

    def test_case_insensitive_names(self) -> None:
        """Option names are case-insensitive, as everywhere in Spark."""
        options = parse(
            STREAMS="events, receipts",
            writers="w1",
            maxrowspertrigger="10",
            numPartitions="3",
            startingToken=" Latest ",
        )
        self.assertEqual(options.streams, ("events", "receipts"))
        self.assertEqual(options.writers, ("w1",))
        self.assertEqual((options.max_rows, options.num_partitions), (10, 3))
        self.assertEqual(options.starting_token, "latest")
        self.assertEqual(options.conninfo, {"dbname": "x"})

    def test_defaults(self) -> None:
        """By default, all rows of all streams and writers are read."""
        options = parse()
        self.assertEqual((options.streams, options.writers), (None, None))
        self.assertEqual(
            (options.starting_token, options.ending_token), ("earliest", "latest")
        )

    def test_invalid_options(self) -> None:
        """Each error names its option and the accepted values."""
        self.refuse("option stream is unknown", "streams", stream="events")
        self.refuse("stream evnts is unknown", "receipts", streams="evnts")
        self.refuse("typing", "synapse-replication record", streams="typing")
        self.refuse("option streams is 'a,,b'", streams="a,,b")
        self.refuse("option writers", writers="")
        for count in ("0", "-1", "1.5", "x", "", str(2**31), "9" * 5000):
            self.refuse(
                "option maxRowsPerTrigger", "1 to 2147483647", maxRowsPerTrigger=count
            )
            self.refuse("option numPartitions", "1 to 2147483647", numPartitions=count)
        for token in ("x", "-5", '{"events": [1]}', "{", "m5~x", '{"events": "m1~2"}'):
            self.refuse("option startingToken", "m5~1.7", startingToken=token)
            self.refuse("option endingToken", "m5~1.7", endingToken=token)

    def test_one_database(self) -> None:
        """
        Exactly one of dsn and config is required. The error contains neither value.
        """
        for options in ({}, {"dsn": "dbname=x", "config": "x.yaml"}):
            error = self.assertRaises(PipelineError, SourceOptions.parse, options)
            self.assertIn("options dsn and config", str(error))
        error = self.assertRaises(
            PipelineError, SourceOptions.parse, {"dsn": "password=hush hush"}
        )
        self.assertIn("option dsn", str(error))
        self.assertNotIn("hush", str(error))
        self.assertNotIn("hush", repr(parse(dsn="dbname=x password=hush")))

    def _config(self) -> str:
        path = Path(self.mktemp())
        path.write_text(CONFIG)
        return str(path)

    def test_relative_config(self) -> None:
        """
        A relative path is resolved in the folder in which Spark was started; if there
        is no such file, the error names this folder.
        """
        path = Path(self._config())
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        os.chdir(path.parent)
        self.assertTrue(SourceOptions.parse({"config": path.name}).catalog)
        os.chdir(here)
        error = self.assertRaises(
            PipelineError, SourceOptions.parse, {"config": "no/such.yaml"}
        )
        self.assertIn(here, str(error))
        self.assertIn("write an absolute path", str(error))

    def test_config(self) -> None:
        """A configuration declares writers and custom streams, too."""
        options = SourceOptions.parse({"config": self._config(), "streams": "orders"})
        self.assertEqual(options.declared_writers["receipts"], ("r1", "r2"))
        orders = options.catalog["orders"]
        self.assertEqual(
            (orders.sequence, orders.negative, orders.positions_name),
            ("orders_seq", True, "orders"),
        )
        (query,) = orders.queries
        self.assertEqual(
            (query.ids.table, query.ids.id_column, query.ids.writer_column),
            ("shop.orders", "id", "writer"),
        )

    def test_settings_travel(self) -> None:
        """
        The settings of a job are passed to the data source unchanged; their ``repr``
        hides the password.
        """
        path = self._config()
        settings = PipelineSettings.of_config([path])
        passed = SourceOptions.parse(reader_options(settings))
        read = SourceOptions.parse({"config": path})
        self.assertEqual(passed.catalog, read.catalog)
        self.assertEqual(
            {k: tuple(v) for k, v in passed.declared_writers.items()},
            dict(read.declared_writers),
        )
        self.assertEqual(passed.conninfo["password"], "hush hush")
        self.assertNotIn("hush", repr(settings))

    def test_settings_of_dsn_travel(self) -> None:
        """Settings that contain only a database are passed to the data source, too."""
        options = SourceOptions.parse(reader_options(PipelineSettings({"dbname": "y"})))
        self.assertEqual(options.conninfo, {"dbname": "y"})


class TokenTests(SynchronousTestCase):
    """Tests for the text forms of tokens."""

    def test_forms(self) -> None:
        """
        A token may be a number, a text, or a JSON object of numbers, texts or
        positions.
        """
        names = {1: "a", 2: "b"}

        def parse(text: str) -> dict[str, StreamOffset]:
            return parse_token(text, ["events"], names.__getitem__)

        self.assertEqual(parse("5"), {"events": StreamOffset(5)})
        self.assertEqual(parse("m5~2.7"), {"events": StreamOffset(5, {"b": 7})})
        self.assertEqual(
            parse('{"events": "m5~1.7", "caches": 3, "x": {"minimum": 1}}'),
            {
                "events": StreamOffset(5, {"a": 7}),
                "caches": StreamOffset(3),
                "x": StreamOffset(1),
            },
        )

    def test_unknown_instance(self) -> None:
        """The error for an instance that is not in the database names the instance."""
        error = self.assertRaises(
            PipelineError, parse_token, "m5~9.7", [], {}.__getitem__
        )
        self.assertIn("9", str(error))

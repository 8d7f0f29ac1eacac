"""Tests that the examples of the manual run and its commands exist."""

from __future__ import annotations

import contextlib
import html
import importlib
import io
import json
import re
import runpy
import shlex
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import psycopg2
import treq
from prometheus_client import CollectorRegistry
from treq.testing import StubTreq
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource

from synapse_replication import api
from synapse_replication.cli.main import cli
from synapse_replication.config.process import load_config
from synapse_replication.errors import ConfigError
from synapse_replication.handlers.events import Discarded, DiscardReason
from synapse_replication.handlers.host_parts import (
    BackgroundProcesses,
    StreamTable,
    WriteNotifier,
)
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.stream import (
    CheckedStream,
    StreamUpdateResult,
    UpdateFunction,
)
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.doubles import EventRecorder
from synapse_replication.testing.servers import shared_postgres

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PAGES = [ROOT / "README.rst", *sorted((ROOT / "docs").glob("*.rst"))]


class ReadingService(Resource):
    """The service that the example ``readings.py`` asks; it has two readings."""

    isLeaf = True  # noqa: N815
    is_down = False

    def render_GET(self, request: Any) -> bytes:
        if self.is_down:
            return b"down for maintenance"
        if request.path.endswith(b"/newest"):
            return b"2"
        after, upto = (int(request.args[key][0]) for key in (b"after", b"upto"))
        upto = min(upto, after + 2)
        rows = [[n, ["Oslo", n / 2]] for n in range(after + 1, upto + 1)]
        return json.dumps({"rows": rows, "upto": upto}).encode()


def run_example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def declared_orders() -> TableStream:
    orders = run_example("orders.py")["ORDERS"]
    assert isinstance(orders, TableStream)
    return orders


class ConfigurationExamplesTests(SynchronousTestCase):
    def test_main_process(self) -> None:
        """The example of a homeserver's configuration is valid."""
        config = load_config([str(EXAMPLES / "homeserver.yaml")], "main")
        self.assertEqual(
            config.writers["events"], ("event_persister1", "event_persister2")
        )

    def test_tls(self) -> None:
        """The example of TLS is valid except that the files it names are missing."""
        files = [str(EXAMPLES / name) for name in ("homeserver.yaml", "tls.yaml")]
        with self.assertRaises(ConfigError) as caught:
            load_config(files, "worker")
        (problem,) = caught.exception.problems
        self.assertIn("No such file or directory: '/etc/synapse/", problem.problem)

    def test_worker(self) -> None:
        """The example of a worker's file is valid with the homeserver's file."""
        files = [str(EXAMPLES / name) for name in ("homeserver.yaml", "worker.yaml")]
        config = load_config(files, "worker")
        self.assertEqual(config.instance_name, "stream_writer1")
        self.assertEqual(config.writers["typing"], ("stream_writer1",))

    def test_direct_tcp(self) -> None:
        """The example of direct TCP is valid with the homeserver's file."""
        files = [
            str(EXAMPLES / name) for name in ("homeserver.yaml", "direct_tcp.yaml")
        ]
        config = load_config(files, "worker")
        self.assertEqual(len(config.tcp_connect), 3)

    def test_sentinel(self) -> None:
        """
        The example of Sentinel is valid except that the files it names are missing.
        """
        files = [str(EXAMPLES / name) for name in ("homeserver.yaml", "sentinel.yaml")]
        with self.assertRaises(ConfigError) as caught:
            load_config(files, "main")
        self.assertEqual(
            [problem.key for problem in caught.exception.problems],
            ["redis.password_path", "redis.sentinel.password_path"],
        )

    def test_tracing(self) -> None:
        """The example of tracing is valid with the homeserver's file."""
        files = [str(EXAMPLES / name) for name in ("homeserver.yaml", "tracing.yaml")]
        config = load_config(files, "main")
        assert config.tracing is not None
        self.assertEqual(config.tracing.endpoint, "http://localhost:4318/v1/traces")

    def test_declared_stream(self) -> None:
        """The YAML and the Python example declare the same stream."""
        config = load_config([str(EXAMPLES / "orders.yaml")], "main")
        (stream,) = config.streams
        assert isinstance(stream, TableStream)
        declared = declared_orders()
        for attribute in ("name", "table", "columns", "sequence", "writers"):
            self.assertEqual(getattr(stream, attribute), getattr(declared, attribute))

    def test_monitor_of_a_server(self) -> None:
        """The file for the command line declares the stream of the complete server."""
        config = load_config([str(EXAMPLES / "shop_monitor.yaml")], "main")
        (stream,) = config.streams
        assert isinstance(stream, TableStream)
        declared = declared_orders()
        for attribute in ("name", "table", "columns", "sequence"):
            self.assertEqual(getattr(stream, attribute), getattr(declared, attribute))


class CodeExamplesTests(SynchronousTestCase):
    def test_writer(self) -> None:
        """The example writes two rows under one token at each interval."""
        description = declared_orders().description
        row_type = description.codec.row_type
        written: list[Any] = []

        async def write(rows: list[Any]) -> int:
            written.append(rows)
            return len(written)

        stream = SimpleNamespace(write=write, description=description)
        host = SimpleNamespace(
            streams=SimpleNamespace(get_streams=lambda: {"orders": stream}),
            run_as_background_process=lambda name, func: Deferred.fromCoroutine(func()),
        )
        service = run_example("order_writer.py")["make_writer"](host, {"interval": 5})
        service.clock = Clock()
        service.startService()
        service.clock.advance(5)
        service.stopService()
        expected = [row_type("o1", "first"), row_type("o2", None)]
        self.assertEqual(written, [expected, expected])

    def test_sink(self) -> None:
        """The example of a sink prints the rows and positions delivered to it."""
        row_type: Any = declared_orders().row_type
        sink = run_example("order_sink.py")["make_sink"](None, {})
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            sink.on_rdata("orders", "writer1", 7, [row_type("o1", None)])
            sink.on_position("orders", "writer1", 8)
        self.assertEqual(
            printed.getvalue(),
            "orders writer1 7 o1 None\norders writer1 has nothing more up to 8\n",
        )

    def test_stream_in_memory(self) -> None:
        """
        The example of a stream in memory is written here and fetched from other
        writers.
        """
        fetched: list[tuple[str, str, int, int]] = []

        def fetch_from_writer(name: str) -> UpdateFunction:
            async def fetch(
                writer: str, after: int, upto: int, limit: int
            ) -> StreamUpdateResult:
                fetched.append((name, writer, after, upto))
                return StreamUpdateResult([], upto, False)

            return fetch

        example = run_example("cursors.py")
        streams, notifier = StreamTable(), WriteNotifier()
        host = SimpleNamespace(
            identity=Identity("example.com", "writer1", "id"),
            streams=streams,
            notifier=notifier,
            fetch_from_writer=fetch_from_writer,
        )
        example["add_stream"](host, {"writer": "writer1"})
        pokes: list[None] = []
        notifier.add_replication_callback(lambda: pokes.append(None))
        (stream,) = streams.get_streams_to_replicate()
        assert isinstance(stream, MemoryStream)
        self.assertEqual(stream.write([example["CursorRow"]("d1", 7)]), 1)
        self.assertEqual(len(pokes), 1)
        rows = self.successResultOf(
            Deferred.fromCoroutine(stream.get_updates_since("writer1", 0, 1))
        )
        self.assertEqual(rows.updates, [(1, ["d1", 7])])
        self.successResultOf(
            Deferred.fromCoroutine(stream.get_updates_since("other", 3, 5))
        )
        self.assertEqual(fetched, [("cursors", "other", 3, 5)])

    def test_readings(self) -> None:
        """
        A stream fetches its rows from a service; its writer announces new ones, after a
        failed request and a restart, too.
        """
        saved = Path(self.mktemp())
        service = ReadingService()
        stub: Any = StubTreq(service)
        self.patch(treq, "get", stub.get)
        recorder = EventRecorder()
        pokes: list[None] = []

        def start(name: str) -> tuple[StreamTable, Any]:
            streams, notifier = StreamTable(), WriteNotifier()
            notifier.add_replication_callback(lambda: pokes.append(None))
            host = SimpleNamespace(
                identity=Identity("example.com", name, "id"),
                streams=streams,
                notifier=notifier,
                run_as_background_process=BackgroundProcesses(recorder),
            )
            config = {
                "writer": "w",
                "url": "http://service/readings",
                "saved_token": str(saved),
            }
            return streams, run_example("readings.py")["add_stream"](host, config)

        streams, timer = start("w")
        stream: Any = streams.get_streams()["readings"]
        self.assertIsInstance(stream, CheckedStream)
        self.assertEqual(streams.get_streams_to_replicate(), [stream])
        fetched = Deferred.fromCoroutine(stream.get_updates_since("w", 1, 9))
        stub.flush()
        page = self.successResultOf(fetched)
        self.assertEqual(
            (page.updates, page.upto_token, page.limited),
            ([[2, ["Oslo", 1.0]], [3, ["Oslo", 1.5]]], 3, True),
        )
        row = stream.description.codec.from_json(["Oslo", 1.0])
        self.assertEqual((row.place, row.degrees), ("Oslo", 1.0))

        timer.clock = Clock()
        service.is_down = True
        timer.startService()
        stub.flush()
        ((what, error),) = recorder.failures
        self.assertEqual(what, "poll-readings")
        self.assertIsInstance(error, api.CatchUpError)
        self.assertEqual(stream.minimal_local_current_token(), 0)
        service.is_down = False
        for _ in range(2):
            timer.clock.advance(1)
            stub.flush()
        self.assertEqual(stream.minimal_local_current_token(), 2)
        self.assertEqual(len(pokes), 1)
        self.successResultOf(timer.stopService())

        for name, token in (("w", 2), ("reader", 0)):
            streams, timer = start(name)
            stream = streams.get_streams()["readings"]
            self.assertEqual(stream.current_token("w"), token)
        self.assertIsNone(timer)
        self.assertEqual(streams.get_streams_to_replicate(), [])

    def test_hooks(self) -> None:
        """The example of hooks logs a stalled stream."""
        reactor = Clock()
        clock: Any = SimpleNamespace(call_later=reactor.callLater)
        failures: list[object] = []
        status = StatusObserver(
            "x", "me", [("orders", "w1")], monotonic=reactor.seconds
        )
        hooks = ReplicationHooks(
            clock, status.snapshot, lambda what, error: failures.append(error)
        )
        run_example("hooks.py")["subscribe"](SimpleNamespace(hooks=hooks), {})
        hooks.start()
        with capturedLogs() as logged:
            reactor.pump([1.0] * 12)
        (event,) = logged
        self.assertIn("orders is stalled", formatEvent(event))
        self.assertEqual(failures, [])

    def test_observer(self) -> None:
        """The example of an observer counts and prints discarded rows."""
        registry = CollectorRegistry()
        observer = run_example("observer.py")["make_observer"](
            registry, "example.com", "w1"
        )
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            observer.observe(Discarded("events", "w1", DiscardReason.OLD_TOKEN, 3))
        self.assertEqual(printed.getvalue(), "3 of events: old_token\n")
        labels = {
            "stream_name": "events",
            "reason": "old_token",
            "server_name": "example.com",
        }
        value = registry.get_sample_value("synapse_replication_discarded_total", labels)
        self.assertEqual(value, 3)

    def test_own_test(self) -> None:
        """The example of a trial test passes under trial."""
        case = run_example("test_sink.py")["CollectingSinkTests"]
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        self.assertEqual((result.testsRun, result.errors, result.failures), (1, [], []))


class ApiPageTests(SynchronousTestCase):
    def test_every_public_name(self) -> None:
        """The reference lists every public name once, and no other name."""
        page = (ROOT / "docs" / "api.rst").read_text()
        documented = re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE)
        self.assertEqual(sorted(documented), dir(api))


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of lines of a page that can be wrapped.

    Skips literal blocks, tables and titles; a line of one or two long words is empty.
    """
    literal: int | None = None
    in_table = False
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            in_table = False
            continue
        indent = len(line) - len(line.lstrip())
        if literal is not None and indent > literal:
            continue
        literal = None
        in_table = in_table or set(line) <= {"=", " "}
        directive = re.match(r" *\.\. [\w-]+::", line)
        if line.endswith("::") or directive:
            literal = indent
        is_title = number < len(lines) and set(lines[number]) in ({"~"}, {"-"})
        if not (in_table or directive or is_title or set(line) == {"~"}):
            yield number, line if len(words) > 2 else ""


class LanguageTests(SynchronousTestCase):
    def test_sentences_have_a_subject(self) -> None:
        """No sentence or title opens with a headless "who" or "what"."""
        for page in PAGES:
            text = page.read_text()
            for match in re.finditer(
                r"(?:^|\n\n|[.:] +|\* )((?:What|Who|Whoever)\b[^.?]*[.?]?)", text
            ):
                sentence = " ".join(match[1].split())
                self.assertTrue(sentence.endswith("?"), f"{page.name}: {sentence}")


class ImagesTests(SynchronousTestCase):
    def test_diagram(self) -> None:
        """The drawing of a row's path contains every label of its source."""
        images = ROOT / "docs" / "images"
        source = (images / "path-of-a-row.dot").read_text()
        drawn = html.unescape((images / "path-of-a-row.svg").read_text())
        for label in re.findall(r'label="([^"]+)"', source):
            for line in label.split("\\n"):
                self.assertIn(f">{line}<", drawn)

    def test_ratios(self) -> None:
        """The plot of the benchmark has the tasks and ratios of the table, in order."""
        images = ROOT / "docs" / "images"
        page = (ROOT / "docs" / "performance.rst").read_text()
        table = page.partition("\nFigures\n")[2]
        rows = re.findall(r"\* - (.+)\n +- .+\n +- .+\n +- .+\n +- ([\d.]+)\n", table)
        self.assertGreater(len(rows), 15)
        drawn = html.unescape((images / "performance-ratios.svg").read_text())
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
        tasks = [text for text in texts if text in dict(rows)]
        self.assertEqual(tasks, [task for task, _ in reversed(rows)])
        ratios = [f"{float(ratio):g}" for _, ratio in reversed(rows)]
        self.assertEqual(
            [text for text in texts if text in ratios][-len(rows) :], ratios
        )


class LineLengthTests(SynchronousTestCase):
    def test_prose(self) -> None:
        """Lines of prose have at most 88 columns."""
        for page in PAGES:
            for number, line in prose(page):
                self.assertLessEqual(len(line), 88, f"{page.name}:{number}: {line}")


def named_tests(text: str) -> list[str]:
    """Return the names of tests in a text.

    :raises AssertionError: if one of the tests does not exist.
    """
    names = re.findall(r"``(tests(?:\.\w+){3,})``", text)
    for name in names:
        module, case, method = name.rsplit(".", 2)
        test = getattr(
            getattr(importlib.import_module(module), case, None), method, None
        )
        assert callable(test), f"there is no test {name}"
    return names


class PromisesTests(SynchronousTestCase):
    def test_each_has_a_test(self) -> None:
        """Each promise of the page names at least one test that exists."""
        page = (ROOT / "docs" / "promises.rst").read_text()
        promises = [
            cells
            for row in page.split("\n   * - ")[1:]
            if (cells := row.partition("\n     - "))[0] != "promise"
        ]
        self.assertGreater(len(promises), 200)
        for promise, _, tests in promises:
            self.assertTrue(named_tests(tests), promise)

    def test_each_once(self) -> None:
        """No promise is listed twice."""
        page = (ROOT / "docs" / "promises.rst").read_text()
        promises = re.findall(r"^   \* - ((?!promise$).+)$", page, re.MULTILINE)
        self.assertEqual(len(promises), len(set(promises)))


class FailureModesTests(SynchronousTestCase):
    def test_tests_exist(self) -> None:
        """Every test that the page, or the one on security, names exists."""
        pages = [
            ROOT / "docs" / f"{name}.rst" for name in ("failure-modes", "security")
        ]
        texts = "".join(page.read_text() for page in pages)
        self.assertGreater(len(named_tests(texts)), 150)

    def test_references_in_code(self) -> None:
        """
        Each module has at most one reference to the page, and it names existing rules.
        """
        page = (ROOT / "docs" / "failure-modes.rst").read_text()
        rules = set(re.findall(r"^\.\. _(failure-[\w-]+):$", page, re.MULTILINE))
        found = 0
        for module in sorted((ROOT / "synapse_replication").rglob("*.py")):
            _, *references = module.read_text().split("docs/failure-modes.rst")
            self.assertLessEqual(len(references), 1, module)
            for reference in references:
                named = re.findall(r"failure-[\w-]+", reference.partition('"""')[0])
                self.assertTrue(named, module)
                self.assertLessEqual(set(named), rules, module)
                found += 1
        self.assertGreater(found, 20)

    def test_each_rule_has_a_test(self) -> None:
        """Each rule of the page names at least one test."""
        page = (ROOT / "docs" / "failure-modes.rst").read_text()
        _, *rules = page.split(".. _failure-")
        for rule in rules:
            self.assertIn("* ``tests.", rule, rule.splitlines()[0])


class TableExampleTests(SynchronousTestCase):
    def test_tables_fit_the_declaration(self) -> None:
        """The example's table has the columns that the stream declares."""
        declared = declared_orders()
        dsn = shared_postgres().new_database()
        with (
            contextlib.closing(psycopg2.connect(dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute((EXAMPLES / "orders.sql").read_text())
            columns = ", ".join(
                [
                    declared.id_column,
                    str(declared.writer_column),
                    *declared.column_names,
                ]
            )
            cursor.execute(f"SELECT {columns} FROM {declared.table}")
            self.assertEqual(cursor.fetchall(), [])
            cursor.execute(f"SELECT nextval('{declared.sequence}')")
            self.assertEqual(cursor.fetchone(), (2,))


def leaf_commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield each command that is not a group, with its words."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaf_commands(found, (*path, name))


def parse_command(line: str) -> None:
    """Parse a command line without running it.

    :raises click.UsageError: if there is no such command or option.
    """
    _, *words = shlex.split(re.split(r" \||\\$", line)[0])
    command: click.Command = cli
    while isinstance(command, click.Group):
        found = command.get_command(
            click.Context(command), words.pop(0) if words else ""
        )
        if found is None:
            raise click.UsageError("there is no such command")
        command = found
    context = click.Context(command, **command.context_settings)
    command.make_parser(context).parse_args(words)


class CommandsInThePagesTests(SynchronousTestCase):
    def check(self, where: str, line: str) -> None:
        try:
            parse_command(line)
        except click.UsageError as error:
            self.fail(f"{where}: {line}: {error}")

    def test_commands_exist(self) -> None:
        """Each command shown on a page exists, with the options shown."""
        shown = [
            (page.name, line.strip())
            for page in PAGES
            for line in page.read_text().splitlines()
            if re.match(r"    ?synapse-replication [a-z]", line)
        ]
        self.assertGreater(len(shown), 4)
        for page, line in shown:
            self.check(page, line)

    def test_examples_in_help(self) -> None:
        """The help of each command ends with examples that are valid command lines."""
        commands = list(leaf_commands(cli))
        self.assertGreater(len(commands), 18)
        for path, command in commands:
            name = " ".join(path)
            lines = (command.epilog or "").split("\n")
            self.assertEqual(lines[:2], ["\b", "Examples:"], name)
            for line in lines[2:]:
                self.assertIn(f"  synapse-replication {name}", line)
                self.check(name, line)

    def test_exit_statuses(self) -> None:
        """The table of exit statuses has exactly one row for each command."""
        page = (ROOT / "docs" / "commands.rst").read_text()
        table = page.partition("Exit status\n")[2].partition("\n.. click::")[0]
        rows = re.findall(r"^   \* - (``(?:.|\n       ``)*)$", table, re.MULTILINE)
        names = [name for row in rows for name in re.findall(r"``([^`]+)``", row)]
        commands = [" ".join(path) for path, _ in leaf_commands(cli)]
        self.assertEqual(sorted(names), sorted(commands))

    def test_readme_links_exist(self) -> None:
        """The files that the README links to exist."""
        text = (ROOT / "README.rst").read_text()
        links = re.findall(r"<((?:docs/|CHANGES)[^>]*)>`_", text)
        self.assertGreater(len(links), 4)
        for link in links:
            self.assertTrue((ROOT / link).is_file(), link)

"""Tests for synapse_replication.app.tracing_export."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace.export import SpanExporter
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import capturedLogs, formatEvent

from synapse_replication.app.tracing_export import (
    EXPORT_TIMEOUT,
    SpanExport,
    _TwistedLogHandler,
)
from synapse_replication.config.process import ProcessConfig, load_config
from synapse_replication.transport.reactor import as_reactor
from tests.support.config_files import FilesMixin


def export_of(config: ProcessConfig) -> SpanExport:
    return SpanExport(config.tracing, config.server_name, config.instance_name)


class SpanExportTests(FilesMixin):
    def load(self, **own: object) -> ProcessConfig:
        settings = {
            "server_name": "x.test",
            "redis": {"enabled": True},
            "synapse_replication": {"streams": ["typing"], **own},
        }
        return load_config([self.write("h.yaml", json.dumps(settings))])

    def test_not_configured(self) -> None:
        """
        Without configuration, spans are not recorded, and nothing needs to be stopped.
        """
        export = export_of(self.load())
        with export.tracer.start_as_current_span("work") as span:
            self.assertFalse(span.is_recording())
        self.assertIsNone(export.stop(as_reactor(MemoryReactorClock())))

    def test_not_global(self) -> None:
        """The tracer is not installed globally."""
        export = export_of(self.load(tracing={"endpoint": "http://127.0.0.1:1"}))
        assert export._provider is not None
        self.addCleanup(export._provider.shutdown)
        self.assertIsNot(trace.get_tracer_provider(), export._provider)

    def test_file(self) -> None:
        """Spans are appended to a file, as one JSON object in each line."""
        path = self.folder.resolve() / "spans.jsonl"
        for number in range(2):
            export = export_of(self.load(tracing={"endpoint": path.as_uri()}))
            assert export._provider is not None
            with export.tracer.start_as_current_span(f"work {number}") as span:
                self.assertTrue(span.is_recording())
            export._provider.shutdown()
        spans = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertEqual([span["name"] for span in spans], ["work 0", "work 1"])
        attributes = spans[0]["resource"]["attributes"]
        self.assertEqual(attributes["service.namespace"], "x.test")
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)

    def test_console(self) -> None:
        """Spans are printed on standard output."""
        out = io.StringIO()
        self.patch(sys, "stdout", out)
        export = export_of(self.load(tracing={"endpoint": "console"}))
        assert export._provider is not None
        with export.tracer.start_as_current_span("work"):
            pass
        export._provider.shutdown()
        self.assertEqual(json.loads(out.getvalue())["name"], "work")


class StopTests(FilesMixin):
    def setUp(self) -> None:
        super().setUp()
        settings = {
            "server_name": "x.test",
            "redis": {"enabled": True},
            "synapse_replication": {
                "streams": ["typing"],
                "tracing": {"endpoint": "http://127.0.0.1:1"},
            },
        }
        self.export = export_of(load_config([self.write("h", json.dumps(settings))]))
        self.reactor: Any = _OneThread()

    def test_in_time(self) -> None:
        """If all spans are sent in time, no timer remains."""
        stopped = self.export.stop(self.reactor)
        assert stopped is not None
        self.assertNoResult(stopped)
        self.reactor.run_waiting()
        self.successResultOf(stopped)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_a_collector_that_hangs(self) -> None:
        """
        The exporter is shut down at the time limit, so that an unresponsive collector
        cannot delay the end of the process.
        """
        exporter = self.export._exporter = _Exporter()
        stopped = self.export.stop(self.reactor)
        assert stopped is not None
        self.reactor.advance(EXPORT_TIMEOUT - 0.1)
        self.assertFalse(exporter.is_shut_down)
        self.reactor.advance(0.1)
        self.assertTrue(exporter.is_shut_down)
        self.reactor.run_waiting()
        self.successResultOf(stopped)


class _Exporter(SpanExporter):
    is_shut_down = False

    def shutdown(self) -> None:
        self.is_shut_down = True


class _OneThread(Clock):
    """A reactor whose thread pool runs its work on request."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Callable[[], None]] = []

    def getThreadPool(self) -> _OneThread:
        return self

    def callInThreadWithCallback(
        self,
        on_result: Callable[[bool, object], None],
        func: Callable[..., object],
        *args: object,
        **kwargs: object,
    ) -> None:
        self._waiting.append(lambda: on_result(True, func(*args, **kwargs)))

    def callFromThread(self, func: Callable[..., object], *args: object) -> None:
        func(*args)

    def run_waiting(self) -> None:
        for run in self._waiting:
            run()


class LogTests(FilesMixin):
    def record(self, level: int, text: str, *args: object) -> logging.LogRecord:
        return logging.LogRecord(
            "opentelemetry.x", level, __file__, 1, text, args, None
        )

    def test_levels(self) -> None:
        """Log records of OpenTelemetry reach our log with the same level and text."""
        handler = _TwistedLogHandler()
        with capturedLogs() as logs:
            handler.emit(self.record(logging.WARNING, "slow: %s", 7))
            handler.emit(self.record(logging.ERROR, "no %s", "way"))
        self.assertEqual(
            [(event["log_level"].name, formatEvent(event)) for event in logs],
            [
                ("warn", "OpenTelemetry: slow: 7"),
                ("error", "OpenTelemetry: no way"),
            ],
        )

    def test_repeated(self) -> None:
        """A repeated message is logged once a minute."""
        handler = _TwistedLogHandler()
        with capturedLogs() as logs:
            for number in range(100):
                handler.emit(self.record(logging.ERROR, "no way for %s", number))
        self.assertEqual(len(logs), 1)

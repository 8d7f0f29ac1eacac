"""Tests for the section ``synapse_replication.tracing``."""

from __future__ import annotations

import json
from typing import Any

from synapse_replication.config import shared_options
from synapse_replication.config.process import ProcessConfig, load_config
from synapse_replication.config.shared_options import TracingOptions
from synapse_replication.errors import ConfigError
from tests.support.config_files import FilesMixin


class TracingConfigTests(FilesMixin):
    def load(self, **tracing: Any) -> ProcessConfig:
        settings = {
            "server_name": "x.test",
            "redis": {"enabled": True},
            "synapse_replication": {"streams": ["typing"], "tracing": tracing},
        }
        return load_config([self.write("h.yaml", json.dumps(settings))])

    def problem(self, **tracing: Any) -> tuple[str, str, str]:
        with self.assertRaises(ConfigError) as caught:
            self.load(**tracing)
        (problem,) = caught.exception.problems
        return problem.key, problem.problem, problem.hint

    def test_endpoint(self) -> None:
        """An endpoint without a path gets the default path; any other path is kept."""
        self.assertEqual(
            self.load(endpoint="http://c.test:4318").tracing,
            TracingOptions(endpoint="http://c.test:4318/v1/traces"),
        )
        for endpoint in ("https://c.test/otlp?x=1", "http://c.test/v1/traces"):
            config = self.load(endpoint=endpoint)
            self.assertEqual(config.tracing, TracingOptions(endpoint=endpoint))
        config = self.load(endpoint="http://c.test/")
        self.assertEqual(
            config.tracing, TracingOptions(endpoint="http://c.test/v1/traces")
        )

    def test_file_and_console(self) -> None:
        """Spans can be appended to a file, or printed, without the extra."""
        self.patch(shared_options, "EXPORTER", "nothing.of.this")
        config = self.load(endpoint="console")
        assert config.tracing is not None
        self.assertIsNone(config.tracing.file)
        path = self.folder.resolve() / "spans of x.jsonl"
        config = self.load(endpoint=path.as_uri())
        assert config.tracing is not None
        self.assertEqual(config.tracing.file, path)
        folder = path.parent
        for bad in (folder / "none" / "x", folder):
            key, problem, hint = self.problem(endpoint=bad.as_uri())
            self.assertEqual(key, "synapse_replication.tracing")
            self.assertIn(f"cannot be written to {bad}", problem)
            self.assertIn("a folder that exists", hint)
        for bad_url in ("file:spans", "file://host/spans", "stdout"):
            key, _, hint = self.problem(endpoint=bad_url)
            self.assertEqual(key, "synapse_replication.tracing.endpoint")
            self.assertIn("file:///var/log/spans.jsonl", hint)

    def test_all(self) -> None:
        """
        Headers, sample ratio and service name are read; headers are not in the repr.
        """
        config = self.load(
            endpoint="http://c.test:4318",
            headers={"Authorization": "Bearer hush"},
            sample_ratio=0.1,
            service_name="matrix",
        )
        assert config.tracing is not None
        (secret,) = config.tracing.headers.values()
        self.assertEqual(secret, "Bearer hush")
        self.assertEqual(config.tracing.sample_ratio, 0.1)
        self.assertEqual(config.tracing.service_name, "matrix")
        self.assertNotIn("hush", repr(config))

    def test_none(self) -> None:
        """Without the section, tracing is disabled."""
        settings = {"server_name": "x.test", "redis": {"enabled": True}}
        own = {"synapse_replication": {"streams": ["typing"]}}
        path = self.write("h.yaml", json.dumps({**settings, **own}))
        self.assertIsNone(load_config([path]).tracing)

    def test_problems(self) -> None:
        """Each problem is reported with a hint."""
        key, _, hint = self.problem(endpoint="localhost:4318")
        self.assertEqual(key, "synapse_replication.tracing.endpoint")
        self.assertIn("http://localhost:4318", hint)
        key, _, hint = self.problem(endpoint="http://c.test", sample_ratio=2)
        self.assertEqual(key, "synapse_replication.tracing.sample_ratio")
        self.assertIn("from 0 to 1", hint)
        key, _, hint = self.problem(endpoint="http://c.test", header={})
        self.assertEqual(key, "synapse_replication.tracing.header")
        self.assertIn("'headers'", hint)

    def test_not_installed(self) -> None:
        """If the extra is not installed, the problem says what to install."""
        for name in ("opentelemetry.exporter.nothing", "nothing.of.this"):
            self.patch(shared_options, "EXPORTER", name)
            key, problem, hint = self.problem(endpoint="http://c.test")
            self.assertEqual(key, "synapse_replication.tracing")
            self.assertIn("is not installed", problem)
            self.assertIn("synapse_replication[otlp]", hint)

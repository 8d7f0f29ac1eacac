"""Tests for synapse_replication.config.structuring."""

from __future__ import annotations

from typing import Any

from rich.pretty import pretty_repr
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config.models import SynapseFile
from synapse_replication.config.process import read_own_section
from synapse_replication.config.structuring import Section, read_value
from synapse_replication.config.yaml_files import MergedFiles


class HintsTests(SynchronousTestCase):
    def problems_of(self, section: type[Section], value: Any) -> list[str]:
        merged = MergedFiles(["f.yaml"], value, {})
        read_value(section, value, (), merged)
        read_own_section(merged)
        return [f"{problem.key}: {problem.hint}" for problem in merged.problems]

    def test_every_problem_has_a_hint(self) -> None:
        """Each kind of problem has a hint."""
        self.assertEqual(
            self.problems_of(
                SynapseFile,
                {
                    "server_name": "a b",
                    "database": 1,
                    "redis": {"dbid": -1, "password": 5, "use_tls": "x"},
                    "stream_writers": [],
                    "listeners": {},
                    "worker_name": 7,
                },
            ),
            [
                "server_name: write the homeserver's name, without slashes; for "
                "instance `server_name: example.com`",
                "database: write a mapping: indented `key: value` lines",
                "redis.password: write a text; in quotes if it looks like a number",
                "redis.dbid: write a number in the range",
                "redis.use_tls: write true or false",
                "stream_writers: write a mapping: indented `key: value` lines",
                "listeners: write a list: one line for each entry, beginning with `- `",
                "worker_name: write a text; in quotes if it looks like a number",
            ],
        )

    def test_unknown_own_keys(self) -> None:
        """
        An unknown key of the project's section is reported with a suggestion or the
        known keys.
        """
        self.assertCountEqual(
            self.problems_of(
                SynapseFile,
                {
                    "server_name": "x",
                    "synapse_replication": {
                        "zzz": 1,
                        "direct_tcp": {"conect": "x"},
                        "modules": [{"module": "a.b", "confg": {}}],
                    },
                },
            ),
            [
                "synapse_replication.modules[0].confg: did you mean 'config'?",
                "synapse_replication.direct_tcp.conect: did you mean 'connect'?",
                "synapse_replication.zzz: write one of allow_unprotected_listeners, "
                "command_sink, direct_tcp, extension, fill_sink, http, log_level, "
                "modules, receiving, row_sink, streams, tls, tracing, "
                "writer_lock",
            ],
        )

    def test_every_entry_is_checked(self) -> None:
        """Each invalid entry of a list or mapping is reported, and each key of it."""
        self.assertCountEqual(
            self.problems_of(
                SynapseFile,
                {
                    "server_name": "x\n",
                    "database": {"args": {5: "x"}},
                    "stream_writers": {"events": [1, "a", {}], "typing": {}},
                    "synapse_replication": {
                        "log_level": "loud",
                        "modules": [{}, {"module": "no_dots"}],
                        "tracing": {"endpoint": "http://c:x", "service_name": ""},
                    },
                },
            ),
            [
                "server_name: write the homeserver's name, without slashes; for "
                "instance `server_name: example.com`",
                "database.args.5: write the key in quotes",
                "stream_writers.events[0]: write a text; in quotes if it looks like a "
                "number",
                "stream_writers.events[2]: write a text; in quotes if it looks like a "
                "number",
                "stream_writers.typing: write a list: one line for each entry, "
                "beginning with `- `",
                "synapse_replication.modules[0].module: write the dotted name of a "
                "function, for instance my_package.my_module.make_sink",
                "synapse_replication.modules[1].module: write the dotted name of a "
                "function, for instance my_package.my_module.make_sink",
                "synapse_replication.log_level: write one of debug, info, warn, error, "
                "critical",
                "synapse_replication.tracing.endpoint: write the URL of a collector, "
                "for instance http://localhost:4318, or the URL of a file, for "
                "instance file:///var/log/spans.jsonl, or console",
                "synapse_replication.tracing.service_name: write at least one "
                "character",
            ],
        )


class SecretsTests(SynchronousTestCase):
    def test_no_secret(self) -> None:
        """Neither a problem nor the representation of a section contains a secret."""
        values = {
            "server_name": "x",
            "database": {"args": {"password": "hush"}},
            "redis": {
                "password": "hush",
                "port": "hush",
                "sentinel": {"master": "a", "sentinels": "b", "password": "hush"},
            },
            "worker_replication_secret": "hush",
            "worker_name": "hu sh",
            "synapse_replication": {
                "tracing": {"endpoint": "http://c", "headers": {"a": "hush"}},
                "modules": [{"module": "a.b", "config": {"password": "hush"}}],
            },
        }
        merged = MergedFiles(["f.yaml"], values, {})
        section = read_value(SynapseFile, values, (), merged)
        own = read_own_section(merged)
        keys = [problem.key for problem in merged.problems]
        self.assertEqual(keys, ["redis.port", "worker_name"])
        self.assertEqual(section.worker_replication_secret, "hush")
        self.assertEqual(section.redis.sentinel.password, "hush")
        shown = (repr(section), pretty_repr(section), repr(own), pretty_repr(own))
        for text in (*shown, *map(str, merged.problems)):
            self.assertNotIn("hush", text)
            self.assertNotIn("hu sh", text)

"""Tests for synapse_replication.config.models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config.files import MergedFiles
from synapse_replication.config.models import (
    ListenerSection,
    OwnSection,
    RedisSection,
    SharedFile,
    problems_of,
)
from synapse_replication.streams.table import TableStream


class SectionTests(SynchronousTestCase):
    def mistakes(self, section: type[BaseModel], value: Any) -> list[str]:
        with self.assertRaises(ValidationError) as caught:
            section.model_validate(value)
        problems = problems_of(caught.exception, MergedFiles(["f.yaml"], {}, {}))
        return [f"{problem.key}: {problem.hint}" for problem in problems]

    def test_unknown_keys_of_synapse(self) -> None:
        """Keys of Synapse that we do not know are skipped, at any depth."""
        shared = SharedFile.model_validate(
            {"server_name": "x", "pid_file": 7, "redis": {"new_key": 1}}
        )
        self.assertEqual(shared.redis, RedisSection())

    def test_empty_sections(self) -> None:
        """A section with nothing in it is as good as none."""
        empty = dict.fromkeys(
            ["redis", "stream_writers", "instance_map", "listeners", "worker_listeners"]
        )
        shared = SharedFile.model_validate({"server_name": "x", **empty})
        self.assertEqual(shared, SharedFile(server_name="x"))

    def test_every_mistake_has_its_mend(self) -> None:
        """Each kind of mistake says what to write instead."""
        self.assertEqual(
            self.mistakes(
                SharedFile,
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
                "server_name: write the homeserver's name, for instance `server_name: "
                "example.com`",
                "database: write a mapping: indented `key: value` lines",
                "redis.password: write a text; in quotes if it looks like a number",
                "redis.dbid: write a number in the range",
                "redis.use_tls: write true or false",
                "stream_writers: write a mapping: indented `key: value` lines",
                "listeners: write a list: one line for each entry, beginning with `- `",
                "worker_name: write a text; in quotes if it looks like a number",
            ],
        )

    def test_unknown_keys_of_ours(self) -> None:
        """An unknown key of our own section is a mistake, with a guess or a list."""
        self.assertEqual(
            self.mistakes(
                SharedFile,
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
                "command_sink, direct_tcp, extension, http, log_level, modules, "
                "row_sink, streams, tls, tracing",
            ],
        )

    def test_streams(self) -> None:
        """A declaration becomes what code would have made of it."""
        declaration = {
            "name": "a",
            "table": "a",
            "id_column": "i",
            "columns": ["c"],
            "sequence": "s",
            "writers": "w",
        }
        own = OwnSection.model_validate({"streams": ["typing", declaration]})
        self.assertEqual(own.streams, ["typing", own.streams and own.streams[1]])
        assert own.streams is not None
        self.assertIsInstance(own.streams[1], TableStream)

    def test_listener(self) -> None:
        """A listener tells where it listens and what of ours it serves."""
        listener = ListenerSection.model_validate(
            {
                "type": "http",
                "port": 1,
                "bind_address": "::1",
                "resources": [{"names": ["client", "health"]}, {"names": "metrics"}],
            }
        )
        self.assertEqual(listener.addresses, ["::1"])
        self.assertEqual(listener.resource_names, {"health", "metrics"})
        everywhere = ListenerSection(type="metrics", port=1)
        self.assertEqual(everywhere.addresses, ["0.0.0.0"])
        self.assertEqual(everywhere.resource_names, {"metrics"})

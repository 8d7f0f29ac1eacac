"""Tests for synapse_replication.config.validation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config.models import SharedFile
from synapse_replication.config.validation import problems_of
from synapse_replication.config.yaml_files import MergedFiles


class HintsTests(SynchronousTestCase):
    def problems_of(self, section: type[BaseModel], value: Any) -> list[str]:
        with self.assertRaises(ValidationError) as caught:
            section.model_validate(value)
        problems = problems_of(caught.exception, MergedFiles(["f.yaml"], {}, {}))
        return [f"{problem.key}: {problem.hint}" for problem in problems]

    def test_every_problem_has_a_hint(self) -> None:
        """Each kind of problem has a hint."""
        self.assertEqual(
            self.problems_of(
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

    def test_unknown_own_keys(self) -> None:
        """
        An unknown key of the project's section is reported with a suggestion or the
        known keys.
        """
        self.assertEqual(
            self.problems_of(
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
                "command_sink, direct_tcp, extension, fill_sink, http, log_level, "
                "modules, receiving, row_sink, streams, tls, tracing, "
                "writer_lock",
            ],
        )

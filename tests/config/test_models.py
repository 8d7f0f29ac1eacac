"""Tests for synapse_replication.config.models."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config.models import (
    ListenerSection,
    RedisSection,
    SharedFile,
)


def sections_of(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield this section and all nested sections."""
    yield section
    for field in section.model_fields.values():
        for part in parts_of(field.annotation):
            # In Python 3.10, list[str] is an instance of type.
            is_class = isinstance(part, type) and typing.get_origin(part) is None
            if is_class and issubclass(part, BaseModel):
                yield from sections_of(part)


def parts_of(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in typing.get_args(annotation):
        yield from parts_of(argument)


class DescriptionsTests(SynchronousTestCase):
    def test_every_key(self) -> None:
        """Every key has a description for the reference manual."""
        sections = list(sections_of(SharedFile))
        self.assertGreater(len(sections), 12)
        for section in sections:
            for name, field in section.model_fields.items():
                self.assertTrue(field.description, f"{section.__name__}.{name}")


class SectionTests(SynchronousTestCase):
    def test_unknown_keys_of_synapse(self) -> None:
        """Unknown keys of Synapse are ignored at any depth."""
        shared = SharedFile.model_validate(
            {"server_name": "x", "pid_file": 7, "redis": {"new_key": 1}}
        )
        self.assertEqual(shared.redis, RedisSection())

    def test_empty_sections(self) -> None:
        """An empty section equals a missing one."""
        empty = dict.fromkeys(
            ["redis", "stream_writers", "instance_map", "listeners", "worker_listeners"]
        )
        shared = SharedFile.model_validate({"server_name": "x", **empty})
        self.assertEqual(shared, SharedFile(server_name="x"))

    def test_listener(self) -> None:
        """A listener has its addresses, and only the resources of this project."""
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

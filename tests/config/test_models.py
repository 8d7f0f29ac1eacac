"""Tests for synapse_replication.config.models."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config.models import (
    ListenerSection,
    RedisSection,
    SynapseFile,
)
from synapse_replication.config.structuring import Section, read_value
from synapse_replication.config.yaml_files import MergedFiles

T = TypeVar("T")


def sections_of(section: type[Section]) -> Iterator[type[Section]]:
    """Yield this section and all nested sections."""
    yield section
    for kind in typing.get_type_hints(section).values():
        for part in parts_of(kind):
            is_class = isinstance(part, type) and typing.get_origin(part) is None
            if is_class and issubclass(part, Section):
                yield from sections_of(part)


def parts_of(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in typing.get_args(annotation):
        yield from parts_of(argument)


def read(section: type[T], values: dict[str, Any]) -> T:
    """Read a section from values that are valid."""
    merged = MergedFiles(["f.yaml"], {}, {})
    found: T = read_value(section, values, (), merged)
    assert not merged.problems, merged.problems
    return found


class DescriptionsTests(SynchronousTestCase):
    def test_every_key(self) -> None:
        """Every key has a description for the reference manual."""
        sections = list(sections_of(SynapseFile))
        self.assertGreater(len(sections), 5)
        for section in sections:
            # From Python 3.13 on, a docstring is stored without its indentation.
            described = inspect.getdoc(section) or ""
            for attribute in attrs.fields(section):
                self.assertIn(f"\n:ivar {attribute.name}: ", described)


class SectionTests(SynchronousTestCase):
    def test_unknown_keys_of_synapse(self) -> None:
        """Unknown keys of Synapse are ignored at any depth."""
        shared = read(
            SynapseFile, {"server_name": "x", "pid_file": 7, "redis": {"new_key": 1}}
        )
        self.assertEqual(shared.redis, RedisSection())

    def test_empty_sections(self) -> None:
        """An empty section equals a missing one."""
        empty = dict.fromkeys(
            ["redis", "stream_writers", "instance_map", "listeners", "worker_listeners"]
        )
        shared = read(SynapseFile, {"server_name": "x", **empty})
        self.assertEqual(shared, SynapseFile(server_name="x"))

    def test_listener(self) -> None:
        """A listener has its addresses, and only the resources of this project."""
        section = read(
            ListenerSection,
            {
                "type": "http",
                "port": 1,
                "bind_address": "::1",
                "resources": [{"names": ["client", "health"]}, {"names": "metrics"}],
            },
        )
        listener = section.to_listener()
        self.assertEqual(listener.addresses, ("::1",))
        self.assertEqual(listener.resources, {"health", "metrics"})
        everywhere = ListenerSection(type="metrics", port=1).to_listener()
        self.assertEqual(everywhere.addresses, ("0.0.0.0",))
        self.assertEqual(everywhere.resources, {"metrics"})

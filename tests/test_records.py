"""
How records are declared: as attrs classes.

A ``msgspec.Struct`` is for bytes that are decoded into it, or for a hot path that an
attrs class would make more than 3 % slower.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import synapse_replication

_PACKAGE = Path(synapse_replication.__file__).parent

#: Classes into which bytes are decoded.
DECODED = {
    "demo/check.py": {"JournalEntry"},
    "http/client.py": {"_Answer", "_Lost"},
    "instrumentation/status/model.py": {
        "DuplicateStatus",
        "InstanceStatus",
        "LinkStatus",
        "PeerStatus",
        "ProcessStatus",
        "StallGroup",
        "WriterStatus",
    },
    "pipeline/source/offsets.py": {"StreamOffset"},
    "pipeline/source/options.py": {"_Deployment"},
    "recordings/reader.py": {"_Line"},
    "wire/extension.py": {
        "ExtensionLine",
        "ExtensionMessage",
        "Silence",
        "StreamPosition",
    },
}
#: One is created for each chunk of rows, or for each command; those of the status, for
#: each writer and each page: attrs classes take 30 % longer for a large deployment.
HOT = {
    "handlers/receiving/receiver.py": {"_Arrival", "_InterleavedArrival"},
    "instrumentation/status/assessment.py": {"Assessment"},
    "instrumentation/status/records.py": {
        "HearingRecord",
        "LinkRecord",
        "PeerRecord",
        "WriterRecord",
    },
    "instrumentation/status/verdict.py": {"Diagnosis", "Rule", "WriterFacts"},
    "streams/memory.py": {"_Entry"},
    "streams/pages.py": {"Page"},
    "streams/rows.py": {"DecodedRows"},
    "wire/commands.py": {"Command"},
    "wire/connection.py": {"Received"},
    "wire/rdata.py": {"InterleavedGroup", "RdataGroup", "RefusedLine"},
}
#: What makes a class a record without attrs, as a base class or as a decorator.
OTHER_WAYS = {"Struct", "NamedTuple", "dataclass"}


def _other_records(source: str) -> Iterator[str]:
    """Yield the names of the classes that are records without attrs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            marks = (*node.bases, *node.decorator_list)
            names = {re.split(r"[(\[]", ast.unparse(each))[0] for each in marks}
            if OTHER_WAYS & {name.rpartition(".")[2] for name in names}:
                yield node.name


class RecordTests(SynchronousTestCase):
    """The classes that are records without attrs."""

    def test_reasons(self) -> None:
        """Each has a reason, and no reason is without a class."""
        found = {
            f"{path.relative_to(_PACKAGE).as_posix()}:{name}"
            for path in _PACKAGE.rglob("*.py")
            for name in _other_records(path.read_text("utf-8"))
        }
        allowed = {
            f"{module}:{name}"
            for reasons in (DECODED, HOT)
            for module, names in reasons.items()
            for name in names
        }
        self.assertEqual(found - allowed, set(), "declare an attrs class")
        self.assertEqual(allowed - found, set(), "remove the reason")

    def test_each_way_is_found(self) -> None:
        """Each way to declare a record is found."""
        source = """
class A(msgspec.Struct, Generic[T], frozen=True): ...
class B(NamedTuple): ...
class C(typing.NamedTuple): ...
@dataclass
class D: ...
@dataclasses.dataclass(frozen=True)
class E: ...
@attrs.frozen
class F(B): ...
"""
        self.assertEqual(list(_other_records(source)), ["A", "B", "C", "D", "E"])

"""The directive ``config-reference``: lists made from the declarations of the options.

One section for each mapping that a configuration file can hold, with an entry for each
key: its type, its default and its description.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

from synapse_replication import options
from synapse_replication.config import models, process, replication_options
from synapse_replication.config.models import SynapseFile
from synapse_replication.config.process import FactorySection, own_leaves
from synapse_replication.config.yaml_files import OWN_SECTION
from synapse_replication.options import Option, declared_option, descriptions
from synapse_replication.streams.table import TableStream

#: What the sections below ``synapse_replication`` are about.
_INTRODUCTIONS = {
    "": "Settings of this package for which Synapse has no key.",
    "command_sink": "A function that you provide.",
    "direct_tcp": "Direct TCP endpoints in Twisted's syntax, for instance for TLS.",
    "extension": "The optional protocol between instances of this package.",
    "http": "Limits of the HTTP listeners.",
    "receiving": "Limits of the data and positions that are accepted from peers.",
    "row_sink": "A function that you provide.",
    "tls": "TLS between instances.",
    "tracing": "A collector to which spans are sent, by OTLP over HTTP.",
}
#: Names of types for people who write YAML.
_PLAIN = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Any: "any",
    Path: "text",
}
#: The types of a declared stream's keys, which its converters accept.
_STREAM_TYPES = {
    "columns": "mapping of column names to types (``text``, ``integer``, ``number``, "
    "``boolean``, ``json``; with ``?`` if the column may be null), or list of names",
    "writers": "text, or list of text",
}


def _sections_in(annotation: Any) -> list[type[Any]]:
    is_class = isinstance(annotation, type) and not typing.get_args(annotation)
    if is_class and attrs.has(annotation) and annotation is not TableStream:
        return [annotation]
    parts = typing.get_args(annotation)
    return [section for part in parts for section in _sections_in(part)]


def _type_name(annotation: Any, path: str, declared: Option) -> str:
    """Return the type in words; a section is a link to its list."""
    return _plain_type(annotation, path) + _bounds(declared)


def _plain_type(annotation: Any, path: str) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in arguments if part is not type(None)]
        return " or ".join(_plain_type(part, path) for part in parts)
    if origin is typing.Literal:
        return ", ".join(f"``{choice}``" for choice in arguments)
    if origin in (list, tuple):
        return f"list of {_plain_type(arguments[0], path)}"
    if origin is dict:
        return f"mapping of names to {_plain_type(arguments[1], path)}"
    if _sections_in(annotation):
        return f":ref:`{path} <{_label(path)}>`"
    return _PLAIN[annotation]


def _bounds(declared: Option) -> str:
    """Return the range of a number, or that a text is a secret, in words."""
    if declared.is_secret:
        return ", never logged"
    if declared.minimum is None:
        return ""
    if declared.maximum is not None:
        return f", {declared.minimum} to {declared.maximum}"
    return f", at least {declared.minimum}"


def _default(default: Any) -> str:
    if default is attrs.NOTHING:
        return "required"
    if isinstance(default, bool):
        return f"``{str(default).lower()}``"
    if isinstance(default, (int, float, str)):
        return f"``{default}``"
    return "--"


def _label(path: str) -> str:
    return "config-" + re.sub(r"\W+", "-", path).strip("-")


def _inner_path(path: str, name: str, annotation: Any) -> str:
    """Return the path of the keys within the key ``name``."""
    inner = f"{path}.{name}" if path else name
    kinds = {typing.get_origin(part) for part in _all_parts(annotation)}
    if list in kinds:
        return f"{inner}[]"
    return f"{inner}.NAME" if dict in kinds else inner


def _all_parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in typing.get_args(annotation):
        yield from _all_parts(part)


def _entries(rows: Sequence[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield a definition list, which a phone can show, unlike a wide table."""
    for key, kind, default, meaning in rows:
        if default not in ("required", "--"):
            default = f"default {default}"
        yield f"{key} : {kind}" + (f"; {default}" if default != "--" else "")
        yield f"   {meaning}"
        yield ""


def _title(path: str, introduction: str) -> Iterator[str]:
    title = f"``{path}``" if path else "Top-level keys"
    yield from (f".. _{_label(path or 'top-level')}:", "", title, "-" * len(title), "")
    yield from (introduction, "")


def _record(record: type[Any], path: str, shown: dict[type[Any], str]) -> Iterator[str]:
    """Yield the lines of the list of a record, and of the lists of nested records.

    :param shown: the paths of the records that already have a list.
    """
    rows, within = [], []
    meanings, kinds = descriptions(record), typing.get_type_hints(record)
    for attribute in attrs.fields(record):
        name, kind = attribute.name, kinds[attribute.name]
        inner = _inner_path(path, name, kind)
        for part in _sections_in(kind):
            if part not in shown:
                shown[part] = inner
                within.append((part, inner))
            inner = shown[part]
        declared = declared_option(attribute) or Option()
        shown_type = _type_name(kind, inner, declared)
        rows.append(
            (f"``{name}``", shown_type, _default(attribute.default), meanings[name])
        )
    if record is SynapseFile:
        kind = f":ref:`{OWN_SECTION} <{_label(OWN_SECTION)}>`"
        rows.append((f"``{OWN_SECTION}``", kind, "--", _INTRODUCTIONS[""]))
    yield from _title(path, (record.__doc__ or "").partition("\n")[0])
    yield from _entries(rows)
    for part, inner in within:
        yield from _record(part, inner, shown)


def _own_section(path: tuple[str, ...], shown: dict[type[Any], str]) -> Iterator[str]:
    """Yield the lines of this package's section, or of a section in it."""
    rows: dict[str, tuple[str, str, str, str]] = {}
    within: list[Iterator[str]] = []
    for leaf in own_leaves():
        if leaf.key[: len(path)] != path:
            continue
        name, inner = leaf.key[len(path)], ".".join(leaf.key[: len(path) + 1])
        if name in rows:
            continue
        if len(leaf.key) > len(path) + 1:
            kind = f":ref:`{inner} <{_label(inner)}>`"
            rows[name] = (f"``{name}``", kind, "--", _INTRODUCTIONS[name])
            within.append(_own_section((*path, name), shown))
            continue
        kind = _type_name(leaf.type, inner, leaf.option) if name != "streams" else ""
        if name == "streams":
            inner += "[]"
            kind = f"list of names, or of :ref:`declarations <{_label(inner)}>`"
            within.append(_stream(inner))
        elif _sections_in(leaf.type) == [FactorySection]:
            inner += "[]"
            kind = _type_name(leaf.type, inner, leaf.option)
            within.append(_record(FactorySection, inner, shown))
        rows[name] = (f"``{name}``", kind, _default(leaf.default), leaf.meaning)
    introduction = _INTRODUCTIONS[path[-1] if len(path) > 1 else ""]
    yield from _title(".".join(path), introduction)
    yield from _entries(list(rows.values()))
    for lines in within:
        yield from lines


def _stream(path: str) -> Iterator[str]:
    """Yield the lines of the list of a declared stream's keys."""
    meanings = descriptions(TableStream)
    rows = []
    for field in attrs.fields(TableStream):
        if not field.init or field.name == "row_type":
            continue
        kind = _STREAM_TYPES.get(field.name) or (
            "true or false" if field.type == "bool" else "text"
        )
        if field.default is attrs.NOTHING:
            default = "required"
        elif isinstance(field.default, bool):
            default = f"``{str(field.default).lower()}``"
        else:
            default = "--"
        rows.append((f"``{field.name}``", kind, default, meanings[field.name]))
    yield from _title(path, "A stream whose rows are the rows of one of your tables.")
    yield from _entries(rows)


class ConfigReference(SphinxDirective):
    """The lists of all sections."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the lists."""
        for module in (models, options, process, replication_options):
            self.env.note_dependency(str(module.__file__))
        self.env.note_dependency(__file__)
        shown: dict[type[Any], str] = {}
        lines = StringList(
            [*_record(SynapseFile, "", shown), *_own_section((OWN_SECTION,), shown)],
            source="config/models.py",
        )
        container = nodes.section()
        container.document = self.state.document
        nested_parse_with_titles(self.state, lines, container)
        return container.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("config-reference", ConfigReference)
    return {"parallel_read_safe": True}

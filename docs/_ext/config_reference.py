"""The directive ``config-reference``: lists made from the models of the configuration.

One section for each mapping that a configuration file can hold, with an entry for each
key: its type, its default and its description.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import attrs
from docutils import nodes
from docutils.statemachine import StringList
from msgspec import NODEFAULT, Meta
from msgspec.structs import FieldInfo, fields
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

from synapse_replication.config import models, own_section
from synapse_replication.config.models import SharedFile
from synapse_replication.config.sections import Section
from synapse_replication.streams.table import TableStream

#: Names of types for people who write YAML.
_PLAIN = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Any: "any",
}
#: The types of a declared stream's keys, which its converters accept.
_STREAM_TYPES = {
    "columns": "mapping of column names to types (``text``, ``integer``, ``number``, "
    "``boolean``, ``json``; with ``?`` if the column may be null), or list of names",
    "writers": "text, or list of text",
}


def _sections_in(annotation: Any) -> list[type[Any]]:
    is_class = isinstance(annotation, type) and not typing.get_args(annotation)
    if is_class and issubclass(annotation, Section):
        return [annotation]
    parts = typing.get_args(annotation)
    return [section for part in parts for section in _sections_in(part)]


def _type_name(annotation: Any, path: str) -> str:
    """Return the type in words; a section is a link to its list."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0], path) + _bounds(arguments[1:])
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in arguments if part is not type(None)]
        return " or ".join(_type_name(part, path) for part in parts)
    if origin is typing.Literal:
        return ", ".join(f"``{choice}``" for choice in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0], path)}"
    if origin is dict:
        return f"mapping of names to {_type_name(arguments[1], path)}"
    if _sections_in(annotation):
        return f":ref:`{path} <{_label(path)}>`"
    return _PLAIN[annotation]


def _bounds(metadata: Any) -> str:
    """Return the range of a number, or that a text is a secret, in words."""
    (limits,) = metadata
    if not isinstance(limits, Meta):
        return ""
    if limits.extra:
        return ", never logged"
    if limits.ge is None:
        return ""
    if limits.le is not None:
        return f", {limits.ge} to {limits.le}"
    return f", at least {limits.ge}"


def _default(field: FieldInfo) -> str:
    if field.required:
        return "required"
    if isinstance(field.default, (types.NoneType, Section)):
        return "--"
    if field.default is NODEFAULT:
        return "--"
    if isinstance(field.default, bool):
        return f"``{str(field.default).lower()}``"
    return f"``{field.default}``"


def _meanings(section: type[Any]) -> dict[str, str]:
    """Return the descriptions of the fields in a docstring, as sentences."""
    described = re.findall(
        r":ivar (\w+): (.*?)(?=\n\s*:(?:ivar|raises) |\Z)",
        section.__doc__ or "",
        re.DOTALL,
    )
    texts = ((name, " ".join(text.split())) for name, text in described)
    return {name: text[:1].upper() + text[1:] for name, text in texts}


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


def _entries(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
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


def _section(
    section: type[Any], path: str, shown: dict[type[Any], str]
) -> Iterator[str]:
    """Yield the lines of the list of a section, and of the lists of nested sections.

    :param shown: the paths of the sections that already have a list.
    """
    rows, within = [], []
    meanings = _meanings(section)
    for field in fields(section):
        name = field.name
        inner = _inner_path(path, name, field.type)
        for part in _sections_in(field.type):
            if part not in shown:
                shown[part] = inner
                within.append((part, inner))
            inner = shown[part]
        kind = (
            f"list of names, or of :ref:`declarations <{_label(inner)}>`"
            if section is not SharedFile and name == "streams"
            else _type_name(field.type, inner)
        )
        rows.append((f"``{name}``", kind, _default(field), meanings[name]))
        if section is not SharedFile and name == "streams":
            within.append((TableStream, inner))
    yield from _title(path, (section.__doc__ or "").partition("\n")[0])
    yield from _entries(rows)
    for part, inner in within:
        yield from (
            _stream(inner) if part is TableStream else _section(part, inner, shown)
        )


def _stream(path: str) -> Iterator[str]:
    """Yield the lines of the list of a declared stream's keys."""
    meanings = _meanings(TableStream)
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
        for module in (models, own_section):
            self.env.note_dependency(str(module.__file__))
        self.env.note_dependency(__file__)
        lines = StringList(
            list(_section(SharedFile, "", {})), source="config/models.py"
        )
        container = nodes.section()
        container.document = self.state.document
        nested_parse_with_titles(self.state, lines, container)
        return container.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("config-reference", ConfigReference)
    return {"parallel_read_safe": True}

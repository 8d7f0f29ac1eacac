"""The sections of the configuration: their base classes, and how they are read.

:func:`read_value` creates a section from the merged content of the files, and reports
everything that the annotations of the section's fields do not allow. The descriptions
of the fields are those of the manual.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, TypeAlias, get_args, get_origin

import msgspec
from msgspec import Meta, Struct
from typing_extensions import override

from synapse_replication.config.yaml_files import KeyPath, MergedFiles, hint_for
from synapse_replication.data_files import read_table

#: The value of whatever is invalid; its problems have been reported.
INVALID: Final[Any] = object()

#: What to write as the value of some keys, and as any other value of a type.
_HINTS = {
    row["Value"]: row["Hint"]
    for row in read_table(Path(__file__).with_name("hints.csv"))
}


class Section(Struct, frozen=True):
    """A section that Synapse defines: unknown keys are ignored."""

    @override
    def __repr__(self) -> str:
        # Without the values: some are secrets.
        return f"{type(self).__name__}(...)"

    @override
    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the values that rich shows, for instance in a traceback: none."""
        return []


class StrictSection(Section, frozen=True, forbid_unknown_fields=True):
    """A section of this package: an unknown key is an error."""


class InvalidValueError(ValueError):
    """A value is invalid, or the values of a section do not fit together.

    :ivar problem: what is wrong.
    :ivar hint: what to do.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"{problem}; {hint}")
        self.problem = problem
        self.hint = hint


#: A port number.
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
#: A text that is never logged.
Secret: TypeAlias = Annotated[str, Meta(extra={"is_secret": True})]


def not_empty(values: list[str]) -> list[str]:
    """Return a list.

    :raises InvalidValueError: if it is empty.
    """
    if not values:
        raise InvalidValueError("is empty", "write at least one entry")
    return values


def read_value(kind: Any, value: Any, path: KeyPath, merged: MergedFiles) -> Any:
    """Convert a value of the files to a type, and report everything that is invalid.

    A section of which a part is invalid has the default in its place. A list of which
    a part is invalid, and a section that lacks a key, are invalid as a whole.

    :param kind: a section, or another type that a field of a section may have.
    :param path: the path of the value.
    :return: :data:`INVALID` if the value is invalid.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if NoneType in inner:
        (kind,) = (each for each in inner if each is not NoneType)
        return None if value is None else read_value(kind, value, path, merged)
    if origin is Annotated and callable(inner[1]):
        return _read_checked(inner[0], inner[1], value, path, merged)
    is_section = isinstance(kind, type) and origin is None and issubclass(kind, Section)
    container = dict if is_section else origin
    if container not in (list, dict):
        return _read_scalar(kind, value, path, merged)
    if value is None:
        value = container()
    elif isinstance(value, str) and inner == (str,):
        value = [value]
    if not isinstance(value, container):
        name = "list" if container is list else "mapping"
        merged.report(path, f"is not a {name}", _HINTS[f"any {container.__name__}"])
        return INVALID
    if is_section:
        return _read_section(kind, value, path, merged)
    if container is dict:
        return _read_mapping(inner[1], value, path, merged)
    before = len(merged.problems)
    found = [
        read_value(inner[0], each, (*path, index), merged)
        for index, each in enumerate(value)
    ]
    return found if len(merged.problems) == before else INVALID


def _read_scalar(kind: Any, value: Any, path: KeyPath, merged: MergedFiles) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        problem = str(error)
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if not isinstance(base, type):
        hint = f"write one of {', '.join(get_args(kind))}"
    elif ", got " in problem:
        hint = _HINTS[f"any {base.__name__}"]
    elif base is str:
        problem = "is not of the required form"
        hint = "write one word, without white space"
    else:
        hint = "write a number in the range"
    hint = _HINTS.get(str(path[-1]), hint)
    merged.report(path, problem[:1].lower() + problem[1:], hint)
    return INVALID


def _read_checked(
    kind: Any, check: Any, value: Any, path: KeyPath, merged: MergedFiles
) -> Any:
    """Convert a value to a type, and pass it to the function of its annotation."""
    found = read_value(kind, value, path, merged)
    try:
        return found if found is INVALID else check(found)
    except InvalidValueError as error:
        merged.report(path, error.problem, error.hint)
        return INVALID


def _read_mapping(
    kind: Any, values: Mapping[Any, Any], path: KeyPath, merged: MergedFiles
) -> dict[str, Any]:
    """Convert the values of a mapping; the result lacks those that are invalid."""
    found = {}
    for key, value in values.items():
        inner = (*path, str(key))
        if not isinstance(key, str):
            merged.report(inner, "the key is not a text", "write the key in quotes")
        elif (read := read_value(kind, value, inner, merged)) is not INVALID:
            found[key] = read
    return found


def _read_section(
    section: type[Section],
    values: Mapping[Any, Any],
    path: KeyPath,
    merged: MergedFiles,
) -> Any:
    before = len(merged.problems)
    found = {}
    fields = msgspec.structs.fields(section)
    for field in fields:
        inner = (*path, field.name)
        if field.required and values.get(field.name) is None:
            problem, hint = "is missing", "add it"
            if field.name in values:
                problem, hint = "is empty", "write a value"
            merged.report(inner, problem, _HINTS.get(field.name, hint))
        elif field.name in values:
            read = read_value(field.type, values[field.name], inner, merged)
            if read is not INVALID:
                found[field.name] = read
    is_complete = len(merged.problems) == before
    if section.__struct_config__.forbid_unknown_fields:
        known = sorted(section.__struct_fields__)
        for key in values:
            if key not in known:
                hint = hint_for(str(key), known)
                merged.report((*path, str(key)), "there is no such key", hint)
    if any(field.required and field.name not in found for field in fields):
        return INVALID
    try:
        return section(**found)
    except InvalidValueError as error:
        # Otherwise, the section may be invalid only because of a default.
        if is_complete:
            merged.report(path, error.problem, error.hint)
        return INVALID

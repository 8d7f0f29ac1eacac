"""Conversion of pydantic's errors to problems with a source location and a hint."""

from __future__ import annotations

import copy
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from synapse_replication.config.models import LISTENER_TYPES, SharedFile
from synapse_replication.config.yaml_files import (
    OWN_SECTION,
    KeyPath,
    MergedFiles,
    hint_for,
)
from synapse_replication.errors import ConfigProblem

#: The most attempts to remove invalid parts. Removing one may make the section that
#: contains it invalid, and sections are nested only a few levels deep.
_MAX_ROUNDS = 8

#: Hints for pydantic's own errors, by the beginning of the error's type.
_HINTS: tuple[tuple[str, str], ...] = (
    ("missing", "add it"),
    ("bool", "write true or false"),
    ("int", "write a whole number, without quotes"),
    ("string_pattern", "write one word, without white space"),
    ("string", "write a text; in quotes if it looks like a number"),
    ("list", "write a list: one line for each entry, beginning with `- `"),
    ("dict", "write a mapping: indented `key: value` lines"),
    ("too_short", "write at least one entry"),
    ("literal", "write one of these values"),
    ("model", "write a mapping: indented `key: value` lines"),
    ("greater", "write a number in the range"),
    ("less", "write a number in the range"),
)

#: Hints for keys for which a general hint would not be specific enough.
_HINTS_OF_KEYS: dict[str, str] = {
    "server_name": "write the homeserver's name, for instance `server_name: "
    "example.com`",
    "port": "write a port number from 1 to 65535",
    "worker_replication_port": "write a port number from 1 to 65535",
    "module": "write the dotted name of a function, for instance "
    "my_package.my_module.make_sink",
    "endpoint": "write the URL of a collector, for instance http://localhost:4318",
    "sample_ratio": "write a number from 0 to 1",
    "type": f"write one of {', '.join(LISTENER_TYPES)}",
}


def problems_of(error: ValidationError, merged: MergedFiles) -> list[ConfigProblem]:
    """Return pydantic's errors as problems with file, key and hint."""
    return [_problem_of(details, merged) for details in error.errors()]


def _problem_of(details: ErrorDetails, merged: MergedFiles) -> ConfigProblem:
    path: KeyPath = details["loc"]
    kind = details["type"]
    context = details.get("ctx", {})
    if kind == "invalid":
        return merged.problem(path, str(context["problem"]), str(context["hint"]))
    if kind == "extra_forbidden":
        hint = hint_for(str(path[-1]), _known_keys(path[:-1]))
        return merged.problem(path, "there is no such key", hint)
    general = next((hint for start, hint in _HINTS if kind.startswith(start)), None)
    hint = _HINTS_OF_KEYS.get(str(path[-1])) or general or "see the documentation"
    problem = "is missing" if kind == "missing" else details["msg"]
    return merged.problem(path, problem[:1].lower() + problem[1:], hint)


def _known_keys(path: KeyPath) -> list[str]:
    section: type[BaseModel] = SharedFile
    for step in path:
        if isinstance(step, str):
            annotation = section.model_fields[step].annotation
            section = next(
                each
                for each in (annotation, *get_args(annotation))
                # On Python 3.10, list[str] is an instance of type.
                if get_origin(each) is None
                and isinstance(each, type)
                and issubclass(each, BaseModel)
            )
    return sorted(section.model_fields)


def drop_invalid_sections(
    merged: MergedFiles, error: ValidationError
) -> SharedFile | None:
    """Remove the invalid parts of the merged content, and validate what remains.

    A missing or invalid ``server_name`` is replaced by ``unknown``.

    :return: the validated content; ``None`` if invalid parts remain after
        :data:`_MAX_ROUNDS` attempts.
    """
    values = copy.deepcopy(dict(merged.values))
    # Removing a part may make its section invalid. The errors of later rounds only
    # determine what to remove next; they are not reported.
    for _ in range(_MAX_ROUNDS):
        for details in error.errors():
            _remove(values, details["loc"])
        values.setdefault("server_name", "unknown")
        try:
            return SharedFile.model_validate(values)
        except ValidationError as next_error:
            error = next_error
    return None


def _remove(values: dict[str, Any], path: KeyPath) -> None:
    """Remove the part at ``path``.

    If the part is in a list, remove the whole list. If the part is missing, remove the
    section that lacks it; if a top-level key is missing, remove nothing.
    """
    if path[:2] in ((OWN_SECTION,), (OWN_SECTION, "streams")):
        # Which keys of stream_writers are valid depends on the declared streams.
        values.pop("stream_writers", None)
    holder: dict[Any, Any] = values
    key = path[0]
    for step in path[1:]:
        inner = holder.get(key)
        if not isinstance(inner, dict) or step not in inner:
            break
        holder, key = inner, step
    holder.pop(key, None)

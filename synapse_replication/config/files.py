"""Read YAML files, merge them as Synapse does, and remember what stood where.

A later file wins per top-level key: its ``redis:`` replaces the whole ``redis:``
of an earlier one. The one exception is our own section
(:data:`OWN_SECTION`), where each of its keys wins by itself, so that a worker's
file can add its sink to the streams that the shared file declares.

Nothing here is logged: the files hold secrets. See docs/operators-guide.rst.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import yaml
from yaml.reader import ReaderError

from synapse_replication.errors import ConfigProblem

__all__ = ["OWN_SECTION", "MergedFiles", "did_you_mean", "read_files", "read_secret"]

#: The key of homeserver.yaml under which our own settings live.
OWN_SECTION = "synapse_replication"

#: Values in a file at most: aliases of aliases make any number of a few lines.
_MAX_VALUES = 100_000

KeyPath: TypeAlias = tuple[str | int, ...]
"""The way to a value: keys of mappings, and indices of lists from 0."""


@attrs.frozen
class SourceLocation:
    """Where a key stands.

    :ivar file: as it was given.
    :ivar line: from 1.
    """

    file: str
    line: int


def dotted(path: KeyPath) -> str:
    """Write the way to a value as people read it: ``listeners[0].port``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Find what somebody meant who mistyped a word."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return close[0] if close else None


@attrs.frozen
class MergedFiles:
    """What the files say together.

    :ivar files: those read, in order.
    :ivar values: the merged mapping.
    :ivar places: where the keys of the values stand.
    """

    files: Sequence[str]
    values: Mapping[str, Any]
    places: Mapping[KeyPath, SourceLocation]

    def problem(self, path: KeyPath, problem: str, hint: str) -> ConfigProblem:
        """Say what is wrong with the value at ``path``, which may be missing."""
        for length in range(len(path), 0, -1):
            place = self.places.get(path[:length])
            if place is not None:
                return ConfigProblem(
                    place.file, dotted(path), problem, hint, place.line
                )
        return ConfigProblem(", ".join(self.files), dotted(path), problem, hint)


def read_files(paths: Sequence[str], problems: list[ConfigProblem]) -> MergedFiles:
    """Read and merge configuration files, left to right.

    :param paths: files, or folders, whose ``*.yaml`` files are read by name.
    :param problems: gains what cannot be read.
    """
    values: dict[str, Any] = {}
    places: dict[KeyPath, SourceLocation] = {}
    files = _expand(paths, problems)
    for file in files:
        found = _read(file, problems)
        if found is None:
            continue
        content, lines = found
        for key, value in content.items():
            mine = {path: line for path, line in lines.items() if path[0] == key}
            old = values.get(key)
            if key == OWN_SECTION and isinstance(value, dict) and isinstance(old, dict):
                values[key] = {**old, **value}
                gone: set[KeyPath] = {(key, inner) for inner in value}
            else:
                values[key] = value
                gone = {(key,)}
            places = {p: at for p, at in places.items() if not _below(p, gone)}
            places.update(
                (path, SourceLocation(file, line)) for path, line in mine.items()
            )
    return MergedFiles(tuple(files), values, places)


def _below(path: KeyPath, roots: set[KeyPath]) -> bool:
    return path[:1] in roots or path[:2] in roots


def _expand(paths: Sequence[str], problems: list[ConfigProblem]) -> list[str]:
    files: list[str] = []
    for path in paths:
        folder = Path(path)
        if not folder.is_dir():
            files.append(path)
            continue
        inside = sorted(str(file) for file in folder.glob("*.yaml"))
        if not inside:
            problems.append(
                ConfigProblem(
                    path,
                    "(the folder)",
                    "no .yaml file is in it",
                    "name a file, or a folder with files whose names end in .yaml",
                )
            )
        files.extend(inside)
    return files


def _read(
    file: str, problems: list[ConfigProblem]
) -> tuple[dict[str, Any], dict[KeyPath, int]] | None:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        problems.append(
            ConfigProblem(
                file,
                "(the file)",
                f"cannot be read: {reason}",
                "give the name of a YAML file in UTF-8 that this user may read",
            )
        )
        return None
    lines: dict[KeyPath, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None and _expanded_size(node, {}) > _MAX_VALUES:
            problems.append(
                ConfigProblem(
                    file,
                    "(the file)",
                    f"its aliases (*name) stand for more than {_MAX_VALUES:,} values",
                    "write what is meant without aliases of aliases",
                )
            )
            return None
        content = None if node is None else loader.construct_document(node)
        if node is not None:
            _note_lines(node, (), lines)
    # Besides its own errors: a date with a thirteenth month, a list in itself.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.append(_syntax_problem(file, text, error))
        return None
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        problems.append(
            ConfigProblem(
                file, "(the file)", "it is no mapping", "write `key: value` lines", 1
            )
        )
        return None
    return {str(key): value for key, value in content.items()}, lines


def _expanded_size(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values of a node, those behind aliases each time that they are used.

    :param known: the sizes of nodes by their id; each is counted once.
    """
    size = known.get(id(node))
    if size is None:
        # Of a node in itself, construction says so.
        known[id(node)] = size = 1
        if isinstance(node, yaml.MappingNode):
            size += sum(_expanded_size(n, known) for pair in node.value for n in pair)
        elif isinstance(node, yaml.SequenceNode):
            size += sum(_expanded_size(n, known) for n in node.value)
        known[id(node)] = size
    return size


def _syntax_problem(file: str, text: str, error: Exception) -> ConfigProblem:
    # The error's own text would repeat the line, which may hold a secret.
    mark = getattr(error, "problem_mark", None)
    line = None if mark is None else mark.line + 1
    what = getattr(error, "problem", None) or "not YAML"
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        what = "a control character, which no text has"
    elif isinstance(error, RecursionError):
        what = "lists or mappings in one another without end"
    elif isinstance(error, ValueError):
        what = "a date or a number that there is none of; quote it if it is a text"
    return ConfigProblem(
        file,
        "(the file)" if mark is None else f"column {mark.column + 1}",
        f"YAML syntax: {what}",
        "check the indentation, colons and quotes here and in the line above",
        line,
    )


def _note_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            lines[here] = key.start_mark.line + 1
            _note_lines(value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            item: KeyPath = (*path, index)
            lines[item] = value.start_mark.line + 1
            _note_lines(value, item, lines)


def read_secret(
    inline: str | None,
    path: str | None,
    key: KeyPath,
    merged: MergedFiles,
    problems: list[ConfigProblem],
) -> str | None:
    """Take a secret from its key or from the file that ``<key>_path`` names.

    White space around the content of the file is cut off.
    """
    path_key: KeyPath = (*key[:-1], f"{key[-1]}_path")
    if path is None:
        return inline
    if inline is not None:
        problems.append(
            merged.problem(
                path_key,
                f"{dotted(key)} is set too",
                f"keep one of {dotted(key)} and {dotted(path_key)}",
            )
        )
        return None
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        problems.append(
            merged.problem(
                path_key,
                f"{path} cannot be read: {reason}",
                "name a file that holds nothing but the secret and that this user "
                "may read",
            )
        )
        return None
    if not secret:
        problems.append(
            merged.problem(path_key, f"{path} is empty", "write the secret into it")
        )
        return None
    return secret

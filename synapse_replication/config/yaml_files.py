"""Reading of YAML files: their values, merged as in Synapse, and source locations.

Later files take precedence per top-level key: the ``redis:`` of a later file replaces
the whole ``redis:`` of an earlier file. The only exception is this package's section
(:data:`OWN_SECTION`), which is merged key by key: for instance, the shared file can set
``streams``, and a worker's file can set ``row_sink``.

This module logs nothing, because the files contain secrets. docs/operators-guide.rst
describes how files are merged.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import yaml
from yaml.reader import ReaderError

from synapse_replication.errors import ConfigError, ConfigProblem

#: The key of homeserver.yaml for the settings of this package.
OWN_SECTION = "synapse_replication"

#: The most keys and values in a file, with its aliases expanded: nested aliases can
#: expand a few lines to any number of values.
_MAX_VALUES = 100_000

#: The most bytes of a YAML file, and of a file with a secret.
MAX_YAML_BYTES = 4 * 2**20
MAX_SECRET_BYTES = 64 * 1024

#: The part of an error of PyYAML that repeats the name of an alias or a tag.
_NAMED = re.compile(r"\b(alias|tag handle|tag) '.*", re.DOTALL)

#: The path of a value: keys of mappings, and indices of lists from 0.
KeyPath: TypeAlias = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """Return a path as text, for instance ``listeners[0].port``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


def did_you_mean(
    word: str, known: Iterable[str], least_likeness: float = 0.7
) -> str | None:
    """Return the known word that a mistyped word resembles, if there is one."""
    # Imported here, because it takes 0.1 MiB and only errors need it.
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=least_likeness)
    return close[0] if close else None


def hint_for(word: str, known: Collection[str], otherwise: str = "") -> str:
    """Return the hint for an unknown word: a known word that it resembles.

    :param otherwise: the hint if it resembles none; by default, it lists all.
    """
    meant = did_you_mean(word, known)
    if meant is not None:
        return f"did you mean {meant!r}?"
    return otherwise or f"write one of {', '.join(known)}"


@attrs.frozen(eq=False)
class MergedFiles:
    """The merged content of the files.

    :ivar files: the given files, and those of the given folders, in order; also files
        that cannot be read.
    :ivar values: the merged mapping.
    :ivar locations: the file, as it was given, and the line (from 1) of each key and
        list item, by its path.
    :ivar problems: the problems that were reported.
    """

    files: Sequence[str]
    values: Mapping[str, Any]
    locations: Mapping[KeyPath, tuple[str, int]]
    problems: list[ConfigProblem] = attrs.field(factory=list)

    def report(self, path: KeyPath, problem: str, hint: str) -> None:
        """Report a problem with the value at ``path``."""
        self.problems.append(self.problem(path, problem, hint))

    def problem(self, path: KeyPath, problem: str, hint: str) -> ConfigProblem:
        """Return a problem with the value at ``path``.

        If the value is missing, the source location is that of the nearest enclosing
        key or list item. If there is none, the problem names all files.
        """
        for length in range(len(path), 0, -1):
            if path[:length] in self.locations:
                file, line = self.locations[path[:length]]
                return ConfigProblem(file, dotted(path), problem, hint, line)
        return ConfigProblem(", ".join(self.files), dotted(path), problem, hint)

    def failed_keys(self) -> set[str]:
        """Return the top-level keys with reported problems."""
        return {problem.key.split(".")[0].split("[")[0] for problem in self.problems}


def read_files(paths: Sequence[str]) -> MergedFiles:
    """Read and merge configuration files, left to right.

    Each file that cannot be read or is not valid, and each folder with other files than
    ``*.yaml`` only, is reported as a problem. An empty folder has no keys.

    :param paths: files, or folders, whose ``*.yaml`` files are read in order of name.
    """
    problems: list[ConfigProblem] = []
    values: dict[str, Any] = {}
    locations: dict[KeyPath, tuple[str, int]] = {}
    files = _expand(paths, problems)
    for file in files:
        try:
            content, lines = _read(file)
        except ConfigError as error:
            problems += error.problems
            continue
        for key, value in content.items():
            old = values.get(key)
            if key == OWN_SECTION and isinstance(value, dict) and isinstance(old, dict):
                values[key] = {**old, **value}
                replaced: set[KeyPath] = {(key, inner) for inner in value}
            else:
                values[key] = value
                replaced = {(key,)}
            locations = {
                path: at
                for path, at in locations.items()
                if replaced.isdisjoint((path[:1], path[:2]))
            }
            locations |= {
                path: (file, line) for path, line in lines.items() if path[0] == key
            }
    return MergedFiles(tuple(files), values, locations, problems)


def _expand(paths: Sequence[str], problems: list[ConfigProblem]) -> list[str]:
    files: list[str] = []
    for path in paths:
        folder = Path(path)
        if not folder.is_dir():
            files.append(path)
            continue
        inside = sorted(str(file) for file in folder.glob("*.yaml"))
        others = [each.name for each in folder.iterdir() if each.name[0] != "."]
        if not inside and others:
            problems.append(
                ConfigProblem(
                    path,
                    "(the folder)",
                    f"it contains {others[0]}, but no .yaml file",
                    "name a file, or a folder with files whose names end in .yaml",
                )
            )
        files.extend(inside)
    return files


def _read(file: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        text = _read_text(file, MAX_YAML_BYTES)
    except (OSError, ValueError) as error:
        hint = "name a YAML file in UTF-8 that this user may read"
        raise _unusable(file, f"cannot be read: {_reason(error)}", hint) from error
    lines: dict[KeyPath, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if _expanded_size(node, {}) > _MAX_VALUES:
            raise _unusable(
                file,
                f"it has more than {_MAX_VALUES:,} keys and values, with its aliases "
                "(*name) expanded",
                "write the values without nested aliases",
            )
        # Before construct_document(), which merges mappings in the nodes themselves.
        repeated = _repeated_keys(node, ())
        content = loader.construct_document(node)
        _record_lines(node, (), lines)
    # In addition to YAMLError, PyYAML raises ValueError for a date with a thirteenth
    # month, and RecursionError for deep nesting. _record_lines() raises RecursionError
    # for a list or mapping that contains itself.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([_syntax_problem(file, text, error)]) from None
    if repeated:
        raise ConfigError(
            [
                ConfigProblem(
                    file,
                    dotted(path),
                    f"the key is there twice, first in line {first}; only the last "
                    "value would count",
                    "remove one of the two",
                    line,
                )
                for path, first, line in repeated
            ]
        )
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise _unusable(file, "it is not a mapping", "write `key: value` lines", 1)
    return {str(key): value for key, value in content.items()}, lines


def _read_text(file: str, most: int) -> str:
    """Return the text of a file, with its line ends as line feeds.

    :param most: the most bytes that it may have.
    :raises ValueError: if it has more, or is not UTF-8.
    """
    with Path(file).open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return io.StringIO(content.decode("utf-8"), newline=None).read()


def _reason(error: OSError | ValueError) -> str | None:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return error.strerror if isinstance(error, OSError) else str(error)


def _unusable(file: str, why: str, hint: str, line: int | None = None) -> ConfigError:
    return ConfigError([ConfigProblem(file, "(the file)", why, hint, line)])


def _expanded_size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of keys and values in a node, with its aliases expanded.

    :param known: a cache of the sizes of nodes by their ``id()``.
    """
    size = known.get(id(node))
    if size is None:
        # Set a size first: otherwise, the recursion would not end for a node that
        # contains itself. _read() rejects such a node later, so its size may be wrong.
        known[id(node)] = size = 1
        if isinstance(node, yaml.MappingNode):
            size += sum(_expanded_size(n, known) for pair in node.value for n in pair)
        elif isinstance(node, yaml.SequenceNode):
            size += sum(_expanded_size(n, known) for n in node.value)
        known[id(node)] = size
    return size


def _syntax_problem(file: str, text: str, error: Exception) -> ConfigProblem:
    # The error's own text would repeat the line, which may contain a secret. Its
    # `problem` repeats at most one character of the line, or the name of an alias or a
    # tag. That name is removed, because it may be a secret, too: without quotes, a
    # secret that begins with * or ! is an alias or a tag.
    mark = getattr(error, "problem_mark", None)
    line = None if mark is None else mark.line + 1
    what = _NAMED.sub(r"\1", getattr(error, "problem", None) or "not YAML")
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        what = "a control character, which is not allowed"
    elif isinstance(error, RecursionError):
        what = "lists or mappings that are nested too deeply"
    elif isinstance(error, ValueError):
        what = "an impossible date or number; quote it if it is a text"
    return ConfigProblem(
        file,
        "(the file)" if mark is None else f"column {mark.column + 1}",
        f"YAML syntax: {what}",
        "check the indentation, colons and quotes here and in the line above",
        line,
    )


def _repeated_keys(node: yaml.Node, path: KeyPath) -> list[tuple[KeyPath, int, int]]:
    """Return the keys that a mapping has twice, with the lines of both."""
    found: list[tuple[KeyPath, int, int]] = []
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            inner = (*path, name)
            # A mapping may merge several others: `<<: *name`.
            if name in lines and key.tag != "tag:yaml.org,2002:merge":
                found.append((inner, lines[name], line))
            lines[name] = line
            found += _repeated_keys(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            found += _repeated_keys(value, (*path, index))
    return found


def _record_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            lines[here] = key.start_mark.line + 1
            _record_lines(value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            item: KeyPath = (*path, index)
            lines[item] = value.start_mark.line + 1
            _record_lines(value, item, lines)


def read_secret(section: Any, key: KeyPath, merged: MergedFiles) -> str | None:
    """Return a secret from its key, or from the file that ``<key>_path`` names.

    White space around the content of the file is removed.

    :param section: the section that has both keys.
    :return: ``None`` if neither is set, or there is a problem.
    """
    name = str(key[-1])
    path_key: KeyPath = (*key[:-1], f"{name}_path")
    inline: str | None = getattr(section, name)
    path: str | None = getattr(section, f"{name}_path")
    if path is None:
        return inline
    if inline is not None:
        merged.report(
            path_key,
            f"{dotted(key)} is set, too",
            f"remove {dotted(key)} or {dotted(path_key)}",
        )
        return None
    try:
        secret = _read_text(path, MAX_SECRET_BYTES).strip()
    except (OSError, ValueError) as error:
        merged.report(
            path_key,
            f"{path} cannot be read: {_reason(error)}",
            "name a file that contains only the secret and that this user may read",
        )
        return None
    if not secret:
        merged.report(path_key, f"{path} is empty", "write the secret to the file")
        return None
    return secret

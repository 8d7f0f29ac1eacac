"""Finds damaged files of a table's transaction log: commits and checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from synapse_replication.errors import excerpt

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

#: The reason of a file that does not exist.
MISSING: Final = "is missing"

#: The names of commits and of checkpoints in a log, with their version.
_COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(\.[\w-]+)*\.parquet")


def damaged_log_files(filesystem: FileSystem, path: str) -> list[tuple[str, str]]:
    """Return the files of a table's log that are damaged or missing, with the reason.

    Commits that a checkpoint replaces may be missing.

    :param path: the path of the table.
    """
    from pyarrow.fs import FileSelector

    selector = FileSelector(f"{path}/_delta_log", allow_not_found=True)
    commits: dict[int, str] = {}
    checkpoints: dict[int, str] = {}
    for info in filesystem.get_file_info(selector):
        for pattern, found in ((_COMMIT, commits), (_CHECKPOINT, checkpoints)):
            if match := pattern.fullmatch(info.base_name):
                found[int(match[1])] = info.path
    damaged = [
        *_unreadable(filesystem, checkpoints, _read_checkpoint),
        *_unreadable(filesystem, commits, _read_commit),
    ]
    bad = {name for name, _ in damaged}
    intact = [n for n, path in checkpoints.items() if _name(path) not in bad]
    versions = range(max(intact, default=-1) + 1, max(commits, default=-1))
    missing = [f"{n:020}.json" for n in versions if n not in commits]
    return [*damaged, *((name, MISSING) for name in missing)]


def _unreadable(
    filesystem: FileSystem,
    paths: dict[int, str],
    read: Callable[[Any], object],
) -> list[tuple[str, str]]:
    found = []
    for _, path in sorted(paths.items()):
        try:
            with filesystem.open_input_file(path) as file:
                read(file)
        except (pa.ArrowException, OSError, ValueError) as error:
            found.append((_name(path), f"is damaged ({excerpt(str(error))})"))
    return found


def _read_checkpoint(file: Any) -> None:
    from pyarrow import parquet

    parquet.read_table(file)


def _read_commit(file: Any) -> None:
    lines: Sequence[bytes] = file.read().splitlines()
    if not lines:
        raise ValueError("the file is empty")
    for line in lines:
        json.loads(line)


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]

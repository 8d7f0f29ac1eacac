"""Files that survive a loss of power."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["rename_durably", "sync_folder", "write_durably"]


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file at once: whole or not at all, also after a loss of power.

    :raises OSError: if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename_durably(temporary, path)


def rename_durably(old: Path, new: Path) -> None:
    """Return a file that was synced another name in its folder, for good.

    :raises OSError: if it cannot be renamed.
    """
    old.replace(new)
    sync_folder(new.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power.

    :raises OSError: if it cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""File operations whose results survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def open_private(path: str, flags: int) -> int:
    """Open a file that only its owner can read, if it is created.

    Pass it to ``open()`` as the ``opener``, for files that contain rows.
    """
    return os.open(path, flags, 0o600)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file atomically, and make the change survive a power failure.

    If several processes replace it at once, the file is the one of the last of them.

    :raises OSError: if the file cannot be written, or its folder cannot be synced. In
        the latter case, the file has been replaced.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename_durably(temporary, path)


def rename_durably(old: Path, new: Path) -> None:
    """Rename a file within its folder, and make the rename survive a power failure.

    The caller must have called ``fsync`` on the file itself.

    :raises OSError: if the file cannot be renamed, or its folder cannot be synced. In
        the latter case, the file has been renamed.
    """
    old.replace(new)
    sync_folder(new.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure.

    :raises OSError: if the folder cannot be opened or synced.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

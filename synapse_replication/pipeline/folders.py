"""Folders that a job makes."""

from __future__ import annotations

from pathlib import Path

from synapse_replication.errors import PipelineError

__all__ = ["new_folder"]


def new_folder(out: str) -> Path:
    """Check the name of a folder that is to be made.

    :raises PipelineError: if it exists, or could not be made.
    """
    folder = Path(out).absolute()
    if folder.exists():
        raise PipelineError(f"{folder} exists: give the name of a new folder")
    if not folder.parent.is_dir():
        raise PipelineError(f"{folder.parent} is no folder: make it first")
    return folder

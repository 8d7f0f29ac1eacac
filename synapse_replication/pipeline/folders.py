"""Folders that jobs create."""

from __future__ import annotations

from pathlib import Path

from synapse_replication.errors import PipelineError


def new_folder(out: str) -> Path:
    """Return the absolute path of the folder that a job will create.

    :raises PipelineError: if the folder exists, or its parent does not.
    """
    folder = Path(out).absolute()
    if folder.exists():
        raise PipelineError(f"{folder} exists: give the name of a new folder")
    if not folder.parent.is_dir():
        raise PipelineError(f"{folder.parent} is not a folder: create it first")
    return folder

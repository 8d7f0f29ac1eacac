"""The folder of a job's results, which gets its name once it is complete."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from synapse_replication.errors import PipelineError


def path_of_new_folder(out: str) -> Path:
    """Return the absolute path of the folder that a job will create.

    :raises PipelineError: if the folder exists, or its parent does not.
    """
    folder = Path(out).absolute()
    if folder.exists():
        raise PipelineError(f"{folder} exists: give the name of a new folder")
    if not folder.parent.is_dir():
        raise PipelineError(f"{folder.parent} is not a folder: create it first")
    return folder


@contextlib.contextmanager
def created_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which gets its name once the context has ended.

    :raises PipelineError: if the folder exists and is not empty, or cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        yield temporary
        # This fails if another process has created a folder of that name with files.
        temporary.rename(folder)
    except OSError as error:
        raise PipelineError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

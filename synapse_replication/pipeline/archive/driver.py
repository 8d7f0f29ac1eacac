"""Changing an archive: alone, and on what the last driver left finished."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from synapse_replication.pipeline.archive.compaction import ENOUGH_FILES, Compactor
from synapse_replication.pipeline.archive.layout import ArchiveLayout, open_archive
from synapse_replication.pipeline.archive.lock import lock_archive
from synapse_replication.pipeline.archive.writer import ArchiveWriter, Point, Watch

__all__ = ["ArchiveDriver", "drive_archive"]


def _pass(point: Point) -> None:
    pass


@attrs.frozen
class ArchiveDriver:
    """An archive that nobody else changes.

    :ivar writers: of ``"rows"`` and of ``"wire"``.
    :ivar compactors: the same.
    """

    layout: ArchiveLayout
    writers: dict[str, ArchiveWriter]
    compactors: dict[str, Compactor]

    def recover(self) -> None:
        """Finish what a crash cut off. Java of the last driver has ended.

        :raises PipelineError: the archive is damaged.
        """
        # Compaction first: it may have a folder away, which publishing would make.
        for compactor in self.compactors.values():
            compactor.recover()
        for writer in self.writers.values():
            writer.recover()


@contextmanager
def drive_archive(
    folder: str | os.PathLike[str],
    *,
    create: bool = False,
    enough_files: int = ENOUGH_FILES,
    watch: Watch = _pass,
) -> Iterator[ArchiveDriver]:
    """Open an archive for changes, and hold its lock.

    Call :meth:`ArchiveDriver.recover` before any change; if the change is made by
    Spark, after :func:`~.archive_lock.lock_archive_in_java`.

    :param create: make it if the folder is missing or empty.
    :param enough_files: how many small files of a folder are made into one.
    :param watch: called at each point of the writing.
    :raises PipelineError: there is no archive, another process changes it, or this
        version cannot.
    """
    layout = open_archive(folder, create=create)
    with lock_archive(layout):
        yield ArchiveDriver(
            layout,
            {kind: ArchiveWriter(layout, kind, watch) for kind in ("rows", "wire")},
            {
                kind: Compactor(layout, kind, watch, enough_files=enough_files)
                for kind in ("rows", "wire")
            },
        )

"""Old days leave an archive, and a record stays of what they held.

A day goes in two steps: first ``_meta/purges/NUMBER.json`` says which rows go, then the
day's folder is renamed out of the archive, which is one act of the operating system,
and removed. A crash between leaves a record of rows that are still there: purging
again removes them, and until then an audit misses nothing that it would have to find.
What was renamed away lies where the next start of any driver cleans up.

The archive goes on where it was: neither its checkpoint nor its manifests change, so
what was read is not read again. A row that is read later, but was written on a day that
is gone, begins that day's folder anew.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import attrs

from synapse_replication.durable import sync_folder, write_durably
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.layout import (
    ArchiveLayout,
)
from synapse_replication.pipeline.archive.lock import PATIENCE
from synapse_replication.pipeline.archive.writer import count_rows, remove_tree

__all__ = [
    "OldDay",
    "PurgedRange",
    "find_old_days",
    "purge_days",
    "read_purged_ranges",
    "wait_for_java",
]

_POLL_SECONDS = 0.1


@attrs.frozen
class OldDay:
    """A folder of the archive that is to go.

    :ivar kind: ``"rows"`` or ``"wire"``.
    :ivar stream: ``None`` of the wire.
    :ivar size: of its files, in bytes.
    """

    kind: str
    stream: str | None
    day: datetime.date
    folder: Path
    rows: int
    size: int


@attrs.frozen
class PurgedRange:
    """Rows that an archive had and has no more.

    :ivar first_token: the smallest of them; ``last_token`` the greatest.
    """

    stream: str
    instance_name: str
    day: datetime.date
    first_token: int
    last_token: int
    rows: int


def find_old_days(layout: ArchiveLayout, before: datetime.date) -> list[OldDay]:
    """Find all days before a date, of rows and of the wire, in order."""
    found = []
    for kind, pattern in (("rows", "stream=*/day=*"), ("wire", "day=*")):
        for folder in sorted(layout.data(kind).glob(pattern)):
            try:
                day = datetime.date.fromisoformat(folder.name.removeprefix("day="))
            except ValueError:
                raise PipelineError(
                    f"{folder} is no day's folder; it does not belong there: move it "
                    "away"
                ) from None
            if day >= before:
                continue
            paths = list(folder.glob("*.parquet"))
            found.append(
                OldDay(
                    kind,
                    # Spark writes a slash as %2F.
                    unquote(folder.parent.name.removeprefix("stream="))
                    if kind == "rows"
                    else None,
                    day,
                    folder,
                    sum(map(count_rows, paths)),
                    sum(path.stat().st_size for path in paths),
                )
            )
    return found


def purge_days(layout: ArchiveLayout, days: Iterable[OldDay]) -> None:
    """Remove days, and record what they held. Who calls holds the archive's lock.

    What crashes cut off before must have been finished.

    :raises PipelineError: a file cannot be read or removed.
    """
    days = list(days)
    if not days:
        return
    try:
        _record(layout, days)
        for day in days:
            # A driver's start removes what it finds there.
            away = layout.staging / day.kind / f"purged-{uuid.uuid4().hex}"
            away.parent.mkdir(parents=True, exist_ok=True)
            day.folder.rename(away)
            sync_folder(day.folder.parent)
            remove_tree(away)
    except OSError as error:
        raise PipelineError(
            f"cannot purge: {error}; purge again once that is mended"
        ) from error


def read_purged_ranges(layout: ArchiveLayout) -> list[PurgedRange]:
    """Tell which rows of streams were purged, of all purges there were.

    :raises PipelineError: a record is damaged.
    """
    found = []
    for path in sorted(_folder(layout).glob("*.json")):
        try:
            for value in json.loads(path.read_bytes())["rows"]:
                day = datetime.date.fromisoformat(value.pop("day"))
                found.append(PurgedRange(day=day, **value))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PipelineError(
                f"{path} is damaged: {error!r}; restore it from a backup"
            ) from error
    return found


def wait_for_java(
    layout: ArchiveLayout,
    *,
    patience: float = PATIENCE,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until the Java of a driver that was killed is gone, too.

    :param patience: s.
    :param now: monotonic s.
    :raises PipelineError: it does not end.
    """
    if not layout.jvm_lock.exists():
        return
    give_up = now() + patience
    with layout.jvm_lock.open("r+") as file:
        while True:
            try:
                # Java's locks are those of fcntl(2).
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if now() >= give_up:
                    raise PipelineError(
                        f"the Java process of an earlier driver still holds "
                        f"{layout.jvm_lock} after {patience:.0f} s: look for it with "
                        "'fuser', and stop it"
                    ) from None
                sleep(_POLL_SECONDS)
            else:
                return


def _folder(layout: ArchiveLayout) -> Path:
    return layout.meta / "purges"


def _record(layout: ArchiveLayout, days: list[OldDay]) -> None:
    folder = _folder(layout)
    folder.mkdir(exist_ok=True)
    number = 1 + max((int(path.stem) for path in folder.glob("*.json")), default=0)
    ranges = [each for day in days if day.stream for each in _ranges(day)]
    record: dict[str, Any] = {
        "purged": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        "rows": [
            {**attrs.asdict(each), "day": each.day.isoformat()} for each in ranges
        ],
        "wire": [
            {"day": day.day.isoformat(), "commands": day.rows}
            for day in days
            if day.kind == "wire"
        ],
    }
    write_durably(folder / f"{number:06d}.json", json.dumps(record, indent=1).encode())


def _ranges(day: OldDay) -> list[PurgedRange]:
    """Look which tokens of whom are there; a batch at a time, whatever there is."""
    from pyarrow import parquet

    assert day.stream is not None
    found: dict[str, tuple[int, int, int]] = {}
    for path in sorted(day.folder.glob("*.parquet")):
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["instance_name", "stream_id"]):
                table = _by_writer(batch)
                for writer, first, last, rows in table:
                    known = found.get(writer, (first, last, 0))
                    found[writer] = (
                        min(first, known[0]),
                        max(last, known[1]),
                        rows + known[2],
                    )
    return [
        PurgedRange(day.stream, writer, day.day, *numbers)
        for writer, numbers in sorted(found.items())
    ]


def _by_writer(batch: Any) -> list[tuple[str, int, int, int]]:
    import pyarrow

    grouped = (
        pyarrow.Table.from_batches([batch])
        .group_by("instance_name")
        .aggregate([("stream_id", "min"), ("stream_id", "max"), ("stream_id", "count")])
    )
    return [
        (
            row["instance_name"],
            row["stream_id_min"],
            row["stream_id_max"],
            row["stream_id_count"],
        )
        for row in grouped.to_pylist()
    ]

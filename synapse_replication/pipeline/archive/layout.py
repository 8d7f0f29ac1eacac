"""Where an archive keeps what, and how it is read.

::

    DIR/rows/stream=NAME/day=YYYY-MM-DD/*.parquet   rows of streams
    DIR/wire/day=YYYY-MM-DD/*.parquet               commands of recordings
    DIR/_meta/archive.json                          format, and versions of schemas
    DIR/_meta/rows/, DIR/_meta/wire/                the manifest of each batch
    DIR/_meta/checkpoint/                           Spark's: where reading goes on
    DIR/_meta/staging/                              batches that are being written
    DIR/_meta/lock, DIR/_meta/lock.jvm              held by who changes the archive

``rows`` and ``wire`` hold whole files of finished batches and nothing else, so any
reader of Parquet sees each row once by reading those folders. Nothing under
``_meta`` is data. How files come there: :mod:`.archive_writer`.

The folder is one of a file system that the driver and all executors see by the same
path: a local one, or one that is mounted, such as NFS.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from pyspark.sql.types import DateType, StructField, StructType

from synapse_replication.durable import write_durably
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.schemas import ARCHIVE_SCHEMA, WIRE_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "ARCHIVED_WIRE_SCHEMA",
    "ArchiveLayout",
    "open_archive",
    "read_archive",
    "read_archived_wire",
]

#: A command of the archive. ``day`` is its partition: of received_ts, or else of
#: when it was archived; UTC.
ARCHIVED_WIRE_SCHEMA: Final = StructType(
    [*WIRE_SCHEMA.fields, StructField("day", DateType(), nullable=False)]
)

#: The layout described above. A later one has a higher number.
FORMAT: Final = 1

#: The versions of both schemas. Raised whenever a column changes; what an older
#: archive needs then is told by the error of :func:`open_archive`.
SCHEMA_VERSIONS: Final[Mapping[str, int]] = {"rows": 1, "wire": 1}

_SCHEMAS: Final = {"rows": ARCHIVE_SCHEMA, "wire": ARCHIVED_WIRE_SCHEMA}


@attrs.frozen
class ArchiveLayout:
    """The paths of an archive.

    :ivar folder: of the archive, absolute.
    """

    folder: Path

    @property
    def rows(self) -> Path:
        """Where rows of streams are, as Parquet by stream and day."""
        return self.folder / "rows"

    @property
    def wire(self) -> Path:
        """Where commands of recordings are, as Parquet by day."""
        return self.folder / "wire"

    @property
    def meta(self) -> Path:
        """All that is no data."""
        return self.folder / "_meta"

    @property
    def description(self) -> Path:
        """The file that makes a folder an archive."""
        return self.meta / "archive.json"

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint of the rows."""
        return self.meta / "checkpoint"

    @property
    def staging(self) -> Path:
        """Where batches are written before they are published."""
        return self.meta / "staging"

    @property
    def lock(self) -> Path:
        """Locked by the driver's Python."""
        return self.meta / "lock"

    @property
    def jvm_lock(self) -> Path:
        """Locked by the driver's Java, which may outlive its Python."""
        return self.meta / "lock.jvm"

    def data(self, kind: str) -> Path:
        """Give the folder of ``"rows"`` or ``"wire"``."""
        return self.folder / kind

    def manifests(self, kind: str) -> Path:
        """Give the folder of the manifests of ``"rows"`` or ``"wire"``."""
        return self.meta / kind


def open_archive(
    folder: str | os.PathLike[str], *, create: bool = False
) -> ArchiveLayout:
    """Open an archive, and check that this version can read and write it.

    :param create: make it if the folder is missing or empty.
    :raises PipelineError: there is none; or it is of a version that this one does
        not know.
    """
    text = os.fspath(folder)
    if "://" in text:
        raise PipelineError(
            f"{text} is no folder: an archive is kept on a file system that is "
            "mounted here and, by the same path, on all workers"
        )
    if wrong := sorted(set(text) & set("*?[]{}\\")):
        raise PipelineError(
            f"{text}: Spark takes {' '.join(wrong)} for a pattern; give another name"
        )
    layout = ArchiveLayout(Path(text).absolute())
    try:
        description = json.loads(layout.description.read_bytes())
    except FileNotFoundError:
        if not create:
            raise PipelineError(
                f"{layout.folder} is no archive: {layout.description} is missing; "
                "'synapse-replication pipeline archive' makes one"
            ) from None
        description = _create(layout)
    except (OSError, ValueError) as error:
        raise PipelineError(f"cannot read {layout.description}: {error}") from error
    _check(layout, description)
    return layout


def _create(layout: ArchiveLayout) -> dict[str, Any]:
    description = {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        "schemas": {
            kind: {"version": version, "fields": _SCHEMAS[kind].jsonValue()["fields"]}
            for kind, version in SCHEMA_VERSIONS.items()
        },
    }
    try:
        layout.folder.mkdir(parents=True, exist_ok=True)
        others = sorted(
            path.name
            for path in layout.folder.iterdir()
            if path not in (layout.meta, layout.rows, layout.wire)
        )
        if others:
            raise PipelineError(
                f"{layout.folder} holds other files ({others[0]}): give an empty "
                "folder, or one that does not exist"
            )
        for part in (layout.meta, layout.rows, layout.wire):
            part.mkdir(exist_ok=True)
        # The last: what makes it an archive.
        write_durably(layout.description, json.dumps(description, indent=1).encode())
    except OSError as error:
        raise PipelineError(f"cannot make an archive: {error}") from error
    return description


def _check(layout: ArchiveLayout, description: Any) -> None:
    try:
        found_format = int(description["format"])
        found = {
            kind: (int(schema["version"]), schema["fields"])
            for kind, schema in description["schemas"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PipelineError(
            f"{layout.description} is damaged ({error!r}): restore it, all archives "
            "of one version have the same but for its date"
        ) from error
    if found_format > FORMAT:
        raise PipelineError(
            f"{layout.folder} has format {found_format}, this version knows "
            f"{FORMAT}: update synapse_replication"
        )
    for kind, version in SCHEMA_VERSIONS.items():
        if kind not in found:
            raise PipelineError(f"{layout.description} says nothing of {kind}")
        found_version, fields = found[kind]
        if found_version > version:
            raise PipelineError(
                f"{kind} of {layout.folder} have schema version {found_version}, this "
                f"version knows {version}: update synapse_replication"
            )
        if found_version < version:
            raise PipelineError(
                f"{kind} of {layout.folder} have schema version {found_version}, this "
                f"version writes {version}: start a new archive, or use the version "
                "that made it"
            )
        if fields != _SCHEMAS[kind].jsonValue()["fields"]:
            raise PipelineError(
                f"{kind} of {layout.folder} have other columns than schema version "
                f"{version} has: start a new archive, or use the version that made it"
            )


def read_archive(session: SparkSession, folder: str | os.PathLike[str]) -> DataFrame:
    """Read the rows of an archive: a data frame of ARCHIVE_SCHEMA.

    Filters on ``stream`` and ``day`` skip whole folders.

    :raises PipelineError: the folder is no archive, or of an unknown version.
    """
    return _read(session, open_archive(folder), "rows")


def read_archived_wire(
    session: SparkSession, folder: str | os.PathLike[str]
) -> DataFrame:
    """Read the commands of an archive: a data frame of ARCHIVED_WIRE_SCHEMA.

    :raises PipelineError: the folder is no archive, or of an unknown version.
    """
    return _read(session, open_archive(folder), "wire")


def _read(session: SparkSession, layout: ArchiveLayout, kind: str) -> DataFrame:
    schema = _SCHEMAS[kind]
    # The order of the schema: partitions come last otherwise.
    return (
        session.read.schema(schema)
        .parquet(f"file://{layout.data(kind)}")
        .select(*schema.names)
    )

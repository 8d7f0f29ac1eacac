"""The location of an archive, in a local folder or an object store, and its tables.

::

    ARCHIVE/streams/NAME/     a Delta table per stream
    ARCHIVE/wire/             a Delta table of the commands of recordings

Credentials of an object store come from its usual environment variables, which the
Spark driver reads. They are sent to tasks, like the database's password, so that
executors need no configuration.

An error names the location and the cause, in one line; for a typical cause, it also
names the remedy. If the transaction log of a table cannot be read, the error names the
damaged files of the log.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlsplit

import attrs
import click
import pyarrow as pa
from pyarrow import fs, parquet
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType

from synapse_replication.errors import PipelineError, excerpt

if TYPE_CHECKING:
    from deltalake import DeltaTable

#: The reason of a file that does not exist.
MISSING_REASON: Final = "is missing"

#: The names of commits and of checkpoints in a log, with their version.
_LOG_FILE: Final = re.compile(r"(\d{20})(\.checkpoint(\.[\w-]+)*\.parquet|\.json)")

#: The maximum length of a cause. The end of a longer one is shown.
_LONGEST: Final = 300

#: The answer of an S3 server.
_ANSWER: Final = re.compile(r"<Code>(\w+)</Code>\s*<Message>([^<]*)</Message>")

#: The number of the last errors of a chain that are shown.
_SHOWN: Final = 3

#: Regular expressions for the texts of errors, and what to do about them.
_HINTS: Final = (
    (r"NoSuchBucket|NO_SUCH_BUCKET", "create the bucket, or correct --archive"),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|INVALID_ACCESS_KEY_ID"
        r"|SIGNATURE_DOES_NOT_MATCH|ExpiredToken",
        "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    (
        r"169\.254\.169\.254|ACCESS_DENIED.*anonymous|CredentialsNotLoaded",
        "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    (r"AccessDenied|ACCESS_DENIED", "check the rights of these credentials"),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|[Mm]issing region",
        "set AWS_REGION to the region of the bucket",
    ),
    (
        r"NETWORK_CONNECTION|error sending request|dns error",
        "check AWS_ENDPOINT_URL, or Amazon's default, and the network",
    ),
    (r"[Pp]ermission denied", "check the rights of this user"),
    (r"[Rr]ead-only file system|[Cc]annot create", "choose another location"),
    (r"[Nn]o space left|[Dd]isk quota", "free some space, and run the job again"),
)

_STREAMS: Final = "streams"
_WIRE: Final = "wire"

_S3: Final = "s3://"

#: The prefix of the environment variables that configure access to an object store.
_ENVIRONMENT: Final = "AWS_"


def _environment() -> dict[str, str]:
    options = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT)
    }
    if options.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        options.setdefault("AWS_ALLOW_HTTP", "true")
    return options


@attrs.frozen
class ArchiveStore:
    """The location of an archive. It can be sent to tasks.

    :ivar uri: an absolute path, or ``s3://bucket/path``; without a slash at its end.
    :ivar options: the options of the object store. They may include credentials, so
        they must not be printed or logged.
    """

    uri: str
    options: Mapping[str, str] = attrs.field(repr=False, factory=dict)

    @classmethod
    def at(cls, archive: str | os.PathLike[str]) -> ArchiveStore:
        """Return the store of an archive that need not exist yet.

        An object store is not accessed yet.

        :raises PipelineError: if the location is unusable, or its scheme is not that of
            a supported object store.
        """
        given = os.fspath(archive)
        text = given.rstrip("/")
        if given.startswith(_S3):
            if not given.removeprefix(_S3).partition("/")[0]:
                raise PipelineError(
                    f"--archive {excerpt(given)}: the bucket is missing; write "
                    "s3://BUCKET/PATH"
                )
            return cls(text, _environment())
        if "://" in text:
            # Libraries know other stores, but retry for many minutes before they fail.
            raise PipelineError(
                f"--archive {excerpt(text)}: give a folder or s3://BUCKET/PATH; "
                "for another store, mount it, or use its S3-compatible interface"
            )
        store = cls(str(Path(text or "/").absolute()))
        if wrong := sorted(set(store.uri) & set("*?[]{}\\%#")):
            raise PipelineError(
                f"{store.uri}: the path of an archive must not contain "
                f"{' '.join(wrong)}, which Spark interprets as a pattern or an escape; "
                "choose another path"
            )
        if Path(store.uri).exists() and not Path(store.uri).is_dir():
            raise PipelineError(
                f"{store.uri} is a file; give a folder or s3://BUCKET/PATH"
            )
        return store

    @classmethod
    def existing(cls, archive: str | os.PathLike[str]) -> ArchiveStore:
        """Return the store of an archive that exists.

        :raises PipelineError: if the archive does not exist or cannot be read.
        """
        store = cls.at(archive)
        if not store.streams() and store.table(store.wire_uri) is None:
            raise PipelineError(
                f"{store.uri} is not an archive: it has no table of a stream or of "
                "recorded commands; create an archive with: synapse-replication "
                "pipeline archive"
            )
        return store

    def create(self) -> None:
        """Create the folder of a local archive, if it is missing.

        :raises PipelineError: if the folder cannot be created or written.
        """
        if not self.is_local:
            return
        try:
            os.makedirs(self.uri, exist_ok=True)
            # The user root may write to any folder, except on a read-only file system.
            with tempfile.TemporaryFile(dir=self.uri):
                pass
        except OSError as error:
            reason = storage_error_text(f"cannot create files ({error.strerror})")
            raise PipelineError(
                f"the archive {self.uri} cannot be written: {reason}"
            ) from error

    @property
    def is_local(self) -> bool:
        """Whether the archive is a local folder."""
        return "://" not in self.uri

    @property
    def wire_uri(self) -> str:
        """The URI of the table of recorded commands."""
        return f"{self.uri}/{_WIRE}"

    def stream_uri(self, stream: str) -> str:
        """Return the URI of a stream's table."""
        return f"{self.uri}/{_STREAMS}/{_folder_name(stream)}"

    def streams(self) -> list[str]:
        """Return the names of the streams that have a folder in the archive.

        A folder may not have a table yet: the files of the first batch are written
        before the table is created.

        :raises PipelineError: if the store cannot be reached.
        """
        found = self.list_folder(f"{self.uri}/{_STREAMS}")
        folders = (info for info in found if info.type == FileType.Directory)
        return sorted(_stream_name(folder.base_name) for folder in folders)

    def list_folder(self, uri: str, *, recursive: bool = False) -> list[FileInfo]:
        """Return the contents of a folder, which may be missing.

        :raises PipelineError: if the store cannot be reached.
        """
        selector = FileSelector(
            self.path(uri), allow_not_found=True, recursive=recursive
        )
        try:
            return list(self.filesystem.get_file_info(selector))
        except OSError as error:
            raise self._unreachable(error) from error

    def tables(self) -> Iterator[tuple[str, str, DeltaTable]]:
        """Yield the name, the URI and the table of each stream that has a table.

        :raises PipelineError: if the store cannot be reached, or a table's log is
            damaged.
        """
        for stream in self.streams():
            uri = self.stream_uri(stream)
            if (table := self.table(uri)) is not None:
                yield stream, uri, table

    def table(self, uri: str) -> DeltaTable | None:
        """Open a table at its newest version; return ``None`` if it does not exist.

        :raises PipelineError: if the store cannot be reached, or the table's log is
            damaged.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            return DeltaTable(uri, storage_options=self.delta_options)
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise self._damaged_log(uri) or self._unreachable(error) from error

    def _damaged_log(self, uri: str) -> PipelineError | None:
        """Return an error that names the damaged files of a log, if there are any."""
        try:
            damaged = self.damaged_log_files(uri)
        except OSError:
            # The store cannot be reached, which the caller reports.
            return None
        if not damaged:
            return None
        return PipelineError(
            f"the log of the table {uri} cannot be read: "
            + ", ".join(f"{name} {reason}" for name, reason in damaged)
            + "; restore these files from a backup, or run: synapse-replication "
            "pipeline archive --repair"
        )

    def damaged_log_files(self, uri: str) -> list[tuple[str, str]]:
        """Return the damaged and missing files of a table's log, with the reason.

        Commits that a checkpoint replaces may be missing.

        :param uri: the URI of the table.
        """
        filesystem = self.filesystem
        selector = FileSelector(f"{self.path(uri)}/_delta_log", allow_not_found=True)
        damaged: list[tuple[str, str]] = []
        commits: set[int] = set()
        first = 0
        for info in sorted(filesystem.get_file_info(selector), key=_checkpoints_first):
            found = _LOG_FILE.fullmatch(info.base_name)
            if found is None:
                continue
            version, is_commit = int(found[1]), info.extension == "json"
            if is_commit:
                commits.add(version)
            try:
                with filesystem.open_input_file(info.path) as file:
                    if is_commit:
                        _check_commit(file.read())
                    else:
                        parquet.read_table(file)
            except (pa.ArrowException, OSError, ValueError) as error:
                damaged.append((info.base_name, f"is damaged ({excerpt(str(error))})"))
            else:
                first = first if is_commit else version + 1
        for version in range(first, max(commits, default=-1)):
            if version not in commits:
                damaged.append((f"{version:020}.json", MISSING_REASON))
        return damaged

    @property
    def delta_options(self) -> dict[str, str] | None:
        """The storage options for delta-rs."""
        return dict(self.options) or None

    @property
    def filesystem(self) -> FileSystem:
        """The file system for pyarrow."""
        return fs.LocalFileSystem() if self.is_local else _s3(self.options)

    def path(self, uri: str) -> str:
        """Return the path of a table in the file system."""
        return uri.removeprefix(_S3)

    def _unreachable(self, error: Exception) -> PipelineError:
        return PipelineError(
            f"the archive {self.uri} cannot be read: {storage_error_text(error)}"
        )


def _checkpoints_first(info: FileInfo) -> tuple[bool, str]:
    return info.extension == "json", info.path


def _check_commit(content: bytes) -> None:
    lines = content.splitlines()
    if not lines:
        raise ValueError("the file is empty")
    for line in lines:
        json.loads(line)


def _s3(options: Mapping[str, str]) -> FileSystem:
    given: dict[str, Any] = {}
    endpoint = options.get("AWS_ENDPOINT_URL_S3") or options.get("AWS_ENDPOINT_URL")
    if endpoint:
        parts = urlsplit(endpoint)
        given |= {"endpoint_override": parts.netloc, "scheme": parts.scheme or "https"}
    region = options.get("AWS_REGION") or options.get("AWS_DEFAULT_REGION")
    if region or endpoint:
        given["region"] = region or "us-east-1"
    if "AWS_ACCESS_KEY_ID" in options:
        given |= {
            "access_key": options["AWS_ACCESS_KEY_ID"],
            "secret_key": options.get("AWS_SECRET_ACCESS_KEY", ""),
            "session_token": options.get("AWS_SESSION_TOKEN"),
        }
    return fs.S3FileSystem(**given)


def _folder_name(stream: str) -> str:
    """Encode a stream's name as a folder name that is safe in URIs and not hidden."""
    encoded = quote(stream, safe="").replace("~", "%7E").replace("%", "~")
    if encoded[:1] in ("_", "."):
        return f"~{ord(encoded[0]):02X}{encoded[1:]}"
    return encoded


def _stream_name(folder: str) -> str:
    return unquote(folder.replace("~", "%"))


def storage_error_text(error: Exception | str) -> str:
    """Return the cause of an error, in one line and without colours, with a hint.

    Errors of delta-rs are chains, whose last elements are the cause.
    """
    text = click.unstyle(str(error))
    if answer := _ANSWER.search(text):
        cause = f"{answer[1]}: {answer[2]}"
    else:
        chain = [" ".join(part.split()) for part in text.split("\u21b3")]
        cause = ": ".join(chain[-_SHOWN:])
    cause = "".join(each if each.isprintable() else "?" for each in cause)
    if len(cause) > _LONGEST:
        cause = "..." + cause[-_LONGEST:]
    hints = (hint for pattern, hint in _HINTS if re.search(pattern, text))
    hint = next(hints, None)
    return cause if hint is None else f"{cause}; {hint}"

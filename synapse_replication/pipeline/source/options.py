"""The validated options of the data source.

Each error names the option and says what to write instead, except those about a
stream's name or the configuration file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
from psycopg2.extensions import make_dsn

from synapse_replication.errors import PipelineError, TokenError, excerpt
from synapse_replication.pipeline.schemas import RowForm
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.catalog import (
    CatalogStream,
    catalog_of,
    select_streams,
    stream_of,
)
from synapse_replication.pipeline.source.offsets import StreamOffset, offsets_from_json
from synapse_replication.streams.table import TableStream
from synapse_replication.streams.tokens import MultiWriterStreamToken

EARLIEST = "earliest"
LATEST = "latest"


class _Deployment(msgspec.Struct):
    """The part of a configuration that a process without it needs."""

    writers: Mapping[str, tuple[str, ...]]
    declared: tuple[CatalogStream, ...]


def reader_options(settings: PipelineSettings) -> dict[str, str]:
    """Convert settings to options of the data source, for ``.options(**...)``."""
    deployment = _Deployment(settings.writers, tuple(map(stream_of, settings.declared)))
    return {
        "dsn": make_dsn(**settings.conninfo),
        "deployment": msgspec.json.encode(deployment).decode(),
    }


@attrs.frozen
class SourceOptions:
    """The rows to read, and the database to read them from.

    :ivar conninfo: libpq's parameters by name. They may contain a password, so they
        must not be printed or logged.
    :ivar declared_writers: the configured writers of each stream.
    :ivar catalog: all streams that can be read.
    :ivar streams: the names of the streams to read; ``None`` for all that the database
        has.
    :ivar writers: the instances whose rows to read; ``None`` for all.
    :ivar starting_token: the value of ``startingToken``, not parsed yet.
    :ivar ending_token: the value of ``endingToken``, not parsed yet.
    :ivar max_rows: the maximum number of rows in a batch of a continuous read,
        exceeded only by a single token with more rows; ``None`` for no limit.
    :ivar num_partitions: the maximum number of tasks; ``None`` to derive the number
        from the number of ids.
    :ivar filter_pushdown: whether the data source applies a query's filters.
    :ivar form: which columns of each row to read.
    """

    conninfo: Mapping[str, str] = attrs.field(repr=False)
    declared_writers: Mapping[str, Sequence[str]]
    catalog: Mapping[str, CatalogStream] = attrs.field(repr=False)
    streams: tuple[str, ...] | None = None
    writers: tuple[str, ...] | None = None
    starting_token: str = EARLIEST
    ending_token: str = LATEST
    max_rows: int | None = None
    num_partitions: int | None = None
    filter_pushdown: bool = False
    form: RowForm = RowForm.JSON

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Validate the options that were passed to Spark, which ignores their case.

        :raises PipelineError: if an option is unknown, missing or invalid.
        """
        given = {name.lower(): value for name, value in options.items()}
        names = [*_DATABASE, *_ROWS]
        unknown = given.keys() - {name.lower() for name in names}
        if unknown:
            raise PipelineError(
                f"option {excerpt(min(unknown))} is unknown; the options are "
                f"{', '.join(names[1:])}"
            )
        settings, declared = _deployment(given)
        rows: dict[str, Any] = {}
        for name, (field, parse) in _ROWS.items():
            text = given.get(name.lower())
            if text is not None:
                try:
                    rows[field] = parse(text)
                except (ValueError, PipelineError) as error:
                    raise PipelineError(
                        f"option {name} is '{excerpt(text)}'; write {error}"
                    ) from None
        parsed = cls(
            dict(settings.conninfo),
            dict(settings.writers),
            catalog_of(declared),
            **rows,
        )
        select_streams(parsed.catalog, parsed.streams or ())
        if parsed.form is RowForm.TYPED and len(parsed.streams or ()) != 1:
            raise PipelineError(
                "option rows is 'typed', which requires one stream, because each "
                "stream has its own columns; name the stream in the option streams"
            )
        return parsed


def _deployment(
    given: Mapping[str, str],
) -> tuple[PipelineSettings, Sequence[TableStream | CatalogStream]]:
    if ("dsn" in given) is ("config" in given):
        raise PipelineError(
            "options dsn and config: set one of them, dsn to a connection string of "
            "libpq or config to the path of the homeserver's configuration"
        )
    if "config" in given:
        path = Path(given["config"])
        if not path.is_absolute() and not path.exists():
            # Options are parsed in a process of Spark, which remains in the folder in
            # which Java was started.
            raise PipelineError(
                f"option config is '{excerpt(str(path))}', a relative path, and "
                f"{Path.cwd()}, the folder in which Spark was started, has no such "
                "file; write an absolute path"
            )
        settings = PipelineSettings.of_config([str(path)])
        return settings, settings.declared
    try:
        settings = PipelineSettings.of_dsn(given["dsn"])
    except PipelineError as error:
        raise PipelineError(f"option dsn: {error}") from None
    if "deployment" not in given:
        return settings, []
    deployment = msgspec.json.decode(given["deployment"], type=_Deployment)
    return attrs.evolve(settings, writers=deployment.writers), deployment.declared


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("names separated by commas, or omit the option to read all")
    return names


def _token(text: str) -> str:
    token = text.strip()
    if token.lower() in (EARLIEST, LATEST):
        return token.lower()
    # Check the syntax only. The planner checks the streams and instances of the token.
    parse_token(token, [], str)
    return token


def _count(text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= 10
    if not is_number or not 0 < int(text) < 2**31:
        raise ValueError(f"a whole number from 1 to {2**31 - 1}")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def _form(text: str) -> RowForm:
    try:
        return RowForm(text.lower())
    except ValueError:
        raise ValueError("json, typed or none") from None


#: The options that name the database. Only the package's own jobs set the first one,
#: the relevant part of a configuration as JSON.
_DATABASE: Final = ("deployment", "dsn", "config")

#: The field of each other option, and the function that parses its text. The function's
#: error says what to write.
_ROWS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "streams": ("streams", _names),
    "writers": ("writers", _names),
    "startingToken": ("starting_token", _token),
    "endingToken": ("ending_token", _token),
    "maxRowsPerTrigger": ("max_rows", _count),
    "numPartitions": ("num_partitions", _count),
    "filterPushdown": ("filter_pushdown", _flag),
    "rows": ("form", _form),
}


def parse_token(
    text: str, streams: Sequence[str], name_of: Callable[[int], str]
) -> dict[str, StreamOffset]:
    """Parse a token that is neither ``earliest`` nor ``latest``.

    :param streams: the streams to read; a token that is not JSON applies to each.
    :param name_of: maps the number of an instance to its name; raises
        :exc:`LookupError` for an unknown number.
    :raises PipelineError: if ``text`` is not a token. The message says what to write.
    """

    def parse(token: str) -> StreamOffset:
        parsed = MultiWriterStreamToken.parse(token, name_of)
        return StreamOffset(parsed.stream, dict(parsed.instance_map))

    try:
        if not text.startswith("{"):
            return dict.fromkeys(streams, parse(text))
        value = json.loads(text)
        texts = {n: v for n, v in value.items() if isinstance(v, str)}
        offsets = offsets_from_json({n: v for n, v in value.items() if n not in texts})
        return offsets | {name: parse(position) for name, position in texts.items()}
    except (PipelineError, TokenError, ValueError) as error:
        raise PipelineError(
            "earliest, latest, a token like 5 or m5~1.7, or a token for each stream "
            f'like {{"events": "m5~1.7"}} ({error})'
        ) from error

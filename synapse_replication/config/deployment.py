"""The configuration that all processes share: database, streams and writers.

The pipeline uses this module on machines that run no replication process. So the module
imports no reactor, and reads no file that only a replication process needs, for
instance a certificate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from synapse_replication.config.models import DatabaseSection, SynapseFile
from synapse_replication.config.structuring import INVALID, add_hook, read_value
from synapse_replication.config.yaml_files import (
    OWN_SECTION,
    KeyPath,
    MergedFiles,
    hint_for,
    read_files,
)
from synapse_replication.errors import ConfigError, StreamConfigurationError
from synapse_replication.options import InvalidValueError
from synapse_replication.streams.memory import InMemory
from synapse_replication.streams.standard.registry import (
    DEFAULT_STREAMS,
    MAIN_INSTANCE,
    STANDARD_STREAMS,
)
from synapse_replication.streams.table import TableStream

#: The keys of ``stream_writers`` that may name only one instance, unless a declared
#: stream has that name.
SINGLE_WRITER_KEYS = frozenset(
    {"account_data", "presence", "push_rules", "to_device", "typing"}
)


@attrs.frozen
class DatabaseConfig:
    """The connection parameters of PostgreSQL.

    :ivar conninfo: libpq's parameters by name.
    :ivar max_connections: the maximum number of connections in the pool (Synapse's
        ``cp_max``).
    """

    conninfo: Mapping[str, Any] = attrs.field(repr=False)
    max_connections: int = 10


@attrs.frozen
class DeploymentConfig:
    """The configuration that all processes of a deployment share.

    :ivar database: ``None`` if the database is not PostgreSQL, or not configured.
    :ivar streams: standard streams (by name) and declared ones.
    :ivar writers: the writers of each stream, by its name on the wire; empty for a
        stream that every instance may write.
    """

    database: DatabaseConfig | None
    streams: tuple[str | TableStream, ...]
    writers: Mapping[str, tuple[str, ...]]


def load_deployment(paths: Sequence[str]) -> DeploymentConfig:
    """Read the configuration that all processes share.

    Settings of a single process, for instance its listeners, are checked only on their
    own: not against other settings, and not against files.

    :param paths: YAML files, or folders of them; later files take precedence.
    :raises ConfigError: if the configuration is invalid; the error lists all problems.
    """
    merged, shared = read_shared(paths)
    streams = read_streams(merged)
    deployment = DeploymentConfig(
        read_database(shared, merged, streams),
        streams,
        read_writers(shared, merged, streams),
    )
    if merged.problems:
        raise ConfigError(merged.problems)
    return deployment


def read_shared(paths: Sequence[str]) -> tuple[MergedFiles, SynapseFile]:
    """Read and merge files.

    :return: the merged files, with the problems that were found, and their valid
        sections.
    :raises ConfigError: if the files have problems and contain no key.
    """
    merged = read_files(paths)
    if merged.problems and not merged.values:
        raise ConfigError(merged.problems)
    shared = read_value(SynapseFile, merged.values, (), merged)
    if shared is INVALID:
        # Only server_name is required. Read the rest, whose problems are reported.
        values = {**merged.values, "server_name": "unknown"}
        shared = read_value(SynapseFile, values, (), attrs.evolve(merged, problems=[]))
    return merged, shared


def read_streams(merged: MergedFiles) -> tuple[str | TableStream, ...]:
    """Return the streams: standard ones by name, declared ones as objects."""
    own = merged.values.get(OWN_SECTION)
    entries = own.get("streams") if isinstance(own, dict) else None
    if entries is None:
        return DEFAULT_STREAMS
    path = (OWN_SECTION, "streams")
    streams = read_value(tuple[StreamEntry, ...], entries, path, merged)
    return () if streams is INVALID else tuple(streams)


#: An entry of ``streams`` in Python; in the files, there are no streams in memory.
StreamEntry: TypeAlias = str | TableStream | InMemory


def _to_stream(value: Any) -> Any:
    """Read an entry of ``streams``: a standard stream's name, or a declaration.

    :raises InvalidValueError: if the entry is invalid.
    """
    if isinstance(value, str):
        if value in STANDARD_STREAMS:
            return value
        known = ", ".join(STANDARD_STREAMS)
        otherwise = f"declare it by its table, or write one of {known}"
        raise InvalidValueError(
            f"{value!r} is not a standard stream",
            hint_for(value, STANDARD_STREAMS, otherwise),
        )
    if not isinstance(value, dict):
        raise InvalidValueError(
            "each entry must be a mapping, or the name of a standard stream",
            "write name, table, id_column, columns, sequence and writers",
        )
    fields = {
        field.name: field
        for field in attrs.fields(TableStream)
        if field.init and field.name != "row_type"
    }
    for key in value:
        if key not in fields:
            otherwise = f"write only {', '.join(fields)}"
            raise InvalidValueError(
                f"{key!r} is not a key of a stream",
                hint_for(str(key), fields, otherwise),
            )
    missing = [
        name
        for name, field in fields.items()
        if field.default is attrs.NOTHING and name not in value
    ]
    if missing:
        raise InvalidValueError(
            f"the declaration lacks {', '.join(missing)}", "add the missing keys"
        )
    try:
        return TableStream(**value)
    except StreamConfigurationError as error:
        problem, _, hint = str(error).rpartition("; ")
        raise InvalidValueError(
            problem or str(error), hint or "see the documentation"
        ) from None


add_hook(StreamEntry, _to_stream)


#: The default of ``cp_max``, the maximum number of connections to the database.
DEFAULT_CONNECTIONS = 10


def _conninfo(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return libpq's parameters among the arguments of the driver."""
    conninfo = {
        name: value
        for name, value in args.items()
        if not name.startswith("cp_") and value is not None
    }
    # `database` is psycopg2's older name of libpq's `dbname`.
    if "database" in conninfo and "dbname" not in args:
        conninfo["dbname"] = conninfo.pop("database")
    return conninfo


def _replicated_database(
    shared: SynapseFile, merged: MergedFiles
) -> tuple[KeyPath, DatabaseSection | None]:
    """Return the path and the section of the database that has the streams.

    Synapse can distribute its tables over several databases. The streams and their
    positions are in the one that holds the data store ``main``.
    """
    databases = shared.databases
    if not databases:
        return ("database",), shared.database
    if shared.database is not None:
        merged.report(
            ("databases",), "database is set, too", "remove database or databases"
        )
    holders = [name for name in databases if "main" in databases[name].data_stores]
    if len(holders) != 1:
        merged.report(
            ("databases",),
            f"{len(holders)} databases hold the data store main",
            "write `data_stores: [main]` in the one that has the tables of events",
        )
        return ("databases",), None
    return ("databases", holders[0]), databases[holders[0]]


def read_database(
    shared: SynapseFile, merged: MergedFiles, streams: Sequence[str | TableStream]
) -> DatabaseConfig | None:
    """Return the connection parameters of PostgreSQL, if they are configured.

    If any of the streams is stored in it, a missing or unusable database is a problem.
    An invalid ``cp_max`` is always one.
    """
    path, section = _replicated_database(shared, merged)
    report = merged.report
    is_needed = any(
        isinstance(stream, TableStream) or not STANDARD_STREAMS[stream].held_in_memory
        for stream in streams
    )
    if section is None:
        if is_needed and not {"database", "databases"} & merged.values.keys():
            report(
                ("database",),
                "is missing",
                "write name: psycopg2 and args: with host, dbname, user, ...; or, if "
                "no stream is stored in a database, list the streams under "
                "synapse_replication.streams (`streams: []` if your modules add them)",
            )
        return None
    if section.name != "psycopg2":
        if is_needed:
            report(
                (*path, "name"),
                f"{section.name!r} cannot be replicated: replication needs the "
                "sequences of PostgreSQL",
                "write psycopg2, and move the data to PostgreSQL",
            )
        return None
    args = section.args
    most = args.get("cp_max", DEFAULT_CONNECTIONS)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        report(
            (*path, "args", "cp_max"),
            "is not a number of connections",
            f"write a whole number from 1, for instance {DEFAULT_CONNECTIONS}",
        )
        most = DEFAULT_CONNECTIONS
    conninfo = _conninfo(args)
    if is_needed and (why := conninfo_problem(conninfo)) is not None:
        report(
            (*path, "args"),
            why,
            "write libpq's parameters (host, port, dbname, user, password, ...) "
            "and the pool's cp_min and cp_max",
        )
    return DatabaseConfig(conninfo, most)


def read_writers(
    shared: SynapseFile, merged: MergedFiles, streams: Sequence[str | TableStream]
) -> dict[str, tuple[str, ...]]:
    """Return the writers of each stream, by its name on the wire."""
    check = _WriterChecks(shared, merged)
    # Which keys of stream_writers are valid depends on the declared streams.
    sources = OWN_SECTION, f"{OWN_SECTION}.streams"
    if any(problem.key.partition("[")[0] in sources for problem in merged.problems):
        configured = {}
    else:
        configured = shared.stream_writers
    declared = {s.name for s in streams if isinstance(s, TableStream)}
    check.configured(configured, declared)
    writers: dict[str, tuple[str, ...]] = {}
    for index, stream in enumerate(streams):
        path = (OWN_SECTION, "streams", index)
        name = stream if isinstance(stream, str) else stream.name
        if name in writers:
            check.report(
                path, f"{name} is declared twice", "rename or remove one of the two"
            )
        if isinstance(stream, TableStream):
            if name not in configured:
                check.instances((*path, "writers"), stream.writers)
            writers[name] = tuple(configured.get(name, stream.writers))
        elif STANDARD_STREAMS[stream].any_instance_writes:
            writers[name] = ()
        else:
            key = STANDARD_STREAMS[stream].writers_key or ""
            writers[name] = tuple(configured.get(key) or (MAIN_INSTANCE,))
    return writers


class _WriterChecks:
    """Checks the names in ``stream_writers``, and the writers of declared streams."""

    def __init__(self, shared: SynapseFile, merged: MergedFiles) -> None:
        self._merged = merged
        self.report = merged.report
        self._known = {MAIN_INSTANCE, *shared.instance_map} - {"main"}

    def configured(
        self, configured: Mapping[str, Sequence[str]], declared: set[str]
    ) -> None:
        """Check ``stream_writers`` itself.

        :param declared: the names of the declared streams.
        """
        standard = {stream.writers_key for stream in STANDARD_STREAMS.values()}
        known = {key for key in standard if key is not None} | declared
        for key, names in configured.items():
            path = ("stream_writers", key)
            if key not in known:
                hint = hint_for(key, sorted(known))
                self.report(path, "there is no such stream", hint)
            if not names:
                self.report(
                    path,
                    "names no instance",
                    "name one, or remove the key to use the default writers",
                )
            if len(set(names)) < len(names):
                self.report(path, "names an instance twice", "name each instance once")
            if key in SINGLE_WRITER_KEYS and key not in declared and len(names) > 1:
                self.report(path, "may have one writer only", "name one instance")
            self.instances(path, names)

    def instances(self, path: KeyPath, names: Sequence[str]) -> None:
        """Check that each instance is the main process, or is in ``instance_map``.

        If ``instance_map`` itself has problems, nothing is checked.
        """
        for index, name in enumerate(names):
            if name in self._known or "instance_map" in self._merged.failed_keys():
                continue
            if name == "main":
                problem = "as a writer, the main process is not called 'main'"
                hint = f"write {MAIN_INSTANCE}"
            else:
                problem = f"instance {name!r} is not in instance_map"
                add = f"add it: `instance_map: {{{name}: {{host: ..., port: ...}}}}`"
                hint = hint_for(name, self._known, add)
            self.report((*path, index), problem, hint)


def conninfo_problem(conninfo: Mapping[str, Any]) -> str | None:
    """Return why the driver rejects the parameters; the text repeats no value.

    :return: ``None`` if the parameters are valid, or the driver is not installed.
    """
    try:
        from psycopg2 import ProgrammingError
        from psycopg2.extensions import make_dsn
    except ModuleNotFoundError:
        # Commands that need the driver report at startup that it is missing.
        return None
    try:
        make_dsn(**conninfo)
    except (ProgrammingError, TypeError) as error:
        # A TypeError means that both `database` and `dbname` are given, for instance.
        if "dsn" in conninfo:
            # The driver's text may repeat a word of the string.
            return "dsn is not a valid connection string, or a parameter is unknown"
        return " ".join(str(error).split())
    return None

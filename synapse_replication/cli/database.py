"""The commands on the database: ``init-db`` and ``positions show|check|repair``.

They block and need no reactor. They can be run while a deployment is running, except
``positions repair`` without ``--dry-run`` or ``--seen``, which requires that all
writers are stopped.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import psycopg2
from rich.console import Console
from rich.table import Table

from synapse_replication.cli.common import (
    cell,
    command,
    config_option,
    echo,
    fail,
    load_or_exit,
)
from synapse_replication.config.process import ProcessConfig
from synapse_replication.errors import StorageError
from synapse_replication.storage import consistency
from synapse_replication.storage.id_streams import IdStream, read_sequence
from synapse_replication.storage.schema import prepare_database
from synapse_replication.storage.sequences import skip_ids
from synapse_replication.storage.transactions import connect
from synapse_replication.text import counted

#: Exit status if positions, tables and sequences disagree.
EXIT_DISAGREES = 1

#: A position: an id, which has 19 digits at most.
_POSITION = re.compile(r"[0-9]{1,19}")

#: The connection timeout in s, unless one is configured.
_CONNECT_TIMEOUT = 10


@contextlib.contextmanager
def _open_database(config_paths: Sequence[str]) -> Iterator[tuple[Any, ProcessConfig]]:
    """Read the configuration and connect to its database.

    An invalid configuration, a failed connection, or a failure of the caller's queries
    ends the process with status 2 and a message. The caller must commit.
    """
    config = load_or_exit(config_paths, None)
    if config.database is None:
        fail(
            "the configuration has no PostgreSQL database; add the section 'database' "
            "with 'name: psycopg2'"
        )
    conninfo = {"connect_timeout": _CONNECT_TIMEOUT, **config.database.conninfo}
    try:
        connection = connect(conninfo)
    except psycopg2.Error as error:
        fail(f"cannot connect to the database: {str(error).strip()}")
    with contextlib.closing(connection):
        try:
            yield connection, config
        except (StorageError, psycopg2.Error) as error:
            fail(f"no table was changed: {str(error).strip()}")


@command("init-db", "init-db -c homeserver.yaml")
@config_option
def init_db_command(config_paths: tuple[str, ...]) -> None:
    """Create the tables that replication needs, once per database.

    A main process does the same when it starts. Existing tables, including those of a
    homeserver, are not changed. Running the command again changes nothing.
    """
    with _open_database(config_paths) as (connection, _):
        applied = prepare_database(connection.cursor())
        connection.commit()
    what = (
        f"applied {counted(applied, 'schema change')}" if applied else "nothing to do"
    )
    echo(f"The database is ready: {what}.")


@click.group("positions")
def positions_command() -> None:
    """Compare sequences, tables and stored positions, and repair disagreements."""


@command("show", "positions show -c homeserver.yaml", group=positions_command)
@config_option
def show_command(config_paths: tuple[str, ...]) -> None:
    """Print sequences, greatest ids of tables, stored positions, and disagreements."""
    with _open_database(config_paths) as (connection, config):
        report = consistency.examine(connection.cursor(), config.id_streams)
    _print_table(report)
    _print_problems(report.problems)


@command("check", "positions check -c homeserver.yaml", group=positions_command)
@config_option
def check_command(config_paths: tuple[str, ...]) -> None:
    """Print disagreements and the SQL to repair them; exit with 1 if there are any."""
    with _open_database(config_paths) as (connection, config):
        report = consistency.examine(connection.cursor(), config.id_streams)
    _print_problems(report.problems)
    if report.problems:
        sys.exit(EXIT_DISAGREES)
    present = [state for state in report.streams if state.sequence_value is not None]
    echo(f"{counted(len(present), 'stream')}, all positions agree")


def _parse_positions(
    context: object, parameter: object, values: Sequence[str]
) -> dict[str, int]:
    seen: dict[str, int] = {}
    for value in values:
        name, equals, position = value.partition("=")
        if not (equals and _POSITION.fullmatch(position)):
            raise click.BadParameter(f"'{value}': write STREAM=POSITION")
        if name in seen:
            raise click.BadParameter(f"there are two positions of {name}: write one")
        seen[name] = int(position)
    return seen


def _advance_sequences(
    cursor: Any,
    streams: Mapping[str, IdStream],
    seen: Mapping[str, int],
    *,
    dry_run: bool,
) -> None:
    """Advance sequences to the positions that readers have reached.

    A sequence that is already at or beyond the position is not changed. All streams and
    positions are checked first: PostgreSQL does not roll back a change of a sequence.

    :param dry_run: print what would be changed, and change nothing.
    :raises StorageError: if a stream is unknown, or a position is too far beyond its
        sequence.
    """
    for name, position in seen.items():
        if name not in streams:
            raise StorageError(f"there is no stream {name} with a sequence")
        sequence = streams[name].sequence
        last = read_sequence(cursor, sequence)
        distance = position - last
        if distance > streams[name].plausible_distance:
            raise StorageError(
                f"{position} of {name} is {distance} beyond sequence {sequence}: "
                "advancing the sequence that far would use up the ids in between. Move "
                "the reader back instead: see ahead_of_writer in the runbook"
            )
    for name, position in seen.items():
        sequence = streams[name].sequence
        last = read_sequence(cursor, sequence)
        distance = position - last
        if distance > 0 and not dry_run:
            last = skip_ids(cursor, sequence, distance)
        verb = "would be advanced to" if dry_run and distance > 0 else "is at"
        echo(f"{name}: sequence {sequence} {verb} {max(last, position)}")


@command(
    "repair",
    "positions repair -c homeserver.yaml --dry-run",
    "positions repair -c homeserver.yaml",
    "positions repair -c homeserver.yaml --seen events=90000",
    group=positions_command,
)
@config_option
@click.option(
    "--dry-run", is_flag=True, help="Print what would be changed; change nothing."
)
@click.option(
    "--seen",
    multiple=True,
    callback=_parse_positions,
    metavar="STREAM=POSITION",
    help="Advance a stream's sequence to a reader's position, and repair nothing else. "
    "Writers may be running. May be repeated.",
)
def repair_command(
    config_paths: tuple[str, ...], dry_run: bool, seen: Mapping[str, int]
) -> None:
    """Repair disagreements in one transaction.

    Stop all writers first, unless --dry-run or --seen is used.
    """
    with _open_database(config_paths) as (connection, config):
        cursor = connection.cursor()
        problems: Sequence[consistency.Problem]
        if seen:
            _advance_sequences(cursor, config.id_streams, seen, dry_run=dry_run)
            connection.commit()
            return
        if dry_run:
            problems = consistency.examine(cursor, config.id_streams).problems
        else:
            problems, _ = consistency.repair(cursor, config.id_streams)
            connection.commit()
    _print_problems(problems)
    if not problems:
        echo("nothing to repair")
    elif dry_run:
        echo("nothing was changed (--dry-run)")
    else:
        echo(f"repaired: {len(problems)}")


def _print_table(report: consistency.ConsistencyReport) -> None:
    table = Table("stream", "sequence", "table max", "writer", "stored", "lag")
    for index in (1, 2, 4, 5):
        table.columns[index].justify = "right"
    for state in report.streams:
        if state.sequence_value is None:
            table.add_row(state.name, "absent")
            continue
        greatest = str(max(state.farthest.values(), default=0) * state.stream.sign)
        first = [state.name, str(state.sequence_value), greatest]
        if not state.writers:
            table.add_row(*first, "(any instance)")
        for writer in state.writers:
            known = writer.stored is not None
            name = writer.instance_name
            name += "" if writer.declared else " (not a writer)"
            stored = str(writer.stored) if known else "none"
            table.add_row(*first, cell(name), stored, str(writer.lag) if known else "")
            first = ["", "", ""]
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _print_problems(problems: Sequence[consistency.Problem]) -> None:
    for problem in problems:
        where = "" if problem.stream_name is None else f"{problem.stream_name}: "
        echo(f"{where}{problem.text}")
        for statement in problem.statements:
            echo(f"    {' '.join(statement.split())}")

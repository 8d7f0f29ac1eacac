"""``synapse-replication exec``: run a module of Synapse on our replication.

Theory of operation: before the module is run as ``__main__``, the names of
``table.py`` are replaced, all or none: the module and all that it imports then find
ours. What is installed is compared with the table first; if it differs, nothing is
started. Exit status 2 means that: nothing was started.
"""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import sys
from collections.abc import Iterable, Sequence

import click

from synapse_replication.dropin.backlogs import BYTES, ROWS
from synapse_replication.dropin.extension import ENVIRONMENT
from synapse_replication.dropin.substitution import (
    Substitution,
    SubstitutionError,
    substitute,
)
from synapse_replication.dropin.table import PARTS, PROVEN_VERSIONS, SUBSTITUTIONS
from synapse_replication.streams.backlog import BacklogOptions

__all__ = ["choose", "exec_command", "version_problem"]

#: Exit status when nothing was started.
EXIT_REFUSED = 2

#: The distribution that the table is about.
DISTRIBUTION = "matrix-synapse"


def choose(only: Iterable[str], excepted: Iterable[str]) -> tuple[Substitution, ...]:
    """Choose substitutions by their parts.

    :param only: the parts; all if empty.
    :param excepted: the parts to leave as they are.
    :raises SubstitutionError: there is no such part, or none is left.
    """
    only, excepted = set(only), set(excepted)
    if unknown := sorted((only | excepted) - set(PARTS)):
        known = ", ".join(PARTS)
        raise SubstitutionError([f"there is no part {', '.join(unknown)}; {known} are"])
    parts = (only or set(PARTS)) - excepted
    if not parts:
        raise SubstitutionError(["every part is left out: nothing would be replaced"])
    return tuple(known for known in SUBSTITUTIONS if known.part in parts)


def installed_version() -> str | None:
    """Give the version of Synapse that is installed here, if one is."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_problem(version: str | None) -> str | None:
    """Say why a version is not one that this was proven with."""
    proven = ", ".join(PROVEN_VERSIONS)
    if version is None:
        return f"{DISTRIBUTION} is not installed beside {sys.executable}"
    if version not in PROVEN_VERSIONS:
        return f"{DISTRIBUTION} {version} was not proven; {proven} were"
    return None


def _split(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


@click.command(
    "exec",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@click.option(
    "--only",
    default="",
    callback=_split,
    metavar="PARTS",
    help=f"Replace these parts only ({','.join(PARTS)}).",
)
@click.option(
    "--except",
    "excepted",
    default="",
    callback=_split,
    metavar="PARTS",
    help="Replace all but these parts.",
)
@click.option(
    "--extension/--no-extension",
    envvar=ENVIRONMENT,
    default=True,
    show_default=True,
    help="Tell one another epochs and heartbeats, on a channel that stock processes "
    "never see.",
)
@click.option(
    "--backlog-rows",
    type=click.IntRange(min=0),
    envvar=ROWS,
    default=BacklogOptions().max_rows,
    show_default=True,
    help="Keep so many rows of each stream for readers that miss them.",
)
@click.option(
    "--backlog-bytes",
    type=click.IntRange(min=0),
    envvar=BYTES,
    default=BacklogOptions().max_bytes,
    show_default=True,
    help="Use so much memory for that, for each stream.",
)
@click.option("--list", "as_list", is_flag=True, help="Print what is replaced.")
@click.option("--strict", is_flag=True, help="Refuse versions that were not proven.")
@click.option("-m", "module", metavar="MODULE", help="The module to run.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def exec_command(
    only: Sequence[str],
    excepted: Sequence[str],
    extension: bool,
    backlog_rows: int,
    backlog_bytes: int,
    as_list: bool,
    strict: bool,
    module: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Run a module of Synapse on our replication.

    For instance: synapse-replication exec -m synapse.app.homeserver -c FILE
    """
    try:
        substitutions = choose(only, excepted)
        if as_list:
            click.echo(_table(substitutions))
            return
        if module is None:
            raise click.UsageError("name a module with -m MODULE, or ask for --list")
        problem = version_problem(installed_version())
        if problem is not None:
            if strict or installed_version() is None:
                raise SubstitutionError([problem])
            _say(f"{problem}; going on without --strict")
        substitute(substitutions)
    except SubstitutionError as error:
        for line in error.problems:
            _say(line)
        _say("nothing was started")
        sys.exit(EXIT_REFUSED)
    # For what the module starts, too.
    os.environ[ENVIRONMENT] = "true" if extension else "false"
    os.environ[ROWS] = str(backlog_rows)
    os.environ[BYTES] = str(backlog_bytes)
    # What `python -m` does: the working directory comes first.
    sys.path.insert(0, os.getcwd())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _say(text: str) -> None:
    click.echo(f"synapse-replication exec: {text}", err=True)


def _table(substitutions: Sequence[Substitution]) -> str:
    """Write what is replaced, and for which versions that was proven."""
    width = max(len(known.part) for known in substitutions)
    lines = [
        f"{known.part:<{width}}  {known}\n{'':<{width}}    -> {known.replacement}"
        for known in substitutions
    ]
    found = installed_version() or "none"
    return "\n".join(
        [
            *lines,
            "",
            f"Proven with {DISTRIBUTION} {', '.join(PROVEN_VERSIONS)}; "
            f"installed here: {found}.",
        ]
    )

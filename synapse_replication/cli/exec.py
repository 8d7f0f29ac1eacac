"""``synapse-replication exec``: runs a module of Synapse on this package.

If an error prevents the start of the module, the exit status is 2. Otherwise, it is the
status of the module, which may also be 2. ``--list`` starts no module; its exit status
is 0, or 2 after an error.

The command raises :exc:`~synapse_replication.cli.common.ModuleReady`, whereupon
:func:`synapse_replication.cli.main.main` runs the module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from synapse_replication.cli.common import EXIT_USAGE, ModuleReady, examples
from synapse_replication.dropin.backlogs import BYTES, ROWS
from synapse_replication.dropin.extension import ENVIRONMENT
from synapse_replication.dropin.launcher import (
    check_version,
    choose,
    describe_substitutions,
    prepare,
)
from synapse_replication.dropin.monitoring import HOOKS, TRACING
from synapse_replication.dropin.settings import DISTANCE
from synapse_replication.dropin.substitution import SubstitutionError
from synapse_replication.dropin.table import PARTS
from synapse_replication.errors import HooksNotFoundError
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE


def _split(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


@click.command(
    "exec",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    epilog=examples(
        "exec --list",
        "exec -m synapse.app.homeserver -c homeserver.yaml",
    ),
)
@click.option(
    "--only",
    default="",
    callback=_split,
    metavar="PARTS",
    help=f"Replace only these parts ({','.join(PARTS)}).",
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
    help="Exchange epochs and heartbeats with peers, on a channel that stock processes "
    "do not use.",
)
@click.option(
    "--backlog-rows",
    type=click.IntRange(min=0),
    envvar=ROWS,
    default=BacklogOptions().max_rows,
    show_default=True,
    help="The most rows in the backlog of each stream, for readers that missed them.",
)
@click.option(
    "--backlog-bytes",
    type=click.IntRange(min=0),
    envvar=BYTES,
    default=BacklogOptions().max_bytes,
    show_default=True,
    help="The most bytes in the backlog of each stream.",
)
@click.option(
    "--plausible-distance",
    type=click.IntRange(min=1000),
    envvar=DISTANCE,
    default=PLAUSIBLE_DISTANCE,
    show_default=True,
    help="The most ids by which an announced position may exceed the last id of the "
    "stream's sequence.",
)
@click.option(
    "--hooks",
    envvar=HOOKS,
    default="",
    metavar="NAMES",
    help="Dotted names, separated by commas, of functions that take (host, config) and "
    "subscribe to hooks.",
)
@click.option(
    "--tracing-endpoint",
    envvar=TRACING,
    default="",
    metavar="URL",
    help="Send spans to this collector with OTLP over HTTP.",
)
@click.option("--list", "as_list", is_flag=True, help="Print the replaced parts.")
@click.option(
    "--strict", is_flag=True, help="Reject versions of Synapse that were not tested."
)
@click.option("-m", "module", metavar="MODULE", help="The module to run.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def exec_command(
    only: Sequence[str],
    excepted: Sequence[str],
    extension: bool,
    backlog_rows: int,
    backlog_bytes: int,
    plausible_distance: int,
    hooks: str,
    tracing_endpoint: str,
    as_list: bool,
    strict: bool,
    module: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Run a module of Synapse with this package's replication."""
    try:
        substitutions = choose(only, excepted)
        if as_list:
            click.echo(describe_substitutions(substitutions))
            return
        if module is None:
            raise click.UsageError("name a module with -m MODULE, or use --list")
        if (warning := check_version(strict=strict)) is not None:
            _print_error(f"{warning}; continuing, because --strict is not set")
        prepare(
            substitutions,
            module,
            arguments,
            extension=extension,
            backlog_rows=backlog_rows,
            backlog_bytes=backlog_bytes,
            plausible_distance=plausible_distance,
            hooks=hooks,
            tracing_endpoint=tracing_endpoint,
        )
    except (SubstitutionError, HooksNotFoundError) as error:
        for line in str(error).splitlines():
            _print_error(line)
        _print_error("nothing was started")
        sys.exit(EXIT_USAGE)
    raise ModuleReady(module)


def _print_error(text: str) -> None:
    click.echo(f"synapse-replication exec: {text}", err=True)

"""``synapse-replication exec``: runs a module of Synapse on this package.

If an error prevents the start of the module, the exit status is 2. Otherwise, it is the
status of the module, which may also be 2. ``--list`` starts no module; its exit status
is 0, or 2 after an error.

The command replaces its process with one that runs the module: see
:mod:`synapse_replication.dropin.launcher`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import click
from msgspec.structs import asdict

from synapse_replication.cli.common import command
from synapse_replication.dropin import launcher
from synapse_replication.dropin.replaced_names import PARTS
from synapse_replication.dropin.settings import DropInSettings, variable
from synapse_replication.dropin.substitution import SubstitutionError

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DEFAULTS: Final = asdict(DropInSettings())


def _split(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _setting(flags: str, **more: Any) -> Callable[[_Command], _Command]:
    """Return a decorator that adds the option for a setting, which has its name."""
    name = flags.partition("/")[0].removeprefix("--").replace("-", "_")
    default = _DEFAULTS[name]
    return click.option(
        flags,
        envvar=variable(name),
        default=default,
        show_default=default != "",
        **more,
    )


@command(
    "exec",
    "exec --list",
    "exec -m synapse.app.homeserver -c homeserver.yaml",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
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
@_setting(
    "--extension/--no-extension",
    help="Exchange epochs and heartbeats with peers, on a channel that stock processes "
    "do not use.",
)
@_setting(
    "--backlog-rows",
    type=click.IntRange(min=0),
    help="The most rows in the backlog of each stream, for readers that missed them.",
)
@_setting(
    "--backlog-bytes",
    type=click.IntRange(min=0),
    help="The most bytes in the backlog of each stream.",
)
@_setting(
    "--plausible-distance",
    type=click.IntRange(min=1000),
    help="The most ids by which an announced position may exceed the last id of the "
    "stream's sequence.",
)
@_setting(
    "--position-check-seconds",
    type=click.IntRange(min=0, max=3600),
    help="The mean time between two reads of stream_positions, which find rows that a "
    "writer has not announced; 0 to read none.",
)
@_setting(
    "--writer-lock/--no-writer-lock",
    help="Refuse to start while another process with the name of a writer runs.",
)
@_setting(
    "--hooks",
    metavar="NAMES",
    help="Dotted names, separated by commas, of functions that take (host, config) and "
    "subscribe to hooks.",
)
@_setting(
    "--tracing-endpoint",
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
    as_list: bool,
    strict: bool,
    module: str | None,
    arguments: tuple[str, ...],
    **settings: Any,
) -> None:
    """Run a module of Synapse with this package's replication."""
    try:
        substitutions = launcher.choose(only, excepted)
        if as_list:
            click.echo(launcher.describe_substitutions(substitutions))
            return
        if module is None:
            raise click.UsageError("name a module with -m MODULE, or use --list")
        if (warning := launcher.check_version(strict=strict)) is not None:
            launcher.print_error(f"{warning}; continuing, because --strict is not set")
    except SubstitutionError as error:
        launcher.fail(error)
    launcher.exec_module(substitutions, module, arguments, DropInSettings(**settings))

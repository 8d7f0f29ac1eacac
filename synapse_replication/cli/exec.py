"""``synapse-replication exec``: runs a module of Synapse on this package.

If an error prevents the start of the module, the exit status is 2. Otherwise, it is the
status of the module, which may also be 2. ``--list`` starts no module; its exit status
is 0, or 2 after an error.

Theory of operation: a command line that has been parsed is of no further use, but its
modules take 1.5 MB. Therefore the process is replaced, as by exec(3), with one that
runs only ``dropin/__main__.py``, and finds the settings in its environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

import attrs
import click

from synapse_replication.cli.common import command, fail
from synapse_replication.dropin import substitution
from synapse_replication.dropin.settings import setting_leaves, to_environ, variable

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PREFIX: Final = "synapse-replication exec: "


def _split(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _settings(command: _Command) -> _Command:
    """Add an option for each setting, with the name of its environment variable."""
    for leaf in reversed(setting_leaves()):
        name = leaf.variable.removeprefix(variable("")).lower()
        flag = f"--{name.replace('_', '-')}"
        least, most = leaf.option.minimum, leaf.option.maximum
        kind: Any = leaf.type
        if kind is int:
            kind = click.IntRange(
                least if least is None else int(least),
                most if most is None else int(most),
            )
        elif kind is float:
            kind = click.FloatRange(least, most)
        default = "" if leaf.default is attrs.NOTHING else leaf.default
        command = click.option(
            f"{flag}/--no-{flag[2:]}" if leaf.type is bool else flag,
            type=kind,
            envvar=leaf.variable,
            default=default,
            show_default=default != "",
            help=leaf.meaning,
        )(command)
    return command


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
    help=f"Replace only these parts ({','.join(substitution.PARTS)}).",
)
@click.option(
    "--except",
    "excepted",
    default="",
    callback=_split,
    metavar="PARTS",
    help="Replace all but these parts.",
)
@_settings
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
        parts = substitution.choose(only, excepted)
        if as_list:
            click.echo(_describe(parts))
            return
        if module is None:
            raise click.UsageError("name a module with -m MODULE, or use --list")
        _check_version(strict=strict)
    except substitution.SubstitutionError as error:
        problems = [*error.problems, "nothing was started"]
        fail("\n".join(f"{_PREFIX}{problem}" for problem in problems))
    _exec_module(parts, module, arguments, settings)


def _describe(parts: Sequence[substitution.Part]) -> str:
    """Return a text with the replaced names, and the tested and installed versions."""
    # Loads all replacements, which only the listing needs here.
    from synapse_replication.dropin.replaced_names import substitutions_of

    width = max(map(len, parts))
    lines = [
        f"{known.part:<{width}}  {known}\n{'':<{width}}    -> {known.location}"
        for known in substitutions_of(parts)
    ]
    tested = ", ".join(substitution.TESTED_VERSIONS)
    found = substitution.installed_version() or "none"
    return "\n".join(
        [
            *lines,
            "",
            f"Tested with {substitution.DISTRIBUTION} {tested}; "
            f"installed here: {found}.",
        ]
    )


def _check_version(*, strict: bool) -> None:
    """Print a warning if the installed version was not tested.

    :param strict: whether to reject a version that was not tested.
    :raises SubstitutionError: if Synapse is not installed, or its version is rejected.
    """
    installed = substitution.installed_version()
    problem = substitution.version_problem(installed)
    if problem is None:
        return
    if strict or installed is None:
        raise substitution.SubstitutionError([problem])
    click.echo(f"{_PREFIX}{problem}; continuing, because --strict is not set", err=True)


def _exec_module(
    parts: Sequence[substitution.Part],
    module: str,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
) -> NoReturn:
    """Replace this process with one that applies substitutions and runs a module.

    :param parts: the parts to replace.
    :param module: the module to run as ``__main__``.
    :param arguments: its arguments.
    :param settings: the values of the settings, by the names of their options.
    """
    command = [
        sys.executable,
        *interpreter_options(sys.orig_argv, len(sys.argv) - 1),
        *("-m", "synapse_replication.dropin", ",".join(parts), module, *arguments),
    ]
    variables = to_environ({variable(name): value for name, value in settings.items()})
    os.execve(sys.executable, command, {**os.environ, **variables})


def interpreter_options(command_line: Sequence[str], arguments: int) -> list[str]:
    """Return the options of Python on a command line.

    :param command_line: as in ``sys.orig_argv``.
    :param arguments: the number of arguments of the program, which are at the end.
    """
    options = list(command_line[1 : len(command_line) - arguments - 1])
    if options and options[-1].startswith("-") and options[-1].endswith("m"):
        # The program is a module. Options without values may precede the letter: "-Im".
        last = options.pop()[:-1]
        options += [last] if last != "-" else []
    return options

"""Options, configuration loading and the reactor, shared by all commands.

This is the only module that imports the process's reactor; all other code receives it
as an argument.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from synapse_replication.errors import ConfigError
from synapse_replication.text import counted, printable, printable_lines
from synapse_replication.transport.reactor import IReactor, as_reactor

if TYPE_CHECKING:
    from rich.text import Text

    from synapse_replication.config.process import ProcessConfig, Purpose

#: Exit status when the command or the configuration is wrong.
EXIT_USAGE = 2

_Command = TypeVar("_Command", bound=Callable[..., Any])


def config_files(*, required: bool) -> Callable[[_Command], _Command]:
    """Return a decorator that adds the option ``-c`` for configuration files."""
    return click.option(
        "-c",
        "--config-path",
        "config_paths",
        multiple=True,
        required=required,
        metavar="FILE",
        help="A YAML file, or a folder of YAML files. May be repeated; for each "
        "top-level key, and each key of synapse_replication, the last file that "
        "contains it takes precedence.",
    )


config_option = config_files(required=True)


def command(
    name: str, *examples: str, group: click.Group | None = None, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a command whose help ends with examples.

    :param examples: commands to copy, without the name of the program.
    :param group: the group of the command; ``None`` if the group imports the command.
    :param settings: passed to click.
    """
    # The first line prevents click from joining the lines into a paragraph.
    lines = ["\b", "Examples:", *(f"  synapse-replication {each}" for each in examples)]
    make = click.command if group is None else group.command
    return make(name, epilog="\n".join(lines), **settings)


def load_or_exit(paths: Sequence[str], purpose: Purpose | None) -> ProcessConfig:
    """Return the configuration, or print all problems in it and exit."""
    # Imported here, because ``exec`` and ``--help`` load no configuration.
    from synapse_replication.config.process import load_config

    try:
        return load_config(paths, purpose)
    except ConfigError as error:
        exit_with_problems(error)


def exit_with_problems(error: ConfigError) -> NoReturn:
    """Print the problems in the configuration, and exit."""
    what = counted(len(error.problems), "problem")
    lines = [click.style(f"{what} in the configuration:", fg="red", bold=True)]
    for problem in error.problems:
        lines += [
            "",
            f"  {printable(str(problem.where))}: "
            f"{click.style(printable(problem.key), bold=True)}",
            printable_lines(f"    {problem.problem}"),
            printable_lines(f"    -> {problem.hint}"),
        ]
    click.echo("\n".join(lines), err=True)
    sys.exit(EXIT_USAGE)


def prepare_output() -> None:
    """Make the standard streams fit for any text, and for being closed.

    Characters that the encoding of a terminal lacks are escaped. A closed standard
    output, for instance of a command that ends with ``>&-``, swallows what is written.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # It lives as long as the process.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def fail_to_write(error: OSError) -> NoReturn:
    """Print that the output could not be written, unless its reader is gone; exit."""
    # Python flushes standard output at exit. Redirect it, so that this does not fail.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        sys.exit(1)
    fail(f"synapse-replication: cannot write: {error.strerror}", 1)


def fail(text: str, status: int = EXIT_USAGE) -> NoReturn:
    """Print why the command failed, and exit."""
    echo(text, err=True)
    sys.exit(status)


def echo(text: str, *, err: bool = False) -> None:
    """Print lines in which names of peers, writers or files cannot control a terminal.

    :param err: whether to print to standard error.
    """
    click.echo(printable_lines(text), err=err)


def cell(text: str, style: str = "") -> Text:
    """Return the text of a cell, in which a name can neither control nor style it."""
    # Imported here, because most commands print no table.
    from rich.text import Text

    return Text(printable(text), style)


log_option = click.option(
    "--log-json", is_flag=True, help="Write log lines as JSON objects."
)


def get_reactor() -> IReactor:
    """Return the process's reactor."""
    # Imported here only: all other code receives the reactor as an argument.
    from twisted.internet import reactor  # noqa: TID251

    return as_reactor(reactor)

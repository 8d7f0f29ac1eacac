"""What the commands have in common: options, configuration, and the reactor.

This is the one place that takes the process's reactor; everything else is given it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from synapse_replication.config.process import ProcessConfig, Purpose, load_config
from synapse_replication.errors import ConfigError
from synapse_replication.text import counted

__all__ = [
    "EXIT_USAGE",
    "ModuleReady",
    "config_option",
    "exit_with_mistakes",
    "get_reactor",
    "load_or_exit",
    "log_option",
]

#: Exit status when the command or the configuration is wrong.
EXIT_USAGE = 2

config_option = click.option(
    "-c",
    "--config-path",
    "config_paths",
    multiple=True,
    required=True,
    metavar="FILE",
    help="A YAML file, or a folder of them. May be given again: later files win "
    "per top-level key.",
)


class ModuleReady(Exception):  # noqa: N818 -- it is none
    """A module is to be run as ``__main__`` once the command line has returned.

    Each frame of the command line below a host's would make the tracebacks that it
    logs longer and ``inspect.stack()`` slower.

    :ivar module: its name. ``sys.argv`` is what it expects.
    """

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


def load_or_exit(paths: Sequence[str], purpose: Purpose | None) -> ProcessConfig:
    """Read the configuration, or say all that is wrong with it and exit."""
    try:
        return load_config(paths, purpose)
    except ConfigError as error:
        exit_with_mistakes(error)


def exit_with_mistakes(error: ConfigError) -> NoReturn:
    """Print what is wrong with the configuration, and exit."""
    what = counted(len(error.problems), "mistake")
    lines = [click.style(f"{what} in the configuration:", fg="red", bold=True)]
    for problem in error.problems:
        where = (
            problem.file if problem.line is None else f"{problem.file}:{problem.line}"
        )
        lines += [
            "",
            f"  {where}: {click.style(problem.key, bold=True)}",
            f"    {problem.problem}",
            f"    -> {problem.hint}",
        ]
    click.echo("\n".join(lines), err=True)
    sys.exit(EXIT_USAGE)


log_option = click.option(
    "--log-json", is_flag=True, help="Log lines are JSON objects, for programs."
)


def get_reactor() -> Any:
    """Return the process's reactor."""
    # The wiring: everything else is given the reactor.
    from twisted.internet import reactor  # noqa: TID251

    return reactor

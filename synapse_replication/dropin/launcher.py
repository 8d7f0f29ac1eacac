"""Selects the names of Synapse to replace, and starts the process that replaces them.

Theory of operation: a command line that has been parsed is of no further use, but its
modules take 1.5 MB. Therefore the process is replaced, as by exec(3), with one that
runs only ``dropin/__main__.py``.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from synapse_replication.dropin.replaced_names import (
    PARTS,
    SUBSTITUTIONS,
    TESTED_VERSIONS,
)
from synapse_replication.dropin.settings import DropInSettings
from synapse_replication.dropin.substitution import Substitution, SubstitutionError

#: The distribution that the table describes.
DISTRIBUTION = "matrix-synapse"


def choose(only: Iterable[str], excepted: Iterable[str]) -> tuple[Substitution, ...]:
    """Return the substitutions of the selected parts.

    :param only: the parts to replace; all if empty.
    :param excepted: the parts that are not replaced.
    :raises SubstitutionError: if a part does not exist, or no part is selected.
    """
    only, excepted = set(only), set(excepted)
    if unknown := sorted((only | excepted) - set(PARTS)):
        known = ", ".join(PARTS)
        raise SubstitutionError(
            [f"there is no part {', '.join(unknown)}; the parts are {known}"]
        )
    parts = (only or set(PARTS)) - excepted
    if not parts:
        raise SubstitutionError(["every part is excluded: nothing would be replaced"])
    return tuple(known for known in SUBSTITUTIONS if known.part in parts)


def installed_version() -> str | None:
    """Return the installed version of Synapse; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_problem(version: str | None) -> str | None:
    """Return why a version counts as untested; ``None`` if it was tested."""
    tested = ", ".join(TESTED_VERSIONS)
    if version is None:
        return f"{DISTRIBUTION} is not installed in the environment of {sys.executable}"
    if version not in TESTED_VERSIONS:
        return (
            f"{DISTRIBUTION} {version} was not tested; the tested versions are {tested}"
        )
    return None


def check_version(*, strict: bool) -> str | None:
    """Compare the installed version with the tested ones.

    :param strict: whether to reject a version that was not tested.
    :return: a warning if the version was not tested; otherwise ``None``.
    :raises SubstitutionError: if Synapse is not installed, or its version is rejected.
    """
    installed = installed_version()
    problem = version_problem(installed)
    if problem is not None and (strict or installed is None):
        raise SubstitutionError([problem])
    return problem


def exec_module(
    substitutions: Sequence[Substitution],
    module: str,
    arguments: Sequence[str],
    settings: DropInSettings,
) -> NoReturn:
    """Replace this process with one that applies substitutions and runs a module.

    :param substitutions: the names to replace; all those of their parts.
    :param module: the module to run as ``__main__``.
    :param arguments: its arguments.
    """
    parts = ",".join(dict.fromkeys(known.part for known in substitutions))
    command = [
        sys.executable,
        *interpreter_options(sys.orig_argv, len(sys.argv) - 1),
        *("-m", "synapse_replication.dropin", parts, module, *arguments),
    ]
    os.execve(sys.executable, command, {**os.environ, **settings.to_environ()})


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


def fail(error: Exception) -> NoReturn:
    """Print that an error prevented the start, and exit with status 2."""
    for line in [*str(error).splitlines(), "nothing was started"]:
        print_error(line)
    sys.exit(2)


def print_error(text: str) -> None:
    """Print a line on the standard error, in the name of the command."""
    sys.stderr.write(f"synapse-replication exec: {text}\n")


def describe_substitutions(substitutions: Sequence[Substitution]) -> str:
    """Return a text with the replaced names, and the tested and installed versions."""
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
            f"Tested with {DISTRIBUTION} {', '.join(TESTED_VERSIONS)}; "
            f"installed here: {found}.",
        ]
    )

"""Prepares a process to run a module of Synapse on our replication.

Theory of operation: before the module is run as ``__main__``, the names of
``table.py`` are replaced, all or none: the module and all that it imports then find
ours. What is installed is compared with the table first; if it differs, nothing is
started.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence

from synapse_replication.dropin import announcement
from synapse_replication.dropin.backlogs import BYTES, ROWS
from synapse_replication.dropin.extension import ENVIRONMENT
from synapse_replication.dropin.monitoring import HOOKS, TRACING, load_hooks
from synapse_replication.dropin.substitution import (
    Substitution,
    SubstitutionError,
    substitute,
)
from synapse_replication.dropin.table import PARTS, PROVEN_VERSIONS, SUBSTITUTIONS

__all__ = [
    "DISTRIBUTION",
    "check_version",
    "choose",
    "describe_substitutions",
    "prepare",
    "version_problem",
]

#: The distribution that the table is about.
DISTRIBUTION = "matrix-synapse"


def choose(only: Iterable[str], excepted: Iterable[str]) -> tuple[Substitution, ...]:
    """Choose substitutions by their parts.

    :param only: the parts; all if empty.
    :param excepted: the parts to leave as they are.
    :raises SubstitutionError: if there is no such part, or none is left.
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
    """Return the version of Synapse that is installed here, if one is."""
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
        return f"{DISTRIBUTION} {version} was not tried; {proven} were"
    return None


def check_version(*, strict: bool) -> str | None:
    """Compare the installed version with those that the table was proven with.

    :param strict: refuse a version that was not proven.
    :return: a warning, if there is one to give.
    :raises SubstitutionError: if Synapse is not installed, or its version is refused.
    """
    installed = installed_version()
    problem = version_problem(installed)
    if problem is not None and (strict or installed is None):
        raise SubstitutionError([problem])
    return problem


def prepare(
    substitutions: Sequence[Substitution],
    module: str,
    arguments: Sequence[str],
    *,
    extension: bool,
    backlog_rows: int,
    backlog_bytes: int,
    hooks: str = "",
    tracing_endpoint: str = "",
) -> None:
    """Replace names, and set up what a module finds when it is run.

    :param arguments: what the module finds in ``sys.argv``.
    :param extension: speak the extension.
    :param backlog_rows: rows of each stream that are retained at most.
    :param backlog_bytes: bytes of them at most, for each stream.
    :param hooks: dotted names of functions that subscribe to hooks.
    :param tracing_endpoint: the URL of a collector of spans; empty for none.
    :raises SubstitutionError: if what is installed differs from the table; nothing
        was started.
    :raises HooksNotFoundError: if a function that subscribes to hooks is missing;
        nothing was started either.
    """
    substitute(substitutions)
    installed = installed_version()
    parts = dict.fromkeys(known.part for known in substitutions)
    announcement.prepare(list(parts), installed, version_problem(installed))
    # What `python -m` does: the working directory comes first.
    sys.path.insert(0, os.getcwd())
    load_hooks(hooks)
    # For what the module starts, too.
    os.environ[ENVIRONMENT] = "true" if extension else "false"
    os.environ[ROWS] = str(backlog_rows)
    os.environ[BYTES] = str(backlog_bytes)
    os.environ[HOOKS] = hooks
    os.environ[TRACING] = tracing_endpoint
    sys.argv = [module, *arguments]


def describe_substitutions(substitutions: Sequence[Substitution]) -> str:
    """Return a text: what is replaced, and for which versions that was proven."""
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
